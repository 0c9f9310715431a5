"""The backends of attention by name: which serves, which is refused, and what each needs of a mask.

Letters: B samples, S context rows, N blocks a sample, b rows a block, Q = N * b, X = B * N.
"""

from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask

from .masks import MaskRule, WindowPlan, dense_mask, flex_mask, window_plan

BACKENDS = ("eager", "sdpa", "flex", "flash", "native")
SINK_BACKENDS = ("eager", "flex", "native")


@dataclass(frozen=True)
class DensePlan:
    """mask_B1QL bool, and blind_B1Q1: the rows that see no key."""

    mask_B1QL: torch.Tensor
    blind_B1Q1: torch.Tensor


@dataclass(frozen=True)
class VarlenPlan:
    """Blocks as sequences of their own, for kernels without masks.

    index_K int64: rows of all samples' keys, [B * (S + Q)] flat, one sequence after another. Lengths int32, summed.
    window: positions to the left and right of a row's own, counted from the ends of both sequences; -1 is no limit.
    """

    index_K: torch.Tensor
    query_ends_X: torch.Tensor
    key_ends_X: torch.Tensor
    longest: int
    window: tuple[int, int]
    keep_BQ: torch.Tensor


Plan = DensePlan | BlockMask | WindowPlan | VarlenPlan
Need = tuple[MaskRule, str]
"""(rule, backend)."""


def choose_backend(name: str, prefers_window: bool, rule: MaskRule, device: torch.device) -> str:
    """The backend that a layer uses on the device: the one named, or for "auto" the first that serves it.

    flex on CUDA; elsewhere native for kinds that prefer it and have a context window; eager otherwise.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        return "flex"
    return "native" if prefers_window and rule.context_window is not None else "eager"


def check_backend(name: str, rule: MaskRule, sinks: bool, mode: str) -> None:
    """ValueError where the backend can never serve such a layer; what depends on devices is refused in the call."""
    if name == "auto":
        return
    if name not in BACKENDS:
        raise ValueError(f"attention_backend is {name!r}; backends are auto, {', '.join(BACKENDS)}")
    if name == "native" and rule.context_window is None:
        raise ValueError("attention_backend 'native' gathers a window and needs context_window, which is null")
    if sinks and name not in SINK_BACKENDS:
        raise ValueError(
            f"attention_backend {name!r} cannot serve the parameter 'sinks' of attention_mode {mode!r}; "
            f"those that can are {', '.join(SINK_BACKENDS)}"
        )


def make_plan(
    rule: MaskRule,
    backend: str,
    anchors_BN: torch.Tensor,
    keep_BN: torch.Tensor,
    context_position_BS: torch.Tensor,
    block_size: int,
) -> Plan:
    """What the backend needs of the mask of these blocks."""
    places = anchors_BN, keep_BN, context_position_BS, block_size
    if backend == "native":
        return window_plan(rule, *places)
    empty = anchors_BN.numel() == 0  # Kernels take no empty tensors; the dense form of nothing costs nothing.
    if backend == "flex" and not empty:
        return flex_mask(rule, *places)
    if backend == "flash" and not empty:
        return varlen_plan(rule, *places)
    mask_B1QL = dense_mask(rule, *places)
    return DensePlan(mask_B1QL, ~mask_B1QL.any(dim=3, keepdim=True))


def varlen_plan(
    rule: MaskRule,
    anchors_BN: torch.Tensor,
    keep_BN: torch.Tensor,
    context_position_BS: torch.Tensor,
    block_size: int,
) -> VarlenPlan:
    """Positions must ascend. Waits for the device: for the lengths, and to see gaps where there is a sliding window."""
    sliding = rule.sliding_window
    if sliding is not None and sliding < block_size:
        raise ValueError(
            f"attention_backend 'flash' would cut the block itself: sliding_window {sliding} is below block_size "
            f"{block_size}"
        )
    (batch, blocks), context = anchors_BN.shape, context_position_BS.shape[1]
    device = anchors_BN.device
    position_BS = context_position_BS.contiguous()
    end_BN = torch.searchsorted(position_BS, anchors_BN.contiguous())
    reach = min((limit for limit in (rule.context_window, sliding and sliding - 1) if limit is not None), default=None)
    first_BN = torch.zeros_like(end_BN)
    if reach is not None:
        first_BN = torch.searchsorted(position_BS, (anchors_BN - reach).contiguous())
    first_BN = torch.where(keep_BN, first_BN, end_BN)
    count_X = (end_BN - first_BN).flatten()
    if sliding is not None:
        check_gaps(position_BS, anchors_BN, first_BN, end_BN)
    length_X = count_X + block_size
    start_X = length_X.cumsum(0) - length_X
    block_X = torch.arange(batch * blocks, device=device)
    sequence_K = block_X.repeat_interleave(length_X)
    place_K = torch.arange(len(sequence_K), device=device) - start_X[sequence_K]
    own_K = place_K - count_X[sequence_K]
    rows = context + blocks * block_size
    context_K = first_BN.flatten()[sequence_K] + place_K
    block_K = context + (sequence_K % blocks) * block_size + own_K
    index_K = (sequence_K // blocks) * rows + torch.where(own_K < 0, context_K, block_K)
    ends = torch.nn.functional.pad(length_X.cumsum(0), (1, 0)).to(torch.int32)
    query_ends = torch.arange(0, (batch * blocks + 1) * block_size, block_size, device=device, dtype=torch.int32)
    longest = int(length_X.max())
    window = (-1 if sliding is None else sliding - 1, 0 if rule.causal else -1)
    return VarlenPlan(index_K, query_ends, ends, longest, window, keep_BN.repeat_interleave(block_size, dim=1))


def check_gaps(
    position_BS: torch.Tensor, anchors_BN: torch.Tensor, first_BN: torch.Tensor, end_BN: torch.Tensor
) -> None:
    """ValueError unless each window's rows [first, end) are the positions just before its anchor, one after another.

    Flash counts rows where the rule counts positions.
    """
    if not position_BS.shape[1]:
        return
    oldest_BN = position_BS.gather(1, first_BN.clamp(max=position_BS.shape[1] - 1))
    newest_BN = position_BS.gather(1, (end_BN - 1).clamp(min=0))
    whole_BN = (newest_BN == anchors_BN - 1) & (oldest_BN == anchors_BN - (end_BN - first_BN))
    if ((end_BN > first_BN) & ~whole_BN).any():
        raise ValueError(
            "attention_backend 'flash' counts rows: with sliding_window, positions before an anchor must have no gap"
        )
