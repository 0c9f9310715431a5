"""Drafters at test size, and a pool behind a ring of pages as an engine's caches would have it."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from meshspark.layouts.pages import PageTable
from meshspark.models.checkpoint.forms import scale_key
from meshspark.models.checkpoint.names import held_table
from meshspark.models.checkpoint.share import held_slices
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.dspark.context import DraftPool, name_rows, write_context
from meshspark.models.dspark.draft import Drafts, draft
from meshspark.models.dspark.drafter import Drafter, make_drafter
from meshspark.models.dspark.plan import DraftBlock, plan_draft
from meshspark.models.dspark.projector import context_keys, draft_taps, project
from meshspark.models.dspark.shape import DraftShape
from meshspark.models.matrix import held_matrix
from meshspark.models.numerics import numerics
from meshspark.models.v4.config import DSparkFields, V4Config, tiny
from meshspark.models.v4.pools import draft_family
from meshspark.parallel.groups import Groups

SLOTS, MAX_FRESH, PAGE = 8, 24, 4


def draft_config(stages: int = 2, window: int = 16) -> V4Config:
    """tiny() with a DSpark drafter of blocks of 5."""
    fields = DSparkFields(5, 262, (2, 3, 4), 8, stages)
    return replace(tiny(), draft_ratios=(0,) * stages, dspark=fields, sliding_window=window)


@cache
def draft_weights(config: V4Config, mode: str, seed: int = 3) -> Mapping[str, torch.Tensor]:
    """Random mtp.* with embed.weight and head.weight, whole, as the mode holds them."""
    weights = random_weights(config, seed, numerics(mode), draft=True)
    ends = ("embed.weight", "head.weight")
    return {name: w for name, w in weights.items() if name.startswith("mtp.") or name in ends}


def rank_share(weights: Mapping[str, torch.Tensor], config: V4Config, groups: Groups) -> dict[str, torch.Tensor]:
    """This rank's part of whole weights, channel scales beside codes."""
    share = {}
    for name, specs in held_table(config, draft=True).items():
        if name not in weights:
            continue
        held = [held_slices(spec, config, groups.topology, groups.rank) for spec in specs]
        scale = scale_key(name)
        if specs[0].shard == "experts":
            mine = [i for i, slices in enumerate(held) if slices is not None]
            share |= {key: weights[key][mine] for key in (name, scale) if key in weights}
        else:
            assert held[0] is not None
            share[name] = weights[name][held[0]].contiguous()
            if scale in weights:
                share[scale] = weights[scale][held[0][0]].contiguous()
    return share


def draft_model(
    groups: Groups,
    mode: str,
    config: V4Config | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    shape: DraftShape | None = None,
    kv_group: int = 0,
) -> Drafter:
    """A rank's drafter, of random weights where none are given."""
    config = draft_config() if config is None else config
    weights = draft_weights(config, mode) if weights is None else weights
    share = rank_share(weights, config, groups)
    head = held_matrix(share, "head", numerics(mode))
    return make_drafter(
        config, share, share["embed.weight"], head, groups, numerics(mode), shape=shape, kv_group=kv_group
    )


class Pages:
    """A pool of context rows behind a ring of pages, whose free pages come in a random order.

    What was never written is noise; a page that is given back is filled with NaN.
    """

    def __init__(self, drafter: Drafter, slots: int, max_fresh: int, page: int, seed: int) -> None:
        family, config = draft_family(drafter.config, page), drafter.config
        self.page, self.depth = page, family.depth(0, max_fresh)
        self.free = list(range(slots * self.depth + 1))
        random.Random(seed).shuffle(self.free)
        generator = torch.Generator().manual_seed(seed)
        size = (drafter.stages, len(self.free) * page, config.head_dim)
        keys = torch.randn(size, generator=generator).to(drafter.numerics.kv)
        table = torch.full((slots, self.depth), -1, dtype=torch.int64)
        stamps, ends = np.arange(slots, dtype=np.int64) + 10, np.zeros(slots, dtype=np.int64)
        self.pool = DraftPool(keys, PageTable(page, table), stamps, ends)
        self.ends = [0] * slots

    def extend(self, slot: int, end: int) -> None:
        """Map pages for positions below `end`; the oldest are given back where the ring is full."""
        row = self.pool.table.host[slot]
        while self.ends[slot] * self.page < end:
            place = self.ends[slot] % self.depth
            if row[place] >= 0:
                self.pool.keys_MSD[:, row[place] * self.page : (row[place] + 1) * self.page] = float("nan")
                self.free.insert(0, int(row[place]))
            row[place] = self.free.pop()
            self.ends[slot] += 1

    def generation(self, slot: int) -> int:
        return int(self.pool.generation_Q[slot])

    def rows(self, slot: int, positions: Sequence[int]) -> torch.Tensor:
        """Context rows [M, positions, D] of these positions."""
        index = torch.tensor(list(positions), dtype=torch.int64)
        return self.pool.keys_MSD[:, self.pool.table.slots(torch.tensor(slot), index)]


def taps_of(request: int, positions: range, drafter: Drafter) -> torch.Tensor:
    """Taps of a request at these positions; a position's depend on nothing else."""
    width = drafter.config.hidden_size * len(draft_taps(drafter.config))
    rows = [
        torch.randn(width, generator=torch.Generator().manual_seed(1000 * request + position)) for position in positions
    ]
    return torch.stack(rows).to(drafter.numerics.activation) if rows else torch.zeros(0, width)


def anchor_of(request: int, position: int) -> int:
    return random.Random(request * 977 + position).randrange(2, 260)


def feed(
    drafter: Drafter, pages: Pages, request: int, slot: int, start: int, length: int, chunk: int = MAX_FRESH
) -> None:
    """Write the context rows of a request in chunks, on one rank."""
    for first in range(start, length, chunk):
        positions = range(first, min(first + chunk, length))
        pages.extend(slot, positions.stop)
        keys = context_keys(project(taps_of(request, positions, drafter), drafter), torch.tensor(positions), drafter)
        count = len(positions)
        names = name_rows(np.full(count, slot), np.full(count, pages.generation(slot)), np.array(positions))
        write_context(keys, names, pages.pool, drafter)


def drafts_of(drafter: Drafter, pages: Pages, at: list[tuple[int, int, int]], **kwargs: Any) -> Drafts:
    """Drafts of (request, slot, anchor position), all in one call."""
    blocks = [DraftBlock(slot, position, anchor_of(request, position)) for request, slot, position in at]
    with torch.no_grad():
        plan = plan_draft(blocks, drafter, pages.pool.table, **kwargs)
        return draft(plan, drafter, pages.pool.keys_MSD, keep_logits=True)
