"""Flex attention: sinks by the log-sum-exp, and tiles for wide heads. training.md 4.3, 9.2.

Letters: B samples, Q block rows, L keys, A query heads, G key heads, D head dim, V value dim.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

WIDE_HEAD = 256
"""Heads above this get torch's smallest backward tiles by default."""

MASK_TILE = 128
"""Width of a BlockMask's tiles; a kernel's must divide it."""

BACKWARD_TILES = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
FORWARD_TILES = ("BLOCK_M", "BLOCK_N")

PLAIN_FLEX: Callable[..., Any] = flex_attention


def flex_options(
    head_dim: int, capability: tuple[int, int] | None, given: Mapping[str, int | bool] | None = None
) -> dict[str, int | bool]:
    """Kernel options for heads of that width on a CUDA device of that compute capability; None is no CUDA device.

    Above 256, from 9.0 on: backward tiles of 32 with 8 warps and 3 stages. From 10.0 on forward tiles of 32 too, for
    the default ones fault there. What the caller gave wins, with the prefix of the pass or without.
    """
    given = dict(given or {})
    chosen: dict[str, int | bool] = {}
    if head_dim > WIDE_HEAD and capability is not None and capability >= (9, 0):
        chosen = {f"bwd_{name}": 32 for name in BACKWARD_TILES} | {"bwd_num_warps": 8, "bwd_num_stages": 3}
        if capability >= (10, 0):
            chosen |= {f"fwd_{name}": 32 for name in FORWARD_TILES}
    options = {name: value for name, value in chosen.items() if name[4:] not in given} | given
    tiles = BACKWARD_TILES + FORWARD_TILES
    for name, value in options.items():
        is_tile = name.removeprefix("fwd_").removeprefix("bwd_") in tiles
        if is_tile and (isinstance(value, bool) or value < 1 or MASK_TILE % value):
            raise ValueError(f"flex_options {name} is {value}; it must divide the mask's tile of {MASK_TILE}")
    return options


def clones_values(head_dim: int, capability: tuple[int, int] | None) -> bool:
    """Whether values that are the keys are copied first: the compiled backward of an aliased tensor is far slower."""
    return head_dim > WIDE_HEAD and capability is not None and capability >= (9, 0)


def flex_attend(
    q_BAQD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLV: torch.Tensor,
    mask: BlockMask,
    sinks_A: torch.Tensor | None,
    scale: float,
    given: Mapping[str, int | bool],
) -> torch.Tensor:
    """[B, A, Q, V]. On a CPU without gradients only: flex has no backward there, and no gradient of sinks either."""
    refuse_gradients(q_BAQD, k_BGLD, v_BGLV, sinks_A)
    on_cuda = q_BAQD.device.type == "cuda"
    capability = torch.cuda.get_device_capability(q_BAQD.device) if on_cuda else None
    if v_BGLV is k_BGLD and clones_values(q_BAQD.shape[3], capability):
        v_BGLV = v_BGLV.clone()
    call = compiled_flex() if on_cuda else PLAIN_FLEX
    shared = {
        "block_mask": mask,
        "scale": scale,
        "enable_gqa": q_BAQD.shape[1] != k_BGLD.shape[1],
        "kernel_options": flex_options(q_BAQD.shape[3], capability, given) or None,
    }
    if sinks_A is None:
        return call(q_BAQD, k_BGLD, v_BGLV, **shared)
    o_BAQV, aux = call(q_BAQD, k_BGLD, v_BGLV, return_aux=AuxRequest(lse=True), **shared)
    return with_sinks(o_BAQV, aux.lse, sinks_A)


def with_sinks(o_BAQV: torch.Tensor, lse_BAQ: torch.Tensor, sinks_A: torch.Tensor) -> torch.Tensor:
    """What a sink's column leaves of an output without one: e^lse / (e^lse + e^sink). training.md 4.3.

    lse is the natural logarithm of the sum of a row's exponentials; a row that sees nothing has -inf and stays 0.
    """
    share_BAQ1 = torch.sigmoid(lse_BAQ - sinks_A.to(lse_BAQ.dtype)[:, None]).unsqueeze(3)
    return (o_BAQV.to(share_BAQ1.dtype) * share_BAQ1).to(o_BAQV.dtype)


def refuse_gradients(
    q_BAQD: torch.Tensor, k_BGLD: torch.Tensor, v_BGLV: torch.Tensor, sinks_A: torch.Tensor | None
) -> None:
    if q_BAQD.device.type != "cpu" or not torch.is_grad_enabled():
        return
    if any(x.requires_grad for x in (q_BAQD, k_BGLD, v_BGLV)):
        raise NotImplementedError(
            "attention_backend 'flex' has no backward on a CPU: use 'native' or 'eager', or no_grad"
        )
    if sinks_A is not None and sinks_A.requires_grad:
        raise NotImplementedError("attention_backend 'flex' gives the parameter 'sinks' no gradient on a CPU")


@cache
def compiled_flex() -> Callable[..., Any]:
    """flex_attention compiled, once per process: its own cache of kernels is the point."""
    return torch.compile(flex_attention)
