"""Flash attention: every block a sequence of its own, since these kernels take no mask.

Letters: B samples, Q block rows, L keys, K packed keys, A query heads, G key heads, D head dim, V value dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from .plans import VarlenPlan

WIDEST_HEAD = 256


def flash_attend(
    q_BAQD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLV: torch.Tensor,
    plan: VarlenPlan,
    scale: float,
) -> torch.Tensor:
    """[B, A, Q, V] by torch's flash kernel; ValueError naming flash where there is none for these tensors."""
    refuse_flash(q_BAQD, v_BGLV)
    return by_sequences(q_BAQD, k_BGLD, v_BGLV, plan, scale, varlen_attn)


def refuse_flash(q_BAQD: torch.Tensor, v_BGLV: torch.Tensor) -> None:
    """ValueError unless torch has a flash kernel for such tensors."""
    reasons = []
    if q_BAQD.device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        reasons.append(f"there is no flash kernel on {q_BAQD.device.type}")
    if q_BAQD.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"dtype is {q_BAQD.dtype}, not torch.bfloat16 or torch.float16")
    if max(q_BAQD.shape[3], v_BGLV.shape[3]) > WIDEST_HEAD:
        reasons.append(f"head_dim is {max(q_BAQD.shape[3], v_BGLV.shape[3])}, above {WIDEST_HEAD}")
    if q_BAQD.shape[3] != v_BGLV.shape[3]:
        reasons.append(f"values are {v_BGLV.shape[3]} wide, keys {q_BAQD.shape[3]}")
    if reasons:
        raise ValueError(f"attention_backend 'flash' cannot serve here: {'; '.join(reasons)}")


def by_sequences(
    q_BAQD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLV: torch.Tensor,
    plan: VarlenPlan,
    scale: float,
    kernel: Callable[..., Any],
) -> torch.Tensor:
    """The packing around a kernel of varlen_attn's signature."""
    (batch, heads, rows), groups = q_BAQD.shape[:3], k_BGLD.shape[1]
    size = rows // max(1, (len(plan.query_ends_X) - 1) // batch)

    def packed(x_BGLD: torch.Tensor) -> torch.Tensor:
        return x_BGLD.transpose(1, 2).flatten(0, 1)

    o_XAV = kernel(
        packed(q_BAQD),
        packed(k_BGLD).index_select(0, plan.index_K),
        packed(v_BGLV).index_select(0, plan.index_K),
        plan.query_ends_X,
        plan.key_ends_X,
        size,
        plan.longest,
        scale=scale,
        window_size=plan.window,
        enable_gqa=heads != groups,
    )
    o_BAQV = o_XAV.unflatten(0, (batch, rows)).transpose(1, 2)
    return o_BAQV.masked_fill(~plan.keep_BQ[:, None, :, None], 0)
