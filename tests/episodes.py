"""Ragged traffic for tests of the model on many ranks: who runs how many rows of which request in which step."""

import random
from dataclasses import dataclass
from functools import cache

import torch

from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.share import shard_weights
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.numerics import numerics
from meshspark.models.v4.caches import Caches, poison
from meshspark.models.v4.config import PRESETS
from meshspark.models.v4.model import Model
from meshspark.models.v4.pools import CacheShape
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

MAX_FRESH = 160
SLOTS = 8
CONTEXT = 512


@dataclass(frozen=True)
class Traffic:
    """Requests of one dp group and the rows that each brings to each step."""

    tokens: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]
    """Per step (request, rows); a request that is not listed has none."""


def ragged_traffic(seed: int, dp_rank: int, tp: int, vocab: int, num_steps: int, idle: bool) -> Traffic:
    """Requests whose lengths and chunks divide by nothing; an idle group has none in any step."""
    draw = random.Random(seed * 1000 + dp_rank)
    lengths = [] if idle else [draw.choice((1, 3, 5, 33, 64, 130, 143)) + draw.randrange(3) for _ in range(3)]
    tokens = tuple(tuple(draw.randrange(2, vocab) for _ in range(n)) for n in lengths)
    left = list(lengths)
    steps = []
    for step in range(num_steps):
        rows = []
        for request, rest in enumerate(left):
            last = step == num_steps - 1
            count = rest if last else min(rest, draw.choice((0, 1, 2, 4, 7, 31, 65)))
            if 0 < count <= MAX_FRESH:
                rows.append((request, count))
                left[request] -= count
        steps.append(tuple(rows))
    return Traffic(tokens, tuple(steps))


def permute_pages(caches: Caches, seed: int) -> None:
    """Another random order of free pages in every family: a fixture must not lean on page n being n."""
    for i, pages in enumerate(caches.pages.values()):
        random.Random(seed * 97 + i).shuffle(pages.free)


def run_traffic(model: Model, traffic: Traffic, tp: int, seed: int, *, gather_weights: bool = False) -> dict:
    """Drive a group's traffic -> {(request, position): logits row} of the rows that this rank owns, and dumps."""
    caches = model.make_caches(CacheShape(SLOTS, CONTEXT, MAX_FRESH))
    permute_pages(caches, seed)
    poison(caches)
    slots = [(2 * i + 1) % SLOTS for i in range(len(traffic.tokens))]
    for slot in slots:
        caches.admit(slot, CONTEXT)
    done = [0] * len(traffic.tokens)
    logits: dict[tuple[int, int], torch.Tensor] = {}
    for step in traffic.steps:
        rows = []
        for request, count in step:
            start = done[request]
            tokens = traffic.tokens[request][start : start + count]
            kind = "verify" if count <= 4 else "prefill"
            rows.append(RequestRows(slots[request], start, tokens, request % tp, kind, range(count)))
            done[request] += count
        with torch.no_grad():
            output = model.forward(model.plan(rows, caches), caches, gather_weights=gather_weights)
        assert output.logits is not None
        for (index, offset), row in zip(output.owned, output.logits, strict=True):
            logits[step[index][0], rows[index].start + offset] = row
    caches.check_integrity()
    dumps = [caches.dump(slot, n) for slot, n in zip(slots, done, strict=True)]
    return {"logits": logits, "dumps": dumps}


@cache
def full_weights(preset: str, mode: str) -> dict[str, torch.Tensor]:
    return random_weights(PRESETS[preset](), 7, numerics(mode))


def make_model(groups: Groups, preset: str, mode: str) -> Model:
    """The rank's share of the random model of a preset."""
    config = PRESETS[preset]()
    weights = shard_weights(full_weights(preset, mode), groups.topology, groups.rank, config)
    return Model(config, weights, groups, numerics(mode))


@cache
def single_model(preset: str, mode: str) -> Model:
    """The twin: the same model on one rank."""
    return make_model(Groups.single(topology=Topology()), preset, mode)


def twin_logits(preset: str, mode: str, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits of every row of one sequence in one call on one rank."""
    model = single_model(preset, mode)
    with torch.no_grad():
        logits = model.forward(model.plan_sequences([tokens])).logits
    assert logits is not None
    return logits
