"""Caches behind page tables: pools per family and layer, an allocator of pages, and dumps for tests.

Legend: M layers that have the family, S pool slots, C columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...layouts.pages import PageFamily, PageTable, page_families
from ...parallel.topology import Topology
from ..numerics import Numerics
from .config import V4Config


@dataclass(frozen=True)
class CacheShape:
    """What fixes the size of a rank's caches.

    request_slots: requests of the group at once; max_context: positions of one request; max_fresh: rows of one
    request in one step; block_size: positions of a window page. pages: physical pages per family, by default
    enough for every slot at full length.
    """

    request_slots: int
    max_context: int
    max_fresh: int
    block_size: int = 32
    pages: Mapping[str, int] | None = None


def family_columns(family: PageFamily, config: V4Config) -> int:
    """Columns of one cache row of this family."""
    return {
        "csa_index": config.index_head_dim,
        "csa_state": 4 * config.head_dim,
        "index_state": 4 * config.index_head_dim,
        "hca_state": 2 * config.head_dim,
    }.get(family.name, config.head_dim)


class Caches:
    """One rank's replica of its group's caches.

    A slot of position p is table[(p // page) mod depth] * page + p % page; entries that no page backs are -1.
    The pools are on the device, the tables on the host, where plans are made. The caches belong to one topology
    and refuse another.
    """

    def __init__(
        self,
        config: V4Config,
        shape: CacheShape,
        numerics: Numerics,
        topology: Topology,
        device: torch.device | str = "cpu",
    ) -> None:
        if not 1 <= shape.max_context <= config.max_position_embeddings:
            raise ValueError(
                f"max_context is {shape.max_context}, allowed: 1 to max_position_embeddings "
                f"{config.max_position_embeddings}"
            )
        self.config, self.shape, self.topology = config, shape, topology
        self.families = page_families(config.sliding_window, config.compress_ratios, shape.block_size)
        self.pools: dict[str, torch.Tensor] = {}
        self.tables: dict[str, PageTable] = {}
        self._free: dict[str, list[int]] = {}
        for family in self.families:
            depth = family.depth(shape.max_context, shape.max_fresh)
            pages = (shape.pages or {}).get(family.name, shape.request_slots * depth)
            self._free[family.name] = list(range(pages - 1, -1, -1))
            self.tables[family.name] = PageTable(
                family.page, torch.full((shape.request_slots, depth), -1, dtype=torch.int64)
            )
            self.pools[family.name] = torch.zeros(
                len(self.layers_of(family)),
                pages * family.page,
                family_columns(family, config),
                dtype=numerics.accumulation if family.name.endswith("state") else numerics.kv,
                device=device,
            )

    def layers_of(self, family: PageFamily) -> tuple[int, ...]:
        """The layers that have rows of this family, ascending."""
        if family.ratio is None:
            return tuple(range(self.config.num_hidden_layers))
        return self.config.layers_of(family.ratio)

    def pool(self, family: str, place: int) -> torch.Tensor:
        """Rows [S, C] of the place-th layer that has the family."""
        return self.pools[family][place]

    def lookup(self, device: torch.device) -> dict[str, PageTable]:
        """The tables that a layer reads at run time (entries that rows select), on `device`."""
        chosen = {name: table for name, table in self.tables.items() if name == "csa_kv"}
        return {name: PageTable(table.page, table.table.to(device)) for name, table in chosen.items()}

    def pages_needed(self, limit: int) -> dict[str, int]:
        """Pages of each family that a request of up to `limit` positions maps."""
        return {f.name: self._pages(f, limit) for f in self.families}

    def _pages(self, family: PageFamily, limit: int) -> int:
        depth = self.tables[family.name].table.shape[1]
        rows = limit // family.ratio if family.per_entry and family.ratio else limit
        return min(depth, -(-rows // family.page))

    def free_pages(self) -> dict[str, int]:
        return {name: len(pages) for name, pages in self._free.items()}

    def admit(self, request_slot: int, limit: int) -> None:
        """Map the pages of a request of at most `limit` positions to a free request slot, or change nothing.

        ValueError where the slot is taken, the limit is beyond max_context, or pages are short.
        """
        if not 0 <= request_slot < self.shape.request_slots:
            raise ValueError(f"request slot is {request_slot}, allowed: 0 to {self.shape.request_slots - 1}")
        if not 1 <= limit <= self.shape.max_context:
            raise ValueError(f"limit is {limit} positions, allowed: 1 to max_context {self.shape.max_context}")
        needed, free = self.pages_needed(limit), self.free_pages()
        if bool((self.tables["window"].table[request_slot] >= 0).any()):
            raise ValueError(f"request slot {request_slot} is taken")
        short = {name: f"needs {n}, free {free[name]}" for name, n in needed.items() if n > free[name]}
        if short:
            raise ValueError(f"cache pages are short for {limit} positions: {short}")
        for name, count in needed.items():
            pages = [self._free[name].pop() for _ in range(count)]
            self.tables[name].table[request_slot, :count] = torch.tensor(pages, dtype=torch.int64)

    def release(self, request_slot: int) -> None:
        """Give the pages of a request slot back."""
        for name, table in self.tables.items():
            row = table.table[request_slot]
            self._free[name].extend(sorted((int(p) for p in row if p >= 0), reverse=True))
            row.fill_(-1)

    def write(self, family: str, place: int, rows_XC: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy rows_XC[source] to pool slots, target = (source, slot) from the plan. Mutates the pool."""
        source, slot = target
        self.pool(family, place).index_copy_(0, slot, rows_XC[source].to(self.pools[family].dtype))

    def check_integrity(self) -> None:
        """Every page is free or mapped exactly once; raises RuntimeError naming the family otherwise."""
        for name, table in self.tables.items():
            mapped = table.table[table.table >= 0].tolist()
            seen = sorted(mapped + self._free[name])
            if seen != list(range(self.pools[name].shape[1] // table.page)):
                raise RuntimeError(f"{name}: pages are lost or mapped twice")

    def dump(self, request_slot: int, length: int) -> dict[str, torch.Tensor]:
        """The logical rows that a step after `length` committed positions can read, unpaged, by family.

        Each is [M, rows, C] in index order: window rows behind the next query, all complete entries, and the
        state rows that the next entries still pool.
        """
        return {family.name: self._dump_family(family, request_slot, length) for family in self.families}

    def _dump_family(self, family: PageFamily, request_slot: int, length: int) -> torch.Tensor:
        if family.per_entry:
            assert family.ratio is not None
            first, last = 0, length // family.ratio
        elif family.ratio is None:
            first, last = max(0, length - self.config.sliding_window + 1), length
        else:
            older = family.ratio if family.ratio == 4 else 0
            first, last = max(0, length // family.ratio * family.ratio - older), length
        slots = self.tables[family.name].slots(torch.tensor(request_slot), torch.arange(first, last))
        if bool((slots < 0).any()):
            raise ValueError(f"{family.name}: request slot {request_slot} maps no page for {length} positions")
        return self.pools[family.name][:, slots]


def poison(caches: Caches, value: float = float("nan")) -> None:
    """Fill every pool row with `value`: whoever reads a row that was never written sees it. Mutates the pools."""
    for pool in caches.pools.values():
        pool.fill_(value)
