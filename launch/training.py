"""A drafter's training run on one rank: what it is made of, its steps, its states, its end."""

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from ..comm.agreement import agree
from ..models.drafts.build import Draft, build_draft
from ..models.moe.balancing import MoEBalancing, mixture_layers
from ..models.moe.expert_parallel import shard_experts
from ..models.numerics import numerics
from ..models.training.core import StepReport, TrainerCore
from ..models.training.draft_files import load_draft_files, write_draft
from ..models.training.objective import Objective
from ..models.training.order import generators
from ..models.training.packing import DraftBatch
from ..models.training.placed import Placed, place
from ..models.training.placement import AdamWSettings
from ..models.training.prepare import draft_batch, draft_reach
from ..models.training.samples import FeatureShape, collate
from ..models.training.sources import FeatureSource
from ..models.training.state import Progress, latest_state, load_state, save_state
from ..models.training.target_tables import read_tables
from ..parallel.groups import Groups
from .stopping import StopSignals
from .training_flags import Task
from .training_log import TrainingLog, draw_curves, show_step

STATES_NAME, DRAFT_NAME = "states", "draft"
NOTHING, SIGNALLED = 0, 1


@dataclass(frozen=True)
class Outcome:
    """steps: taken in all; signal: the number of the signal that stopped the run before its end, 0 for none."""

    steps: int
    signal: int = 0


class DrafterRun:
    """The trainer of one rank. All ranks of `groups`, those that train, make one and call the same of it."""

    def __init__(self, task: Task, groups: Groups) -> None:
        self.task, self.groups = task, groups
        config, self.compute = task.config, numerics(task.settings.numerics).activation
        self.order = task.order()
        self.reach = draft_reach(config)
        self.draft = _make_draft(task, groups)
        self.placed = _placed(self.draft, task, groups, self.compute)
        tables = read_tables(task.checkpoint, config.vocab_size, config.hidden_size, self.compute, groups.device)
        objective: Objective = Objective(self.draft, tables, task.objective, reads_next=config.is_mtp)
        self.core: TrainerCore[DraftBatch] = TrainerCore(
            objective, self.placed, max_grad_norm=task.settings.clip, learning_rate=task.settings.rate
        )
        if mixture_layers(self.draft):
            self.core.register_step_hook(MoEBalancing(self.draft, groups.world))
        self.shape = FeatureShape(task.spec.width, config.hidden_size, task.objective.needs_teacher, self.compute)
        self._states, self._contract = task.out / STATES_NAME, task.contract()

    def resume(self) -> int:
        """Go on from the latest state, if --resume says so and there is one; the steps taken. Collective."""
        path = latest_state(self._states) if self.task.resume else None
        if path is not None:
            self.core.steps = load_state(path, self.placed, self._contract).step
        return self.core.steps

    def save(self) -> Path:
        """Write the state; older ones but for `keep` go. Collective."""
        steps = self.core.steps
        position = {"samples": steps * self.order.step_samples}
        path = save_state(self._states, self.placed, Progress(steps, position), self._contract)
        if self.groups.rank == 0:
            for old in sorted(self._states.glob("step-*[0-9]"))[: -self.task.keep]:
                shutil.rmtree(old)
        return path

    def step(self, source: FeatureSource) -> StepReport:
        """One step with the samples that the order has for it."""
        micros = [self._micro_batch(source, micro) for micro in range(self.task.settings.accumulate)]
        return self.core.step(micros)

    def _micro_batch(self, source: FeatureSource, micro: int) -> DraftBatch:
        draws, samples = source.micro_batch(self.core.steps, micro)
        drawn = generators(draws, self.task.settings.seed)
        weights = torch.promote_types(self.compute, torch.float32)
        led = self.task.config.is_mtp
        batch = draft_batch(collate(samples, self.shape), self.task.objective, self.reach, drawn, weights, led=led)
        return batch.to(self.groups.device)

    def write_draft(self) -> None:
        """The draft as it is now, into the run's folder. Collective."""
        write_draft(self.task.out / DRAFT_NAME, self.task.config, self.placed, writes=self.groups.rank == 0)


def _make_draft(task: Task, groups: Groups) -> Draft:
    """Whole and alike on all ranks, then this rank's share of the experts."""
    torch.manual_seed(task.settings.seed)
    draft = build_draft(task.config, task.attention)
    if task.start is not None:
        load_draft_files(task.start, draft)
    if task.settings.numerics == "float64":
        draft = draft.double()
    if task.recompute:
        draft.enable_recompute()
    if groups.topology.ep > 1:
        shard_experts(draft, groups.ep)
    return draft.to(groups.device).train()


def _placed(draft: Draft, task: Task, groups: Groups, compute: torch.dtype) -> Placed:
    s = task.settings
    optimizer = AdamWSettings(learning_rate=s.learning_rate, weight_decay=s.weight_decay)
    narrow = compute if compute.itemsize < torch.float32.itemsize else None
    return place(draft, groups, s.placement, optimizer=optimizer, compute_dtype=narrow)  # type: ignore[arg-type]


def train(run: DrafterRun, source: FeatureSource, out: TextIO | None) -> Outcome:
    """Steps until the run is whole or a signal came to any of its ranks. Collective; `out` on the first rank only.

    A state is saved now and then and at the end, log and curves are kept, and at the end the draft is written.
    """
    task, groups = run.task, run.groups
    steps, log = task.settings.steps, TrainingLog(task.out, run.core.steps) if groups.rank == 0 else None
    with StopSignals() as signals:
        stopped = 0
        while run.core.steps < steps and not (stopped := _agreed(signals.number, groups)):
            begin, rate = time.perf_counter(), task.settings.rate(run.core.steps)
            report = run.step(source)
            if log is not None:
                log.add(_line(report, run, rate, time.perf_counter() - begin))
                if out is not None and (report.step % task.log_every == 0 or report.step == steps):
                    show_step(log.lines[-1], steps, out)
            if report.step % task.save_every == 0 and report.step < steps:
                run.save()
        source.stop()
        run.save()
    if log is not None:
        log.close()
        draw_curves(log.lines, task.out)
    if not stopped:
        run.write_draft()
    return Outcome(run.core.steps, stopped)


def _agreed(number: int, groups: Groups) -> int:
    """The signal that any rank has, 0 for none: all stop behind the same step."""
    return max(told for (told,) in agree([number], groups, stage="stop"))


def _line(report: StepReport, run: DrafterRun, rate: float, seconds: float) -> Mapping[str, Any]:
    samples = report.step * run.order.step_samples
    return {
        "step": report.step,
        "loss": report.loss,
        "learning_rate": rate,
        "gradient_norm": report.gradient_norm,
        "denominator": report.denominator,
        "samples": samples,
        "epoch": samples / run.order.samples,
        "seconds": seconds,
        **report.metrics,
    }
