"""Engines that draft, in turns: steps of each in every round, with the tokens that came of them."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..launch.engine import Engine
from ..models.dspark.costs import CostTable
from ..models.dspark.schedule import VERIFY_ALL, Verification
from ..models.request import SamplingParams
from ..models.v4.model import Model
from ..parallel.ownership import first_slots
from .oracle import OracleProposer, with_chance

GRACE = 3
"""Steps of an engine that are not counted: prompts, and the first drafts."""


@dataclass(frozen=True)
class Text:
    """Prompts of one length and their greedy continuations, as long as any run may need."""

    prompts: tuple[tuple[int, ...], ...]
    continuations: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Side:
    """One engine: gamma 0 is plain decoding. chances: of a draft to be right, by request in turn."""

    name: str
    gamma: int
    chances: tuple[float, ...] = (1.0,)
    verify: Verification = VERIFY_ALL


@dataclass(frozen=True)
class Turns:
    """By side, tokens and seconds of each round, and the cost table of those that have one."""

    tokens: Mapping[str, list[int]]
    seconds: Mapping[str, list[float]]
    tables: Mapping[str, CostTable]

    def rate(self, name: str) -> float:
        """Tokens/s over all rounds."""
        return sum(self.tokens[name]) / sum(self.seconds[name])

    def ratio(self, name: str, other: str) -> tuple[float, float, float]:
        """(median, least, most) over the rounds of a side's tokens/s over another's."""
        pairs = [
            (self.tokens[name][i] / self.seconds[name][i]) / (self.tokens[other][i] / self.seconds[other][i])
            for i in range(len(self.seconds[name]))
        ]
        return statistics.median(pairs), min(pairs), max(pairs)


def slots_of(engine: Engine, requests: int) -> dict[int, int]:
    """The slot of each of so many requests that this rank's group runs, by number in order of arrival, where all groups
    were idle."""
    tp, dp = engine.topology.tp, engine.topology.dp
    mine = range(engine.place.dp_rank, requests, dp)
    return dict(zip(mine, first_slots(len(mine), tp, engine.slots_per_rank), strict=True))


def seats(model: Model, requests: int) -> int:
    """Requests of a group at once, for so many in all."""
    return -(-requests // model.groups.topology.dp)


def write_text(model: Model, prompts: Sequence[Sequence[int]], new_tokens: int) -> Text:
    """Plain greedy continuations, known on all ranks. All ranks call it."""
    length = len(prompts[0]) + new_tokens
    engine = Engine(model, requests=seats(model, len(prompts)), max_context=length, prefix_points=0)
    _fill(engine, prompts, new_tokens)
    engine.step()
    requests = list(engine.requests.values())
    while engine.requests:
        engine.step()
    _end(engine)
    written = (tuple(request.tokens[len(request.prompt) :]) for request in requests)
    return Text(tuple(map(tuple, prompts)), tuple(written))


def take_turns(model: Model, text: Text, sides: Sequence[Side], *, rounds: int, steps: int) -> Turns:
    """Rounds in which every side runs `steps` steps of all its requests. All ranks call it.

    RuntimeError where a side comes to the end of the known text.
    """
    engines = {side.name: make_engine(model, text, side) for side in sides}
    new_tokens = len(text.continuations[0])
    for engine in engines.values():
        _fill(engine, text.prompts, new_tokens)
        for _ in range(GRACE):
            engine.step()
    tokens: dict[str, list[int]] = {name: [] for name in engines}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            before, begin = engine.counters.drafts.emitted, time.perf_counter()
            for _ in range(steps):
                engine.step()
            seconds[name].append(time.perf_counter() - begin)
            tokens[name].append(engine.counters.drafts.emitted - before)
            if len(engine.requests) < len(text.prompts):
                raise RuntimeError(f"{name}: the known text of {new_tokens} tokens is too short for {rounds} rounds")
    for engine in engines.values():
        _end(engine)
    return Turns(tokens, seconds, {name: each.table for name, each in engines.items() if each.table is not None})


def make_engine(model: Model, text: Text, side: Side) -> Engine:
    """The engine of a side, its oracle knowing the text by the slots that requests will get."""
    count, length = len(text.prompts), len(text.prompts[0]) + len(text.continuations[0])
    whole = [(*prompt, *ids) for prompt, ids in zip(text.prompts, text.continuations, strict=True)]
    known: dict[int, tuple[int, ...]] = {}

    def chance(slot: int) -> float:
        return side.chances[slot % len(side.chances)]

    oracle = OracleProposer(side.gamma, known, with_chance(chance), model.config.vocab_size, chance)
    engine = Engine(
        model,
        requests=seats(model, count),
        max_context=length,
        prefix_points=0,
        proposer=oracle if side.gamma else None,
        verify=side.verify,
    )
    known.update({slot: whole[number] for number, slot in slots_of(engine, count).items()})
    return engine


def _fill(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    if engine.is_front:
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(new_tokens))


def _end(engine: Engine) -> None:
    """All ranks' way out: the front says so, the others hear it."""
    if engine.is_front:
        engine.close()
    else:
        engine.serve()
