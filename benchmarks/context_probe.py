"""Long contexts without a long prefill: pools filled through their page tables, and one row of one layer in FP64.

The reference reads the pools by its own index arithmetic and shares no code with the model.

Legend: T local rows (here 1), A heads, D head dim, I index heads, L keys, C columns.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..layouts.pages import PageFamily
from ..layouts.rowplan import RowPlan
from ..models.v4.attention import IndexInputs, KeySource, attend, selection
from ..models.v4.caches import Caches
from ..models.v4.config import V4Config
from ..models.v4.model import Model
from .context_rows import as_rows, as_values, numbers_of

BLOCK_ROWS = 16_381
"""Random rows that a fill repeats with other columns; a prime, so that no page boundary falls in with it."""

DEPTHS = 10
SLOT = 0
FAMILY = {4: "csa_kv", 128: "hca_kv"}


@dataclass(frozen=True)
class Found:
    """One layer at one position against FP64.

    missed: planted entries that were not selected, of `planted`; wrong: selected ones that FP64 would not take, or
    the reverse, but for ties within rounding. error: largest difference of an output element; visible: how much the
    output would differ at least without one of the planted values. select_s, attend_s: seconds of the two parts.
    """

    position: int
    layer: int
    ratio: int
    planted: int
    missed: int
    wrong: int
    error: float
    visible: float
    select_s: float
    attend_s: float

    @property
    def holds(self) -> bool:
        small = 1e-4 if self.error else 1.0
        return not self.missed and not self.wrong and self.error < small and self.visible > 3 * self.error


def fill_resident(caches: Caches, slot: int, length: int, seed: int) -> None:
    """Synthetic rows wherever a step at position `length` may read. The slot is admitted; its pages are permuted.

    Mutates pools and tables.
    """
    for number, pages in enumerate(caches.pages.values()):
        random.Random(97 * seed + number).shuffle(pages.free)
    caches.map_resident(slot, length)
    generator = torch.Generator().manual_seed(seed)
    for family in caches.families:
        index = torch.tensor(family.readable(length), dtype=torch.int64)
        slots = caches.tables[family.name].slots(torch.tensor(slot), index)
        size, pool_MSC = min(BLOCK_ROWS, max(1, len(slots))), caches.pools[family.name]
        block_BD = _noise(generator, size, numbers_of(pool_MSC.shape[2], pool_MSC.dtype))
        if pool_MSC.is_floating_point():
            block_BD = block_BD.to(pool_MSC.dtype)
        for layer, pool_SC in enumerate(pool_MSC):
            for number, part in enumerate(slots.split(size)):
                rolled_BD = block_BD.roll((977 * layer, 7 * number), (0, 1))[: len(part)]
                pool_SC.index_copy_(0, part, as_rows(rolled_BD, pool_SC.dtype))


def _noise(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator)


def rows_of(caches: Caches, family: PageFamily, slot: int, index: Sequence[int]) -> np.ndarray:
    """Pool rows of these logical indices, by Python's own whole numbers."""
    table = caches.tables[family.name].table[slot].tolist()
    page = family.page
    return np.array([table[i // page % len(table)] * page + i % page for i in index], dtype=np.int64)


class Probe:
    """One row at `position` through the selection and attention of single layers, with drawn queries."""

    def __init__(self, model: Model, caches: Caches, plan: RowPlan, position: int, seed: int) -> None:
        self.config: V4Config = model.config
        self.caches, self.plan, self.position = caches, plan, position
        self.families = {family.name: family for family in caches.families}
        self.wide = model.numerics.accumulation
        # Not the pools' own numbers over again: a query that is a key would see nothing else.
        self.generator = torch.Generator().manual_seed((1 << 31) + seed)
        self.tables = caches.lookup(torch.device("cpu"))
        self.kept: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def draw(self, *shape: int) -> torch.Tensor:
        return _noise(self.generator, *shape)

    def source(self, family: str, place: int, columns: int, rows: int) -> KeySource:
        """Drawn fresh rows beside the pool of a layer."""
        pool_SD = self.caches.pool(family, place)
        return KeySource(family, as_rows(self.draw(rows, columns), pool_SD.dtype), pool_SD)

    def keys(self, source: KeySource, indices: Sequence[int]) -> torch.Tensor:
        """Rows of ascending logical indices in FP64: of the pool below the step's first, drawn ones from there."""
        family = self.families[source.family]
        first = family.rows(self.position) if family.per_entry else self.position
        old = [i for i in indices if i < first]
        assert source.pool_SD is not None
        resident = source.pool_SD[torch.from_numpy(rows_of(self.caches, family, SLOT, old))]
        return as_values(torch.cat((resident, source.fresh_XD[[i - first for i in indices if i >= first]])))

    @torch.no_grad()
    def run(self, ratio: int, place: int) -> Found:
        """The place-th layer of this ratio, 4 or 128. Its pools are left as they were."""
        config, layer = self.config, self.config.layers_of(ratio)[place]
        visible, fresh = (self.position + 1) // ratio, len(self.plan.boundaries[ratio].start_E)
        q_TAD = self.draw(1, config.num_attention_heads, config.head_dim).to(self.wide)
        sink_A = self.draw(config.num_attention_heads).to(self.wide)
        window = self.source("window_kv", layer, config.head_dim, 1)
        entries = self.source(FAMILY[ratio], place, config.head_dim, fresh)
        planted = spread(visible, min(DEPTHS, config.index_topk // 2))
        index, picked, wrong, select_s = None, set(range(visible)), 0, 0.0
        if ratio == 4:
            index = self.index_inputs(place, planted, fresh)
            begin = time.perf_counter()
            picked = self.selected(index)
            select_s = time.perf_counter() - begin
            wrong = self.wrongly(index, picked, visible)
        begin = time.perf_counter()
        got = attend(q_TAD, window, entries, index, sink_A, self.plan.tiles[ratio], self.tables)[0]
        attend_s = time.perf_counter() - begin
        for pool_SD, slots, rows in self.kept:
            pool_SD[slots] = rows
        near = self.keys(window, range(max(0, self.position - config.sliding_window + 1), self.position + 1))
        chosen = sorted(picked)
        keys = torch.cat((near, self.keys(entries, chosen)))
        want = attended(q_TAD[0], keys, sink_A)
        lost = [
            float((attended(q_TAD[0], _without(keys, len(near) + chosen.index(e)), sink_A) - want).abs().max())
            for e in planted
            if e in picked
        ]
        self.kept.clear()
        return Found(
            position=self.position,
            layer=layer,
            ratio=ratio,
            planted=len(planted),
            missed=len(set(planted) - picked),
            wrong=wrong,
            error=float((got - want).abs().max()),
            visible=min(lost, default=float("inf")),
            select_s=select_s,
            attend_s=attend_s,
        )

    def index_inputs(self, place: int, planted: list[int], fresh: int) -> IndexInputs:
        """Drawn index queries; the keys of the planted entries point where these score highest."""
        config = self.config
        q_TID = self.draw(1, config.index_n_heads, config.index_head_dim).to(self.wide)
        if self.caches.pools["csa_index"].dtype == torch.int8:
            q_TID = (32 * q_TID).round_().clamp_(-127, 127)
        head_TI = self.draw(1, config.index_n_heads).to(self.wide)
        keys = self.source("csa_index", place, config.index_head_dim, fresh)
        best_D = (head_TI[0][:, None] * q_TID[0]).sum(0)
        first = self.position // 4
        # No two keys alike: their order is not to rest on ties.
        planted_ED = as_rows(best_D * (1 + torch.arange(len(planted))[:, None] / 16), keys.fresh_XD.dtype)
        slots = torch.from_numpy(
            rows_of(self.caches, self.families["csa_index"], SLOT, [e for e in planted if e < first])
        )
        assert keys.pool_SD is not None
        self.kept.append((keys.pool_SD, slots, keys.pool_SD[slots]))
        keys.pool_SD[slots] = planted_ED[: len(slots)]
        keys.fresh_XD[[e - first for e in planted if e >= first]] = planted_ED[len(slots) :]
        return IndexInputs(q_TID, head_TI, keys, config.index_topk)

    def selected(self, index: IndexInputs) -> set[int]:
        """What the model's own selection takes for the row."""
        (batch,) = self.plan.tiles[4].batches
        if batch.entries is None:
            return set()
        if batch.entries.width <= index.topk:
            return set(range(int(batch.entries.visible_NR.max())))
        mask_E = selection(index, batch, batch.entries)[0, 0]
        return set(mask_E.nonzero().flatten().tolist())

    def wrongly(self, index: IndexInputs, picked: set[int], visible: int) -> int:
        """Entries that FP64 would choose otherwise, beyond what the rounding of their scores explains."""
        keys_ED = self.keys(index.keys, range(visible))
        scores = [
            torch.relu(part @ index.q_TID[0].double().T) @ index.head_TI[0].double() for part in keys_ED.split(1 << 15)
        ]
        scores_E = torch.cat(scores) if scores else torch.zeros(0, dtype=torch.float64)
        count = min(index.topk, visible)
        if not count:
            return len(picked)
        last = scores_E.topk(count).values[-1]
        slack = 1e-5 * float(scores_E.abs().max())
        taken = torch.zeros(visible, dtype=torch.bool)
        taken[list(picked)] = True
        worse, better = taken & (scores_E < last - slack), ~taken & (scores_E > last + slack)
        return int(worse.sum() + better.sum()) + abs(len(picked) - count)


def spread(count: int, depths: int) -> list[int]:
    """Numbers from 0 to count - 1 at equal distances, both ends among them."""
    return sorted({depth * (count - 1) // max(1, depths - 1) for depth in range(depths)}) if count else []


def attended(q_AD: torch.Tensor, keys_LD: torch.Tensor, sink_A: torch.Tensor) -> torch.Tensor:
    """Attention with a sink in FP64, [A, D]; keys are values."""
    scores_AL = q_AD.double() @ keys_LD.T * q_AD.shape[1] ** -0.5
    weights = torch.softmax(torch.cat((scores_AL, sink_A.double()[:, None]), dim=1), dim=1)
    return weights[:, :-1] @ keys_LD


def _without(keys_LD: torch.Tensor, row: int) -> torch.Tensor:
    return torch.cat((keys_LD[:row], keys_LD[row + 1 :]))
