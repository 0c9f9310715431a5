"""Attention of blocks by a backend: where the keys come from, and the eager and SDPA products.

Letters: B samples, S context rows, C fresh context rows, N blocks a sample, b rows a block, Q = N * b, L keys, W rows
of a window, A query heads, G key heads, D head dim, V value dim, X = B * N.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from .attention import Attention, AttentionContext
from .flash import flash_attend
from .flex import flex_attend
from .masks import WindowPlan
from .plans import DensePlan, VarlenPlan
from .wide import wide_dtype

Keys = tuple[torch.Tensor, torch.Tensor]
"""(keys [B, G, L, D], values [B, G, L, V]); one tensor twice where K is V."""


def attend(
    attention: Attention,
    q_BAQD: torch.Tensor,
    hidden_BQH: torch.Tensor,
    context_BCH: torch.Tensor,
    given: AttentionContext,
    scale: float,
    sinks_A: torch.Tensor | None,
) -> torch.Tensor:
    """[B, A, Q, V]: the blocks' queries over context and own block, by the backend that serves the layer here.

    A row that sees nothing gives zeros. Appends to the cache, if there is one.
    """
    need = attention.need(q_BAQD.device)
    plan = given.plans.get(need)
    if plan is None:
        raise ValueError(f"the attention context has no mask for {need}: make it from all layers of the draft")
    own = attention.keys(hidden_BQH, given.query_position_BQ)
    if isinstance(plan, WindowPlan):
        context = window_keys(attention, context_BCH, given, plan)
        return native(q_BAQD, context, own, plan, sinks_A, scale)
    k_BGLD, v_BGLV = joined(context_keys(attention, context_BCH, given), own)
    if isinstance(plan, BlockMask):
        return flex_attend(q_BAQD, k_BGLD, v_BGLV, plan, sinks_A, scale, attention.config.flex_options)
    if isinstance(plan, VarlenPlan):
        return flash_attend(q_BAQD, k_BGLD, v_BGLV, plan, scale)
    assert isinstance(plan, DensePlan)
    if need[1] == "sdpa":
        return sdpa(q_BAQD, k_BGLD, v_BGLV, plan, scale)
    return eager(q_BAQD, k_BGLD, v_BGLV, plan, sinks_A, scale)


def joined(first: Keys, second: Keys, dim: int = 2) -> Keys:
    """Both one after the other; where K is V in both, the result is one tensor too."""
    keys = torch.cat((first[0], second[0]), dim)
    if first[0] is first[1] and second[0] is second[1]:
        return keys, keys
    return keys, torch.cat((first[1], second[1]), dim)


def context_keys(attention: Attention, context_BCH: torch.Tensor, given: AttentionContext) -> Keys:
    """Keys of all S context rows: of the fresh ones, after those that the cache holds."""
    fresh_position_BC = given.context_position_BS[:, given.context_position_BS.shape[1] - context_BCH.shape[1] :]
    fresh = attention.keys(context_BCH, fresh_position_BC)
    if given.cache is None:
        return fresh
    if fresh[0] is fresh[1]:
        (held,) = given.cache.append(attention.layer_idx, fresh[0])
        return held, held
    keys, values = given.cache.append(attention.layer_idx, *fresh)
    return keys, values


def window_keys(attention: Attention, context_BCH: torch.Tensor, given: AttentionContext, plan: WindowPlan) -> Keys:
    """Keys [B, G, N, W, D] of each block's window.

    Projects the gathered rows where they are fewer than the context's, so neither memory nor time grows with S.
    """
    blocks, width = plan.index_BNW.shape[1:]
    if given.cache is None and blocks * width < context_BCH.shape[1]:
        index_BX = plan.index_BNW.flatten(1)
        position_BX = given.context_position_BS.gather(1, index_BX)
        gathered = attention.keys(gather_rows(context_BCH, index_BX), position_BX)
        parts = [part.unflatten(2, (blocks, width)) for part in one_or_two(gathered)]
    else:
        parts = [
            gather_rows(part.transpose(1, 2), plan.index_BNW.flatten(1)).transpose(1, 2).unflatten(2, (blocks, width))
            for part in one_or_two(context_keys(attention, context_BCH, given))
        ]
    return parts[0], parts[-1]


def one_or_two(keys: Keys) -> tuple[torch.Tensor, ...]:
    return keys[:1] if keys[0] is keys[1] else keys


def gather_rows(rows_BL: torch.Tensor, index_BX: torch.Tensor) -> torch.Tensor:
    """rows_BL[b, index_BX[b]] of any trailing shape."""
    batch, length = rows_BL.shape[:2]
    first_B1 = torch.arange(0, batch * length, length, device=rows_BL.device).unsqueeze(1) if length else 0
    flat = rows_BL.flatten(0, 1).index_select(0, (index_BX + first_B1).flatten())
    return flat.view(*index_BX.shape, *rows_BL.shape[2:])


def native(
    q_BAQD: torch.Tensor, context: Keys, own: Keys, plan: WindowPlan, sinks_A: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Every block as a sample of its own, over its window and itself."""
    batch, blocks = plan.index_BNW.shape[:2]
    size = plan.visible_BNbL.shape[2]

    def samples(x_BANLD: torch.Tensor) -> torch.Tensor:
        return x_BANLD.transpose(1, 2).flatten(0, 1)

    def by_block(x_BAQD: torch.Tensor) -> torch.Tensor:
        return x_BAQD.unflatten(2, (blocks, size))

    parts = [
        samples(torch.cat((window, by_block(block)), dim=3))
        for window, block in zip(one_or_two(context), one_or_two(own), strict=True)
    ]
    mask_X1bL = plan.visible_BNbL.flatten(0, 1).unsqueeze(1)
    plan_X = DensePlan(mask_X1bL, ~mask_X1bL.any(dim=3, keepdim=True))
    o_XAbV = eager(samples(by_block(q_BAQD)), parts[0], parts[-1], plan_X, sinks_A, scale)
    return o_XAbV.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)


def eager(
    q_BAQD: torch.Tensor,
    k_BGLD: torch.Tensor,
    v_BGLV: torch.Tensor,
    plan: DensePlan,
    sinks_A: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """The reference: softmax in FP32 at least, a sink as one more column that no value belongs to. training.md 4.3."""
    (batch, heads, rows), groups = q_BAQD.shape[:3], k_BGLD.shape[1]
    q_BGXD = (q_BAQD * scale).unflatten(1, (groups, -1)).flatten(2, 3)
    scores_BAQL = (q_BGXD @ k_BGLD.mT).view(batch, heads, rows, k_BGLD.shape[2])
    scores_BAQL = scores_BAQL.to(wide_dtype(q_BAQD.dtype))
    scores_BAQL = scores_BAQL.masked_fill(~plan.mask_B1QL, torch.finfo(scores_BAQL.dtype).min)
    if sinks_A is not None:
        sink = sinks_A.to(scores_BAQL.dtype).view(1, -1, 1, 1).expand(batch, -1, rows, 1)
        scores_BAQL = torch.cat((scores_BAQL, sink), dim=3)
    weights_BAQL = torch.softmax(scores_BAQL, dim=3)[..., : k_BGLD.shape[2]]
    weights_BAQL = weights_BAQL.masked_fill(plan.blind_B1Q1, 0).to(v_BGLV.dtype)
    o_BGXV = weights_BAQL.unflatten(1, (groups, -1)).flatten(2, 3) @ v_BGLV
    return o_BGXV.view(batch, heads, rows, v_BGLV.shape[3])


def sdpa(
    q_BAQD: torch.Tensor, k_BGLD: torch.Tensor, v_BGLV: torch.Tensor, plan: DensePlan, scale: float
) -> torch.Tensor:
    """torch's own choice of kernel. Rows that see nothing are let see all, then put to zero: kernels differ there."""
    mask_B1QL = plan.mask_B1QL | plan.blind_B1Q1
    o_BAQV = F.scaled_dot_product_attention(
        q_BAQD, k_BGLD, v_BGLV, attn_mask=mask_B1QL, scale=scale, enable_gqa=q_BAQD.shape[1] != k_BGLD.shape[1]
    )
    return o_BAQV.masked_fill(plan.blind_B1Q1, 0)
