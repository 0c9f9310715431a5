"""Lanes: where the keys of a tile come from, resident rows of a pool or fresh rows of the step.

Legend: N tiles, L lanes, A fresh lanes, B resident lanes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .pages import Tables


@dataclass(frozen=True)
class Lanes:
    """N x L lanes; each is fed by one fresh row, by one resident row, or by nothing (it stays zero).

    fresh_lane [A] and resident_lane [B] are flat lane numbers, fresh_source [A] the fresh row behind each,
    resident [family][B] the pool slot behind each.
    """

    num_tiles: int
    num_lanes: int
    fresh_lane: torch.Tensor
    fresh_source: torch.Tensor
    resident_lane: torch.Tensor
    resident: Mapping[str, torch.Tensor]

    def fill(self, fresh_XC: torch.Tensor, pool_SC: torch.Tensor | None, family: str) -> torch.Tensor:
        """Rows of the lanes [N, L, C]: copies, exact zeros where nothing feeds a lane.

        pool_SC is needed where any lane is resident; gradients flow to fresh_XC.
        """
        lanes_XC = fresh_XC.new_zeros(self.num_tiles * self.num_lanes, fresh_XC.shape[1])
        if len(self.fresh_lane):
            rows_XC = fresh_XC.index_select(0, self.fresh_source)
            if rows_XC.requires_grad:
                lanes_XC = lanes_XC.index_copy(0, self.fresh_lane, rows_XC)
            else:
                lanes_XC.index_copy_(0, self.fresh_lane, rows_XC)
        if len(self.resident_lane):
            assert pool_SC is not None
            lanes_XC.index_copy_(0, self.resident_lane, pool_SC.index_select(0, self.resident[family]))
        return lanes_XC.view(self.num_tiles, self.num_lanes, fresh_XC.shape[1])

    def sources(self, family: str) -> torch.Tensor:
        """What feeds each lane, int64 [N, L] on the host: a fresh row (0 or more), nothing (-1), or the pool's row
        -2 - source."""
        source_X = np.full(self.num_tiles * self.num_lanes, -1, dtype=np.int64)
        source_X[self.fresh_lane.numpy()] = self.fresh_source.numpy()
        if len(self.resident_lane):
            source_X[self.resident_lane.numpy()] = -2 - self.resident[family].numpy()
        return torch.from_numpy(source_X).view(self.num_tiles, self.num_lanes)


@dataclass(frozen=True)
class FreshSpan:
    """Per tile: its request's slot, the first fresh index, and where that index's row stands among the fresh."""

    slot_N: torch.Tensor
    first_N: torch.Tensor
    offset_N: torch.Tensor

    @property
    def host(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """slot_N, first_N, offset_N as arrays that share their memory; for a span on the host."""
        return self.slot_N.numpy(), self.first_N.numpy(), self.offset_N.numpy()


def make_lanes(
    index_NL: torch.Tensor,
    needed_NL: torch.Tensor,
    span: FreshSpan,
    tables: Tables | None,
    families: tuple[str, ...],
    fresh_rows: torch.Tensor | None = None,
) -> Lanes:
    """Lanes of logical indices: fresh from span.first_N on, resident below. On any device, as layers need it.

    fresh_rows maps a place among the fresh to its row (None: they are the same). A needed resident index
    without a mapped page is a ValueError: it would be read as garbage.
    """
    fresh_NL = needed_NL & (index_NL >= span.first_N[:, None])
    resident_NL = needed_NL & ~fresh_NL
    lane_NL = torch.arange(index_NL.numel(), device=index_NL.device).view(index_NL.shape)
    source = (span.offset_N - span.first_N)[:, None] + index_NL
    fresh_source = source[fresh_NL]
    return Lanes(
        num_tiles=index_NL.shape[0],
        num_lanes=index_NL.shape[1],
        fresh_lane=lane_NL[fresh_NL],
        fresh_source=fresh_source if fresh_rows is None else fresh_rows[fresh_source],
        resident_lane=lane_NL[resident_NL],
        resident=_resident_slots(index_NL, resident_NL, span, tables, families),
    )


def plan_lanes(
    index_NL: np.ndarray,
    needed_NL: np.ndarray,
    span: FreshSpan,
    tables: Tables | None,
    families: tuple[str, ...],
    fresh_rows: torch.Tensor,
) -> Lanes:
    """`make_lanes` where a plan is made: on the host, in arrays, which have a fraction of the cost on few elements."""
    slot_N, first_N, offset_N = span.host
    fresh_NL = needed_NL & (index_NL >= first_N[:, None])
    fresh_lane, resident_lane = np.flatnonzero(fresh_NL), np.flatnonzero(needed_NL ^ fresh_NL)
    index, lanes = index_NL.ravel(), index_NL.shape[1]
    fresh_source = (offset_N - first_N)[fresh_lane // lanes] + index[fresh_lane]
    resident = {}
    if len(resident_lane):
        resident_slot, resident_index = slot_N[resident_lane // lanes], index[resident_lane]
        for family in families:
            slots = require_tables(tables)[family].host_slots(resident_slot, resident_index)
            if slots.min() < 0:
                bad = int(slots.argmin())
                raise unmapped(family, int(resident_index[bad]), int(resident_slot[bad]))
            resident[family] = torch.from_numpy(slots)
    return Lanes(
        num_tiles=index_NL.shape[0],
        num_lanes=lanes,
        fresh_lane=torch.from_numpy(fresh_lane),
        fresh_source=torch.from_numpy(fresh_rows.numpy()[fresh_source]),
        resident_lane=torch.from_numpy(resident_lane),
        resident=resident,
    )


def _resident_slots(
    index_NL: torch.Tensor,
    resident_NL: torch.Tensor,
    span: FreshSpan,
    tables: Tables | None,
    families: tuple[str, ...],
) -> dict[str, torch.Tensor]:
    if not bool(resident_NL.any()):
        return {}
    tile, lane = resident_NL.nonzero(as_tuple=True)
    index = index_NL[tile, lane]
    slots = {family: require_tables(tables)[family].slots(span.slot_N[tile], index) for family in families}
    for family, slot in slots.items():
        if bool((slot < 0).any()):
            bad = int((slot < 0).nonzero()[0, 0])
            raise unmapped(family, int(index[bad]), int(span.slot_N[tile[bad]]))
    return slots


def require_tables(tables: Tables | None) -> Tables:
    """The tables, where a step reads resident rows."""
    if tables is None:
        raise ValueError("a step that starts behind position 0 reads resident rows and needs caches")
    return tables


def unmapped(family: str, index: int, request_slot: int) -> ValueError:
    """What to raise where a resident index has no page."""
    return ValueError(f"{family}: index {index} of request slot {request_slot} is read but no page is mapped there")
