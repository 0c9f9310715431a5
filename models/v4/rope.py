"""Partial interleaved rotary embedding, its inverse, and the two frequency sets of the model.

Legend: T rows, F rotated pairs (qk_rope_head_dim / 2), W columns of the widest rows that are turned.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..functions import cast
from ..kernels.calls import Kernels
from .config import V4Config

NTK_MIN_SPAN = 0.001
"""Keeps YaRN's ramp finite where both correction dims fall on one integer."""


def frequencies(config: V4Config, ratio: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Angle per position of each rotated pair, FP64 [F]. model.md 3.

    Ratio 0 turns with rope_theta, plain; ratios 4 and 128 with compress_rope_theta and static YaRN.
    """
    dim = config.qk_rope_head_dim
    exponents_F = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    if ratio == 0:
        return config.rope_theta**-exponents_F
    base_F = config.compress_rope_theta**-exponents_F
    if config.yarn.factor == 1:
        return base_F
    low, high = _correction_range(config, dim)
    ramp_F = torch.clamp((torch.arange(dim // 2, dtype=torch.float64, device=device) - low) / (high - low), 0, 1)
    return base_F / config.yarn.factor * ramp_F + base_F * (1 - ramp_F)


def _correction_range(config: V4Config, dim: int) -> tuple[float, float]:
    def correction_dim(turns: float) -> float:
        span = config.yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(config.compress_rope_theta))

    low = max(math.floor(correction_dim(config.yarn.beta_fast)), 0)
    high = min(math.ceil(correction_dim(config.yarn.beta_slow)), dim - 1)
    return low, high + NTK_MIN_SPAN if low == high else high


def spread(frequencies_F: torch.Tensor, width: int) -> torch.Tensor:
    """Frequencies of each of `width` columns, FP64 [W]: zeros, then (-f, f) of each rotated pair.

    Angles of these are what `rotate` multiplies with whole rows: cos is even, and sin takes the sign of the pair.
    """
    signed = torch.stack((-frequencies_F, frequencies_F), dim=1).flatten()
    return torch.cat((signed.new_zeros(width - len(signed)), signed))


def angles(positions_T: torch.Tensor, frequencies_F: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(cos, sin), each [T, F] in dtype; the angle itself is FP64, exact enough for a million positions."""
    angle_TF = positions_T.to(torch.float64)[:, None] * frequencies_F
    return cast(angle_TF.cos(), dtype), cast(angle_TF.sin(), dtype)


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    inverse: bool = False,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """x with its last 2F channels turned as interleaved pairs; inverse turns back.

    cos and sin broadcast over [..., F], or over [..., W] with W not below x's width, as angles of `spread`
    frequencies are: then their last columns are taken. Computed in cos's dtype; the result has x's dtype.
    """
    width = x.shape[-1]
    if kernels is not None and kernels.norms and cos.shape[-1] >= width:
        return kernels.norm_turn(x, None, None, (cos, sin), inverse=inverse)
    if cos.shape[-1] < width:
        cos, sin = _spread_angles(cos, sin, width)
    elif cos.shape[-1] > width:
        cos, sin = cos[..., -width:], sin[..., -width:]
    wide = cast(x, cos.dtype)
    flat = wide if x.ndim == 2 else wide.reshape(-1, width)
    other = flat.index_select(1, _partners(width, x.device))
    other = (other if x.ndim == 2 else other.view(x.shape)).mul_(sin)
    turned = wide * cos
    return cast(turned.sub_(other) if inverse else turned.add_(other), x.dtype)


def _spread_angles(cos: torch.Tensor, sin: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    missing = (width - 2 * cos.shape[-1], 0)
    signed = torch.stack((-sin, sin), dim=-1).flatten(-2)
    return F.pad(cos.repeat_interleave(2, dim=-1), missing, value=1.0), F.pad(signed, missing)


@lru_cache
@torch.inference_mode(False)
def _partners(width: int, device: torch.device) -> torch.Tensor:
    """The other column of each column's pair, pairs counted from the end; a first column without one is its own."""
    odd = width % 2
    paired = torch.arange(odd, width).view(-1, 2).flip(1).flatten()
    return torch.cat((torch.arange(odd), paired)).to(device)
