"""Manifold-constrained hyper-connections: streams -> one row, one row -> streams, and the head's collapse.

Legend: T rows, h streams, H hidden, M = (2 + h) * h mixing logits. All in the accumulation dtype. model.md 2.2-2.4.
Small steps are bound by the number of calls here, so what can be one call over all M logits is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..functions import cast, constant, mean_square_rsqrt, missing_rows, row_linear, sigmoid, sigmoid_inverse
from ..kernels.calls import Kernels
from .config import V4Config


@dataclass(frozen=True)
class HyperWeights:
    """fn [M, h*H] (stream-major columns), base [M], scale [3]; for the head fn [h, h*H], base [h], scale [1]."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


def hyper_weights(weights: Mapping[str, torch.Tensor], prefix: str) -> HyperWeights:
    """Those under `prefix` of a rank's weights, "layers.0.hc_attn" for example."""
    return HyperWeights(*(weights[f"{prefix}_{part}"] for part in ("fn", "base", "scale")))


def _mixing(streams_ThH: torch.Tensor, weights: HyperWeights, config: V4Config) -> torch.Tensor:
    flat_TI = cast(streams_ThH.flatten(1), weights.fn.dtype)
    return row_linear(flat_TI, weights.fn) * mean_square_rsqrt(flat_TI, config.rms_norm_eps)


def _collapse(pre_Th: torch.Tensor, streams_ThH: torch.Tensor, out: torch.dtype) -> torch.Tensor:
    return cast(torch.bmm(pre_Th.unsqueeze(1), cast(streams_ThH, pre_Th.dtype)).squeeze(1), out)


def sinkhorn(logits_Thh: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Near doubly stochastic mixing matrices [T, h, h]: softmax over the last axis, then columns and rows in
    turn, ending on columns."""
    num_rows, h, _ = logits_Thh.shape
    mix_TM = (logits_Thh - logits_Thh.detach().amax(2, keepdim=True)).exp().view(num_rows, h * h)
    extra = missing_rows(num_rows, mix_TM)
    if extra:
        mix_TM = F.pad(mix_TM, (0, 0, 0, extra))
    rows_NN, columns_NN, unit_MN, eps_N = _line_sums(h, eps, mix_TM.dtype, mix_TM.device)
    # The softmax is spelled with sums of the same kind, so that all of its additions have one order on every device.
    mix_TM = mix_TM / torch.mm(mix_TM, rows_NN[: h * h, : h * h])
    # Adds eps, and a last column of ones that carries eps. A product with ones and zeros then puts a line's sum, eps
    # included, under each of its members, and 1 under the ones: two calls a turn.
    mix_TN = torch.addmm(eps_N, mix_TM, unit_MN)
    mix_TN = mix_TN.div_(torch.mm(mix_TN, columns_NN))
    for _ in range(iterations - 1):
        mix_TN = mix_TN.div_(torch.mm(mix_TN, rows_NN))
        mix_TN = mix_TN.div_(torch.mm(mix_TN, columns_NN))
    mix_TM = mix_TN.narrow(1, 0, h * h)
    return (mix_TM[:num_rows] if extra else mix_TM).view(num_rows, h, h)


@lru_cache
@torch.inference_mode(False)
def _line_sums(h: int, eps: float, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Two matrices [h*h + 1, h*h + 1]: a flat h x h matrix and a 1 -> sums of its rows, or columns, + eps, and 1.
    And what makes these rows of flat matrices: a unit matrix [h*h, h*h + 1], and eps in all columns but a last 1."""
    unit, ones = torch.eye(h, dtype=dtype), torch.ones(h, h, dtype=dtype)
    lines = []
    for sums in (torch.kron(unit, ones), torch.kron(ones, unit)):
        whole = F.pad(sums, (0, 1, 0, 1))
        whole[-1, :-1], whole[-1, -1] = eps, 1
        lines.append(whole.to(device))
    start = torch.cat((torch.full((h * h,), eps, dtype=dtype), torch.ones(1, dtype=dtype)))
    return *lines, torch.eye(h * h, h * h + 1, dtype=dtype).to(device), start.to(device)


@lru_cache
@torch.inference_mode(False)
def _parts(h: int, device: torch.device) -> torch.Tensor:
    """Which scale each of the M logits has: pre, post, mixing."""
    return torch.arange(3).repeat_interleave(torch.tensor([h, h, h * h])).to(device)


def hc_pre(
    streams_ThH: torch.Tensor,
    weights: HyperWeights,
    config: V4Config,
    out: torch.dtype,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Collapse the streams for a sub-layer -> (x [T, H] in `out`, post [T, h], mix [T, h, h])."""
    if kernels is not None and kernels.hyper:
        streams_ThH = streams_ThH.contiguous()
        raw_TM = row_linear(streams_ThH.flatten(1), weights.fn)
        places = raw_TM, weights.base, weights.scale, config.rms_norm_eps
        x_TH, post_Th, mix_Thh = kernels.collapse(streams_ThH, *places, config.hc_sinkhorn_iters, config.hc_eps)
        return cast(x_TH, out), post_Th, mix_Thh
    h = config.hc_mult
    mixing_TM = _mixing(streams_ThH, weights, config)
    scale_M = weights.scale.index_select(0, _parts(h, mixing_TM.device))
    gates_TM, logits_TM = torch.addcmul(weights.base, mixing_TM, scale_M).split_with_sizes((2 * h, h * h), dim=1)
    # sigmoid + eps, and twice sigmoid.
    gates_TM = sigmoid_inverse(gates_TM)
    offset_M = constant((config.hc_eps,) * h + (0.0,) * h, gates_TM.dtype, gates_TM.device)
    factor_M = constant((1.0,) * h + (2.0,) * h, gates_TM.dtype, gates_TM.device)
    pre_Th, post_Th = torch.addcdiv(offset_M, factor_M, gates_TM).chunk(2, dim=1)
    mix_Thh = sinkhorn(logits_TM.unflatten(1, (h, h)), config.hc_sinkhorn_iters, config.hc_eps)
    return _collapse(pre_Th, streams_ThH, out), post_Th, mix_Thh


def hc_post(
    y_TH: torch.Tensor,
    streams_ThH: torch.Tensor,
    post_Th: torch.Tensor,
    mix_Thh: torch.Tensor,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """Streams after a sub-layer: new[k] = post[k] * y + sum over j of mix[j, k] * old[j]; dtype of the streams."""
    if kernels is not None and kernels.hyper:
        return kernels.spread(cast(y_TH, streams_ThH.dtype), streams_ThH, post_Th, mix_Thh)
    wide = mix_Thh.dtype
    added_ThH = post_Th.unsqueeze(2) * cast(y_TH, wide).unsqueeze(1)
    return cast(torch.baddbmm(added_ThH, mix_Thh.mT, cast(streams_ThH, wide)), streams_ThH.dtype)


def hc_head(streams_ThH: torch.Tensor, weights: HyperWeights, config: V4Config, out: torch.dtype) -> torch.Tensor:
    """Collapse the streams before the final norm -> [T, H] in `out`."""
    pre_Th = sigmoid(_mixing(streams_ThH, weights, config) * weights.scale + weights.base) + config.hc_eps
    return _collapse(pre_Th, streams_ThH, out)
