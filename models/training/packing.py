"""Packing: of long contexts only the rows that blocks see, so that a step costs by its anchors (training.md 4.4).

A block at anchor a sees the context rows a - window .. a - 1 of its document. Packed, a document with anchors becomes
one row of the draft's batch: the union of its blocks' windows, in order. Every window stays whole and contiguous and
ends right before its anchor's place, and a window clipped by the start of the document starts the row; so a draft
with this context window, whose attention knows relative positions only, computes the same from packed rows, and
nothing crosses documents.

Letters: B samples, D packed documents, N blocks of a document, P context rows of a document, b offsets of a block,
F features, H hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from .anchors import Anchors
from .blocks import Blocks
from .samples import Batch


@dataclass(frozen=True)
class ContextRows:
    """index: the rows that are needed, rising, int64; places: where each anchor stands in them (its window ends
    before that row), int64 of the anchors' shape."""

    index: Tensor
    places: Tensor


@dataclass(frozen=True)
class DraftBatch:
    """What a step of the draft reads: of sizes that depend on anchors and window, not on the length of samples.

    features_DPF, zero in the padding; anchors_DN int64 places in packed rows, keep_DN bool; blocks of [D, N, b], whose
    positions and indices are those of the sample; context_positions_DP: the sample's position of a packed row, -1 in
    the padding; next_ids_DP int64: the token behind a packed row, 0 in the padding; teacher_DNbH: the target's last
    states at the blocks' teacher_index, None without a teacher; samples and candidates: how many samples were packed,
    how many positions could have been anchors.
    """

    features_DPF: Tensor
    anchors_DN: Tensor
    keep_DN: Tensor
    blocks: Blocks
    context_positions_DP: Tensor
    next_ids_DP: Tensor
    teacher_DNbH: Tensor | None
    samples: int
    candidates: int

    def to(self, device: torch.device | str) -> "DraftBatch":
        """The same on a device."""
        blocks = {
            field.name: getattr(self.blocks, field.name).to(device, non_blocking=True) for field in fields(Blocks)
        }
        return replace(
            self,
            features_DPF=self.features_DPF.to(device, non_blocking=True),
            anchors_DN=self.anchors_DN.to(device, non_blocking=True),
            keep_DN=self.keep_DN.to(device, non_blocking=True),
            blocks=Blocks(**blocks),
            context_positions_DP=self.context_positions_DP.to(device, non_blocking=True),
            next_ids_DP=self.next_ids_DP.to(device, non_blocking=True),
            teacher_DNbH=None if self.teacher_DNbH is None else self.teacher_DNbH.to(device, non_blocking=True),
        )


def context_rows(anchors_N: Tensor, start: int, window: int | None) -> ContextRows:
    """The context rows that rising anchors of one document need; `start` is the document's first row.

    Without a window all rows from the start to the last anchor. O(rows that are returned).
    """
    if window is not None and window < 1:
        raise ValueError(f"context_window is {window}, allowed: 1 or more, or null for all rows")
    before_N = torch.cat([anchors_N.new_tensor([start]), anchors_N[:-1]])
    first_N = before_N if window is None else torch.maximum(before_N, anchors_N - window)
    places_N = (anchors_N - first_N).cumsum(0)
    total = int(places_N[-1])
    # Row r lies in the run of the first anchor whose place is beyond r, as far from the anchor as r from the place.
    rows = torch.arange(total)
    run = torch.searchsorted(places_N, rows, right=True)
    return ContextRows(anchors_N[run] - (places_N[run] - rows), places_N)


def pack(batch: Batch, anchors: Anchors, blocks: Blocks, window: int | None) -> DraftBatch:
    """A micro-batch with its blocks, packed. Without any kept anchor one dummy block on one zero row.

    Features and teacher states are read at the rows needed, no others. A document without anchors leaves no trace.
    """
    groups = list(_documents(batch, anchors))
    needed = [context_rows(anchors.positions_BN[row, which], start, window) for row, which, start in groups]
    count, width = max(len(groups), 1), max([len(which) for _, which, _ in groups] + [1])
    longest = max([len(rows.index) for rows in needed] + [1])
    shape = batch.shape
    features_DPF = torch.zeros(count, longest, shape.features, dtype=shape.dtype)
    positions_DP = torch.full((count, longest), -1, dtype=torch.int64)
    next_ids_DP = torch.zeros(count, longest, dtype=torch.int64)
    places_DN = torch.zeros(count, width, dtype=torch.int64)
    keep_DN = torch.zeros(count, width, dtype=torch.bool)
    # Blocks that are not kept copy the shape of block (0, 0): anything of it is masked.
    source_DN = torch.zeros(count, width, dtype=torch.int64)
    for place, ((row, which, _), rows) in enumerate(zip(groups, needed, strict=True)):
        features_DPF[place, : len(rows.index)] = batch.features[row][rows.index]
        positions_DP[place, : len(rows.index)] = rows.index
        # A context row lies before an anchor of its document, so there is a token behind it.
        next_ids_DP[place, : len(rows.index)] = batch.input_ids_BS[row, rows.index + 1]
        places_DN[place, : len(which)] = rows.places
        keep_DN[place, : len(which)] = True
        source_DN[place, : len(which)] = row * anchors.keep_BN.shape[1] + which
    packed = _chosen(blocks, source_DN, keep_DN)
    teacher = None if batch.teacher is None else _teacher(batch, packed, groups)
    counted = int(anchors.candidates_B.sum())
    samples = batch.input_ids_BS.shape[0]
    return DraftBatch(features_DPF, places_DN, keep_DN, packed, positions_DP, next_ids_DP, teacher, samples, counted)


def _documents(batch: Batch, anchors: Anchors) -> Iterator[tuple[int, Tensor, int]]:
    """By sample, then document: the sample, which of its anchors are in the document, the document's first row."""
    for row, documents_S in enumerate(batch.documents_BS):
        which = anchors.keep_BN[row].nonzero().flatten()
        if not len(which):
            continue
        borders = torch.cat([torch.zeros(1, dtype=torch.int64), (documents_S.diff() != 0).nonzero().flatten() + 1])
        document_K = torch.searchsorted(borders, anchors.positions_BN[row, which], right=True) - 1
        for document in document_K.unique().tolist():
            yield row, which[document_K == document], int(borders[document])


def _chosen(blocks: Blocks, source_DN: Tensor, keep_DN: Tensor) -> Blocks:
    chosen = {field.name: getattr(blocks, field.name).flatten(0, 1)[source_DN] for field in fields(Blocks)}
    chosen["eval_mask"] = chosen["eval_mask"] & keep_DN[..., None]
    chosen["weights"] = chosen["weights"] * keep_DN[..., None]
    return Blocks(**chosen)


def _teacher(batch: Batch, packed: Blocks, groups: list[tuple[int, Tensor, int]]) -> Tensor:
    """Target states at the teacher indices, [D, N, b, H]; zeros where a document has no block."""
    assert batch.teacher is not None
    index = packed.teacher_index
    states = torch.zeros(*index.shape, batch.shape.hidden, dtype=batch.shape.dtype)
    for place, (row, which, _) in enumerate(groups):
        # A short sample in a padded batch: what lies beyond it is masked, any row of it will do.
        inside = index[place, : len(which)].clamp(max=batch.teacher[row].shape[0] - 1)
        states[place, : len(which)] = batch.teacher[row][inside]
    return states
