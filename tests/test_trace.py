"""Traces: what ledgers recorded comes back, is repeated exactly, opens as a timeline, and is trusted in nothing."""

import json

import msgpack
import pytest
import torch

from meshspark.benchmarks import replay
from meshspark.comm import collectives, trace
from meshspark.comm.trace import RankTrace, Trace
from meshspark.launch import cli
from meshspark.parallel.ledger import Ledger, Record
from meshspark.parallel.topology import Topology

TWO = Topology(2, 1, 2)


def record(sequence=1, group="world", op="all_gather_rows", rows=2, splits=(), **rest):
    fields = {"dtype": "float32", "columns": 3, "bytes": 24, "stage": "gather", "start": 1.0, "end": 1.5, **rest}
    return Record(sequence=sequence, group=group, op=op, rows=rows, splits=tuple(splits), **fields)


def of(*records, topology=TWO):
    """A trace with these records of each rank."""
    return Trace(topology, tuple(RankTrace(rank, 100.0, tuple(own)) for rank, own in enumerate(records)))


def same(*records):
    return of(records, records)


def _traffic(groups, source):
    """One of each exchange, uneven ones too, over two groups."""
    for group in (groups.world, groups.tp):
        n, me = group.size, group.rank
        collectives.all_gather_rows(torch.ones(3, 4), group, stage="gather")
        counts = [[(2 * s + d) % 3 for d in range(n)] for s in range(n)]
        x = torch.ones(sum(counts[me]), 5, dtype=torch.bfloat16)
        collectives.exchange_rows(x, group, counts[me], [row[me] for row in counts], stage="dispatch")
        collectives.reduce_scatter_rows(torch.ones(2 * n, 3), group, stage="publish")
        ahead = torch.ones(1 << 16, 2)  # large enough to travel in the background
        collectives.start_gather_rows(ahead, group, stage="weights").wait()
        collectives.all_reduce_rows(torch.ones(7), group, stage="publish")
    data = b"four" if groups.rank == source else None
    collectives.broadcast_bytes(data, groups.control, source, length=4, stage="control")


def _repeated(told):
    """What a replay makes of these calls: gathers in the background are gathers, and their ends are nothing."""
    kept = [call for call in told if call[1] != "finish_gather_rows"]
    return [[call[0], call[1].replace("start_gather", "all_gather"), *call[2:]] for call in kept]


def _told(ledger):
    return [[r.group, r.op, r.dtype, r.rows, r.columns, r.bytes, list(r.splits), r.stage] for r in ledger]


def record_and_repeat(groups, folder):
    """What was recorded, what its replay recorded, and what rank 0 wrote."""
    everyone = (groups.world, groups.tp, groups.ep, groups.control, groups.front)
    before = groups.ledger, [group.ledger for group in everyone]
    first, second = Ledger(1000), Ledger(1000)
    try:
        _use(groups, everyone, [first] * 5)
        _traffic(groups, source=1)
        trace.finish(groups, f"{folder}/t.msgpack", f"{folder}/timeline")
        recorded = _told(r for r in first if r.stage != "trace")
        _use(groups, everyone, [second] * 5)
        collectives.exchange_counts(torch.zeros(groups.world.size, dtype=torch.int64), groups.world, stage="written")
        second.clear()
        whole = trace.read_trace(trace.Path(folder) / "t.msgpack")
        spent = replay.replay(whole, groups, 1, 0)
        repeated = _told(r for r in second if not r.stage.startswith("bench."))
        rows = replay.table(whole, spent)
    finally:
        _use(groups, everyone, before[1])
        groups.ledger = before[0]
    return recorded, repeated, rows


def _use(groups, everyone, ledgers):
    groups.ledger = ledgers[0]
    for group, ledger in zip(everyone, ledgers, strict=True):
        group.ledger = ledger


@pytest.mark.parametrize("topology", [Topology(2, 2, 2), Topology(4, 2, 4)])
def test_what_was_recorded_is_repeated(ranks, tmp_path, topology):
    answers = ranks.run(topology, "test_trace:record_and_repeat", folder=str(tmp_path))
    for rank, (recorded, repeated, rows) in enumerate(answers):
        assert len(recorded) >= 15 and repeated == _repeated(recorded) != recorded, rank
        assert rows == answers[0][2]
        assert sum(row["calls"] for row in rows) == len(recorded)
        assert all(row["recorded_us"] > 0 and row["replayed_us"] > 0 for row in rows)
    whole = trace.read_trace(tmp_path / "t.msgpack")
    assert whole.topology == topology
    assert [_told(rank.records) for rank in whole.ranks] == [recorded for recorded, _, _ in answers]
    events = json.loads((tmp_path / "timeline" / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(topology.world))


def test_timeline_has_a_process_for_each_rank():
    ranks = [
        RankTrace(0, 100.0, (record(), record(2, start=2.0, end=2.25), record(3, stage="publish", start=3.0, end=3.5))),
        RankTrace(1, 101.0, (record(start=0.5, end=0.75),), (("attend", 0.0, 0.4),)),
    ]
    told = json.loads(json.dumps(trace.timeline(ranks)))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in told["traceEvents"] if e["name"] == "thread_name"}
    assert names == {(r, t): name for r in (0, 1) for t, name in ((0, "stages"), (1, "collectives"))}
    processes = [e["args"]["name"] for e in told["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["rank 0", "rank 1"]
    spans = {(e["pid"], e["tid"], e["name"]): (e["ts"], e["dur"]) for e in told["traceEvents"] if e["ph"] == "X"}
    # The first moment of any rank, on the clock that all share, is 0.
    assert spans[1, 0, "attend"] == (0, 400_000) and spans[0, 0, "gather"] == (0, 1_250_000)
    assert spans[0, 0, "publish"] == (2_000_000, 500_000) and spans[1, 1, "all_gather_rows"] == (500_000, 250_000)
    assert len(spans) == 5 and sum(e["ph"] == "X" for e in told["traceEvents"]) == 7
    assert trace.timeline([])["traceEvents"] == []


def test_trace_files_come_back(tmp_path):
    whole = of((record(),), (record(splits=(1, 1), op="exchange_rows", rows=2),))
    trace.write_trace(tmp_path / "new" / "t.msgpack", whole)
    assert trace.read_trace(tmp_path / "new" / "t.msgpack") == whole
    with pytest.raises(ValueError, match="cannot be written"):
        trace.write_trace(tmp_path, whole)


def _raw(tmp_path, change=None):
    trace.write_trace(tmp_path / "t.msgpack", same(record()))
    raw = msgpack.unpackb((tmp_path / "t.msgpack").read_bytes())
    if change is not None:
        change(raw)
    (tmp_path / "t.msgpack").write_bytes(msgpack.packb(raw))
    return tmp_path / "t.msgpack"


def _set(place, value):
    def change(raw):
        raw["ranks"][1]["records"][0][place] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(kind="other"), "it is not a map with kind"),
        (lambda raw: raw.update(schema=2), "it is not a map with kind"),
        (lambda raw: raw.update(world=3), "ep"),
        (lambda raw: raw.update(world=1 << 40), "world, tp and ep are"),
        (lambda raw: raw.update(tp=True), "world, tp and ep are"),
        (lambda raw: raw["ranks"].pop(), "ranks is no list of 2"),
        (lambda raw: raw["ranks"].reverse(), "not numbered in order"),
        (lambda raw: raw["ranks"][0].update(offset="late"), "its offset 'late'"),
        (lambda raw: raw["ranks"][0].pop("records"), "a rank is no map"),
        (lambda raw: raw["ranks"][0]["stages"].append(["a", 1]), "a stage is no list"),
        (lambda raw: raw["ranks"][0]["records"].append([1, 2]), "a record is no list of 11"),
        (_set(0, -1), "sequence of a record is -1"),
        (_set(1, "pp"), "group is 'pp', allowed: world"),
        (_set(2, "x" * 1000), "op of a record"),
        (_set(3, "int16"), "dtype of a record is 'int16'"),
        (_set(4, 1.5), "rows of a record is 1.5"),
        (_set(5, 1 << 50), "columns of a record"),
        (_set(7, [1, -1]), "splits of a record"),
        (_set(9, float("nan")), "start of a record is nan"),
        (_set(10, "now"), "end of a record is 'now'"),
    ],
)
def test_faulty_traces_are_refused(tmp_path, change, message):
    assert trace.read_trace(_raw(tmp_path)) == same(record())
    with pytest.raises(ValueError, match=message) as caught:
        trace.read_trace(_raw(tmp_path, change))
    assert "t.msgpack is no trace" in str(caught.value)


def test_files_that_are_no_traces(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="cannot be read"):
        trace.read_trace(tmp_path / "none")
    path = tmp_path / "t"
    for data in (b"", b"\xc1", b"\x93\x01"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="unreadable msgpack"):
            trace.read_trace(path)
    monkeypatch.setitem(trace.LIMITS, "file", 2)
    with pytest.raises(ValueError, match="has 3 bytes, allowed: at most 2"):
        path.write_bytes(b"abc")
        trace.read_trace(path)


EXCHANGE = {"op": "exchange_rows", "rows": 3}


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        (of((record(),), (record(rows=3),)), "number 1 of group world differs between ranks"),
        (of((record(),), (record(dtype="int8"),)), "differs between ranks"),
        (of((record(),), (record(op="reduce_scatter_rows"),)), "differs between ranks"),
        (of((record(),), (record(2),)), "differs between ranks"),
        (same(record(op="scan")), "is 'scan', allowed: all_gather_rows"),
        (same(record(splits=(1, 1), **EXCHANGE)), "has splits .1, 1. of 3 rows on 2 ranks"),
        (same(record(splits=(3,), **EXCHANGE)), "has splits .3. of 3 rows on 2 ranks"),
        (same(record(op="reduce_scatter_rows", rows=3)), "has 3 rows for 2 ranks"),
        (same(record(op="finish_gather_rows", rows=3)), "ends a gather with 3 rows, allowed: 0"),
        (same(record(op="start_gather_rows", rows=1 << 29)), "bytes, allowed: at most"),
        (same(record(op="reduce_scatter_rows", dtype="int8")), "adds int8"),
        (same(record(op="broadcast_bytes", dtype="uint8")), "has no source, or several"),
        (same(record(rows=1 << 30)), "bytes, allowed: at most"),
        (same(record(rows=1 << 29, splits=(1 << 28, 1 << 28), op="exchange_rows")), "bytes, allowed: at most"),
        (
            of(
                (record(1, "world"), record(1, "ep")),
                (record(1, "ep"), record(1, "world")),
            ),
            "ranks .0, 1. would wait for each other",
        ),
    ],
)
def test_replay_refuses_what_could_hang_or_fill_the_memory(whole, message):
    with pytest.raises(ValueError, match=message):
        replay.steps_of(whole)


def test_what_a_ring_lost_is_left_out():
    long = [record(number) for number in range(1, 6)]
    kept = trace.common_records(of(long[1:], long[2:]))
    assert [[(number, r.sequence) for _, number, r in mine] for mine in kept] == [[(0, 3), (1, 4), (2, 5)]] * 2
    assert [len(steps) for steps in replay.steps_of(of(long[1:], long[2:]))] == [3, 3]
    assert replay.steps_of(of((record(),), ())) == [[], []]
    # Each group has numbers of its own.
    topology = Topology(4, 2, 4)
    pair, world = [record(n, "tp") for n in (1, 2)], [record(n) for n in (1, 2)]
    whole = of(world + pair, world + pair, world + pair[1:], world + pair, topology=topology)
    assert [len(mine) for mine in trace.common_records(whole)] == [4, 4, 3, 3]


def test_salvage_writes_one_rank(tmp_path):
    from meshspark.parallel.groups import Groups

    groups = Groups.single()
    groups.ledger = Ledger(4)
    groups.ledger.add(record())
    trace.salvage(groups, None)
    trace.salvage(groups, str(tmp_path / "d"))
    events = json.loads((tmp_path / "d" / "rank-0.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"] == ["gather", "all_gather_rows"]
    trace.finish(groups, None, None)
    trace.finish(groups, str(tmp_path / "t"), None)
    assert trace.read_trace(tmp_path / "t").ranks[0].records == (record(),)


def test_replay_command(tmp_path, capfd):
    path, told = tmp_path / "t.msgpack", tmp_path / "a.json"
    trace.write_trace(path, same(record(), record(2, splits=(0, 3), stage="dispatch", **EXCHANGE)))
    assert cli.main(["bench", "replay", str(path), "--iterations", "2", "--json", str(told)]) == 0
    rows = json.loads(told.read_text())["rows"]
    assert [(row["op"], row["calls"], row["recorded_us"]) for row in rows] == [
        ("exchange_rows", 1, 500_000),
        ("all_gather_rows", 1, 500_000),
    ]
    assert "2 counted" in capfd.readouterr().out


def test_replay_refuses_another_world(tmp_path, capsys):
    path = tmp_path / "t.msgpack"
    trace.write_trace(path, same(record()))
    for given in (["--ranks", "3"], ["--ranks", "1"], ["--tp", "2", "--ep", "2"]):
        assert cli.main(["bench", "replay", str(path), *given]) == 2
        assert "the trace was recorded with --ranks 2 --tp 1 --ep 2" in capsys.readouterr().err
    trace.write_trace(path, of((record(),), (record(rows=3),)))
    assert cli.main(["bench", "replay", str(path)]) == 2
    assert "differs between ranks" in capsys.readouterr().err
