"""Repeats the exchanges of a recorded run on as many ranks: same sizes, same splits, same order, other data."""

import argparse
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ..comm.collectives import (
    all_gather_rows,
    broadcast_bytes,
    exchange_rows,
    reduce_scatter_rows,
)
from ..comm.trace import DTYPES, GroupKey, Trace, common_records, named, read_trace
from ..launch.flags import FlagError, FlagParser, RunFlags, add_common, check_range
from ..launch.output import people, write_json
from ..launch.spawn import run_job
from ..launch.worker import read_place, resolve_here, run_main, shown_environment
from ..parallel.groups import Group, Groups
from ..parallel.ledger import Record
from .driver import barrier

MODULE = "meshspark.benchmarks.replay"
GATHERS = ("all_gather_rows", "start_gather_rows")
"""A gather that went on in the background is repeated as one that does not: its bytes belong to its start."""

FINISH = "finish_gather_rows"
OPS = (*GATHERS, FINISH, "exchange_rows", "broadcast_bytes", "reduce_scatter_rows")
"""What a trace may hold; all other exchanges are made of these."""

MOST_BYTES = 2 << 30
"""Of one rank's part of an exchange, and of its result."""

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Step:
    """One exchange of this rank: its record, and what the records of the other ranks add to it."""

    record: Record
    received: tuple[int, ...] = ()
    source: int = 0

    @property
    def key(self) -> Key:
        """What its time is added to: stage, op, group."""
        return self.record.stage, self.record.op, self.record.group


def steps_of(trace: Trace) -> list[list[Step]]:
    """What each rank repeats, by world rank, in its recorded order.

    ValueError where ranks of a group recorded different exchanges, or one is larger than allowed: a trace is data that
    nobody vouches for, and its replay must neither hang nor fill the memory.
    """
    kept = common_records(trace)
    calls: dict[tuple[GroupKey, int], dict[int, Record]] = defaultdict(dict)
    for rank, mine in enumerate(kept):
        for key, number, record in mine:
            calls[key, number][rank] = record
    made = {call: [by_rank[peer] for peer in call[0][1]] for call, by_rank in calls.items()}
    for records in made.values():
        _check(records)
    _check_order([[(key, number) for key, number, _ in mine] for mine in kept])
    return [
        [_step(record, made[key, number], key[1].index(rank)) for key, number, record in mine]
        for rank, mine in enumerate(kept)
    ]


def _check(records: Sequence[Record]) -> None:
    """ValueError unless the records of all ranks of a group are one exchange."""
    first, size = records[0], len(records)
    where = f"number {first.sequence} of group {first.group}"
    if first.op not in OPS:
        raise ValueError(f"{where} is {first.op!r:.60}, allowed: {', '.join(OPS)}")
    uneven = first.op == "exchange_rows"
    alike = {(r.sequence, r.op, r.dtype, r.columns, 0 if uneven else r.rows) for r in records}
    if len(alike) > 1:
        raise ValueError(f"{where} differs between ranks: {sorted(alike)}")
    for record in records:
        if uneven and (len(record.splits) != size or sum(record.splits) != record.rows):
            raise ValueError(f"{where} has splits {list(record.splits)!r:.60} of {record.rows} rows on {size} ranks")
        if first.op == "reduce_scatter_rows" and record.rows % size:
            raise ValueError(f"{where} has {record.rows} rows for {size} ranks")
    if first.op == "broadcast_bytes" and sum(record.bytes > 0 for record in records) != 1:
        raise ValueError(f"{where} has no source, or several")
    if first.op == FINISH and first.rows:
        raise ValueError(f"{where} ends a gather with {first.rows} rows, allowed: 0")
    if first.op == "reduce_scatter_rows" and not DTYPES[first.dtype].is_floating_point:
        raise ValueError(f"{where} adds {first.dtype}")
    taken = [sum(column) for column in zip(*(r.splits for r in records), strict=True)] if uneven else []
    most = max([r.rows for r in records] + taken) * (size if first.op in GATHERS else 1)
    if first.op == "broadcast_bytes":
        most = 1
    moved = prod((most, first.columns, DTYPES[first.dtype].itemsize))
    if moved > MOST_BYTES:
        raise ValueError(f"{where} moves {moved:,} bytes, allowed: at most {MOST_BYTES:,}")


def _step(record: Record, made: Sequence[Record], me: int) -> Step:
    if record.op == "exchange_rows":
        return Step(record, tuple(peer.splits[me] for peer in made))
    source = next((place for place, peer in enumerate(made) if peer.bytes > 0), 0)
    return Step(record, source=source)


def _check_order(calls: Sequence[Sequence[tuple[GroupKey, int]]]) -> None:
    """ValueError if the ranks would wait for each other in a circle: they meet in an order that they share."""
    places = [0] * len(calls)
    ready = set(range(len(calls)))
    while ready:
        rank = ready.pop()
        if places[rank] == len(calls[rank]):
            continue
        call = calls[rank][places[rank]]
        peers = call[0][1]
        if all(calls[peer][places[peer] : places[peer] + 1] == [call] for peer in peers):
            for peer in peers:
                places[peer] += 1
            ready.update(peers)
    stuck = [rank for rank, place in enumerate(places) if place < len(calls[rank])]
    if stuck:
        raise ValueError(f"ranks {stuck[:8]} would wait for each other: their groups' exchanges are in other orders")


def replay(trace: Trace, groups: Groups, iterations: int, warm_up: int = 1) -> dict[Key, np.ndarray]:
    """Repeat the trace -> by stage, op and group, its seconds of all ranks, [ranks, iterations]. All ranks call it.

    Every iteration begins at a barrier. ValueError as `steps_of`, and for groups of another topology.
    """
    trace.topology.require_same(groups.topology, "the trace")
    steps = steps_of(trace)
    keys = sorted({step.key for mine in steps for step in mine})
    memory = _Memory.of(steps[groups.rank])
    runs = [
        (keys.index(step.key), _runner(step, named(groups, step.record.group), memory)) for step in steps[groups.rank]
    ]
    spent = torch.zeros(len(keys), iterations, dtype=torch.float64)
    for iteration in range(-warm_up, iterations):
        barrier(groups)
        for place, run in runs:
            begin = perf_counter()
            run()
            if iteration >= 0:
                spent[place, iteration] += perf_counter() - begin
    everywhere = all_gather_rows(spent.unsqueeze(0), groups.control, stage="bench.samples").numpy()
    return {key: everywhere[:, place] for place, key in enumerate(keys)}


@dataclass(frozen=True)
class _Memory:
    """What all exchanges send from: their number costs no memory. elements: most that one sends, by dtype."""

    elements: Mapping[str, int]
    made: dict[tuple[str, str], torch.Tensor]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> "_Memory":
        most: dict[str, int] = defaultdict(int)
        for record in (step.record for step in steps if step.record.op != "broadcast_bytes"):
            most[record.dtype] = max(most[record.dtype], record.rows * record.columns)
        return cls(most, {})

    def rows(self, record: Record, device: str) -> torch.Tensor:
        key = record.dtype, device
        if key not in self.made:
            self.made[key] = torch.zeros(self.elements[record.dtype], dtype=DTYPES[record.dtype], device=device)
        return self.made[key][: record.rows * record.columns].view(record.rows, record.columns)


def _runner(step: Step, group: Group, memory: _Memory) -> Callable[[], Any]:
    record = step.record
    if record.op == "broadcast_bytes":
        own = group.rank == step.source
        length, stage = record.columns, record.stage
        return lambda: broadcast_bytes(bytes(length) if own else None, group, step.source, length=length, stage=stage)
    if record.op == FINISH:
        return lambda: None
    x = memory.rows(record, group.device)
    if record.op == "exchange_rows":
        return lambda: exchange_rows(x, group, record.splits, step.received, stage=record.stage)
    verb = all_gather_rows if record.op in GATHERS else reduce_scatter_rows
    return lambda: verb(x, group, stage=record.stage)


def table(trace: Trace, spent: Mapping[Key, np.ndarray]) -> list[dict[str, Any]]:
    """A row for each stage, op and group: calls and bytes of the busiest rank, recorded and replayed time.

    Times are microseconds of one run of the trace on its slowest rank; replayed is the median of the iterations.
    """
    rows = []
    kept = [[record for _, _, record in mine] for mine in common_records(trace)]
    for key, seconds in spent.items():
        mine = [[r for r in records if (r.stage, r.op, r.group) == key] for records in kept]
        rows.append(
            {
                "stage": key[0],
                "op": key[1],
                "group": key[2],
                "calls": max(map(len, mine)),
                "bytes": max(sum(r.bytes for r in records) for records in mine),
                "recorded_us": max(sum(r.end - r.start for r in records) for records in mine) * 1e6,
                "replayed_us": float(np.median(seconds.max(0))) * 1e6,
            }
        )
    return rows


def parser() -> FlagParser:
    """The replay's flags."""
    flags = FlagParser(prog="meshspark bench replay", description=__doc__, allow_abbrev=False)
    flags.add_argument("source", type=Path, metavar="TRACE", help="what --record FILE of a program wrote")
    flags.add_argument("--iterations", type=int, default=5, help="counted runs of the trace (default: 5)")
    flags.add_argument("--warm-up", type=int, default=1, help="runs before them (default: 1)")
    add_common(flags, ("numerics", "seed"))
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0; 1 where a rank failed; 2 for wrong flags, a faulty trace, or one of another topology."""
    return run_main("bench replay", _act, argv)


def _act(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    check_range("--iterations", args.iterations, 1, 1_000_000)
    check_range("--warm-up", args.warm_up, 0, 1_000_000)
    trace = read_trace(args.source)
    steps_of(trace)
    flags = _flags(args, trace)
    digest = hashlib.sha256(args.source.read_bytes()).hexdigest()[:16]
    facts = {"trace": digest, "iterations": args.iterations, "warm-up": args.warm_up}
    return run_job(MODULE, arguments, flags, lambda groups: _run(args, trace, flags, groups), facts)


def _flags(args: argparse.Namespace, trace: Trace) -> RunFlags:
    """The common flags; sizes that are not given are the trace's. FlagError for another topology."""
    wanted, place = trace.topology, read_place()
    if place is None and args.ranks is None:
        args.ranks = wanted.world
    world = args.ranks if place is None else place.world
    if world == wanted.world:
        args.tp = wanted.tp if args.tp is None else args.tp
        args.ep = wanted.ep if args.ep is None else args.ep
    flags = resolve_here(args)
    if flags.topology != wanted:
        raise FlagError(
            f"the trace was recorded with --ranks {wanted.world} --tp {wanted.tp} --ep {wanted.ep}, but would be "
            f"replayed with --ranks {flags.topology.world} --tp {flags.topology.tp} --ep {flags.topology.ep}"
        )
    return flags


def _run(args: argparse.Namespace, trace: Trace, flags: RunFlags, groups: Groups) -> None:
    rows = table(trace, replay(trace, groups, args.iterations, args.warm_up))
    if groups.rank:
        return
    stream = people(flags.json)
    widths = {"stage": 22, "op": 20, "group": 8, "calls": 8, "bytes": 14, "recorded_us": 14, "replayed_us": 14}
    print(f"# {args.warm_up} warm-up runs of the trace, {args.iterations} counted; us of the slowest rank", file=stream)
    left_out = sum(len(rank.records) for rank in trace.ranks) - sum(map(len, common_records(trace)))
    if left_out:
        print(f"# {left_out} records left out: not every rank of their group has them", file=stream)
    print(" ".join(f"{name:>{width}}" for name, width in widths.items()), file=stream)
    for row in rows:
        cells = {name: f"{value:.1f}" if isinstance(value, float) else str(value) for name, value in row.items()}
        print(" ".join(f"{cells[name]:>{width}}" for name, width in widths.items()), file=stream)
    told = {"benchmark": "replay", "warm_up": args.warm_up, "iterations": args.iterations}
    write_json(flags.json, {**told, "environment": shown_environment(), "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
