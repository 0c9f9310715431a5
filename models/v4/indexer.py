"""The lightning indexer: which compressed entries a row of a ratio-4 layer attends.

Legend: T local rows, N tiles, R rows of a tile, I index heads, D index dim, E entries.
"""

from dataclasses import dataclass

import torch

from ..functions import row_linear, tile_product
from .compressor import CompressorWeights
from .config import V4Config
from .projections import Rotation
from .rope import rotate

SCORE_LANES = 2048
"""Entries scored at once: bounds the [rows, heads, entries] intermediate at long context."""


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b [I*D, query rank], weights_proj [I, H], and the indexer's own ratio-4 compressor."""

    wq_b: torch.Tensor
    weights_proj: torch.Tensor
    compressor: CompressorWeights


def index_queries(
    x_TH: torch.Tensor, latent_TR: torch.Tensor, weights: IndexerWeights, config: V4Config, rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries [T, I, D], head weights [T, I]) in the accumulation dtype; the weights carry both scale factors."""
    wide = weights.compressor.norm.dtype
    q_TID = row_linear(latent_TR, weights.wq_b).unflatten(1, (config.index_n_heads, config.index_head_dim))
    scale = config.index_n_heads**-0.5 * config.index_head_dim**-0.5
    head_TI = row_linear(x_TH, weights.weights_proj).to(wide) * scale
    return rotate(q_TID, *(r[:, None] for r in rotation)).to(wide), head_TI


def index_scores(q_NRID: torch.Tensor, head_NRI: torch.Tensor, key_NED: torch.Tensor) -> torch.Tensor:
    """Scores [N, R, E]: sum over heads of weight * relu(query . key). model.md 4.4."""
    N, R, heads, _ = q_NRID.shape
    scores = []
    for key_NLD in key_NED.split(SCORE_LANES, dim=1):
        dots = tile_product(q_NRID.flatten(1, 2), key_NLD.transpose(1, 2).to(q_NRID.dtype))
        scores.append((dots.view(N, R, heads, -1).relu_() * head_NRI[..., None]).sum(2))
    return torch.cat(scores, dim=2)


def select(scores_NRE: torch.Tensor, admitted_NRE: torch.Tensor, count: int) -> torch.Tensor:
    """Mask [N, R, E] of the `count` best admitted entries of each row: higher score, then lower index.

    A NaN score never wins; an entry that is not admitted is never chosen, even where fewer than count are.
    """
    admitted_NRE = admitted_NRE & ~scores_NRE.isnan()
    scores_NRE = scores_NRE.masked_fill(~admitted_NRE, float("-inf"))
    last = scores_NRE.topk(min(count, scores_NRE.shape[2]), dim=2).values[..., -1:]
    above, equal = scores_NRE > last, (scores_NRE == last) & admitted_NRE
    room = count - above.sum(2, keepdim=True)
    return above | (equal & (equal.cumsum(2) <= room))


def selected_entries(mask_NRE: torch.Tensor, count: int) -> torch.Tensor:
    """The chosen entry numbers [N, R, count], ascending, -1 where a row has fewer."""
    tile, row, entry = mask_NRE.nonzero(as_tuple=True)
    chosen = torch.full((*mask_NRE.shape[:2], count), -1, dtype=torch.int64, device=mask_NRE.device)
    chosen[tile, row, (mask_NRE.cumsum(2) - 1)[tile, row, entry]] = entry
    return chosen
