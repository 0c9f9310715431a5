"""Attention over tiles: window lanes and compressed lanes under one softmax with a sink.

Legend: T local rows, N tiles, R rows of a tile, A heads, D head dim, L window lanes, E compressed lanes,
K entries a row attends when they are gathered, X fresh rows.
"""

from dataclasses import dataclass, field

import torch

from ...layouts.entry_lanes import EntryLanes
from ...layouts.lanes import FreshSpan, Lanes, make_lanes
from ...layouts.pages import Tables
from ...layouts.tiles import (
    MIN_WIDTH,
    SCORE_LANES,
    TILE,
    Entries,
    TileBatch,
    TileSet,
    entry_width,
    is_gathered,
    most_tiles,
)
from ..functions import cast, tile_product
from ..kernels.calls import KernelLanes, Kernels
from ..numerics import Numerics
from .config import V4Config
from .indexer import SELECT_ELEMENTS, lane_scores, select, selected_entries

MOST_ELEMENTS = 1 << 24
"""Elements of the largest tensor that attention makes of a batch of tiles (64 MiB in FP32), at any context: rows are
taken in parts where scores or gathered keys would be more."""


MOST_KERNEL_ROWS = 64
"""Rows of a batch of tiles, padding included, up to which attention runs in kernels."""


@dataclass(frozen=True)
class KeySource:
    """Fresh rows of one cache family and the pool of its resident ones (None: nothing is resident)."""

    family: str
    fresh_XD: torch.Tensor
    pool_SD: torch.Tensor | None


@dataclass(frozen=True)
class IndexInputs:
    """What selection needs: index queries [T, I, D], head weights [T, I], index keys, entries a row may take."""

    q_TID: torch.Tensor
    head_TI: torch.Tensor
    keys: KeySource
    topk: int


@dataclass(frozen=True)
class RowMask:
    """Of a batch of tiles: rows [N * R] with 0 for padding, and where a row does not see a window lane [N, R, 1, L]."""

    rows_X: torch.Tensor
    hidden_NR1L: torch.Tensor


@dataclass(frozen=True)
class TileMasks:
    """The row masks of a step's batches, each made by the first layer that needs it. By the identity of the plan's
    tensors, which ratios share; for one plan only. sources: of the batches' lanes, for kernels, likewise."""

    made: dict[int, RowMask] = field(default_factory=dict)
    sources: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    def of(self, batch: TileBatch) -> RowMask:
        key = id(batch.window_admitted_NRL)
        if key not in self.made:
            hidden_NR1L = batch.window_admitted_NRL.logical_not().unsqueeze(2)
            self.made[key] = RowMask(batch.rows_NR.clamp(min=0).flatten(), hidden_NR1L)
        return self.made[key]

    def keys(self, lanes: Lanes | EntryLanes, source: KeySource) -> KernelLanes:
        """A batch's lanes as kernels take them."""
        key = id(lanes), source.family
        if key not in self.sources:
            self.sources[key] = lanes.sources(source.family)
        return KernelLanes(self.sources[key], source.fresh_XD.contiguous(), source.pool_SD)


def attend(
    q_TAD: torch.Tensor,
    window: KeySource,
    entries: KeySource | None,
    index: IndexInputs | None,
    sink_A: torch.Tensor,
    tiles: TileSet,
    tables: Tables | None,
    masks: TileMasks | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """Attention output [T, A, D] in q's (wide) dtype; zero for padding rows. model.md 4.1, 4.2.

    Keys are values. The scale is D^-0.5; the sink joins the denominator only. masks: kept from layer to layer of a
    step; mutated.
    """
    masks = TileMasks() if masks is None else masks
    if kernels is not None and all(_in_kernels(batch, q_TAD, kernels) for batch in tiles.batches):
        out_TAD = torch.zeros_like(q_TAD)
        for batch in tiles.batches:
            _attend_in_kernels(q_TAD, window, entries, index, sink_A, batch, masks, kernels, out_TAD)
        return out_TAD
    outputs = [q_TAD.new_zeros(1, *q_TAD.shape[1:])]
    for batch in tiles.batches:
        mask = masks.of(batch)
        outputs.append(_attend_batch(q_TAD, window, entries, index, sink_A, batch, mask, tables))
    return torch.cat(outputs).index_select(0, tiles.place_T)


def _in_kernels(batch: TileBatch, q_TAD: torch.Tensor, kernels: Kernels) -> bool:
    lanes, entries = batch.window.num_lanes, batch.entries
    if entries is not None:
        lanes += entries.width
    gathered = entries is not None and entries.gathered
    return not gathered and lanes in kernels.lanes and batch.rows_NR.numel() <= MOST_KERNEL_ROWS


def _attend_in_kernels(
    q_TAD: torch.Tensor,
    window: KeySource,
    entries: KeySource | None,
    index: IndexInputs | None,
    sink_A: torch.Tensor,
    batch: TileBatch,
    masks: TileMasks,
    kernels: Kernels,
    out_TAD: torch.Tensor,
) -> None:
    """`_attend_batch` without copies of the keys, written to its rows of out_TAD."""
    shared, compressed, selected_NRE, visible_NR = masks.keys(batch.window, window), None, None, None
    if batch.entries is not None and entries is not None:
        compressed, visible_NR = masks.keys(batch.entries.lanes, entries), batch.entries.visible_NR
        if index is not None and batch.entries.width > index.topk:
            selected_NRE = selection(index, batch, batch.entries)
    admitted_NRL = batch.window_admitted_NRL
    kernels.attend(q_TAD, sink_A, batch.rows_NR, shared, compressed, admitted_NRL, selected_NRE, visible_NR, out_TAD)


def _attend_batch(
    q_TAD: torch.Tensor,
    window: KeySource,
    entries: KeySource | None,
    index: IndexInputs | None,
    sink_A: torch.Tensor,
    batch: TileBatch,
    mask: RowMask,
    tables: Tables | None,
) -> torch.Tensor:
    """Output [N * R, A, D] of a batch of tiles. Keys that a tile shares are made once, for all parts of its rows."""
    N, R = batch.rows_NR.shape
    wide = q_TAD.dtype
    keys_NLD, hidden_NR1L = batch.window.fill(window.fresh_XD, window.pool_SD, window.family), mask.hidden_NR1L
    chosen_NRK = None
    if batch.entries is not None and entries is not None:
        if index is not None and batch.entries.gathered:
            chosen_NRK = selected_entries(selection(index, batch, batch.entries), index.topk)
        else:
            keys_NED = batch.entries.lanes.fill(entries.fresh_XD, entries.pool_SD, entries.family)
            keys_NLD = torch.cat((keys_NLD, keys_NED), dim=1)
            del keys_NED
            hidden_NR1L = torch.cat((hidden_NR1L, _hidden(index, batch, batch.entries)), dim=3)
    keys_NLD, lanes = cast(keys_NLD, wide), keys_NLD.shape[1]
    own = 0 if chosen_NRK is None else chosen_NRK.shape[2]
    outputs = []
    for part in row_parts(N, R, q_TAD.shape[1], q_TAD.shape[2], lanes, own):
        taken = part.stop - part.start
        rows_X = mask.rows_X if taken == R else mask.rows_X.view(N, R)[:, part].flatten()
        q_XAD = q_TAD.index_select(0, rows_X).mul_(q_TAD.shape[2] ** -0.5)
        q_NRAD = q_XAD.view(N, taken, *q_TAD.shape[1:])
        blocks = [_shared_keys(q_NRAD, keys_NLD, hidden_NR1L if taken == R else hidden_NR1L[:, part])]
        if chosen_NRK is not None and entries is not None and batch.entries is not None:
            own_NRK = chosen_NRK[:, part]
            keys_BKD = cast(_gather_rows(own_NRK, entries, batch.entries.span, tables), wide)
            blocks.append(_own_keys(q_NRAD, keys_BKD, (own_NRK < 0).unsqueeze(2)))
        outputs.append(_mix(blocks, sink_A))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)).flatten(0, 1)


def row_parts(tiles: int, rows: int, heads: int, head_dim: int, lanes: int, own: int) -> list[slice]:
    """Rows of a batch of tiles that are taken at once: parts of one size, the last maybe shorter.

    lanes are those that a tile shares, own the entries that each row gathers for itself.
    """
    per_row = tiles * max(heads * max(lanes + own, head_dim), own * head_dim)
    parts = -(-rows // max(1, MOST_ELEMENTS // per_row))
    size = -(-rows // parts)
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


@dataclass(frozen=True)
class _KeyBlock:
    """Scores [N, R, A, L] against keys [batch, L, D], one batch a tile (shared) or a row (own)."""

    scores_NRAL: torch.Tensor
    key_BLD: torch.Tensor

    def values(self, probability_NRAL: torch.Tensor) -> torch.Tensor:
        rows = probability_NRAL.reshape(self.key_BLD.shape[0], -1, self.key_BLD.shape[1])
        return tile_product(rows, self.key_BLD).view(*probability_NRAL.shape[:3], -1)


def _shared_keys(q_NRAD: torch.Tensor, key_NLD: torch.Tensor, hidden_NR1L: torch.Tensor) -> _KeyBlock:
    scores = tile_product(q_NRAD.flatten(1, 2), key_NLD.mT).view(*q_NRAD.shape[:3], -1)
    return _KeyBlock(scores.masked_fill_(hidden_NR1L, float("-inf")), key_NLD)


def _own_keys(q_NRAD: torch.Tensor, key_BKD: torch.Tensor, hidden_NR1K: torch.Tensor) -> _KeyBlock:
    scores = tile_product(q_NRAD.flatten(0, 1), key_BKD.mT).view(*q_NRAD.shape[:3], -1)
    return _KeyBlock(scores.masked_fill_(hidden_NR1K, float("-inf")), key_BKD)


def _mix(blocks: list[_KeyBlock], sink_A: torch.Tensor) -> torch.Tensor:
    """One softmax over the lanes of all blocks and the sink, and the mix of their keys, [N, R, A, D]."""
    scores = [block.scores_NRAL for block in blocks]
    sink_NRA1 = cast(sink_A, scores[0].dtype).unsqueeze(1).expand(*scores[0].shape[:3], 1)
    probability = torch.softmax(torch.cat([*scores, sink_NRA1], dim=3), dim=3)
    parts = probability.split_with_sizes([*(s.shape[3] for s in scores), 1], dim=3)
    output = blocks[0].values(parts[0])
    for block, part in zip(blocks[1:], parts[1:], strict=False):
        output = output + block.values(part)
    return output


def _hidden(index: IndexInputs | None, batch: TileBatch, entries: Entries) -> torch.Tensor:
    """Where a row does not attend an entry, bool [N, R, 1, E]; made anew at every use: it grows with context."""
    if index is not None and entries.width > index.topk:
        return selection(index, batch, entries).logical_not().unsqueeze(2)
    visible_NR11 = entries.visible_NR.view(*entries.visible_NR.shape, 1, 1)
    return torch.arange(entries.width, device=visible_NR11.device) >= visible_NR11


@torch.no_grad()
def selection(index: IndexInputs, batch: TileBatch, entries: Entries) -> torch.Tensor:
    """Which entries each row of a batch of tiles attends to: bool [N, R, E], never one that it may not see."""
    rows_NR = batch.rows_NR.clamp(min=0)
    keys = (index.keys.fresh_XD, index.keys.pool_SD, index.keys.family)
    scores_NRE = lane_scores(index.q_TID[rows_NR], index.head_TI[rows_NR], entries.lanes, keys)
    return select(scores_NRE, entries.admitted_NRE, index.topk)


def _gather_rows(chosen_NRK: torch.Tensor, source: KeySource, span: FreshSpan, tables: Tables | None) -> torch.Tensor:
    """Keys of each row's own entries, [N * R, K, D]."""
    rows = chosen_NRK.shape[1]
    per_row = FreshSpan(*(field.repeat_interleave(rows) for field in (span.slot_N, span.first_N, span.offset_N)))
    chosen_BK = chosen_NRK.flatten(0, 1)
    lanes = make_lanes(chosen_BK, chosen_BK >= 0, per_row, tables, (source.family,))
    return lanes.fill(source.fresh_XD, source.pool_SD, source.family)


def attention_workspace(
    config: V4Config, numerics: Numerics, rows: int, context: int, requests: int | None = None
) -> int:
    """Most bytes that `attend` holds at once for `rows` local rows at positions below `context`, its output included.

    A bound over every mixture of up to `requests` requests (default: one for each row); ValueError for numbers below
    1. The output grows with the rows, the rest is of one batch of tiles and stops growing with either. Index tensors
    of the plan, and q itself, are not in it.
    """
    requests = rows if requests is None else requests
    if min(rows, context, requests) < 1:
        raise ValueError(f"rows is {rows}, context {context}, requests {requests}, allowed: 1 or more")
    # A request's rows begin and end inside of a block.
    tiles_at_most = rows // TILE + 2 * requests
    batches = [
        _batch_bytes(config, numerics, ratio, tiles, padded, width)
        for ratio in sorted(set(config.compress_ratios))
        for width in _widths(ratio, context)
        for padded in (1 << bit for bit in range(TILE.bit_length()) if 1 << bit < 2 * rows)
        for tiles in _tile_counts(config, ratio, rows, padded, width, tiles_at_most)
    ]
    # Rows of a tile are padded to a power of two, so there are fewer than twice as many; all are joined, then placed.
    output = rows * config.num_attention_heads * config.head_dim * numerics.accumulation.itemsize
    return max(max(batches) + 2 * output, 5 * output)


def _widths(ratio: int, context: int) -> list[int]:
    """Compressed widths of tiles below this context, 0 for none."""
    most = entry_width((context - 1) // TILE, ratio) if ratio else 0
    return sorted({0, *(1 << bit for bit in range(MIN_WIDTH.bit_length() - 1, most.bit_length()))})


def _tile_counts(config: V4Config, ratio: int, rows: int, padded: int, width: int, at_most: int) -> set[int]:
    """Tiles of this shape in one batch: the most that the limits and the rows allow, and powers of two below."""
    limit = most_tiles(padded, width, ratio, config.sliding_window, config.index_topk)
    most = min(limit, at_most, max(1, rows // (padded // 2 + 1)))
    return {most, *(1 << bit for bit in range(most.bit_length()))}


def _batch_bytes(config: V4Config, numerics: Numerics, ratio: int, tiles: int, rows: int, width: int) -> int:
    """Most bytes that a batch of tiles of this shape holds: while it selects, or while it mixes keys."""
    wide, kv, heads, dim = (
        numerics.accumulation.itemsize,
        numerics.kv.itemsize,
        config.num_attention_heads,
        config.head_dim,
    )
    gathered = is_gathered(width, ratio, config.index_topk)
    own = config.index_topk if gathered else 0
    shared = config.sliding_window + TILE
    window = tiles * shared * dim * (kv + wide)
    selecting = 0
    if ratio == 4 and width > config.index_topk:
        selecting = _selecting_bytes(config, numerics, tiles, rows, width)
    lanes = shared + (0 if gathered else width)
    parts = row_parts(tiles, rows, heads, dim, lanes, own)
    taken = tiles * (parts[0].stop - parts[0].start)
    keys = tiles * lanes * dim * (kv + wide) + taken * own * dim * (kv + kv + wide)
    masks = tiles * rows * (width + 2 * lanes + 24 * own)
    # Queries, scores thrice (of both kinds, together, as probabilities), what is mixed twice, and outputs so far.
    mixing = taken * heads * (2 * dim + 3 * (lanes + own + 1) + 2 * dim) * wide + 2 * tiles * rows * heads * dim * wide
    return window + max(selecting, keys + masks + mixing)


def _selecting_bytes(config: V4Config, numerics: Numerics, tiles: int, rows: int, width: int) -> int:
    """Queries, scores, masks, and the larger of one part's scoring and one part's choice."""
    wide, kv = numerics.accumulation.itemsize, numerics.kv.itemsize
    heads, dim, taken = config.index_n_heads, config.index_head_dim, tiles * rows
    piece = min(width, SCORE_LANES)
    scoring = 2 * tiles * piece * dim * (kv + wide) + taken * piece * (heads + 1) * wide
    picked = min(taken, max(1, SELECT_ELEMENTS // width)) * width
    return taken * (heads * dim * wide + width * (wide + 3)) + max(scoring, picked * (2 * wide + 12))
