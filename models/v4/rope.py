"""Partial interleaved rotary embedding, its inverse, and the two frequency sets of the model.

Legend: T rows, F rotated pairs (qk_rope_head_dim / 2).
"""

import math

import torch

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


def angles(positions_T: torch.Tensor, frequencies_F: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(cos, sin), each [T, F] in dtype; the angle itself is FP64, exact enough for a million positions."""
    angle_TF = positions_T.to(torch.float64)[:, None] * frequencies_F
    return angle_TF.cos().to(dtype), angle_TF.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
    """x with its last 2F channels turned as interleaved pairs; cos and sin broadcast over [..., F].

    Computed in cos's dtype; the result has x's dtype. inverse turns back.
    """
    width = 2 * cos.shape[-1]
    nope, pairs = x[..., :-width], x[..., -width:].to(cos.dtype)
    a, b = pairs[..., 0::2], pairs[..., 1::2]
    if inverse:
        sin = -sin
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((nope, turned.to(x.dtype)), dim=-1)
