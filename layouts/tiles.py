"""Tiles: the rows of one request and band whose positions share one aligned block, and the lanes of their keys.

Window lanes of block b are the positions [b * TILE - window, (b + 1) * TILE - 1], key j in lane
j - b * TILE + window, resident or fresh alike. Compressed lanes are the entries 0, 1, ...; their width and the
choice dense or gathered depend on b alone, so a row's bits do not depend on the batch.

Legend: N tiles, R rows of a tile (padded), L window lanes, E compressed lanes, T local rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .entry_lanes import EntryLanes, make_entry_lanes
from .lanes import FreshSpan, Lanes, make_lanes
from .pages import Tables
from .rows import GroupRows, RequestRows

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


@dataclass(frozen=True)
class _Tiles:
    request: torch.Tensor
    block: torch.Tensor
    count: torch.Tensor
    first: torch.Tensor
    order: torch.Tensor


def _next_power(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def entry_width(block: int, ratio: int) -> int:
    """Compressed lanes of the tiles of this block: every entry visible in it, padded to a power of two."""
    visible = (block + 1) * TILE // ratio
    return _next_power(max(visible, MIN_WIDTH)) if visible else 0


def make_tiles(
    rows: GroupRows,
    tp_rank: int,
    requests: tuple[RequestRows, ...],
    ratio: int,
    window: int,
    index_topk: int,
    tables: Tables | None,
) -> TileSet:
    """Tiles of the local rows of tp_rank for layers of this ratio; every valid row is in exactly one tile."""
    request_T, position_T = rows.request_G[rows.band(tp_rank)], rows.position_G[rows.band(tp_rank)]
    tiles = _find_tiles(request_T, position_T)
    start_R = torch.tensor([request.start for request in requests], dtype=torch.int64)
    slot_R = torch.tensor([request.slot for request in requests], dtype=torch.int64)
    length_R = torch.tensor([len(request.tokens) for request in requests], dtype=torch.int64)
    batches = []
    for picked, width in _classes(tiles, ratio, window, index_topk):
        rows_NR = _tile_rows(tiles, picked)
        position_NR = torch.where(rows_NR >= 0, position_T[rows_NR.clamp(min=0)], -1)
        request_N = tiles.request[picked]
        span = FreshSpan(slot_R[request_N], start_R[request_N], rows.fresh_offset_R[request_N])
        window_lanes, admitted = _window(position_NR, tiles.block[picked], window, span, rows.fresh_rows_N, tables)
        entries = None
        if width:
            offset_R = entry_offsets(start_R, length_R, ratio)
            entry_span = FreshSpan(span.slot_N, span.first_N // ratio, offset_R[request_N])
            entries = _entries(position_NR, ratio, width, index_topk, entry_span, tables)
        batches.append(TileBatch(rows_NR, window_lanes, admitted, entries))
    return TileSet(tuple(batches), _places(batches, len(request_T)))


def _places(batches: list[TileBatch], num_rows: int) -> torch.Tensor:
    place_T = torch.zeros(num_rows, dtype=torch.int64)
    flat = torch.cat([torch.tensor([-1]), *(batch.rows_NR.flatten() for batch in batches)])
    filled = (flat >= 0).nonzero().flatten()
    place_T[flat[filled]] = filled
    return place_T


def entry_offsets(start_R: torch.Tensor, length_R: torch.Tensor, ratio: int) -> torch.Tensor:
    """Where each request's new entries start among those that the step completes, requests in order."""
    count_R = (start_R + length_R) // ratio - start_R // ratio
    return count_R.cumsum(0) - count_R


def _find_tiles(request_T: torch.Tensor, position_T: torch.Tensor) -> _Tiles:
    span = int(position_T.max()) + 1 if len(position_T) else 1
    key_T = request_T * span + position_T
    order = torch.argsort(key_T, stable=True)
    order = order[request_T[order] >= 0]
    blocks = span // TILE + 1
    tile_key = request_T[order] * blocks + position_T[order] // TILE
    unique, count = torch.unique_consecutive(tile_key, return_counts=True)
    return _Tiles(unique // blocks, unique % blocks, count, count.cumsum(0) - count, order)


def _classes(tiles: _Tiles, ratio: int, window: int, index_topk: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Tile numbers that can run as one batch, with their compressed width."""
    classes: dict[tuple[int, int], list[int]] = {}
    for tile, (block, count) in enumerate(zip(tiles.block.tolist(), tiles.count.tolist(), strict=True)):
        width = entry_width(block, ratio) if ratio else 0
        classes.setdefault((width, _next_power(count)), []).append(tile)
    for (width, rows), members in sorted(classes.items()):
        for part in torch.tensor(members).split(most_tiles(rows, width, ratio, window, index_topk)):
            yield part, width


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


def _tile_rows(tiles: _Tiles, picked: torch.Tensor) -> torch.Tensor:
    count_N, first_N = tiles.count[picked], tiles.first[picked]
    column_R = torch.arange(int(count_N.max()))
    place_NR = first_N[:, None] + column_R
    inside_NR = column_R < count_N[:, None]
    return torch.where(inside_NR, tiles.order[torch.where(inside_NR, place_NR, 0)], -1)


def _window(
    position_NR: torch.Tensor,
    block_N: torch.Tensor,
    window: int,
    span: FreshSpan,
    fresh_rows_N: torch.Tensor,
    tables: Tables | None,
) -> tuple[Lanes, torch.Tensor]:
    lane_NL = block_N[:, None] * TILE - window + torch.arange(TILE + window)
    query_NR1 = position_NR[:, :, None]
    admitted_NRL = (lane_NL[:, None] <= query_NR1) & (lane_NL[:, None] > query_NR1 - window) & (lane_NL[:, None] >= 0)
    lanes = make_lanes(lane_NL, admitted_NRL.any(1), span, tables, ("window_kv",), fresh_rows_N)
    return lanes, admitted_NRL


def _entries(
    position_NR: torch.Tensor,
    ratio: int,
    width: int,
    index_topk: int,
    span: FreshSpan,
    tables: Tables | None,
) -> Entries:
    visible_NR = ((position_NR + 1) // ratio).clamp(min=0)
    lanes = make_entry_lanes(width, visible_NR.amax(1), span, tables, ENTRY_FAMILIES[ratio])
    return Entries(width, lanes, visible_NR, span, is_gathered(width, ratio, index_topk))
