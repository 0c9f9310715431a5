"""Tiles: the rows of one request and band whose positions share one aligned block, and the lanes of their keys.

Window lanes of block b are the positions [b * TILE - window, (b + 1) * TILE - 1], key j in lane
j - b * TILE + window, resident or fresh alike. Compressed lanes are the entries 0, 1, ...; their width and the
choice dense or gathered depend on b alone, so a row's bits do not depend on the batch.

Legend: N tiles, R rows of a tile (padded), L window lanes, E compressed lanes, T local rows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .entry_lanes import EntryLanes, make_entry_lanes
from .lanes import FreshSpan, Lanes, plan_lanes
from .pages import Tables
from .rows import GroupRows, RequestFields

TILE = 64
MIN_WIDTH = 16
DENSE_LIMIT = 4
"""Entries are attended densely, under a mask, up to this multiple of index_topk; beyond they are gathered."""

SCORE_LANES = 2048
"""Entries that the indexer scores at once."""

MOST_KEYS = 1 << 15
MOST_ROW_LANES = 1 << 18
MOST_SCORES = 1 << 24
"""Limits of one batch of tiles, so that nothing made from it grows with the context: key rows, rows x lanes attended
or scored at once (at Flash's 64 heads in FP32 both make 64 MiB), and scores that rows keep of all their entries."""

ENTRY_FAMILIES = {4: ("csa_kv", "csa_index"), 128: ("hca_kv",)}


@dataclass(frozen=True)
class Entries:
    """Compressed lanes of a batch of tiles: width E, of which a row may see the first visible_NR.

    gathered: each row attends its selected entries only, looked up through span and slot at run time;
    otherwise all E lanes are attended under the mask.
    """

    width: int
    lanes: EntryLanes
    visible_NR: torch.Tensor
    span: FreshSpan
    gathered: bool

    @property
    def admitted_NRE(self) -> torch.Tensor:
        """Where entry < (position + 1) // ratio, bool; made anew at every use, for it grows with the context."""
        return torch.arange(self.width, device=self.visible_NR.device) < self.visible_NR[:, :, None]


@dataclass(frozen=True)
class TileBatch:
    """Tiles of equal width. rows [N, R] are local rows, -1 for padding."""

    rows_NR: torch.Tensor
    window: Lanes
    window_admitted_NRL: torch.Tensor
    entries: Entries | None


@dataclass(frozen=True)
class TileSet:
    """All tiles of a rank for one ratio. place [T] finds local row t in the concatenation of one zero row and the
    batches' rows (N * R each, in order): 0 for padding rows."""

    batches: tuple[TileBatch, ...]
    place_T: torch.Tensor

    def selects(self, index_topk: int) -> bool:
        """Whether any tile has more entries than a row may take."""
        return any(batch.entries is not None and batch.entries.width > index_topk for batch in self.batches)


@dataclass(frozen=True)
class _Tiles:
    """Tiles by request, then by block: the local rows of tile n are order[first_N[n]] and the count_N[n] - 1 behind."""

    request_N: np.ndarray
    block_N: np.ndarray
    count_N: np.ndarray
    first_N: np.ndarray
    order: np.ndarray


@dataclass(frozen=True)
class _TileRows:
    """What a batch of tiles has at any ratio. fresh: which fresh positions its requests have."""

    rows_NR: torch.Tensor
    position_NR: np.ndarray
    request_N: np.ndarray
    fresh: FreshSpan
    window: Lanes
    admitted_NRL: torch.Tensor


def _next_power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def entry_width(block: int, ratio: int) -> int:
    """Compressed lanes of the tiles of this block: every entry visible in it, padded to a power of two."""
    visible = (block + 1) * TILE // ratio
    return _next_power(max(visible, MIN_WIDTH)) if visible else 0


def make_tiles(
    rows: GroupRows,
    tp_rank: int,
    fields: RequestFields,
    ratios: Iterable[int],
    window: int,
    index_topk: int,
    tables: Tables | None,
) -> dict[int, TileSet]:
    """Tiles of the local rows of tp_rank for layers of each ratio; every valid row is in exactly one tile of each.

    Ratios differ in which tiles run as one batch; what a batch has at any ratio is made once.
    """
    request_T, position_T = (field_G.numpy()[rows.band(tp_rank)] for field_G in (rows.request_G, rows.position_G))
    tiles = _find_tiles(request_T, position_T)
    made: dict[bytes, _TileRows] = {}
    sets = {}
    for ratio in ratios:
        offset_R = entry_offsets(fields, ratio) if ratio else None
        batches = []
        for picked, width in _classes(tiles, ratio, window, index_topk):
            key = picked.tobytes()
            if key not in made:
                made[key] = _tile_rows(tiles, picked, position_T, window, rows, fields, tables)
            shared, entries = made[key], None
            if offset_R is not None and width:
                entries = _entries(shared, offset_R, ratio, width, index_topk, tables)
            batches.append(TileBatch(shared.rows_NR, shared.window, shared.admitted_NRL, entries))
        sets[ratio] = TileSet(tuple(batches), _places(batches, len(request_T)))
    return sets


def _places(batches: list[TileBatch], num_rows: int) -> torch.Tensor:
    place_T = np.zeros(num_rows, dtype=np.int64)
    flat = np.concatenate([np.array([-1]), *(batch.rows_NR.numpy().ravel() for batch in batches)])
    filled = np.flatnonzero(flat >= 0)
    place_T[flat[filled]] = filled
    return torch.from_numpy(place_T)


def entry_offsets(fields: RequestFields, ratio: int) -> np.ndarray:
    """Where each request's new entries start among those that the step completes, requests in order."""
    count_R = (fields.start_R + fields.length_R) // ratio - fields.start_R // ratio
    return count_R.cumsum() - count_R


def _find_tiles(request_T: np.ndarray, position_T: np.ndarray) -> _Tiles:
    span = int(position_T.max()) + 1 if len(position_T) else 1
    order = np.argsort(request_T * span + position_T, kind="stable")
    order = order[request_T[order] >= 0]
    block = position_T[order] // TILE
    key = request_T[order] * (span // TILE + 1) + block
    edge = np.ones(len(key) + 1, dtype=bool)
    np.not_equal(key[1:], key[:-1], out=edge[1:-1])
    bounds = np.flatnonzero(edge)
    first_N = bounds[:-1]
    return _Tiles(request_T[order[first_N]], block[first_N], bounds[1:] - first_N, first_N, order)


def _classes(tiles: _Tiles, ratio: int, window: int, index_topk: int) -> Iterator[tuple[np.ndarray, int]]:
    """Tile numbers that can run as one batch, with their compressed width."""
    blocks = tiles.block_N.tolist()
    widths = {block: entry_width(block, ratio) if ratio else 0 for block in set(blocks)}
    classes: dict[tuple[int, int], list[int]] = {}
    for tile, (block, count) in enumerate(zip(blocks, tiles.count_N.tolist(), strict=True)):
        classes.setdefault((widths[block], _next_power(count)), []).append(tile)
    for (width, rows), members in sorted(classes.items()):
        most, picked = most_tiles(rows, width, ratio, window, index_topk), np.array(members)
        for first in range(0, len(members), most):
            yield picked[first : first + most], width


def is_gathered(width: int, ratio: int, index_topk: int) -> bool:
    """Whether rows at this compressed width look up the entries that they selected."""
    return ratio == 4 and width > DENSE_LIMIT * index_topk


def most_tiles(rows: int, width: int, ratio: int, window: int, index_topk: int) -> int:
    """Tiles of `rows` padded rows and this compressed width that make one batch; 1 where even one is beyond the
    limits, whose rows attention then takes in parts."""
    shared = TILE + window
    if is_gathered(width, ratio, index_topk):
        lanes = max(shared + index_topk, SCORE_LANES)
        keys = max(shared, index_topk)
    else:
        lanes = keys = shared + width
    return max(1, min(MOST_KEYS // keys, MOST_ROW_LANES // (rows * lanes), MOST_SCORES // (rows * max(width, 1))))


def _tile_rows(
    tiles: _Tiles,
    picked: np.ndarray,
    position_T: np.ndarray,
    window: int,
    rows: GroupRows,
    fields: RequestFields,
    tables: Tables | None,
) -> _TileRows:
    request_N, count_N = tiles.request_N[picked], tiles.count_N[picked]
    column_R = np.arange(count_N.max())
    inside_NR = column_R < count_N[:, None]
    row_NR = tiles.order[np.where(inside_NR, tiles.first_N[picked][:, None] + column_R, 0)]
    position_NR = np.where(inside_NR, position_T[row_NR], -1)
    fresh = FreshSpan(
        torch.from_numpy(fields.slot_R[request_N]),
        torch.from_numpy(fields.start_R[request_N]),
        torch.from_numpy(rows.fresh_offset_R.numpy()[request_N]),
    )
    base_N = tiles.block_N[picked] * TILE - window
    admitted_NRL = _admitted(position_NR, base_N, window)
    lane_NL = base_N[:, None] + np.arange(TILE + window)
    return _TileRows(
        rows_NR=torch.from_numpy(np.where(inside_NR, row_NR, -1)),
        position_NR=position_NR,
        request_N=request_N,
        fresh=fresh,
        window=plan_lanes(lane_NL, np.any(admitted_NRL, axis=1), fresh, tables, ("window_kv",), rows.fresh_rows_N),
        admitted_NRL=torch.from_numpy(admitted_NRL),
    )


def _admitted(position_NR: np.ndarray, base_N: np.ndarray, window: int) -> np.ndarray:
    """Which window lanes a row sees, [N, R, L]: those of the `window` positions up to its own; none for padding."""
    lane_L = np.arange(TILE + window, dtype=np.int32)
    # Lane numbers are small; the positions themselves would take twice the memory of the largest array of a plan.
    own_NR1 = (position_NR - base_N[:, None]).astype(np.int32)[:, :, None]
    admitted_NRL = (lane_L <= own_NR1) & (lane_L > own_NR1 - window)
    if base_N.min() < 0:
        admitted_NRL &= (lane_L >= -base_N[:, None])[:, None]
    return admitted_NRL


def _entries(
    shared: _TileRows, offset_R: np.ndarray, ratio: int, width: int, index_topk: int, tables: Tables | None
) -> Entries:
    visible_NR = (shared.position_NR + 1) // ratio
    span = FreshSpan(
        shared.fresh.slot_N,
        torch.from_numpy(shared.fresh.first_N.numpy() // ratio),
        torch.from_numpy(offset_R[shared.request_N]),
    )
    lanes = make_entry_lanes(width, torch.from_numpy(visible_NR.max(1)), span, tables, ENTRY_FAMILIES[ratio])
    return Entries(width, lanes, torch.from_numpy(visible_NR), span, is_gathered(width, ratio, index_topk))
