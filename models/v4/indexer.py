"""The lightning indexer: which compressed entries a row of a ratio-4 layer attends.

Legend: T local rows, N tiles, R rows of a tile, I index heads, D index dim, E entries.
"""

from dataclasses import dataclass

import torch

from ...layouts.entry_lanes import EntryLanes
from ...layouts.tiles import SCORE_LANES
from ..functions import cast, row_linear, tile_product
from ..int8.hadamard import hadamard_matrix
from ..int8.quantise import quantise_rows
from ..kernels.calls import Kernels
from ..matrix import Matrix, Operand, Watch, product
from .compressor import CompressorWeights
from .config import V4Config
from .projections import Rotation, by_head
from .rope import rotate

SELECT_ELEMENTS = 1 << 22
"""Scores that one pass of the selection looks at: bounds its copies at long context."""


KeyRows = tuple[torch.Tensor, torch.Tensor | None, str]
"""Fresh rows, the pool (None: nothing is resident) and its family."""


@dataclass(frozen=True)
class IndexerWeights:
    """wq_b [I*D, query rank], weights_proj [I, H], and the indexer's own ratio-4 compressor.

    quantised: keys and queries go through the Hadamard rotation and are held as INT8 codes with a scale each.
    """

    wq_b: Matrix
    weights_proj: Matrix
    compressor: CompressorWeights
    quantised: bool = False


def index_queries(
    x_TH: torch.Tensor,
    latent_TR: Operand,
    weights: IndexerWeights,
    config: V4Config,
    rotation: Rotation,
    watch: Watch | None = None,
    kernels: Kernels | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(queries [T, I, D], head weights [T, I]) in the accumulation dtype; the weights carry both scale factors.

    Quantised queries are whole numbers, and the weights carry their scales too. model.md 9.2.
    """
    wide = weights.compressor.norm.dtype
    q_TID = product(latent_TR, weights.wq_b, kernels).view(-1, config.index_n_heads, config.index_head_dim)
    scale = config.index_n_heads**-0.5 * config.index_head_dim**-0.5
    head_TI = cast(product(x_TH, weights.weights_proj, kernels), wide) * scale
    q_TID = rotate(cast(q_TID, x_TH.dtype), *by_head(rotation), kernels=kernels)
    if not weights.quantised:
        return cast(q_TID, wide), head_TI
    rows = quantise_rows(_hadamard(q_TID.flatten(0, 1)))
    scale_TI = rows.scale_T.view_as(head_TI)
    if watch is not None:
        watch("index", scale_TI)
    return cast(rows.codes_TI, wide).view_as(q_TID), head_TI * scale_TI


def quantise_keys(key_ED: torch.Tensor) -> torch.Tensor:
    """Index keys as they are cached in INT8: [E, D + 4] int8, the codes of the rotated key and the bytes of its FP32
    scale."""
    rows = quantise_rows(_hadamard(key_ED))
    return torch.cat((rows.codes_TI, rows.scale_T.unsqueeze(1).view(torch.int8)), dim=1)


def _hadamard(x_XD: torch.Tensor) -> torch.Tensor:
    """Rows in FP32, turned by the orthonormal Hadamard matrix, which is symmetric."""
    wide_XD = cast(x_XD, torch.float32)
    return row_linear(wide_XD, hadamard_matrix(x_XD.shape[1], torch.float32, x_XD.device))


def index_scores(q_NRID: torch.Tensor, head_NRI: torch.Tensor, key_NED: torch.Tensor) -> torch.Tensor:
    """Scores [N, R, E]: sum over heads of weight * relu(query . key). model.md 4.4."""
    scores = [_score(q_NRID, head_NRI, key_NLD) for key_NLD in key_NED.split(SCORE_LANES, dim=1)]
    return torch.cat(scores, dim=2)


def lane_scores(q_NRID: torch.Tensor, head_NRI: torch.Tensor, lanes: EntryLanes, keys: KeyRows) -> torch.Tensor:
    """`index_scores` of a batch of tiles without all its keys at once; minus infinity where no row sees a lane.

    keys: (fresh rows, pool or None, family) as `EntryLanes.fill` takes them.
    """
    scores_NRE = head_NRI.new_full((*head_NRI.shape[:2], lanes.width), float("-inf"))
    for first in range(0, lanes.known, SCORE_LANES):
        last = min(first + SCORE_LANES, lanes.width)
        scores_NRE[:, :, first:last] = _score(q_NRID, head_NRI, lanes.fill(*keys, first, last))
    return scores_NRE


def _score(q_NRID: torch.Tensor, head_NRI: torch.Tensor, key_NLD: torch.Tensor) -> torch.Tensor:
    N, R, heads, dim = q_NRID.shape
    scale_N1L = None
    if key_NLD.dtype == torch.int8:
        # Codes of up to 127 over a few hundred columns: the products are whole numbers that FP32 holds exactly.
        scale_N1L = key_NLD[..., dim:].view(torch.float32).mT
        key_NLD = key_NLD[..., :dim]
    dots = tile_product(q_NRID.flatten(1, 2), cast(key_NLD, q_NRID.dtype).mT)
    scores_NRL = dots.view(N, R, heads, -1).relu_().mul_(head_NRI[..., None]).sum(2)
    return scores_NRL if scale_N1L is None else scores_NRL.mul_(scale_N1L)


def select(scores_NRE: torch.Tensor, admitted_NRE: torch.Tensor, count: int) -> torch.Tensor:
    """Mask [N, R, E] of the `count` best admitted entries of each row: higher score, then lower index.

    A NaN score never wins; an entry that is not admitted is never chosen, even where fewer than count are.
    """
    rows = max(1, SELECT_ELEMENTS // max(1, scores_NRE.shape[2]))
    parts = zip(scores_NRE.flatten(0, 1).split(rows), admitted_NRE.flatten(0, 1).split(rows), strict=True)
    chosen = torch.cat([_select_rows(scores_XE, admitted_XE, count) for scores_XE, admitted_XE in parts])
    return chosen.view(admitted_NRE.shape)


def _select_rows(scores_XE: torch.Tensor, admitted_XE: torch.Tensor, count: int) -> torch.Tensor:
    admitted_XE = admitted_XE & ~scores_XE.isnan()
    scores_XE = scores_XE.masked_fill(~admitted_XE, float("-inf"))
    last = scores_XE.topk(min(count, scores_XE.shape[1]), dim=1).values[:, -1:]
    above, equal = scores_XE > last, (scores_XE == last) & admitted_XE
    room = count - above.sum(1, keepdim=True)
    return above | (equal & (equal.cumsum(1, dtype=torch.int32) <= room))


def selected_entries(mask_NRE: torch.Tensor, count: int) -> torch.Tensor:
    """The chosen entry numbers [N, R, count], ascending, -1 where a row has fewer."""
    mask_XE = mask_NRE.flatten(0, 1)
    row, entry = mask_XE.nonzero(as_tuple=True)
    chosen_X = mask_XE.sum(1)
    place = torch.arange(len(row), device=row.device) - (chosen_X.cumsum(0) - chosen_X)[row]
    chosen = torch.full((len(mask_XE), count), -1, dtype=torch.int64, device=mask_NRE.device)
    chosen[row, place] = entry
    return chosen.view(*mask_NRE.shape[:2], count)
