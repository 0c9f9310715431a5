"""Attention over tiles: window lanes and compressed lanes under one softmax with a sink.

Legend: T local rows, N tiles, R rows of a tile, A heads, D head dim, L window lanes, E compressed lanes,
K entries a row attends when they are gathered, X fresh rows.
"""

from dataclasses import dataclass

import torch

from ...layouts.lanes import FreshSpan, make_lanes
from ...layouts.pages import Tables
from ...layouts.tiles import Entries, TileBatch, TileSet
from ..functions import tile_product
from .indexer import index_scores, select, selected_entries


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


def attend(
    q_TAD: torch.Tensor,
    window: KeySource,
    entries: KeySource | None,
    index: IndexInputs | None,
    sink_A: torch.Tensor,
    tiles: TileSet,
    tables: Tables | None,
) -> torch.Tensor:
    """Attention output [T, A, D] in q's (wide) dtype; zero for padding rows. model.md 4.1, 4.2.

    Keys are values. The scale is D^-0.5; the sink joins the denominator only.
    """
    scaled_TAD = q_TAD * q_TAD.shape[2] ** -0.5
    outputs = [q_TAD.new_zeros(1, *q_TAD.shape[1:])]
    for batch in tiles.batches:
        outputs.append(_attend_batch(scaled_TAD, window, entries, index, sink_A, batch, tables))
    return torch.cat(outputs).index_select(0, tiles.place_T)


def _attend_batch(
    q_TAD: torch.Tensor,
    window: KeySource,
    entries: KeySource | None,
    index: IndexInputs | None,
    sink_A: torch.Tensor,
    batch: TileBatch,
    tables: Tables | None,
) -> torch.Tensor:
    N, R = batch.rows_NR.shape
    A, D = q_TAD.shape[1:]
    q_NMD = q_TAD.index_select(0, batch.rows_NR.clamp(min=0).flatten()).view(N, R * A, D)
    blocks = [_shared_keys(q_NMD, batch.window.fill(window.fresh_XD, window.pool_SD, window.family), R)]
    masks = [batch.window_admitted_NRL]
    if batch.entries is not None and entries is not None:
        block, mask = _entry_keys(q_NMD, entries, index, batch, batch.entries, tables)
        blocks.append(block)
        masks.append(mask)
    sink_NRA1 = sink_A.to(q_NMD.dtype).expand(N, R, A)[..., None]
    scores = [b.scores_NRAL.masked_fill(~m[:, :, None], float("-inf")) for b, m in zip(blocks, masks, strict=True)]
    probability = torch.softmax(torch.cat([*scores, sink_NRA1], dim=3), dim=3)
    parts = probability.split([*(s.shape[3] for s in scores), 1], dim=3)
    output = blocks[0].values(parts[0])
    for block, part in zip(blocks[1:], parts[1:], strict=False):
        output = output + block.values(part)
    return output.flatten(0, 1)


@dataclass(frozen=True)
class _KeyBlock:
    """Scores [N, R, A, L] against keys [batch, L, D], one batch a tile (shared) or a row (own)."""

    scores_NRAL: torch.Tensor
    key_BLD: torch.Tensor

    def values(self, probability_NRAL: torch.Tensor) -> torch.Tensor:
        rows = probability_NRAL.reshape(self.key_BLD.shape[0], -1, self.key_BLD.shape[1])
        return tile_product(rows, self.key_BLD).view(*probability_NRAL.shape[:3], -1)


def _shared_keys(q_NMD: torch.Tensor, key_NLD: torch.Tensor, rows: int) -> _KeyBlock:
    key_NLD = key_NLD.to(q_NMD.dtype)
    scores = tile_product(q_NMD, key_NLD.transpose(1, 2))
    return _KeyBlock(scores.unflatten(1, (rows, -1)), key_NLD)


def _entry_keys(
    q_NMD: torch.Tensor,
    source: KeySource,
    index: IndexInputs | None,
    batch: TileBatch,
    entries: Entries,
    tables: Tables | None,
) -> tuple[_KeyBlock, torch.Tensor]:
    R = batch.rows_NR.shape[1]
    mask_NRE = entries.admitted_NRE
    if index is not None and entries.width > index.topk:
        mask_NRE = selection(index, batch, entries)
    if index is None or not entries.gathered:
        return _shared_keys(q_NMD, entries.lanes.fill(source.fresh_XD, source.pool_SD, source.family), R), mask_NRE
    chosen_NRK = selected_entries(mask_NRE, index.topk)
    key_BKD = _gather_rows(chosen_NRK, source, entries.span, tables).to(q_NMD.dtype)
    q_BAD = q_NMD.reshape(len(key_BKD), -1, q_NMD.shape[2])
    scores_BAK = tile_product(q_BAD, key_BKD.transpose(1, 2))
    return _KeyBlock(scores_BAK.view(*chosen_NRK.shape[:2], *scores_BAK.shape[1:]), key_BKD), chosen_NRK >= 0


@torch.no_grad()
def selection(index: IndexInputs, batch: TileBatch, entries: Entries) -> torch.Tensor:
    """Which entries each row of a batch of tiles attends to: bool [N, R, E], never one that it may not see."""
    rows_NR = batch.rows_NR.clamp(min=0)
    key_NED = entries.lanes.fill(index.keys.fresh_XD, index.keys.pool_SD, index.keys.family)
    scores_NRE = index_scores(index.q_TID[rows_NR], index.head_TI[rows_NR], key_NED)
    return select(scores_NRE, entries.admitted_NRE, index.topk)


def _gather_rows(chosen_NRK: torch.Tensor, source: KeySource, span: FreshSpan, tables: Tables | None) -> torch.Tensor:
    """Keys of each row's own entries, [N * R, K, D]."""
    rows = chosen_NRK.shape[1]
    per_row = FreshSpan(*(field.repeat_interleave(rows) for field in (span.slot_N, span.first_N, span.offset_N)))
    chosen_BK = chosen_NRK.flatten(0, 1)
    lanes = make_lanes(chosen_BK, chosen_BK >= 0, per_row, tables, (source.family,))
    return lanes.fill(source.fresh_XD, source.pool_SD, source.family)
