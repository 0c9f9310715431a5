"""RowPlan: everything about a step's rows that is index arithmetic, made once and shared by all layers.

Legend: G group rows, T local rows, A asked rows, E entries completed in the step, P positions pooled into one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .lanes import FreshSpan, Lanes, plan_lanes
from .move import to_device
from .pages import PageFamily, Tables
from .rows import GroupRows, RequestFields, RequestRows, place_rows, request_fields
from .tiles import TileSet, entry_offsets, make_tiles

STATE_FAMILIES = {4: ("csa_state", "index_state"), 128: ("hca_state",)}


@dataclass(frozen=True)
class Geometry:
    """What of a model's shape decides a plan: window, compression ratios in use (0 included), index_topk."""

    window: int
    ratios: tuple[int, ...]
    index_topk: int


@dataclass(frozen=True)
class Boundaries:
    """The entries that the step completes for one ratio, by request, then by entry.

    lanes [E, P] are the pooled positions in order, resident state or fresh row; the first ones of entry 0 of a
    ratio-4 request do not exist (present is False there). start_E is each entry's first own position.
    """

    lanes: Lanes
    present_EP: torch.Tensor
    start_E: torch.Tensor


@dataclass(frozen=True)
class Asked:
    """Rows whose logits or ids are wanted, by band, then by row of the band.

    counts: asked rows of each band. local_rows: those of this rank's band. destination, request, offset: the
    tp_rank that gets each, the index of its request in the plan, and its offset among the request's rows.
    """

    counts: tuple[int, ...]
    local_rows: torch.Tensor
    destination: tuple[int, ...]
    request: tuple[int, ...]
    offset: tuple[int, ...]

    def owned(self, tp_rank: int) -> tuple[tuple[int, int], ...]:
        """(request, offset) of the asked rows that this tp_rank receives, in the order it receives them."""
        rows = zip(self.destination, self.request, self.offset, strict=True)
        return tuple((request, offset) for rank, request, offset in rows if rank == tp_rank)


@dataclass(frozen=True)
class RowPlan:
    """One step of one rank: its group's rows, its own tiles, the pools' reads and writes.

    tiles and boundaries are by ratio; writes by family: (row of the group or entry of the step, pool slot).
    """

    geometry: Geometry
    tp_rank: int
    requests: tuple[RequestRows, ...]
    rows: GroupRows
    tiles: Mapping[int, TileSet]
    boundaries: Mapping[int, Boundaries]
    asked: Asked
    writes: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    @property
    def local_t(self) -> int:
        return self.rows.local_t

    def to(self, device: torch.device) -> "RowPlan":
        """This plan with its tensors on `device`; itself if they are there."""
        if self.rows.token_G.device == device:
            return self
        moved: RowPlan = to_device(self, device)
        return moved

    def local(self, field_G: torch.Tensor) -> torch.Tensor:
        """This rank's band of a group field."""
        return field_G[self.rows.band(self.tp_rank)]


def plan_rows(
    requests: Sequence[RequestRows],
    geometry: Geometry,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    tables: Tables | None = None,
    families: Sequence[PageFamily] = (),
) -> RowPlan:
    """The plan of a step for one rank; ranks of a group that pass the same requests get fitting plans.

    tables None: nothing is resident and nothing is written (training). ValueError where a request is listed
    twice, or where a row would be read or written without a mapped page.
    """
    requests = tuple(requests)
    slots = [request.slot for request in requests]
    if tables is not None and len(set(slots)) < len(slots):
        raise ValueError(f"request slots are {slots}, allowed: each slot once in a step")
    rows, fields = place_rows(requests, tp), request_fields(requests)
    completed = {ratio: _completed(fields, ratio) for ratio in geometry.ratios if ratio}
    boundaries = {ratio: _boundaries(fields, rows, ratio, done, tables) for ratio, done in completed.items()}
    return RowPlan(
        geometry=geometry,
        tp_rank=tp_rank,
        requests=requests,
        rows=rows,
        tiles=make_tiles(rows, tp_rank, fields, geometry.ratios, geometry.window, geometry.index_topk, tables),
        boundaries=boundaries,
        asked=_asked(requests, rows, tp_rank),
        writes={} if tables is None else _writes(fields, rows, completed, tables, families),
    )


Completed = tuple[np.ndarray, np.ndarray]
"""Request and number of each entry whose last position is in the step, by request, then by entry."""


def _boundaries(
    fields: RequestFields, rows: GroupRows, ratio: int, completed: Completed, tables: Tables | None
) -> Boundaries:
    request_E, entry_E = completed
    pooled = 2 * ratio if ratio == 4 else ratio
    position_EP = ((entry_E + 1) * ratio - pooled)[:, None] + np.arange(pooled)
    span = FreshSpan(
        torch.from_numpy(fields.slot_R[request_E]),
        torch.from_numpy(fields.start_R[request_E]),
        torch.from_numpy(rows.fresh_offset_R.numpy()[request_E]),
    )
    present_EP = position_EP >= 0
    lanes = plan_lanes(position_EP, present_EP, span, tables, STATE_FAMILIES[ratio], rows.fresh_rows_N)
    return Boundaries(lanes, torch.from_numpy(present_EP), torch.from_numpy(entry_E * ratio))


def _completed(fields: RequestFields, ratio: int) -> Completed:
    first_R = fields.start_R // ratio
    count_R = (fields.start_R + fields.length_R) // ratio - first_R
    request_E = np.repeat(np.arange(len(count_R)), count_R)
    within_E = np.arange(len(request_E)) - entry_offsets(fields, ratio)[request_E]
    return request_E, first_R[request_E] + within_E


def _asked(requests: tuple[RequestRows, ...], rows: GroupRows, tp_rank: int) -> Asked:
    wanted, offset_R, row_N = [], rows.fresh_offset_R.tolist(), rows.fresh_rows_N.numpy()
    for index, request in enumerate(requests):
        first = offset_R[index]
        for offset in request.asked:
            wanted.append((int(row_N[first + offset]), request.owner, index, offset))
    wanted.sort()
    band = [row // rows.local_t for row, *_ in wanted]
    return Asked(
        counts=tuple(band.count(rank) for rank in range(rows.tp)),
        local_rows=torch.tensor([row % rows.local_t for row, *_ in wanted if row // rows.local_t == tp_rank]).long(),
        destination=tuple(owner for _, owner, _, _ in wanted),
        request=tuple(index for _, _, index, _ in wanted),
        offset=tuple(offset for *_, offset in wanted),
    )


def _writes(
    fields: RequestFields,
    rows: GroupRows,
    completed: Mapping[int, Completed],
    tables: Tables,
    families: Sequence[PageFamily],
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    row_N = rows.fresh_rows_N
    slot_N, position_N = (field_G.numpy()[row_N.numpy()] for field_G in (rows.slot_G, rows.position_G))
    writes = {}
    for family in families:
        source, slot, index = row_N, slot_N, position_N
        if family.per_entry:
            assert family.ratio is not None
            request_E, index = completed[family.ratio]
            source, slot = torch.arange(len(index)), fields.slot_R[request_E]
        target = tables[family.name].host_slots(slot, index)
        if target.min(initial=0) < 0:
            raise ValueError(f"{family.name}: a row of the step has no mapped page to be written to")
        writes[family.name] = (source, torch.from_numpy(target))
    return writes
