"""Entry lanes: the compressed entries 0, 1, ... of a request as the lanes of a tile, read page by page.

Legend: N tiles, L lanes, P pages of a tile, B rows of a page, C columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .lanes import FreshSpan, require_tables, unmapped
from .pages import PageTable, Tables


@dataclass(frozen=True)
class EntryLanes:
    """Lanes of N tiles, entry e in lane e: below resident_N a row of the pool, from there up to known_N a fresh row
    of the step, exact zeros beyond.

    What is kept is one number a page, so that a plan stays small at any context: pages [family][N, P] are the
    physical pages of `page` rows behind the resident entries, 0 where a tile has fewer. fresh_N is the fresh row
    that entry 0 would have. Over all tiles, resident is the least of resident_N and known the greatest of known_N.
    """

    width: int
    page: int
    resident_N: torch.Tensor
    known_N: torch.Tensor
    fresh_N: torch.Tensor
    pages: Mapping[str, torch.Tensor]
    resident: int
    known: int
    num_fresh: int

    def fill(
        self, fresh_XC: torch.Tensor, pool_SC: torch.Tensor | None, family: str, first: int = 0, last: int | None = None
    ) -> torch.Tensor:
        """Rows of the lanes first to last - 1 (default: all), [N, L, C]: copies.

        pool_SC is needed where any lane is resident; gradients flow to fresh_XC.
        """
        last = self.width if last is None else last
        lanes_NLC = self._resident_rows(fresh_XC, pool_SC, family, first, last)
        if last > self.resident:
            outside_NL = torch.arange(first, last, device=self.resident_N.device) >= self.resident_N[:, None]
            lanes_NLC.masked_fill_(outside_NL[:, :, None], 0)
        if self.num_fresh and last > self.resident and first < self.known:
            tile, entry = self._fresh_lanes(first, last)
            lane = tile * (last - first) + entry - first
            source = self.fresh_N[tile] + entry
            lanes_NLC.view(-1, lanes_NLC.shape[2]).index_copy_(0, lane, fresh_XC.index_select(0, source))
        return lanes_NLC

    def sources(self, family: str) -> torch.Tensor:
        """What feeds each lane, int64 [N, L] on the host: a fresh row (0 or more), nothing (-1), or the pool's row
        -2 - source."""
        lane_L, resident_N1 = np.arange(self.width), self.resident_N.numpy()[:, None]
        source_NL = np.where(lane_L < self.known_N.numpy()[:, None], self.fresh_N.numpy()[:, None] + lane_L, -1)
        pages_NP = self.pages.get(family)
        if pages_NP is not None:
            most = min(self.width, pages_NP.shape[1] * self.page)
            slot_NL = pages_NP.numpy()[:, lane_L[:most] // self.page] * self.page + lane_L[:most] % self.page
            source_NL[:, :most] = np.where(lane_L[:most] < resident_N1, -2 - slot_NL, source_NL[:, :most])
        return torch.from_numpy(source_NL)

    def _resident_rows(
        self, fresh_XC: torch.Tensor, pool_SC: torch.Tensor | None, family: str, first: int, last: int
    ) -> torch.Tensor:
        """[N, L, C] with the pool's rows in resident lanes; anything in the others."""
        shape = (len(self.resident_N), last - first, fresh_XC.shape[1])
        pages_NP = self.pages.get(family)
        if pages_NP is None or first >= pages_NP.shape[1] * self.page:
            return fresh_XC.new_zeros(shape)
        assert pool_SC is not None
        begin = first // self.page
        picked_NP = pages_NP[:, begin : -(-last // self.page)]
        pool_PBC = pool_SC.unflatten(0, (-1, self.page))
        rows_NLC = pool_PBC.index_select(0, picked_NP.flatten()).view(shape[0], -1, shape[2])
        rows_NLC = rows_NLC[:, first - begin * self.page :][:, : shape[1]]
        if rows_NLC.shape[1] == shape[1]:
            return rows_NLC if rows_NLC.is_contiguous() else rows_NLC.contiguous()
        lanes_NLC = fresh_XC.new_zeros(shape)
        lanes_NLC[:, : rows_NLC.shape[1]] = rows_NLC
        return lanes_NLC

    def _fresh_lanes(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(tile, entry) of the fresh lanes from first to last - 1."""
        count_N = self.known_N - self.resident_N
        tiles_N = torch.arange(len(count_N), device=count_N.device)
        tile = torch.repeat_interleave(tiles_N, count_N, output_size=self.num_fresh)
        begin_N = self.resident_N - (count_N.cumsum(0) - count_N)
        entry = torch.arange(self.num_fresh, device=tile.device) + begin_N[tile]
        if first <= self.resident and last >= self.known:
            return tile, entry
        inside = (entry >= first) & (entry < last)
        return tile[inside], entry[inside]


def make_entry_lanes(
    width: int, known_N: torch.Tensor, span: FreshSpan, tables: Tables | None, families: tuple[str, ...]
) -> EntryLanes:
    """Lanes of the first known_N entries of each tile: fresh from span.first_N on, resident below.

    A resident entry without a mapped page is a ValueError: it would be read as garbage.
    """
    slot_N, first_N, offset_N = span.host
    known = known_N.numpy()
    resident = np.minimum(known, first_N)
    page, pages = 1, {}
    if resident.any():
        held = [require_tables(tables)[family] for family in families]
        page = held[0].page
        pages = {family: _pages(family, table, slot_N, resident) for family, table in zip(families, held, strict=True)}
    return EntryLanes(
        width=width,
        page=page,
        resident_N=torch.from_numpy(resident),
        known_N=known_N,
        fresh_N=torch.from_numpy(offset_N - first_N),
        pages=pages,
        resident=int(resident.min()),
        known=int(known.max()),
        num_fresh=int((known - resident).sum()),
    )


def _pages(family: str, table: PageTable, slot_N: np.ndarray, resident_N: np.ndarray) -> torch.Tensor:
    """Physical pages [N, P] of the resident entries, 0 where a tile has fewer."""
    place_P = np.arange(-(-int(resident_N.max()) // table.page))
    assert len(place_P) <= table.host.shape[1], f"{family}: all entries of a request stay, in a table of full depth"
    pages_NP = table.host[slot_N, : len(place_P)]
    read_NP = place_P * table.page < resident_N[:, None]
    missing_NP = read_NP & (pages_NP < 0)
    if missing_NP.any():
        tile, place = divmod(int(missing_NP.argmax()), len(place_P))
        raise unmapped(family, place * table.page, int(slot_N[tile]))
    return torch.from_numpy(np.where(read_NP, pages_NP, 0))
