"""Low-rank queries and the shared key-value row.

Legend: T local rows, H hidden, R query rank, N heads, D head dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..functions import cast, mean_square_rsqrt, rms_norm
from ..kernels.calls import Kernels
from ..matrix import Matrix, Operand, Watch, held_matrix, operand, product
from ..numerics import Numerics
from .config import V4Config
from .rope import rotate


@dataclass(frozen=True)
class ProjectionWeights:
    """wq_a [R, H], q_norm [R], wq_b [N*D, R], wkv [D, H], kv_norm [D]."""

    wq_a: Matrix
    q_norm: torch.Tensor
    wq_b: Matrix
    wkv: Matrix
    kv_norm: torch.Tensor


def projection_weights(weights: Mapping[str, torch.Tensor], prefix: str, numerics: Numerics) -> ProjectionWeights:
    """Those of the attention whose tensor names start with prefix, "layers.0.attn." for example."""
    wq_a, wq_b, wkv = (held_matrix(weights, f"{prefix}{name}", numerics) for name in ("wq_a", "wq_b", "wkv"))
    return ProjectionWeights(wq_a, weights[f"{prefix}q_norm.weight"], wq_b, wkv, weights[f"{prefix}kv_norm.weight"])


Rotation = tuple[torch.Tensor, ...]
"""(cos, sin), each [rows, columns] as `rotate` takes them; where rows have heads, [rows, 1, columns] will do too."""


def by_head(rotation: Rotation) -> Rotation:
    """Of the same angles for every head of a row: [rows, 1, columns]."""
    return rotation if rotation[0].ndim == 3 else tuple(part.unsqueeze(1) for part in rotation)


def query_latent(
    x_TH: torch.Tensor,
    weights: ProjectionWeights,
    config: V4Config,
    watch: Watch | None = None,
    kernels: Kernels | None = None,
) -> Operand:
    """The normed low-rank query [T, R], shared by attention and indexer: quantised once for both. model.md 4.1."""
    wide = weights.q_norm.dtype
    normed_TR = rms_norm(product(x_TH, weights.wq_a, kernels), weights.q_norm, config.rms_norm_eps, wide, kernels)
    return operand(normed_TR, weights.wq_b, x_TH.dtype, "qkv", watch)


def queries(
    latent_TR: Operand,
    weights: ProjectionWeights,
    config: V4Config,
    rotation: Rotation,
    act: torch.dtype,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """Queries [T, N, D] in the accumulation dtype, rounded to `act`: per-head unweighted norm, then rotary."""
    q_TND = product(latent_TR, weights.wq_b, kernels).view(-1, config.num_attention_heads, config.head_dim)
    if kernels is not None and kernels.norms:
        return kernels.norm_turn(q_TND, None, config.rms_norm_eps, rotation)
    wide_TND = cast(q_TND, weights.q_norm.dtype)
    normed_TND = cast(wide_TND * mean_square_rsqrt(wide_TND, config.rms_norm_eps), act)
    return cast(rotate(normed_TND, *by_head(rotation)), weights.q_norm.dtype)


def key_value(
    x_TH: torch.Tensor,
    weights: ProjectionWeights,
    config: V4Config,
    rotation: Rotation,
    out: torch.dtype,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """The row's one vector that is both key and value, normed and rotated: [T, D] in `out`."""
    kv_TD = product(x_TH, weights.wkv, kernels)
    if kernels is not None and kernels.norms:
        return kernels.norm_turn(kv_TD, weights.kv_norm, config.rms_norm_eps, rotation)
    normed_TD = rms_norm(kv_TD, weights.kv_norm, config.rms_norm_eps, x_TH.dtype)
    return cast(rotate(normed_TD, *rotation), out)
