"""Compressors: learned pooling of 4 (overlapping) or 128 positions into one entry.

Legend: T local rows, G group rows, H hidden, C projected columns (2D at ratio 4, D at 128), D entry dim,
E entries completed in the step, P positions pooled into one.
"""

from dataclasses import dataclass

import torch

from ...layouts.rowplan import Boundaries
from ..functions import cast, rms_norm
from ..kernels.calls import Kernels
from ..matrix import Matrix, product
from .projections import Rotation
from .rope import rotate


@dataclass(frozen=True)
class CompressorWeights:
    """wkv and wgate [C, H], ape [ratio, C], norm [D]; all in the accumulation dtype, or the first two packed."""

    wkv: Matrix
    wgate: Matrix
    ape: torch.Tensor
    norm: torch.Tensor

    @property
    def ratio(self) -> int:
        return self.ape.shape[0]

    @property
    def entry_dim(self) -> int:
        return self.norm.shape[0]


def project(
    x_TH: torch.Tensor, weights: CompressorWeights, kernels: Kernels | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(value, score) [T, C] of each row, in the accumulation dtype; the score is still without its ape."""
    return product(x_TH, weights.wkv, kernels), product(x_TH, weights.wgate, kernels)


def state_rows(
    value_GC: torch.Tensor,
    score_GC: torch.Tensor,
    position_G: torch.Tensor,
    weights: CompressorWeights,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """What a state pool stores of each row: [value | score + ape of its position], [G, 2C]."""
    if kernels is not None:
        return kernels.state_rows(value_GC, score_GC, weights.ape, position_G)
    return torch.cat((value_GC, score_GC + weights.ape.index_select(0, position_G % weights.ratio)), dim=1)


def pool_entries(
    state_GC: torch.Tensor,
    state_pool: torch.Tensor | None,
    family: str,
    boundaries: Boundaries,
    weights: CompressorWeights,
    rotation_E: Rotation,
    eps: float,
    out: torch.dtype,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """The entries [E, D] that the step completes, in `out`, from resident state and fresh rows alike.

    Softmax per channel over the pooled positions; at ratio 4 the four older positions give their first half of
    the columns and the four own ones their second half. Then norm, then rotary at the entry's first own position.
    model.md 4.3.
    """
    if not boundaries.lanes.num_tiles:
        return state_GC.new_empty(0, weights.entry_dim, dtype=out)
    lanes_EPC = boundaries.lanes.fill(state_GC, state_pool, family)
    value_EPC, score_EPC = lanes_EPC.chunk(2, dim=2)
    if weights.ratio == 4:
        value_EPC, score_EPC = _overlap(value_EPC), _overlap(score_EPC)
    score_EPC = score_EPC.masked_fill(~boundaries.present_EP[:, :, None], float("-inf"))
    pooled_ED = (torch.softmax(score_EPC, dim=1) * value_EPC).sum(1)
    if kernels is not None and kernels.norms:
        return kernels.norm_turn(pooled_ED, weights.norm, eps, rotation_E)
    normed_ED = rms_norm(pooled_ED, weights.norm, eps, weights.norm.dtype)
    return cast(rotate(normed_ED, *rotation_E), out)


def _overlap(lanes_EPC: torch.Tensor) -> torch.Tensor:
    older, own = lanes_EPC.chunk(2, dim=1)
    half = lanes_EPC.shape[2] // 2
    return torch.cat((older[..., :half], own[..., half:]), dim=1)
