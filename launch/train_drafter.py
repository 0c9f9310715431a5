"""`meshspark train-drafter`: train a drafter against a frozen target, on line or from feature files, on many ranks.

The run's folder gets log.jsonl (a line a step), curves.png (with the extra plot), states/ to resume from, and at the
end draft/. A signal stops the run behind the step under way, with its state saved; --resume goes on, bit for bit.
"""

import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from ..comm.agreement import agree, sleep, wake
from ..models.training.capture import TargetCapture
from ..models.training.sources import (
    FeatureSource,
    FileSource,
    SameRanksSource,
    ShippedSource,
    sender_of,
    ship,
)
from ..models.training.state import latest_state
from ..parallel.groups import Groups, Part
from .exchange import try_exchanges
from .flags import FlagError, RunFlags
from .generate import load_model
from .output import people, write_json
from .spawn import run_job
from .stopping import StopSignals
from .training import DRAFT_NAME, STATES_NAME, DrafterRun, Outcome, train
from .training_flags import Task, base_arguments, parser, prepare
from .training_log import LOG_NAME, read_log
from .worker import named_stage, read_place, resolve_here, run_main

MODULE = "meshspark.launch.train_drafter"
STOP_SECONDS = 120
"""What a launcher leaves its ranks to finish a step and save."""
SIGNAL_CODE = 128


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 for a failure, 2 for wrong flags or data, 128 + the number of the signal that stopped the run."""
    return run_main("train-drafter", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    flags = resolve_here(base_arguments(args))
    task = prepare(args, flags)
    place = read_place()
    if place is None or place.rank == 0:
        check_out(task)
    return run_job(
        MODULE, arguments, flags, lambda groups: run(groups, task, flags), task.facts(), stop_seconds=STOP_SECONDS
    )


def check_out(task: Task) -> None:
    """FlagError where --out cannot be the folder of this run."""
    out = task.out
    if out.exists() and not out.is_dir():
        raise FlagError(f"--out is {str(out)!r}, allowed: a folder, or one that can be made")
    began = (out / LOG_NAME).exists() or latest_state(out / STATES_NAME) is not None
    if began and not task.resume:
        raise FlagError(f"--out is {str(out)!r}, which holds a run; give --resume to go on, or another folder")


def run(groups: Groups, task: Task, flags: RunFlags) -> None:
    """One rank's part: the target's, a drafter's, or both."""
    if groups.topology.world > 1:
        try_exchanges(groups)
    if not task.target_ranks:
        own = groups if groups.topology == task.drafters else groups.derive(task.drafters)
        _train(groups, own, _own_source(groups, task, flags), task, flags)
        return
    part = groups.split([task.drafters, task.target])
    if part.number == 1:
        _run_target(groups, part, task, flags)
    else:
        assert task.data is not None
        sender = task.drafters.world + sender_of(groups.rank, task.target.dp, task.target.tp)
        source = ShippedSource(task.data, task.order(), task.spec, groups.rank, part.bridge, sender)
        _train(groups, part.groups, source, task, flags)


def _own_source(groups: Groups, task: Task, flags: RunFlags) -> FeatureSource:
    """Files, or the target on these ranks."""
    if task.features is not None:
        return FileSource(task.features, task.order(), groups.rank)
    assert task.data is not None
    with named_stage("load"):
        model = load_model(groups, task.checkpoint, flags)
    return SameRanksSource(task.data, task.order(), TargetCapture(model, task.spec))


def _run_target(groups: Groups, part: Part, task: Task, flags: RunFlags) -> None:
    """A rank of the target alone: it ends with the drafters, whatever it is told itself."""
    assert task.data is not None
    with named_stage("load"):
        model = load_model(part.groups, task.checkpoint, flags)
    with StopSignals(), named_stage("capture", lambda: model.clock.current):
        steps = range(_first_step(-1, groups), task.settings.steps)
        ship(TargetCapture(model, task.spec), task.data, task.order(), steps, part.bridge, task.depth)
        # Not before the drafters have saved what they learned: connections of all end with one of them.
        sleep(groups)


def _train(groups: Groups, own: Groups, source: FeatureSource, task: Task, flags: RunFlags) -> None:
    """A rank that trains; own: the groups of those that do."""
    with named_stage("build"):
        drafter = DrafterRun(task, own)
    with named_stage("resume"):
        first = _first_step(drafter.resume(), groups)
    out = people(flags.json) if own.rank == 0 else None
    if out is not None:
        ranks = f"{task.drafters.world} ranks train" + f", {task.target_ranks} run the target" * bool(task.target_ranks)
        print(f"{task.samples:,} samples, step {first} of {task.settings.steps}, {ranks}", file=out, flush=True)
    with named_stage("train"):
        outcome = train(drafter, source, out)
    if task.target_ranks:
        (wake if groups.rank == 0 else sleep)(groups)
    if out is not None:
        _tell(task, outcome, flags, out)
    if outcome.signal:
        raise SystemExit(SIGNAL_CODE + outcome.signal)


def _first_step(step: int, groups: Groups) -> int:
    """The step that the run goes on from, which the ranks that train know."""
    return max(told for (told,) in agree([step], groups, stage="first step"))


def _tell(task: Task, outcome: Outcome, flags: RunFlags, out: TextIO) -> None:
    last = read_log(task.out / LOG_NAME)[-1:]
    write_json(
        flags.json,
        {
            "folder": str(task.out),
            "steps": outcome.steps,
            "whole": not outcome.signal,
            "last": last[0] if last else None,
        },
    )
    if outcome.signal:
        name = signal.Signals(outcome.signal).name
        print(f"{name}: stopped behind step {outcome.steps}, state saved; --resume goes on", file=out, flush=True)
    else:
        print(f"{task.out / DRAFT_NAME}: the draft after {outcome.steps} steps", file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main())
