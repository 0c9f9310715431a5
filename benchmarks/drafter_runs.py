"""Drafters of one target on the same prompts: loaded beside each other, run in turns with plain decoding, measured.

Letters: N blocks that were verified, Y drafts of a block (gamma).
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..comm.agreement import agree
from ..launch.calibrate import gather_halves
from ..launch.drafting import Drafting, make_proposer
from ..launch.engine import Engine
from ..launch.flags import RunFlags
from ..models.checkpoint.loader import load_on_all_ranks
from ..models.checkpoint.share import RankWeights
from ..models.checkpoint.verify import read_config
from ..models.dspark.calibration import Calibration, Rollouts, load_calibration, rollout_survivals
from ..models.dspark.proposer import Proposer
from ..models.dspark.reliability import auc, expected_calibration_error
from ..models.dspark.shape import require_dspark
from ..models.dspark.step import Judged
from ..models.numerics import numerics
from ..models.request import SamplingParams
from ..models.v4.config import V4Config
from ..models.v4.model import Model
from ..parallel.groups import Groups

PLAIN = "plain"
"""The side that drafts nothing: the target of the first checkpoint."""


@dataclass(frozen=True)
class Drafter:
    """A checkpoint as a side: its model (the target's weights are shared), and what it drafts with; proposer None
    where it has no drafter. calibration: the fit beside the checkpoint."""

    name: str
    model: Model
    drafting: Drafting
    proposer: Proposer | None = None
    calibration: Calibration | None = None


@dataclass(frozen=True)
class Load:
    """What every side writes: prompts of prompt_tokens ids each (world rank 0 alone has them), so many new tokens
    behind each, batch requests of a TP group at once."""

    prompts: tuple[tuple[int, ...], ...]
    prompt_tokens: int
    new_tokens: int
    batch: int
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Written:
    """One run over all prompts. tokens and seconds: of decoding, the first token of each request and the steps of its
    prompt left out. turns: decoding requests over all steps; emitted: their tokens; verified, accepted: drafts.
    acceptance: by position, as of Engine.metrics."""

    ids: tuple[tuple[int, ...], ...]
    tokens: int
    seconds: float
    turns: int
    emitted: int
    verified: int
    accepted: int
    acceptance: Mapping[str, list[float | None]]

    @property
    def rate(self) -> float:
        """Tokens/s of decoding, 0 where nothing was decoded."""
        return self.tokens / self.seconds if self.tokens else 0.0

    @property
    def tokens_per_step(self) -> float | None:
        """Of a decoding request, the target's own included; None of none."""
        return self.emitted / self.turns if self.turns else None


@dataclass(frozen=True)
class Swept:
    """One confidence threshold: drafts that were verified, and accepted; tokens and verified drafts of a turn."""

    threshold: float
    verified: int
    accepted: int
    accepted_share: float | None
    tokens_per_step: float | None
    verified_per_step: float | None


@dataclass(frozen=True)
class Side:
    """A drafter, or PLAIN, on one domain: the run that was not counted, tokens/s of each counted round, blocks that
    were verified whole, the thresholds, and (prompt from 1, new token from 0) where its ids part from plain ones in
    any run."""

    name: str
    domain: str
    first: Written
    rates: tuple[float, ...]
    blocks: Rollouts | None = None
    sweep: tuple[Swept, ...] = ()
    parted: tuple[tuple[int, int], ...] = ()

    @property
    def accepted_length(self) -> float | None:
        """Mean over the blocks of accepted drafts and the token behind them (dspark.md 5); None of none."""
        if self.blocks is None or not len(self.blocks.accepted_N):
            return None
        return 1 + float(self.blocks.accepted_N.mean())

    def over(self, other: "Side") -> tuple[float, float, float] | None:
        """(median, least, most) over the rounds of its tokens/s over another's; None where one decoded nothing."""
        ratios = [mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True) if mine and theirs]
        return (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def load_drafters(groups: Groups, places: Sequence[tuple[str, Path]], flags: RunFlags) -> list[Drafter]:
    """The checkpoints by name, with one copy of their target. All ranks call it.

    ValueError on all ranks where a checkpoint's target is not the first one's, and for a calibration that does not fit.
    """
    found: list[Drafter] = []
    target: dict[str, torch.Tensor] = {}
    for name, directory in places:
        config, weights = _load(groups, directory, flags)
        own = {key: weight for key, weight in weights.items() if not key.startswith("mtp.")}
        if found:
            _check_target(found[0].model.config, target, config, own, directory, groups)
        target = target or own
        shared = RankWeights({**weights, **target}, weights.topology, weights.rank)
        model = Model(config, shared, groups, numerics(flags.numerics))
        drafting = whole_drafting(config)
        calibration = load_calibration(directory, drafting.gamma) if drafting.on else None
        found.append(Drafter(name, model, drafting, make_proposer(drafting, shared, model), calibration))
    return found


def _load(groups: Groups, directory: Path, flags: RunFlags) -> tuple[V4Config, RankWeights]:
    has_drafter = read_config(directory).drafter != "none"
    config, weights = load_on_all_ranks(directory, groups, numerics(flags.numerics), draft=has_drafter)
    if groups.device != "cpu":
        moved = {name: weight.to(groups.device) for name, weight in weights.items()}
        weights = RankWeights(moved, weights.topology, weights.rank)
    return config, weights


def _check_target(
    first: V4Config,
    target: Mapping[str, torch.Tensor],
    config: V4Config,
    own: Mapping[str, torch.Tensor],
    directory: Path,
    groups: Groups,
) -> None:
    shapes = [replace(each, draft_ratios=(), dspark=None) for each in (first, config)]
    same = shapes[0] == shapes[1]
    wrong = [name for name, weight in own.items() if not torch.equal(weight, target[name])] if same else []
    told = agree([int(not same), len(wrong)], groups, stage="target")
    if any(different or count for different, count in told):
        what = "its shape" if not same else f"{wrong[0]} and {len(wrong) - 1} more" if wrong else "weights elsewhere"
        raise ValueError(f"{directory} is of another target than the first checkpoint ({what}), allowed: the same one")


def whole_drafting(config: V4Config) -> Drafting:
    """All drafts of the checkpoint's own drafter, every one verified."""
    if config.drafter == "none":
        return Drafting()
    return Drafting(config.drafter, 1 if config.drafter == "mtp" else require_dspark(config).block_size)


def write(
    drafter: Drafter, drafting: Drafting, load: Load, judge: Callable[[Judged], None] | None = None
) -> Written | None:
    """All prompts once through an engine of their own, in waves of as many as run at once: all of a wave start
    together, and the clock runs from the end of their prompts. All ranks call it; None on others than world rank 0."""
    proposer = drafter.proposer if drafting.on else None
    engine = Engine(
        drafter.model,
        requests=load.batch,
        max_context=max(load.prompt_tokens + load.new_tokens, drafting.least_context),
        prefill_rows=load.batch * load.prompt_tokens,
        prefix_points=0,
        **drafting.arguments(proposer),
        judge=judge,
    )
    if not engine.is_front:
        engine.serve()
        return None
    ids: list[list[int]] = [[] for _ in load.prompts]
    seconds, at_once = 0.0, load.batch * engine.topology.dp
    for first in range(0, len(load.prompts), at_once):
        numbers = {}
        for number in range(first, min(first + at_once, len(load.prompts))):
            params = SamplingParams(
                load.new_tokens, load.temperature, seed=load.seed + number, eos_id=drafter.model.config.eos_token_id
            )
            numbers[engine.add_request(list(load.prompts[number]), params)] = number
        seconds += _wave(engine, numbers, ids, 1 + (proposer is not None and proposer.pins_prompt_end))
    engine.close()
    drafts, report = engine.counters.drafts, engine.counters.drafts.report()
    return Written(
        ids=tuple(map(tuple, ids)),
        tokens=sum(max(0, len(each) - 1) for each in ids),
        seconds=seconds,
        turns=drafts.turns,
        emitted=drafts.emitted,
        verified=report["drafts"]["verified"],
        accepted=report["drafts"]["accepted"],
        acceptance=report["acceptance"],
    )


def _wave(engine: Engine, numbers: Mapping[int, int], ids: list[list[int]], prompt_steps: int) -> float:
    """Requests from their prompts to their ends; seconds behind the prompts. RuntimeError for one that failed."""
    for _ in range(prompt_steps):
        engine.step()
    begin = time.perf_counter()
    while engine.active:
        for event in engine.step():
            ids[numbers[event.request_id]] += event.token_ids
            if event.finish_reason == "error":
                raise RuntimeError(f"prompt {numbers[event.request_id] + 1}: a row of logits is not finite")
    return time.perf_counter() - begin


def measure(
    drafters: Sequence[Drafter], domain: str, load: Load, *, rounds: int, thresholds: Sequence[float]
) -> list[Side]:
    """Every side on one domain, PLAIN first: a run of each that is not counted, `rounds` in which they take turns, the
    order turned round from one to the next, and for each drafter a run at every threshold. All ranks call it; [] on
    others than world rank 0."""
    plain = Drafter(PLAIN, drafters[0].model, Drafting())
    sides = {each.name: each for each in (plain, *drafters)}
    runs: dict[str, list[Written | None]] = {name: [] for name in sides}
    blocks: dict[str, Rollouts] = {}
    for name, side in sides.items():
        judged: list[Judged] = []
        runs[name].append(write(side, side.drafting, load, judged.append))
        if side.drafting.on:
            blocks[name] = gather_blocks(judged, side.drafting.gamma, side.model.groups)
    for number in range(rounds):
        for name in sides if number % 2 == 0 else reversed(sides):
            runs[name].append(write(sides[name], sides[name].drafting, load))
    swept: dict[str, list[Written | None]] = {name: [] for name in sides}
    for name, side in sides.items():
        for threshold in thresholds if side.drafting.on else ():
            swept[name].append(write(side, at_threshold(side, threshold), load))
    told = {name: [run for run in found if run is not None] for name, found in runs.items()}
    if not told[PLAIN]:
        return []
    sweeps = {name: [run for run in found if run is not None] for name, found in swept.items()}
    return [
        Side(
            name=name,
            domain=domain,
            first=told[name][0],
            rates=tuple(run.rate for run in told[name][1:]),
            blocks=blocks.get(name),
            sweep=tuple(_swept(*pair) for pair in zip(thresholds, sweeps[name], strict=False)),
            parted=parted(told[PLAIN][0], [*told[name], *sweeps[name]]),
        )
        for name in sides
    ]


def at_threshold(drafter: Drafter, threshold: float) -> Drafting:
    """The drafts before the first of less confidence than the threshold, by the fit beside the checkpoint if any."""
    heat = None if drafter.calibration is None else drafter.calibration.temperatures
    return replace(drafter.drafting, verify=f"threshold:{threshold:g}", temperatures=heat)


def _swept(threshold: float, run: Written) -> Swept:
    return Swept(
        threshold=threshold,
        verified=run.verified,
        accepted=run.accepted,
        accepted_share=run.accepted / run.verified if run.verified else None,
        tokens_per_step=run.tokens_per_step,
        verified_per_step=run.verified / run.turns if run.turns else None,
    )


def gather_blocks(judged: Sequence[Judged], gamma: int, groups: Groups) -> Rollouts:
    """The blocks of all ranks that were verified whole and have finite confidences, known on all. All ranks call it."""
    halves = gather_halves(judged, gamma, groups)
    return join_blocks(halves)


def join_blocks(parts: Sequence[Rollouts]) -> Rollouts:
    """Blocks of one gamma, one part behind the other."""
    names = ("logit_NY", "accepted_N", "width_N")
    return Rollouts(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def parted(plain: Written, runs: Sequence[Written]) -> tuple[tuple[int, int], ...]:
    """(prompt from 1, new token from 0) of every place at which ids of one of the runs part from those of `plain`."""
    found = set()
    for run in runs:
        for number, (a, b) in enumerate(zip(plain.ids, run.ids, strict=True), 1):
            if a != b:
                short = min(len(a), len(b))
                found.add((number, next((place for place in range(short) if a[place] != b[place]), short)))
    return tuple(sorted(found))


def reliability(blocks: Rollouts, calibration: Calibration | None) -> dict[str, Any] | None:
    """By draft, calibration error and AUC of the survivals with temperatures 1, and with the fit where there is one;
    None where there is no block."""
    if not len(blocks.accepted_N):
        return None
    label_NY = blocks.labels()
    found: dict[str, Any] = {"blocks": len(label_NY)}
    fit = None if calibration is None else calibration.temperatures
    for side, heat in (("before", None), ("after", fit)):
        if side == "after" and heat is None:
            found |= {"ece_after": None, "auc_after": None}
            continue
        pairs = list(zip(rollout_survivals(blocks, heat).T, label_NY.T, strict=True))
        found[f"ece_{side}"] = [expected_calibration_error(*pair) for pair in pairs]
        found[f"auc_{side}"] = [auc(*pair) for pair in pairs]
    return found
