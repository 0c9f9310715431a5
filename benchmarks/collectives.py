"""Bandwidth of the exchanges between ranks, each beside a memory copy of the same bytes and checked bit for bit."""

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..launch.flags import FlagError, FlagParser, RunFlags, add_common, check_range
from ..launch.output import people, write_json
from ..launch.spawn import run_job
from ..launch.worker import read_place, resolve_here, run_main, shown_environment
from ..models.v4.config import flash_dspark
from ..parallel.errors import TransportError
from ..parallel.groups import Groups
from . import report
from .driver import Exchange, Loop, Measured, measure
from .exchanges import (
    DTYPES,
    PAYLOAD_OPS,
    STAGE,
    Setting,
    all_to_all,
    broadcast,
    context,
    control,
    flash_payload,
    gather,
    reduction,
)
from .presets import PRESETS, Planned, exchanges
from .routed import AUX_BYTES, experts_combine, experts_dispatch
from .routes import SKEWS

MODULE = "meshspark.benchmarks.collectives"
PLAIN_OPS = ("all-gather", "all-to-all", "reduce-scatter", "all-reduce", "broadcast")
OPS = (*PLAIN_OPS, "control", "dispatch", "combine", *PAYLOAD_OPS)
REDUCTIONS = ("reduce-scatter", "all-reduce")
DEFAULT_OPS = ",".join(PLAIN_OPS)
DEFAULT_SIZES = "1K:16M:4x"

LIMITS = {"iterations": 1_000_000, "warm_up": 1_000_000}
MOST_BYTES, MOST_SIZES = 1 << 36, 64
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Plan:
    """What the verb's own flags ask for. preset: None where ops and sizes say it."""

    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str
    preset: str | None
    skew: str
    loop: Loop
    peers: bool
    samples: str | None
    plot: str | None


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes: a list (0,1K,4M) or a range with a factor (1K:256M:4x, both ends included where they are met).

    K, M, G are powers of 1024. FlagError for anything else.
    """
    if ":" not in text:
        sizes = [_size(part, text) for part in text.split(",")]
    else:
        pieces = text.split(":")
        step = re.fullmatch(r"([0-9]{1,4})x", pieces[-1])
        if len(pieces) != 3 or step is None or int(step[1]) < 2:
            raise FlagError(f"--sizes is {text!r}, allowed: FIRST:LAST:Nx with N from 2, such as {DEFAULT_SIZES}")
        first, last = _size(pieces[0], text), _size(pieces[1], text)
        if not 1 <= first <= last:
            raise FlagError(f"--sizes is {text!r}, allowed: a first size from 1 that is not above the last")
        sizes = []
        while first <= last:
            sizes.append(first)
            first *= int(step[1])
    if len(sizes) > MOST_SIZES:
        raise FlagError(f"--sizes {text} names {len(sizes)} sizes, allowed: at most {MOST_SIZES}")
    return tuple(sizes)


def _size(text: str, whole: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text)
    if found is None or int(found[1]) * UNITS[found[2]] > MOST_BYTES:
        raise FlagError(f"--sizes is {whole!r}, allowed: numbers with K, M or G, at most {MOST_BYTES:,} bytes")
    return int(found[1]) * UNITS[found[2]]


def of_size(s: Setting, groups: Groups, op: str, size: int, dtype: torch.dtype) -> Exchange:
    """The exchange of at most `size` bytes (those of the busiest rank) that whole rows allow, maybe none."""
    n = s.group.size
    share = size // (n * dtype.itemsize)
    if op in PAYLOAD_OPS:
        row = flash_payload(PAYLOAD_OPS[op], s.config)
        return context(s, op, PAYLOAD_OPS[op], size // (n * row.width * row.wire.itemsize))
    if op in ("dispatch", "combine"):
        D, k = s.config.hidden_size, s.config.num_experts_per_tok
        row_bytes = k * (D + AUX_BYTES if op == "dispatch" else 2 * D) * (n if s.skew == "hot" else 1)
        return (experts_dispatch if op == "dispatch" else experts_combine)(s, op, size // row_bytes)
    builders: dict[str, Callable[[], Exchange]] = {
        "all-gather": lambda: gather(s, op, share, 1, dtype),
        "all-to-all": lambda: all_to_all(s, op, share, 1, dtype),
        "reduce-scatter": lambda: reduction(s, op, n * share, dtype),
        "all-reduce": lambda: reduction(s, op, size // dtype.itemsize, dtype),
        "broadcast": lambda: broadcast(replace(s, group=s.control), size),
        "control": lambda: control(replace(s, group=s.control), groups),
    }
    return builders[op]()


def planned(s: Setting, groups: Groups, plan: Planned) -> Exchange:
    """One exchange of a preset; s.group is the one that the plan names."""
    builders: dict[str, Callable[[], Exchange]] = {
        "control": lambda: control(replace(s, group=s.control), groups, plan.name, plan.columns),
        "all-gather": lambda: gather(s, plan.name, plan.rows, plan.columns, DTYPES[plan.dtype]),
        "all-to-all": lambda: all_to_all(s, plan.name, plan.rows, plan.columns, DTYPES[plan.dtype]),
        "dispatch": lambda: experts_dispatch(s, plan.name, plan.rows),
        "combine": lambda: experts_combine(s, plan.name, plan.rows),
    }
    build = builders.get(plan.op, lambda: context(s, plan.op, PAYLOAD_OPS[plan.op], plan.rows, plan.name))
    return replace(build(), calls_per_step=plan.calls)


def built(plan: Plan, groups: Groups, seed: int) -> Iterator[Exchange]:
    """The exchanges to measure, made one by one; sizes that come to the same bytes are measured once."""
    setting = Setting(groups.world, groups.control, seed, plan.skew, plan.peers)
    if plan.preset is not None:
        for item in exchanges(plan.preset, flash_dspark(), groups.topology):
            # Only even exchanges are planned, but for those of the experts.
            skew = plan.skew if item.op in ("dispatch", "combine") else "uniform"
            yield planned(replace(setting, group=getattr(groups, item.group), skew=skew), groups, item)
        return
    for op in plan.ops:
        seen = set()
        for size in plan.sizes:
            exchange = of_size(setting, groups, op, size, DTYPES[plan.dtype])
            if exchange.bytes not in seen:
                yield exchange
            seen.add(exchange.bytes)


def run(plan: Plan, flags: RunFlags, groups: Groups) -> None:
    """Measure and tell; rank 0 writes. TransportError on every rank if any element is wrong."""
    front, stream = groups.rank == 0, people(flags.json)
    if front:
        print(report.heading(plan.loop, groups.topology), report.header(), sep="\n", file=stream, flush=True)
    measured: list[Measured] = []
    for exchange in built(plan, groups, flags.seed):
        measured.append(measure(exchange, groups, plan.loop))
        if front:
            for row in measured[-1].rows:
                print(report.line(row), file=stream, flush=True)
    rows = [row for one in measured for row in one.rows]
    if front:
        told = report.document(rows, plan.loop, groups, shown_environment())
        write_json(flags.json, told)
        if plan.samples:
            report.write_samples(Path(plan.samples), measured)
        if plan.plot:
            report.plot(told["rows"], Path(plan.plot))
    faulty = [row for row in rows if row.wrong]
    if faulty:
        text = ", ".join(f"{row.wrong} of {row.op} at {row.bytes} bytes over {row.transport}" for row in faulty[:3])
        raise groups.world.error(TransportError, f"wrong elements: {text}", faulty[0].op, STAGE)


def parser() -> FlagParser:
    """The benchmark's flags."""
    flags = FlagParser(prog="meshspark bench collectives", description=__doc__, allow_abbrev=False)
    flags.add_argument("--ops", metavar="OP,...", help=f"of {', '.join(OPS)} (default: {DEFAULT_OPS})")
    flags.add_argument("--sizes", help=f"bytes: a list, or FIRST:LAST:Nx (default: {DEFAULT_SIZES})")
    flags.add_argument(
        "--dtype", choices=sorted(DTYPES), default="bfloat16", help="of the plain ops (default: bfloat16)"
    )
    flags.add_argument(
        "--preset", choices=sorted(PRESETS), help="the exchanges of one step of Flash, instead of ops and sizes"
    )
    flags.add_argument(
        "--skew", choices=SKEWS, default="uniform", help="of all-to-all, dispatch, combine (default: uniform)"
    )
    flags.add_argument("--iterations", type=int, default=20, help="counted (default: 20)")
    flags.add_argument("--warm-up", type=int, default=3, help="iterations before them (default: 3)")
    flags.add_argument("--no-peers", action="store_true", help="leave out the plain calls of torch.distributed and MPI")
    flags.add_argument("--samples", metavar="FILE", help="msgpack: seconds of every iteration and rank")
    flags.add_argument("--plot", metavar="FILE", help="bandwidth against size, with the copy's (needs the extra plot)")
    add_common(flags, ("numerics",))
    return flags


def prepare(args: argparse.Namespace) -> Plan:
    """The plan of the flags. FlagError, ValueError."""
    for name, most in LIMITS.items():
        check_range(f"--{name.replace('_', '-')}", getattr(args, name), 1 if name == "iterations" else 0, most)
    if args.preset and (args.ops or args.sizes):
        raise FlagError("--preset names its own exchanges and sizes; leave --ops and --sizes out")
    ops = tuple((args.ops or DEFAULT_OPS).split(","))
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise FlagError(f"--ops has {unknown[0]!r}, allowed: {', '.join(OPS)}")
    if not args.preset and set(ops) & set(REDUCTIONS) and not DTYPES[args.dtype].is_floating_point:
        raise FlagError(f"--dtype is {args.dtype}, but {', '.join(REDUCTIONS)} add floating point; choose other --ops")
    for flag in ("samples", "plot"):
        report.check_target(f"--{flag}", getattr(args, flag))
    if args.plot:
        report.plotting()
    loop = Loop(args.iterations, args.warm_up)
    sizes = parse_sizes(args.sizes or DEFAULT_SIZES)
    return Plan(ops, sizes, args.dtype, args.preset, args.skew, loop, not args.no_peers, args.samples, args.plot)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 where an element is wrong or a rank failed; 2 for wrong flags."""
    return run_main("bench collectives", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    flags = resolve_here(args)
    place = read_place()
    if place is not None and place.rank:
        # Files are rank 0's; the folders need not exist on the other machines.
        args.samples = args.plot = None
    plan = prepare(args)
    if plan.preset:
        exchanges(plan.preset, flash_dspark(), flags.topology)
    return run_job(MODULE, arguments, flags, lambda groups: run(plan, flags, groups), _facts(plan))


def _facts(plan: Plan) -> dict[str, str | int | float]:
    shown = (plan.ops, plan.sizes, plan.dtype, plan.preset, plan.skew, plan.peers)
    return {"iterations": plan.loop.iterations, "warm-up": plan.loop.warm_up, "exchanges": str(shown)}


if __name__ == "__main__":
    sys.exit(main())
