"""Traces: what the ledgers of all ranks recorded, as one msgpack file that can be replayed and as a timeline.

A trace holds no data of the exchanges, only who exchanged how much with whom, for which stage, and when.
"""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch

from ..parallel.group import Group, cpu_tensor
from ..parallel.groups import Groups
from ..parallel.ledger import Record, StageSpan
from ..parallel.topology import Topology
from .backend import WIRE_DTYPES
from .collectives import exchange_counts, exchange_rows

SCHEMA = 1
KIND = "meshspark trace"
CAPACITY = 1 << 20
"""Records that a run with --record or --trace keeps on each rank; the oldest fall out."""

LIMITS = {"file": 1 << 30, "world": 1 << 12, "text": 200, "number": 1 << 40}
"""Most bytes of a file, ranks, characters of a name, and the largest count that a trace may give."""

STAGES, COLLECTIVES = 0, 1
"""Threads of a rank in the timeline."""

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WIRE_DTYPES}

FIELDS = ("sequence", "group", "op", "dtype", "rows", "columns", "bytes", "splits", "stage", "start", "end")
_TEXTS, _NUMBERS, _TIMES = ("group", "op", "dtype", "stage"), ("sequence", "rows", "columns", "bytes"), ("start", "end")


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded. offset: seconds to add to its times to get those of time.time."""

    rank: int
    offset: float
    records: tuple[Record, ...]
    stages: tuple[StageSpan, ...] = ()


@dataclass(frozen=True)
class Trace:
    """The records of all ranks of a run, by world rank."""

    topology: Topology
    ranks: tuple[RankTrace, ...]


def of_rank(groups: Groups) -> RankTrace:
    """This rank's ledger as it stands."""
    ledger = groups.ledger
    return RankTrace(groups.rank, time.time() - time.perf_counter(), tuple(ledger), tuple(ledger.stages))


def finish(groups: Groups, record: str | None, trace: str | None) -> None:
    """Write what --record FILE and --trace DIR ask for, on rank 0; nothing where both are None.

    All ranks call it at the end of a run, for the others send rank 0 what they recorded. ValueError if a file cannot
    be written.
    """
    if record is None and trace is None:
        return
    whole = collect(of_rank(groups), groups)
    if whole is None:
        return
    if record is not None:
        write_trace(Path(record), whole)
    if trace is not None:
        write_timeline(Path(trace) / "trace.json", whole.ranks)


def salvage(groups: Groups, trace: str | None) -> None:
    """After a failure, where nothing can be sent any more: this rank's timeline alone, as DIR/rank-N.json."""
    if trace is not None:
        write_timeline(Path(trace) / f"rank-{groups.rank}.json", [of_rank(groups)])


def collect(own: RankTrace, groups: Groups) -> Trace | None:
    """The traces of all ranks on world rank 0, None on the others. All ranks call it."""
    group = groups.control
    if group.size == 1:
        return Trace(groups.topology, (own,))
    data = cpu_tensor(_pack_rank(own))
    sizes = [len(data)] + [0] * (group.size - 1)
    counts = exchange_counts(torch.tensor(sizes), group, stage="trace").tolist()
    received = exchange_rows(data, group, sizes, counts, stage="trace")
    if group.rank:
        return None
    parts = [_rank_of(_unpack(part.numpy().tobytes())) for part in received.split(counts)]
    return Trace(groups.topology, tuple(parts))


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace for `read_trace`. ValueError if the file cannot be written."""
    topology = trace.topology
    head = {"schema": SCHEMA, "kind": KIND, "world": topology.world, "tp": topology.tp, "ep": topology.ep}
    _write(path, msgpack.packb({**head, "ranks": [_plain_rank(rank) for rank in trace.ranks]}))


def read_trace(path: Path) -> Trace:
    """A trace from a file that nobody vouches for: types, sizes and topology are checked. ValueError for a fault."""
    try:
        size = path.stat().st_size
        if size > LIMITS["file"]:
            raise ValueError(f"{path} has {size:,} bytes, allowed: at most {LIMITS['file']:,}")
        raw = _unpack(path.read_bytes())
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}") from problem
    try:
        return _trace_of(raw)
    except ValueError as problem:
        raise ValueError(f"{path} is no trace: {problem}") from problem


def timeline(ranks: Iterable[RankTrace]) -> dict[str, Any]:
    """The traces in the JSON form that Perfetto and Chrome open: a process per rank, its stages and its collectives.

    Times are microseconds since the first start of any rank. Stages that nobody timed are drawn from the collectives:
    each run of exchanges for one stage is a span.
    """
    ranks = list(ranks)
    starts = [r.start + rank.offset for rank in ranks for r in rank.records]
    starts += [start + rank.offset for rank in ranks for _, start, _ in rank.stages]
    first = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for rank in ranks:
        events += [_name("process_name", rank.rank, STAGES, f"rank {rank.rank}")]
        events += [_name("thread_name", rank.rank, STAGES, "stages")]
        events += [_name("thread_name", rank.rank, COLLECTIVES, "collectives")]
        shift = rank.offset - first
        for name, start, end in rank.stages or runs(rank.records):
            events.append(_event(name, rank.rank, STAGES, start + shift, end - start, {}))
        for r in rank.records:
            told = {name: getattr(r, name) for name in FIELDS[:-2]}
            events.append(_event(r.op, rank.rank, COLLECTIVES, r.start + shift, r.end - r.start, told))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_timeline(path: Path, ranks: Iterable[RankTrace]) -> None:
    """Write `timeline` to a file whose folder is made if need be. ValueError if that fails."""
    _write(path, json.dumps(timeline(ranks)).encode())


def runs(records: Iterable[Record]) -> list[StageSpan]:
    """Spans of neighbouring records with one stage, in their order."""
    spans: list[StageSpan] = []
    for record in records:
        if spans and spans[-1][0] == record.stage:
            spans[-1] = spans[-1]._replace(end=record.end)
        else:
            spans.append(StageSpan(record.stage, record.start, record.end))
    return spans


GroupKey = tuple[str, tuple[int, ...]]
"""Name and world ranks of a group."""


def common_records(trace: Trace) -> list[list[tuple[GroupKey, int, Record]]]:
    """By rank, in its order: (group, number, record) of the calls that all ranks of the group hold, numbered from 0.

    Calls are matched from the newest one on, for a ring may have lost the oldest of a rank.
    """
    keyed: list[list[tuple[GroupKey, Record]]] = []
    held: dict[GroupKey, dict[int, int]] = {}
    for rank in trace.ranks:
        keyed.append([((r.group, members(trace.topology, r.group, rank.rank)), r) for r in rank.records])
        for key, count in Counter(key for key, _ in keyed[-1]).items():
            held.setdefault(key, {})[rank.rank] = count
    kept: list[list[tuple[GroupKey, int, Record]]] = []
    for rank in trace.ranks:
        # Below 0: not on every rank of the group.
        own = {key: held[key][rank.rank] for key, _ in keyed[rank.rank]}
        number = {key: min(held[key].get(peer, 0) for peer in key[1]) - count for key, count in own.items()}
        mine = []
        for key, record in keyed[rank.rank]:
            if number[key] >= 0:
                mine.append((key, number[key], record))
            number[key] += 1
        kept.append(mine)
    return kept


def members(topology: Topology, name: str, rank: int) -> tuple[int, ...]:
    """World ranks of the group with this name to which a world rank belongs. ValueError for an unknown name."""
    if name in ("world", "control", "front"):
        return tuple(range(topology.world))
    if name in ("tp", "ep"):
        return topology.tp_ranks(rank) if name == "tp" else topology.ep_ranks(rank)
    raise ValueError(f"group is {name!r}, allowed: world, control, front, tp, ep")


def named(groups: Groups, name: str) -> Group:
    """The group of this rank with this name, as `members` knows them."""
    assert name in ("world", "control", "front", "tp", "ep")
    group: Group = getattr(groups, name)
    return group


def _name(what: str, rank: int, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": {"name": text}}


def _event(name: str, rank: int, thread: int, start: float, length: float, told: Mapping[str, Any]) -> dict[str, Any]:
    times = {"ts": round(start * 1e6, 3), "dur": round(max(0.0, length) * 1e6, 3)}
    category = "stage" if thread == STAGES else "collective"
    return {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": thread, **times, "args": dict(told)}


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as problem:
        raise ValueError(f"{path} cannot be written: {problem.strerror}") from problem


def _pack_rank(rank: RankTrace) -> bytes:
    data: bytes = msgpack.packb(_plain_rank(rank))
    return data


def _plain_rank(rank: RankTrace) -> dict[str, Any]:
    records = [[getattr(record, name) for name in FIELDS] for record in rank.records]
    return {"rank": rank.rank, "offset": rank.offset, "records": records, "stages": [list(s) for s in rank.stages]}


def _unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.exceptions.UnpackException) as problem:
        raise ValueError(f"unreadable msgpack: {problem}") from problem


def _trace_of(raw: Any) -> Trace:
    if not isinstance(raw, dict) or raw.get("kind") != KIND or raw.get("schema") != SCHEMA:
        raise ValueError(f"it is not a map with kind {KIND!r} and schema {SCHEMA}")
    sizes: list[Any] = [raw.get(name) for name in ("world", "tp", "ep")]
    if not all(type(size) is int and 1 <= size <= LIMITS["world"] for size in sizes):
        raise ValueError(f"world, tp and ep are {sizes}, allowed: 1 to {LIMITS['world']}")
    topology = Topology(*sizes)
    ranks = raw.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != topology.world:
        raise ValueError(f"ranks is no list of {topology.world}")
    traces = tuple(_rank_of(rank) for rank in ranks)
    if [trace.rank for trace in traces] != list(range(topology.world)):
        raise ValueError("the ranks are not numbered in order")
    for trace in traces:
        for record in trace.records:
            members(topology, record.group, trace.rank)
    return Trace(topology, traces)


def _rank_of(raw: Any) -> RankTrace:
    if not isinstance(raw, dict) or not isinstance(raw.get("records"), list) or not isinstance(raw.get("stages"), list):
        raise ValueError("a rank is no map with records and stages")
    rank, offset = raw.get("rank"), raw.get("offset")
    if type(rank) is not int or offset is None or not _is_time(offset):
        raise ValueError(f"rank is {rank!r} and its offset {offset!r}, allowed: a whole number and seconds")
    records = tuple(_record_of(fields) for fields in raw["records"])
    return RankTrace(rank, float(offset), records, tuple(_stage_of(span) for span in raw["stages"]))


def _stage_of(raw: Any) -> StageSpan:
    if not (isinstance(raw, list) and len(raw) == 3 and _is_text(raw[0]) and _is_time(raw[1]) and _is_time(raw[2])):
        raise ValueError("a stage is no list of name, start and end")
    return StageSpan(raw[0], float(raw[1]), float(raw[2]))


def _record_of(raw: Any) -> Record:
    if not isinstance(raw, list) or len(raw) != len(FIELDS):
        raise ValueError(f"a record is no list of {len(FIELDS)}: {', '.join(FIELDS)}")
    fields = dict(zip(FIELDS, raw, strict=True))
    wrong = [name for name in _TEXTS if not _is_text(fields[name])]
    wrong += [name for name in _NUMBERS if not _is_count(fields[name])]
    wrong += [name for name in _TIMES if not _is_time(fields[name])]
    if not isinstance(fields["splits"], list) or not all(map(_is_count, fields["splits"])):
        wrong.append("splits")
    if fields["dtype"] not in DTYPES:
        wrong.append("dtype")
    if wrong:
        raise ValueError(f"{wrong[0]} of a record is {fields[wrong[0]]!r:.100}, which is not allowed")
    return Record(**{**fields, "splits": tuple(fields["splits"])})


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LIMITS["text"]


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LIMITS["number"]


def _is_time(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) < 1e12
