"""Page tables: which slot of a pool holds which logical index. Index arithmetic only, 64 bit throughout."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

COMPRESSED_TOKENS = 128
"""Source tokens that one page of compressed entries covers, whatever the ratio."""


@dataclass(frozen=True)
class PageFamily:
    """One kind of cache row.

    ratio: the compression ratio of the layers that have it, None for all layers. page: rows in a page.
    history: how many indices behind a request's first fresh one a step may read; None where all of them stay.
    per_entry: indexed by compressed entry rather than by position.
    """

    name: str
    ratio: int | None
    page: int
    history: int | None
    per_entry: bool = False

    def depth(self, max_context: int, max_fresh: int) -> int:
        """Entries of a request's table: full where all history stays, else the least ring in which a step of
        max_fresh rows never evicts what it may still read."""
        if self.history is None:
            return -(-max_context // COMPRESSED_TOKENS)
        return -(-(self.history + max_fresh + self.page - 1) // self.page)

    def resting(self, max_context: int) -> int:
        """Pages that a request of max_context positions holds between two steps at most."""
        if self.history is None:
            return -(-self.rows(max_context) // self.page)
        return -(-min(self.rows(max_context), self.history - 1 + self.page - 1) // self.page)

    def rows(self, length: int) -> int:
        """Rows of this family that `length` positions make."""
        return length // self.ratio if self.per_entry and self.ratio else length

    def readable(self, length: int) -> range:
        """Indices that a step may read whose first position is `length`."""
        if self.per_entry:
            return range(self.rows(length))
        if self.ratio is None:
            assert self.history is not None, "the window is a ring"
            return range(max(0, length - self.history + 1), length)
        older = self.ratio if self.ratio == 4 else 0
        return range(max(0, length // self.ratio * self.ratio - older), length)


def page_families(window: int, ratios: tuple[int, ...], block_size: int = 32) -> tuple[PageFamily, ...]:
    """The families that layers of these compression ratios need, in a fixed order."""
    families = [PageFamily("window_kv", None, block_size, window)]
    if 4 in ratios:
        families += [
            PageFamily("csa_kv", 4, COMPRESSED_TOKENS // 4, None, per_entry=True),
            PageFamily("csa_index", 4, COMPRESSED_TOKENS // 4, None, per_entry=True),
            PageFamily("csa_state", 4, 2, 8),
            PageFamily("index_state", 4, 2, 8),
        ]
    if 128 in ratios:
        families += [
            PageFamily("hca_kv", 128, COMPRESSED_TOKENS // 128, None, per_entry=True),
            PageFamily("hca_state", 128, 8, 128),
        ]
    return tuple(families)


@dataclass(frozen=True)
class PageTable:
    """table [request slots, depth] int64 of physical pages, -1 where none is mapped."""

    page: int
    table: torch.Tensor

    @property
    def host(self) -> np.ndarray:
        """The same memory as an array, for plans: numpy takes a fraction of torch's time on few elements."""
        return self.table.numpy()

    def host_slots(self, request_slots: np.ndarray, index: np.ndarray) -> np.ndarray:
        """`slots` of a table on the host, for int64 indices none of which is negative."""
        table = self.host
        place, row = np.divmod(index, self.page)
        pages = table[request_slots, place % table.shape[1]]
        return np.where(pages < 0, -1, pages * self.page + row)

    def slots(self, request_slots: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Pool slot of each logical index, int64 of index's shape, -1 where index < 0 or no page is mapped.

        request_slots broadcasts over index: table[request][(index // page) mod depth] * page + index % page.
        """
        index = index.to(torch.int64)
        depth = self.table.shape[1]
        safe = index.clamp(min=0)
        pages = self.table[request_slots, safe // self.page % depth]
        return torch.where((index < 0) | (pages < 0), -1, pages * self.page + safe % self.page)


Tables = Mapping[str, PageTable]
