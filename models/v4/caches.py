"""Caches behind page tables: pools per family and layer, who holds which page, and dumps for tests.

Legend: M layers (or stages of the drafter) that have the family, S pool slots, C columns, Q request slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from ...layouts.page_pool import PagePool
from ...layouts.pages import COMPRESSED_TOKENS, PageFamily, PageTable
from ...layouts.prefix import ROOT, Pages, PrefixIndex, point_key, point_keys, point_tokens
from ...parallel.topology import Topology
from ..functions import cast
from ..kernels.calls import Kernels
from ..numerics import Numerics
from .config import V4Config
from .integrity import check_pages
from .pools import DRAFT_FAMILY, CacheShape, cache_families, family_layers, pool_shapes


@dataclass
class _Held:
    """What a request slot has: its logical pages first to end - 1 of each family, and the keys of its points."""

    limit: int
    reserved: dict[str, int]
    mapped: dict[str, tuple[int, int]]
    keys: list[bytes] = field(default_factory=list)


class Caches:
    """One rank's replica of its group's caches.

    A slot of position p is table[(p // page) mod depth] * page + p % page; entries that no page backs are -1.
    The pools are on the device, the tables on the host, where plans are made. A request slot is admitted with the
    positions that it may come to hold, which reserves pages for it; they are mapped as its rows come (`extend`) and
    given back as its window moves on (`commit`). Ranks of a group that make the same calls in the same order have
    equal tables. The caches belong to one topology and refuse another.

    generation_Q int64: a number that no other request of the slot has, before or after. context_Q int64: where there
    is a drafter, behind the last position that the slot has context rows of; whoever writes them counts it up.
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
        self.families = cache_families(config, shape)
        self.layer_families = tuple(family for family in self.families if family.name != DRAFT_FAMILY)
        self.generation_Q = np.zeros(shape.request_slots, dtype=np.int64)
        self.context_Q = np.zeros(shape.request_slots, dtype=np.int64)
        self.pools: dict[str, torch.Tensor] = {}
        self.tables: dict[str, PageTable] = {}
        self.pages: dict[str, PagePool] = {}
        self.prefixes = PrefixIndex(shape.prefix_points, lambda family, page: self.pages[family].drop(page))
        self._held: dict[int, _Held] = {}
        # A plain MTP layer's row depends on the token behind it: the last row of a prefix on one that is not in it.
        self._ahead = int(shape.draft_stages > 0 and config.drafter == "mtp")
        shapes = pool_shapes(config, shape, numerics)
        for family in self.families:
            pool = shapes[family.name]
            table = torch.full((shape.request_slots, pool.depth), -1, dtype=torch.int64)
            self.tables[family.name] = PageTable(family.page, table)
            self.pages[family.name] = PagePool(family.name, pool.pages, partial(self._make_room, family))
            self.pools[family.name] = torch.zeros(pool.shape, dtype=pool.dtype, device=device)

    def layers_of(self, family: PageFamily) -> tuple[int, ...]:
        """The layers that have rows of this family, ascending; of the drafter's its stages."""
        return family_layers(family, self.config)

    def generation(self, request_slot: int) -> int:
        """The stamp of the slot's present request. What still comes under an older one is nobody's."""
        return int(self.generation_Q[request_slot])

    def pool(self, family: str, place: int) -> torch.Tensor:
        """Rows [S, C] of the place-th layer that has the family."""
        return self.pools[family][place]

    def lookup(self, device: torch.device) -> dict[str, PageTable]:
        """The tables that a layer reads at run time (entries that rows select), on `device`."""
        chosen = {name: table for name, table in self.tables.items() if name == "csa_kv"}
        return {name: PageTable(table.page, table.table.to(device)) for name, table in chosen.items()}

    def pages_needed(self, limit: int) -> dict[str, int]:
        """Pages of each family that are kept for a request of up to `limit` positions."""
        return {family.name: family.resting(limit) for family in self.families}

    def free_pages(self) -> dict[str, int]:
        """Pages of each family that no admitted request has a right to."""
        reserved = [held.reserved for held in self._held.values()]
        return {name: pages.count - sum(r[name] for r in reserved) for name, pages in self.pages.items()}

    def admit(self, request_slot: int, limit: int, prompt: Sequence[int] = ()) -> int:
        """Give a free request slot to a request of at most `limit` positions -> positions that are resident at once.

        These are a prefix of `prompt` that was published, a multiple of 128 and less than the whole prompt; 0 where
        there is none. ValueError where the slot is taken, the limit is beyond max_context, or pages are short; then
        nothing is changed.
        """
        if not 0 <= request_slot < self.shape.request_slots:
            raise ValueError(f"request slot is {request_slot}, allowed: 0 to {self.shape.request_slots - 1}")
        if not 1 <= limit <= self.shape.max_context:
            raise ValueError(f"limit is {limit} positions, allowed: 1 to max_context {self.shape.max_context}")
        if request_slot in self._held:
            raise ValueError(f"request slot {request_slot} is taken")
        needed, free = self.pages_needed(limit), self.free_pages()
        short = {name: f"needs {n}, free {free[name]}" for name, n in needed.items() if n > free[name]}
        if short:
            raise ValueError(f"cache pages are short for {limit} positions: {short}")
        held = _Held(limit, needed, {family.name: (0, 0) for family in self.families})
        self._held[request_slot] = held
        self.generation_Q[request_slot] += 1
        length = self._resume(request_slot, held, prompt) if self.shape.prefix_points else 0
        self.context_Q[request_slot] = length
        return length

    def _resume(self, request_slot: int, held: _Held, prompt: Sequence[int]) -> int:
        whole = max(0, len(prompt) - 1) // COMPRESSED_TOKENS * COMPRESSED_TOKENS
        keys = point_keys(prompt[: whole + self._ahead], COMPRESSED_TOKENS, ahead=self._ahead)
        chain = self.prefixes.longest(keys)
        length = len(chain) * COMPRESSED_TOKENS
        held.keys = keys[: len(chain)]
        for family in self.families if chain else ():
            state = chain[-1].state
            assert state is not None, "only a point with state is resumed"
            parts = [point.entries for point in chain] if family.per_entry else [state]
            pages = [page for part in parts for page in part[family.name]]
            for page in pages:
                self.pages[family.name].share(page)
            self._map(family, request_slot, held, family.readable(length).start // family.page, pages)
        return length

    def _map(self, family: PageFamily, request_slot: int, held: _Held, first: int, pages: Sequence[int]) -> None:
        """Enter pages that the slot holds from now on as its logical pages first, first + 1, ..."""
        table = self.tables[family.name].host[request_slot]
        table[np.arange(first, first + len(pages)) % len(table)] = pages
        held.mapped[family.name] = (first, first + len(pages))

    def extend(self, request_slot: int, start: int, count: int) -> None:
        """Map the pages that rows at positions start to start + count - 1 are written to.

        Pages come from what `admit` reserved. Does nothing for a slot that nobody was given. ValueError where the
        rows go beyond the slot's limit, or are more than a ring holds without losing what they read.
        """
        held = self._held.get(request_slot)
        if held is None:
            return
        if count > self.shape.max_fresh:
            raise ValueError(
                f"request slot {request_slot} brings {count} rows, allowed: max_fresh {self.shape.max_fresh} in a step"
            )
        end = start + count
        if end > held.limit:
            raise ValueError(f"request slot {request_slot} comes to {end} positions, allowed: its limit {held.limit}")
        for family in self.families:
            last = -(-family.rows(end) // family.page)
            if last > held.mapped[family.name][1]:
                self._grow(family, request_slot, held, last)

    def _grow(self, family: PageFamily, request_slot: int, held: _Held, last: int) -> None:
        pages, table = self.pages[family.name], self.tables[family.name].host[request_slot]
        first, end = held.mapped[family.name]
        while end < last:
            if end - first == len(table):
                pages.drop(int(table[first % len(table)]))
                table[first % len(table)] = -1
                first += 1
                held.mapped[family.name] = (first, end)
            table[end % len(table)] = pages.take()
            end += 1
            held.mapped[family.name] = (first, end)

    def map_resident(self, request_slot: int, length: int) -> None:
        """Map all that a step at position `length` may read to pages of its own, whatever they hold; for pools that
        are filled from elsewhere. The slot is admitted and has no pages yet."""
        held = self._held[request_slot]
        for family in self.families:
            span = family.readable(length)
            first, end = span.start // family.page, -(-span.stop // family.page)
            pages = [self.pages[family.name].take() for _ in range(first, end)]
            self._map(family, request_slot, held, first, pages)
        self.context_Q[request_slot] = length

    def commit(self, request_slot: int, tokens: Sequence[int], length: int) -> None:
        """The first `length` positions of the slot's sequence `tokens` are final: none of their rows changes again.

        Publishes their prefixes of multiples of 128 and gives back the pages that no later step reads; beside a plain
        MTP layer a prefix is told by the token behind it too, and published once that is known. Where there is a
        drafter, the context rows of these positions are written before: RuntimeError where they are not, for
        whoever started from such a prefix would draft from what a page held before.
        """
        held = self._held[request_slot]
        if self.shape.draft_stages and self.context_Q[request_slot] < length:
            raise RuntimeError(
                f"{DRAFT_FAMILY}: request slot {request_slot} has context rows of {self.context_Q[request_slot]} "
                f"positions, {length} are committed"
            )
        if self.shape.prefix_points:
            self._publish(request_slot, held, tokens, length)
        for family in self.families:
            first, end = held.mapped[family.name]
            keep = min(family.readable(length).start // family.page, end)
            if keep > first:
                self._give_back(family, request_slot, range(first, keep))
                held.mapped[family.name] = (keep, end)

    def _publish(self, request_slot: int, held: _Held, tokens: Sequence[int], length: int) -> None:
        final = min(length, len(tokens) - self._ahead)
        while (len(held.keys) + 1) * COMPRESSED_TOKENS <= final:
            number = len(held.keys)
            block = point_tokens(tokens, number, COMPRESSED_TOKENS, self._ahead)
            held.keys.append(point_key(held.keys[-1] if held.keys else ROOT, block))
            first = number
            while first and held.keys[first - 1] not in self.prefixes.points:
                first -= 1
            for point in range(first, number + 1):
                self._publish_entries(request_slot, held, point)
            if self.prefixes.points[held.keys[number]].state is None:
                ring = [family for family in self.families if not family.per_entry]
                spans = {family.name: family.readable((number + 1) * COMPRESSED_TOKENS) for family in ring}
                self.prefixes.add_state(held.keys[number], self._shared(request_slot, ring, spans))

    def _publish_entries(self, request_slot: int, held: _Held, number: int) -> None:
        key, parent = held.keys[number], held.keys[number - 1] if number else ROOT
        if key in self.prefixes.points:
            self.prefixes.publish(key, parent, {})
            return
        entries = [family for family in self.families if family.per_entry]
        spans = {f.name: range(number * f.page, (number + 1) * f.page) for f in entries}
        self.prefixes.publish(key, parent, self._shared(request_slot, entries, spans))

    def _shared(self, request_slot: int, families: Sequence[PageFamily], spans: dict[str, range]) -> Pages:
        """The slot's pages of these spans of rows, each with one more holder."""
        shared = {}
        for family in families:
            table, span = self.tables[family.name].host[request_slot], spans[family.name]
            logical = range(span.start // family.page, -(-span.stop // family.page))
            shared[family.name] = tuple(int(table[page % len(table)]) for page in logical)
            for page in shared[family.name]:
                self.pages[family.name].share(page)
        return shared

    def release(self, request_slot: int) -> None:
        """Give the pages of a request slot back; what of them is published stays until room is needed."""
        held = self._held.pop(request_slot, None)
        if held is None:
            return
        self.generation_Q[request_slot] += 1
        for family in self.families:
            self._give_back(family, request_slot, range(*held.mapped[family.name]))

    def _give_back(self, family: PageFamily, request_slot: int, logical: range) -> None:
        table = self.tables[family.name].host[request_slot]
        for number in logical:
            self.pages[family.name].drop(int(table[number % len(table)]))
            table[number % len(table)] = -1

    def _make_room(self, family: PageFamily) -> bool:
        return self.prefixes.give_entries() if family.per_entry else self.prefixes.give_state()

    def write(
        self,
        family: str,
        place: int,
        rows_XC: torch.Tensor,
        target: tuple[torch.Tensor, torch.Tensor],
        kernels: Kernels | None = None,
    ) -> None:
        """Copy rows_XC[source] to pool slots, target = (source, slot) from the plan. Mutates the pool."""
        source, slot = target
        pool_SC = self.pool(family, place)
        if kernels is not None:
            kernels.write_rows(pool_SC, rows_XC, source, slot)
        elif len(source):
            pool_SC.index_copy_(0, slot, cast(rows_XC.index_select(0, source), pool_SC.dtype))

    def check_integrity(self) -> None:
        """RuntimeError naming family and page where pages are lost, shared unknown, or mapped twice."""
        check_pages(self.tables, self.pages, self.prefixes)

    def dump(self, request_slot: int, length: int) -> dict[str, torch.Tensor]:
        """The logical rows that a step after `length` committed positions can read, unpaged, by family.

        Each is [M, rows, C] in index order: window rows behind the next query, all complete entries, the state rows
        that the next entries still pool, and the drafter's context rows before an anchor at `length`.
        """
        return {family.name: self._dump_family(family, request_slot, length) for family in self.families}

    def _dump_family(self, family: PageFamily, request_slot: int, length: int) -> torch.Tensor:
        index = torch.tensor(family.readable(length), dtype=torch.int64)
        slots = self.tables[family.name].slots(torch.tensor(request_slot), index)
        if bool((slots < 0).any()):
            raise ValueError(f"{family.name}: request slot {request_slot} maps no page for {length} positions")
        return self.pools[family.name][:, slots]


def poison(caches: Caches, value: float = float("nan")) -> None:
    """Fill every pool row with `value`: whoever reads a row that was never written sees it. Mutates the pools."""
    for pool in caches.pools.values():
        # Every byte of codes: their scales become NaN too.
        pool.fill_(value if pool.is_floating_point() else -1)
