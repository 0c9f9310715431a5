"""`meshspark calibrate`: fit a drafter's confidences to what the target accepts; the fit is kept beside the checkpoint.

Takes the flags of `generate`. The prompts are written with all drafts verified and confidences as the drafter gives
them; the first half of each rank's blocks is fitted, the other half judges the fit.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import torch
from rich.table import Table

from ..comm.agreement import agree
from ..comm.collectives import all_gather_rows
from ..models.dspark.calibration import Calibration, Rollouts, calibrate, reliability_panels
from ..models.dspark.reliability import reliability_plot
from ..models.dspark.step import Judged
from ..parallel.groups import Groups
from . import generate
from .deployment import parse_with_point
from .exchange import try_exchanges
from .flags import FlagError, FlagParser, RunFlags
from .generate import Task
from .output import people, show, write_json
from .spawn import run_job
from .worker import named_stage, resolve_here, run_main

MODULE = "meshspark.launch.calibrate"


def parser() -> FlagParser:
    """The flags of generate, and a plot."""
    flags = generate.parser()
    flags.prog, flags.description = "meshspark calibrate", __doc__
    flags.add_argument("--plot", metavar="FILE", help="reliability before and after (needs the extra plot)")
    flags.set_defaults(speculative="dspark")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 for a failure, 2 for wrong flags or a checkpoint without a drafter, 130 for an interrupt."""
    return run_main("calibrate", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args, _ = parse_with_point(parser, arguments)
    flags = resolve_here(args)
    task = prepare(args, flags)
    return run_job(MODULE, arguments, flags, lambda groups: run(groups, task, flags, args.plot), task.facts())


def prepare(args: argparse.Namespace, flags: RunFlags) -> Task:
    """What to write, checked before a rank starts. FlagError for what a calibration cannot have."""
    task = generate.prepare(args, flags)
    if not task.drafting.on:
        raise FlagError("--speculative is none, allowed: the drafter to calibrate")
    if task.drafting.verify != "all" or task.drafting.compare:
        raise FlagError("--verify and --compare are for generate; a calibration verifies all drafts")
    return replace(task, drafting=replace(task.drafting, temperatures=None))


def run(groups: Groups, task: Task, flags: RunFlags, plot: str | None) -> None:
    """One rank's part: load, write, bring all ranks' blocks to world rank 0, which fits and tells.

    ValueError where there are too few blocks: one to fit and one to judge.
    """
    if groups.topology.world > 1:
        try_exchanges(groups)
    with named_stage("load"):
        model, proposer = generate.load_with_drafter(groups, task.directory, flags, task.drafting)
    judged: list[Judged] = []
    with named_stage("step", lambda: model.clock.current):
        generate.run_once(model, proposer, task, None, judged.append)
    halves = gather_halves(judged, task.drafting.gamma, groups)
    if groups.rank:
        return
    fitted, judge = halves
    if not len(fitted.width_N) or not len(judge.width_N):
        raise ValueError(
            f"{len(fitted.width_N)} and {len(judge.width_N)} blocks were verified whole, allowed: 1 or more to fit and "
            "to judge; give more or longer texts (--prompt, --max-new-tokens)"
        )
    found = calibrate(fitted, judge)
    path = found.save(task.directory)
    write_json(flags.json, {"calibration": asdict(found), "file": str(path), "judged": len(judge.width_N)})
    show(people(flags.json), table(found, len(judge.width_N)))
    print(f"kept in {path}", file=people(flags.json))
    if plot:
        reliability_plot(reliability_panels(judge, found.temperatures), plot)


def gather_halves(judged: Sequence[Judged], gamma: int, groups: Groups) -> tuple[Rollouts, Rollouts]:
    """Blocks that were verified whole, of all ranks in their order: the first half of each rank's, and the second.
    All ranks call it; every one gets them."""
    whole = [each for each in judged if each.width == gamma + 1 and all(map(math.isfinite, each.confidences))]
    counts = [count for (count,) in agree([len(whole)], groups, stage="calibration")]
    rows = np.zeros((max(counts), gamma + 1), dtype=np.float64)
    for place, each in enumerate(whole):
        rows[place] = (*each.confidences, each.accepted)
    told = all_gather_rows(torch.from_numpy(rows), groups.control, stage="calibration").numpy()
    parts = [told[rank * max(counts) :][:count] for rank, count in enumerate(counts)]
    first = [part[: (len(part) + 1) // 2] for part in parts]
    return _rollouts(first), _rollouts([part[(len(part) + 1) // 2 :] for part in parts])


def _rollouts(parts: Sequence[np.ndarray]) -> Rollouts:
    rows = np.concatenate(parts)
    return Rollouts(rows[:, :-1], rows[:, -1].astype(np.int64), np.full(len(rows), rows.shape[1]))


def table(found: Calibration, judged: int) -> Table:
    """Temperatures, and what they change, by draft."""
    shown = Table("draft", "temperature", "ECE before", "after", "AUC before", "after", title_justify="left")
    shown.title = f"fitted on {found.rollouts} blocks, judged on {judged} others"
    for draft in range(found.gamma):
        errors = [f"{side[draft]:.4f}" for side in (found.ece_before, found.ece_after)]
        aucs = ["-" if side[draft] is None else f"{side[draft]:.3f}" for side in (found.auc_before, found.auc_after)]
        shown.add_row(str(draft + 1), f"{found.temperatures[draft]:.3f}", *errors, *aucs)
    return shown


if __name__ == "__main__":
    sys.exit(main())
