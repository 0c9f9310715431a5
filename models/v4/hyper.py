"""Manifold-constrained hyper-connections: streams -> one row, one row -> streams, and the head's collapse.

Legend: T rows, h streams, H hidden, M = (2 + h) * h mixing logits. All in the accumulation dtype. model.md 2.2-2.4.
"""

from dataclasses import dataclass

import torch

from ..functions import mean_square_rsqrt, row_linear, sigmoid
from .config import V4Config


@dataclass(frozen=True)
class HyperWeights:
    """fn [M, h*H] (stream-major columns), base [M], scale [3]; for the head fn [h, h*H], base [h], scale [1]."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


def _mixing(streams_ThH: torch.Tensor, weights: HyperWeights, config: V4Config) -> torch.Tensor:
    flat_TI = streams_ThH.flatten(1).to(weights.fn.dtype)
    return row_linear(flat_TI, weights.fn) * mean_square_rsqrt(flat_TI, config.rms_norm_eps)


def _collapse(pre_Th: torch.Tensor, streams_ThH: torch.Tensor, out: torch.dtype) -> torch.Tensor:
    return torch.bmm(pre_Th[:, None], streams_ThH.to(pre_Th.dtype)).squeeze(1).to(out)


def sinkhorn(logits_Thh: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Near doubly stochastic mixing matrices [T, h, h]: softmax over the last axis, then columns and rows in
    turn, ending on columns."""
    # Rows last: every step then runs over long contiguous vectors instead of h x h crumbs.
    mix_hhT = torch.softmax(logits_Thh, dim=-1).permute(1, 2, 0).contiguous() + eps
    mix_hhT = mix_hhT / (mix_hhT.sum(0, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix_hhT = mix_hhT / (mix_hhT.sum(1, keepdim=True) + eps)
        mix_hhT = mix_hhT / (mix_hhT.sum(0, keepdim=True) + eps)
    return mix_hhT.permute(2, 0, 1).contiguous()


def hc_pre(
    streams_ThH: torch.Tensor, weights: HyperWeights, config: V4Config, out: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the streams for a sub-layer -> (x [T, H] in `out`, post [T, h], mix [T, h, h])."""
    h = config.hc_mult
    mixing_TM = _mixing(streams_ThH, weights, config)
    scale, base = weights.scale, weights.base
    pre_Th = sigmoid(mixing_TM[:, :h] * scale[0] + base[:h]) + config.hc_eps
    post_Th = 2 * sigmoid(mixing_TM[:, h : 2 * h] * scale[1] + base[h : 2 * h])
    logits_Thh = (mixing_TM[:, 2 * h :] * scale[2] + base[2 * h :]).unflatten(1, (h, h))
    mix_Thh = sinkhorn(logits_Thh, config.hc_sinkhorn_iters, config.hc_eps)
    return _collapse(pre_Th, streams_ThH, out), post_Th, mix_Thh


def hc_post(
    y_TH: torch.Tensor, streams_ThH: torch.Tensor, post_Th: torch.Tensor, mix_Thh: torch.Tensor
) -> torch.Tensor:
    """Streams after a sub-layer: new[k] = post[k] * y + sum over j of mix[j, k] * old[j]; dtype of the streams."""
    wide = mix_Thh.dtype
    mixed_ThH = torch.bmm(mix_Thh.transpose(1, 2), streams_ThH.to(wide))
    return (mixed_ThH + post_Th[:, :, None] * y_TH.to(wide)[:, None]).to(streams_ThH.dtype)


def hc_head(streams_ThH: torch.Tensor, weights: HyperWeights, config: V4Config, out: torch.dtype) -> torch.Tensor:
    """Collapse the streams before the final norm -> [T, H] in `out`."""
    pre_Th = sigmoid(_mixing(streams_ThH, weights, config) * weights.scale + weights.base) + config.hc_eps
    return _collapse(pre_Th, streams_ThH, out)
