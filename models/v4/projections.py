"""Low-rank queries, the shared key-value row, and the grouped output projection.

Legend: T local rows, H hidden, R query rank, N heads, D head dim, G output groups of this rank, K columns of one
group's input, O rank of one group's output, S rows of the whole group.
"""

from dataclasses import dataclass

import torch

from ...comm.projection import Shards, gather_weight_shards, publish_heads, reduce_partials, tree_sum
from ...parallel.groups import Group
from ..functions import cast, mean_square_rsqrt, rms_norm, row_linear, tile_product
from .config import V4Config
from .rope import rotate


@dataclass(frozen=True)
class ProjectionWeights:
    """wq_a [R, H], q_norm [R], wq_b [N*D, R], wkv [D, H], kv_norm [D]; of this rank's output groups wo_a [G*O, K]
    and wo_b [H, G*O]."""

    wq_a: torch.Tensor
    q_norm: torch.Tensor
    wq_b: torch.Tensor
    wkv: torch.Tensor
    kv_norm: torch.Tensor
    wo_a: torch.Tensor
    wo_b: torch.Tensor


Rotation = tuple[torch.Tensor, ...]
"""(cos, sin), each [rows, columns] as `rotate` takes them; where rows have heads, [rows, 1, columns] will do too."""


def by_head(rotation: Rotation) -> Rotation:
    """Of the same angles for every head of a row: [rows, 1, columns]."""
    return rotation if rotation[0].ndim == 3 else tuple(part.unsqueeze(1) for part in rotation)


def query_latent(x_TH: torch.Tensor, weights: ProjectionWeights, config: V4Config) -> torch.Tensor:
    """The normed low-rank query [T, R], shared by attention and indexer. model.md 4.1."""
    return rms_norm(row_linear(x_TH, weights.wq_a), weights.q_norm, config.rms_norm_eps, x_TH.dtype)


def queries(latent_TR: torch.Tensor, weights: ProjectionWeights, config: V4Config, rotation: Rotation) -> torch.Tensor:
    """Queries [T, N, D] in the accumulation dtype: per-head unweighted norm, then rotary."""
    q_TND = row_linear(latent_TR, weights.wq_b).view(-1, config.num_attention_heads, config.head_dim)
    wide_TND = cast(q_TND, weights.q_norm.dtype)
    normed_TND = cast(wide_TND * mean_square_rsqrt(wide_TND, config.rms_norm_eps), latent_TR.dtype)
    return cast(rotate(normed_TND, *by_head(rotation)), weights.q_norm.dtype)


def key_value(
    x_TH: torch.Tensor, weights: ProjectionWeights, config: V4Config, rotation: Rotation, out: torch.dtype
) -> torch.Tensor:
    """The row's one vector that is both key and value, normed and rotated: [T, D] in `out`."""
    normed_TD = rms_norm(row_linear(x_TH, weights.wkv), weights.kv_norm, config.rms_norm_eps, x_TH.dtype)
    return cast(rotate(normed_TD, *rotation), out)


def group_partials(heads_SGK: torch.Tensor, wo_a: torch.Tensor, wo_b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """One full-width partial per output group, [S, G, H] in the accumulation dtype."""
    num_groups = heads_SGK.shape[1]
    a_GKO = wo_a.view(num_groups, -1, wo_a.shape[1]).mT
    b_GOH = wo_b.view(len(wo_b), num_groups, -1).permute(1, 2, 0)
    latent_GSO = tile_product(heads_SGK.transpose(0, 1), a_GKO)
    return cast(tile_product(latent_GSO, b_GOH).transpose(0, 1), wide)


def project_output(
    o_TND: torch.Tensor,
    weights: ProjectionWeights,
    config: V4Config,
    group: Group,
    *,
    gather_weights: bool = False,
    shards: Shards | None = None,
) -> torch.Tensor:
    """Grouped low-rank output projection of the own rows -> [T, H] in the dtype of wo_a, complete width.

    Heads go to the owner of their output group and partials come back to the owner of the row, added in a fixed
    tree over the groups; with gather_weights the weight shards travel instead and the same tree is walked at home.
    Both give the same bits. shards: every owner's (wo_a, wo_b), where they have come already; implies gather_weights.
    """
    heads_TGK = cast(o_TND, weights.wo_a.dtype).view(len(o_TND), config.o_groups, config.group_columns)
    wide = weights.q_norm.dtype
    if gather_weights and shards is None:
        shards = (gather_weight_shards(weights.wo_a, weights.wo_b, group, stage="weight_gather"),)
    if shards is not None:
        by_owner = zip(heads_TGK.chunk(len(shards), 1), shards, strict=True)
        partials = [part for heads, (a, b) in by_owner for part in group_partials(heads, a, b, wide).unbind(1)]
        return cast(tree_sum(partials), weights.wo_a.dtype)
    heads_SGK = publish_heads(heads_TGK, group, stage="publish")
    partials_SGH = group_partials(heads_SGK, weights.wo_a, weights.wo_b, wide)
    return cast(reduce_partials(partials_SGH, group, config.o_groups, stage="publish"), weights.wo_a.dtype)
