"""`meshspark bench context`: decode steps of one request at long contexts, checked, and what of their time grows.

The caches have the geometry of the preset; its other sizes are small. Nothing is prefilled: the pools are filled
through the page tables with synthetic rows, and every context starts with new pages in another order.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from ..launch.flags import ALONE, FlagError, FlagParser, RunFlags, add_common, check_range
from ..launch.output import people, show, write_json
from ..launch.worker import FAILED, OK, resolve_here, run_main
from ..models.numerics import numerics
from . import report
from .context_steps import PRESETS, Context, Plan, free_bytes, needed_bytes, pool_bytes, run

BENCHMARK = "context"
DEFAULT_CONTEXTS = "4K,64K,256K,1M"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
MOST_STEPS, MOST_CONTEXTS = 64, 32
PLOTTED = 8
"""Stages that the plot shows, those that take longest at the last context."""


def parse_contexts(text: str, most: int) -> tuple[int, ...]:
    """Positions such as 4K,64K,1M, ascending; K and M are powers of 1024. FlagError."""
    found = [re.fullmatch(r"([0-9]{1,7})([KM]?)", part) for part in text.split(",")]
    sizes = [int(one[1]) * UNITS[one[2]] for one in found if one]
    if len(sizes) < len(found) or len(found) > MOST_CONTEXTS or not all(1 <= size <= most for size in sizes):
        raise FlagError(f"--contexts is {text!r}, allowed: up to {MOST_CONTEXTS} numbers with K or M, 1 to {most:,}")
    return tuple(sorted(set(sizes)))


def parser() -> FlagParser:
    """The verb's flags."""
    flags = FlagParser(prog="meshspark bench context", description=__doc__, allow_abbrev=False)
    flags.add_argument("--preset", choices=sorted(PRESETS), default="flash", help="whose caches (default: flash)")
    flags.add_argument(
        "--contexts", metavar="N,...", help=f"positions, the last of each run (default: {DEFAULT_CONTEXTS})"
    )
    flags.add_argument("--steps", type=int, default=6, help="last positions of each context (default: 6)")
    flags.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    flags.add_argument("--plot", metavar="FILE", help="time of a step against context (needs the extra plot)")
    add_common(flags, (*ALONE, "ranks", "tp", "ep", "backend", "device", "timeout"))
    flags.set_defaults(numerics="bfloat16")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 where something found is wrong; 2 for wrong flags, or memory that does not suffice."""
    return run_main("bench context", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    args = parser().parse_args(argv)
    flags = resolve_here(args)
    plan = prepare(args, flags)
    torch.set_num_threads(args.threads)
    stream = people(flags.json)
    needed = needed_bytes(plan)
    print(heading(plan, needed), file=stream, flush=True)
    rows: list[Context] = []
    for row in run(plan, flags.seed):
        print(line(row), file=stream, flush=True)
        rows.append(row)
    told = document(plan, rows, flags.seed, args.threads)
    write_json(flags.json, told)
    show(stream, stage_table(rows))
    print(f"from {rows[0].context:,} to {rows[-1].context:,} positions most grows: {told['grows']}", file=stream)
    if plan.plot:
        plot(rows, Path(plan.plot))
    faults = [fault for row in rows for fault in row.faults]
    for fault in faults:
        print(f"WRONG: {fault}", file=stream)
    return FAILED if faults else OK


def prepare(args: argparse.Namespace, flags: RunFlags) -> Plan:
    """The plan of the flags, if the memory is there. FlagError, ValueError."""
    if flags.topology.world != 1:
        raise FlagError("bench context is one process; start it without torchrun")
    check_range("--steps", args.steps, 1, MOST_STEPS)
    check_range("--threads", args.threads, 1, 1024)
    config = PRESETS[args.preset]()
    default = DEFAULT_CONTEXTS if args.preset == "flash" else f"512,{config.max_position_embeddings}"
    contexts = parse_contexts(args.contexts or default, config.max_position_embeddings)
    if contexts[0] < args.steps:
        raise FlagError(f"--contexts has {contexts[0]}, allowed: not less than --steps {args.steps}")
    report.check_target("--plot", args.plot)
    if args.plot:
        report.plotting()
    plan = Plan(args.preset, config, numerics(flags.numerics), contexts, args.steps, args.plot)
    needed, free = needed_bytes(plan), free_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"caches of {max(contexts):,} positions in {plan.mode.name} and what is beside them take "
            f"{needed:,} bytes of memory, free are {free:,}; give shorter --contexts or a narrower --numerics"
        )
    return plan


def heading(plan: Plan, needed: int) -> str:
    """What is run, and the memory that it takes."""
    pools = ", ".join(f"{name} {size / 2**20:,.1f}" for name, size in pool_bytes(plan).items())
    return (
        f"# {plan.preset}, {plan.mode.name}: one request, the last {plan.steps} positions of each context\n"
        f"# pools, MiB: {pools}; {sum(pool_bytes(plan).values()):,} bytes, {needed:,} with all that is beside them"
    )


def line(row: Context) -> str:
    """One context, as soon as it is known."""
    worst = max((found.error for found in row.probes), default=0.0)
    planted = sum(found.planted for found in row.probes if found.ratio == 4)
    missed = sum(found.missed for found in row.probes)
    return (
        f"{row.context:>9,} positions: step {row.step_ms:,.1f} ms; planted {planted}, not selected {missed}; "
        f"error against FP64 {worst:.1e}; filled in {row.fill_s:.1f} s; {len(row.faults)} wrong"
    )


def growing(rows: Sequence[Context]) -> str:
    """The part of a step whose time grows most from the first context to the last."""
    first, last = rows[0].stages_ms, rows[-1].stages_ms
    return max(last, key=lambda name: last[name] - first.get(name, 0.0))


def stage_table(rows: Sequence[Context]) -> Table:
    """Milliseconds by stage (rows) and context (columns)."""
    table = Table("stage, ms", *(f"{row.context:,}" for row in rows))
    for column in table.columns[1:]:
        column.justify = "right"
    for name in rows[-1].stages_ms:
        table.add_row(name, *(f"{row.stages_ms.get(name, 0.0):,.2f}" for row in rows))
    table.add_row("step", *(f"{row.step_ms:,.2f}" for row in rows))
    return table


def document(plan: Plan, rows: Sequence[Context], seed: int, threads: int) -> dict[str, Any]:
    """The JSON of a run."""
    return {
        "benchmark": BENCHMARK,
        "preset": plan.preset,
        "numerics": plan.mode.name,
        "steps": plan.steps,
        "seed": seed,
        "threads": threads,
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
        "pools": pool_bytes(plan),
        "needed_bytes": needed_bytes(plan),
        "grows": growing(rows),
        "rows": [asdict(row) for row in rows],
    }


def plot(rows: Sequence[Context], path: Path) -> None:
    """Time of a step and of its stages against context. ValueError where the file cannot be written."""
    figure = report.plotting().Figure(figsize=(8, 5), layout="constrained")
    panel = figure.subplots()
    contexts = [row.context for row in rows]
    panel.plot(contexts, [row.step_ms for row in rows], "k-o", label="step")
    longest = sorted(rows[-1].stages_ms, key=lambda name: -rows[-1].stages_ms[name])
    for name in longest[:PLOTTED]:
        style = "-" if name == growing(rows) else "--"
        panel.plot(contexts, [row.stages_ms.get(name, 0.0) for row in rows], style, marker=".", label=name)
    panel.set(xlabel="positions", ylabel="ms of a decode step", title=f"most grows: {growing(rows)}")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.legend(fontsize="small")
    report.save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(main())
