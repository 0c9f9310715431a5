"""The fixtures of transports: they pass on every number of ranks and both transports, and see every planted fault."""

import contextlib
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from meshspark.comm import agreement, context_gather, experts, logits, projection
from meshspark.launch.fixtures import transports_context
from meshspark.launch.fixtures.harness import (
    Options,
    Output,
    Row,
    Run,
    Tolerance,
    compare,
    merge,
    run_fixture,
)
from meshspark.launch.fixtures.origin import Block, OriginMap, Stamp, guarded, poison
from meshspark.launch.fixtures.record import Recorder, facts_of
from meshspark.launch.fixtures.transports import FIXTURES
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

BY_NAME = {fixture.name: fixture for fixture in FIXTURES}
KINDS = ("kv", "hca", "csa-main", "csa-aux")
TRANSPORTS = ("local", "torch")


def run_all(groups, runs):
    """Every run must pass, with something compared."""
    for name, options in runs:
        rows = run_fixture(BY_NAME[name], Run(groups, Options(**options)))
        assert all(row.verdict == "passed" for row in rows), (name, options, rows)
        assert sum(row.compared for row in rows) > 0


CONTEXT = [
    ("cp-allgather", {"payload_kind": kind, "raw_bits": raw, "local_t": 17, "epochs": 3})
    for kind in KINDS
    for raw in (False, True)
]
SMALL = [
    ("publish", {"mode": "collectives", "case": "subcapacity", "local_t": 17}),
    *(("experts", {"skew": skew, "local_t": 17}) for skew in ("uniform", "hot", "one", "empty")),
    ("logits", {"local_t": 5}),
    ("agreement", {"epochs": 5}),
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("runs", [CONTEXT, SMALL], ids=["context", "small"])
def test_every_fixture_passes(ranks, world, transport, runs):
    ranks.run(Topology(world, world, world), "test_fixtures_transports:run_all", 120, transport=transport, runs=runs)


def test_two_tensor_groups_of_one_expert_group(ranks):
    ranks.run(Topology(4, 2, 4), "test_fixtures_transports:run_all", 120, runs=CONTEXT[:3] + SMALL)


@pytest.mark.parametrize(("world", "transport"), [(1, "torch"), (2, "local"), (2, "torch")])
def test_full_bands_and_weights(ranks, world, transport):
    """Default sizes: bands of 128 rows, the whole output projection."""
    runs = [("cp-allgather", {}), ("weight-gather", {}), ("publish", {"mode": "collectives"})]
    runs += [("publish", {"mode": "sharded", "case": "subcapacity", "local_t": 5})] * (transport == "local")
    ranks.run(Topology(world, world, world), "test_fixtures_transports:run_all", 200, transport=transport, runs=runs)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_full_bands_and_weights_on_four_ranks(ranks, transport):
    runs = [(name, {}) for name in BY_NAME]
    ranks.run(Topology(4, 4, 4), "test_fixtures_transports:run_all", 280, transport=transport, runs=runs)


# Plants: what a faulty transport would have done to the result of the exchange, on the last rank only.


def swap(result, before):
    """The bands of the first two ranks change places."""
    half = result.shape[0] // 2
    return torch.cat([result[half:], result[:half]])


def stale(result, before):
    """The first half is what the epoch before brought."""
    if before is None:
        return result
    half = result.shape[0] // 2
    return torch.cat([before[:half], result[half:]])


def shift(result, before):
    """Every row of the first half stands one further."""
    half = result.shape[0] // 2
    return torch.cat([result[:half].roll(1, 0), result[half:]])


def shift_columns(result, before):
    """Every element stands one further in its row."""
    return result.reshape(result.shape[0], -1).roll(1, 1).view(result.shape)


def quieten(result, before):
    """A numeric conversion on the way: NaN payloads are lost."""
    return result.float().bfloat16() if result.dtype == torch.bfloat16 else result


def zero_tail(result, before):
    """The last row never arrives."""
    return torch.cat([result[:-1], torch.zeros_like(result[-1:])])


def unwritten(result, before):
    """The last row stays as the memory was."""
    return torch.cat([result[:-1], poison(torch.empty_like(result[-1:]))])


def narrow(result, before):
    """Partial sums travel in BF16."""
    return result.bfloat16().float() if result.dtype == torch.float32 else result


PLANTS = {f.__name__: f for f in (swap, stale, shift, shift_columns, quieten, zero_tail, unwritten, narrow)}
MODULES = {m.__name__.split(".")[-1]: m for m in (agreement, context_gather, experts, logits, projection)}


def planted(groups, name, options, where, plant, stage):
    """[output, verdict, detail] of every row, while the exchange `where` is faulty on the last rank."""
    module, function = where.split(".")
    original = getattr(MODULES[module], function)
    before = []

    def faulty(x, *arguments, **keywords):
        result = original(x, *arguments, **keywords)
        if groups.rank != groups.topology.world - 1 or not re.search(stage, keywords["stage"]):
            return result
        before.append(result)
        # Of the epoch before: the last result of this shape.
        older = [r for r in before[:-1] if r.shape == result.shape and r.dtype == result.dtype]
        return PLANTS[plant](result, older[-1] if older else None)

    with mock.patch.object(MODULES[module], function, faulty):
        rows = run_fixture(BY_NAME[name], Run(groups, Options(**options)))
    return [[row.output, row.verdict, row.detail] for row in rows]


RAW = {"payload_kind": "kv", "raw_bits": True, "local_t": 17}
GATHER = "context_gather.all_gather_rows"
CASES = [
    ("cp-allgather", RAW, GATHER, "swap", "", r"epoch 1 kv", r"came from rank 1, epoch 1, row 0, column \d, .*swapped"),
    ("cp-allgather", RAW, GATHER, "stale", "", r"epoch 2 kv", r"from rank 0, epoch 1, row 0, column \d, .*: stale \("),
    ("cp-allgather", RAW, GATHER, "stale", "", r"epoch 2 kv cache", "wanted"),
    ("cp-allgather", RAW, GATHER, "shift", "", r"epoch 1 kv", r"came from rank 0, epoch 1, row 16, .*: shifted"),
    ("cp-allgather", RAW, GATHER, "shift_columns", "", r"epoch 1 kv", r"column 1 came from .* column 0, .*shifted"),
    ("cp-allgather", RAW, GATHER, "quieten", "", r"epoch 1 kv", "lost the payload of its NaN"),
    ("cp-allgather", RAW, GATHER, "zero_tail", "", r"epoch 1 kv", "row 33, column 0 is zero"),
    ("cp-allgather", RAW, GATHER, "unwritten", "", r"epoch 1 kv", "row 33, column 0 was never written"),
    ("cp-allgather", {"local_t": 17}, GATHER, "swap", "", "epoch 1 value", "swapped"),
    ("publish", {"mode": "collectives"}, "projection.exchange_rows", "swap", "", "epoch 1 heads", "swapped"),
    ("publish", {"mode": "collectives"}, "projection.exchange_rows", "stale", "", "epoch 2 heads", "stale"),
    ("publish", {"mode": "collectives"}, "projection.exchange_rows", "narrow", "", "epoch 1 sums", "wanted"),
    ("publish", {"mode": "collectives"}, "projection.exchange_rows", "shift", "", "epoch 1 sums", "wanted"),
    ("publish", {"mode": "sharded"}, "projection.exchange_rows", "zero_tail", "", "epoch 1 projection", "wanted"),
    ("weight-gather", {}, "projection.all_gather_rows", "shift_columns", "", "epoch 1 wo_b", "shifted"),
    (
        "experts",
        {"local_t": 17},
        "experts.exchange_rows",
        "shift",
        r"^dispatch",
        "epoch 1 bfloat16 x",
        "came from rank",
    ),
    # All rows at the same experts: both epochs have the same counts.
    ("experts", {"skew": "one"}, "experts.exchange_rows", "stale", "^dispatch", "epoch 2 int8 x", "stale"),
    ("experts", {"local_t": 17}, "experts.exchange_rows", "shift", "combine", "epoch 1 int8 combined", "shifted"),
    ("experts", {"local_t": 17}, "experts.exchange_rows", "quieten", "combine", "epoch 1 int8 combined", "payload"),
    ("logits", {"local_t": 5}, "logits.all_gather_rows", "swap", "", "epoch 1 asked", "swapped"),
    ("logits", {"local_t": 5}, "logits.exchange_rows", "swap", "", "epoch 1 logits", "swapped"),
    ("logits", {"local_t": 5}, "logits.exchange_rows", "stale", "", "epoch 2 best ids", "wanted"),
    ("agreement", {}, "agreement.all_gather_rows", "swap", "", "epoch 1 records", "swapped"),
    ("agreement", {}, "agreement.all_gather_rows", "stale", "", "epoch 2 records", "stale"),
]


def _options(name, options):
    shorter = {"case": "subcapacity", "local_t": 5} if name == "publish" else {}
    return {**options, **shorter}


@pytest.mark.parametrize(("name", "options", "where", "plant", "stage", "output", "says"), CASES)
def test_a_planted_fault_is_seen_and_named(ranks, name, options, where, plant, stage, output, says):
    kwargs = {"name": name, "options": _options(name, options), "where": where, "plant": plant, "stage": stage}
    answers = ranks.run(Topology(2, 2, 2), "test_fixtures_transports:planted", 120, **kwargs)
    assert answers[0] == answers[1], "all ranks know the same verdicts"
    found = [detail for label, verdict, detail in answers[0] if label == output and verdict == "failed"]
    assert len(found) == 1, answers[0]
    assert found[0].startswith("rank 1: ") and re.search(says, found[0]), found[0]


def ties_upwards(groups):
    """Ties between shards go to the highest id."""

    def faulty(ids_SM, values_SM):
        best_M = values_SM.amax(dim=0)
        ids_M = torch.where(values_SM == best_M, ids_SM, -1).amax(dim=0)
        return torch.where(best_M.isnan(), -1, ids_M), best_M

    with mock.patch.object(logits, "_best_of_shards", faulty):
        rows = run_fixture(BY_NAME["logits"], Run(groups, Options(local_t=5)))
    return {row.output: row.verdict for row in rows}


def test_ties_that_go_upwards_are_seen(ranks):
    verdicts = ranks.run(Topology(2, 2, 2), "test_fixtures_transports:ties_upwards")[0]
    assert verdicts["epoch 1 best ids"] == "failed"
    assert verdicts["epoch 1 best values"] == "passed"


def old_message(groups):
    """The last rank reads the control message of the epoch before."""
    original, told = agreement.broadcast_bytes, []

    def faulty(*arguments, **keywords):
        told.append(original(*arguments, **keywords))
        return told[0] if groups.rank == groups.topology.world - 1 else told[-1]

    with mock.patch.object(agreement, "broadcast_bytes", faulty):
        rows = run_fixture(BY_NAME["agreement"], Run(groups))
    return {row.output: row.detail for row in rows if row.verdict == "failed"}


def test_an_old_control_message_is_seen(ranks):
    (failed,) = {tuple(found.items()) for found in ranks.run(Topology(2, 2, 2), "test_fixtures_transports:old_message")}
    assert [name for name, _ in failed] == ["epoch 2 control"]


def scribble(groups):
    """The exchange writes behind the rows that it was given, into the tail of the buffer."""
    original = transports_context.gather_context

    def faulty(tensors, *arguments, **keywords):
        result = original(tensors, *arguments, **keywords)
        for tensor in tensors.values():
            behind = tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel())
            behind.fill_(1)
        return result

    with mock.patch.object(transports_context, "gather_context", faulty):
        rows = run_fixture(BY_NAME["cp-allgather"], Run(groups, Options(local_t=17)))
    return {row.output: row.verdict for row in rows}


def test_a_write_behind_the_rows_is_seen(ranks):
    verdicts = ranks.run(Topology(2, 2, 2), "test_fixtures_transports:scribble")[0]
    assert verdicts["epoch 1 canaries"] == "failed"
    assert verdicts["epoch 1 value"] == "passed"


# The harness and the origins, without ranks.

STAMP = Stamp(3, "rows", 40, torch.bfloat16, raw=True)


def _told(got, want, epochs=2):
    blocks = [Block(rank, epoch, STAMP.block(rank, epoch, 9)) for rank in range(4) for epoch in range(1, epochs + 1)]
    row = compare(Output("x", got, want, Tolerance(bits=True), OriginMap(lambda: blocks)))
    assert row.verdict == "failed" and row.compared == got.numel()
    return row.detail


def test_origins_are_told_apart():
    want = torch.cat([STAMP.block(rank, 2, 9) for rank in range(4)])
    got = want.clone()
    got[13, 7] = STAMP.block(1, 1, 9)[4, 7]
    assert "row 13, column 7 came from rank 1, epoch 1, row 4, column 7, wanted from rank 1, epoch 2" in _told(
        got, want
    )
    assert ": stale (" in _told(got, want)
    got = want.clone()
    got[13] = STAMP.block(2, 1, 9)[8]
    assert "came from rank 2, epoch 1, row 8, column 0, wanted from rank 1" in _told(got, want)
    assert ": stale and swapped and shifted (" in _told(got, want)
    got = want.clone()
    got[13, 39] = want[13, 38]
    assert "column 39 came from rank 1, epoch 2, row 4, column 38" in _told(got, want)
    got = want.clone()
    got[13, 7] = -3.0
    assert "came from an unknown place, wanted from rank 1, epoch 2, row 4, column 7" in _told(got, want)


def test_blocks_differ_by_all_that_names_them():
    same = STAMP.block(0, 1, 9)
    assert torch.equal(same.view(torch.int16), STAMP.block(0, 1, 9).view(torch.int16))
    assert torch.equal(same.view(torch.int16), STAMP.block(0, 1, 20)[:9].view(torch.int16))
    others = [STAMP.block(1, 1, 9), STAMP.block(0, 2, 9), Stamp(4, "rows", 40, torch.bfloat16, raw=True).block(0, 1, 9)]
    others.append(Stamp(3, "other rows", 40, torch.bfloat16, raw=True).block(0, 1, 9))
    for other in others:
        assert (same.view(torch.int16) == other.view(torch.int16)).float().mean() < 0.05
    assert same[0, 0].isnan()
    finite = Stamp(3, "rows", 4000, torch.bfloat16).block(0, 1, 90)
    assert finite.isfinite().all() and finite.abs().max() < 2


def test_guards_see_every_neighbour():
    rows = torch.arange(12.0).view(3, 4)
    for index in (0, 4, 15, 16, 27):
        view, intact = guarded(rows, 5)
        assert torch.equal(view, rows) and intact()
        view._base.view(-1)[index] = 1.5
        assert not intact()


@pytest.mark.parametrize(
    ("got", "want", "tolerance", "verdict", "wrong"),
    [
        ([1.0, 2.0], [1.0, 2.0], Tolerance(), "passed", 0),
        ([1.0, 2.1], [1.0, 2.0], Tolerance(), "failed", 1),
        ([1.0, 2.1], [1.0, 2.0], Tolerance(atol=0.2), "passed", 0),
        ([1.0, 2.1], [1.0, 2.0], Tolerance(rtol=0.06), "passed", 0),
        ([1.0, 2.1], [1.0, 2.0], Tolerance(rtol=0.04), "failed", 1),
        ([1.0, 2.1], [1.0, 2.0], Tolerance(outliers=0.5), "passed", 1),
        ([1.1, 2.1], [1.0, 2.0], Tolerance(outliers=0.5), "failed", 2),
        ([float("nan")], [float("nan")], Tolerance(atol=9.0), "failed", 1),
        ([float("inf")], [float("inf")], Tolerance(), "passed", 0),
        ([float("inf")], [1.0], Tolerance(atol=9.0, rtol=9.0), "failed", 1),
        ([0.0], [-0.0], Tolerance(), "passed", 0),
        ([0.0], [-0.0], Tolerance(bits=True), "failed", 1),
        ([float("nan")], [float("nan")], Tolerance(bits=True), "passed", 0),
        ([3, 4], [3, 5], Tolerance(), "failed", 1),
        ([3, 4], [3, 5], Tolerance(atol=1.0), "passed", 0),
        ([True], [False], Tolerance(bits=True), "failed", 1),
        ([1.0], [1], Tolerance(atol=9.0), "failed", 1),
        ([1.0], [1.0, 1.0], Tolerance(atol=9.0), "failed", 1),
        ([1.0], None, Tolerance(atol=9.0), "not compared", 0),
    ],
)
def test_verdicts(got, want, tolerance, verdict, wrong):
    row = compare(Output("x", torch.tensor(got), None if want is None else torch.tensor(want), tolerance))
    assert (row.verdict, row.wrong) == (verdict, wrong)


def test_worst_error_is_the_largest():
    row = compare(Output("x", torch.tensor([1.0, 5.0]), torch.tensor([1.5, 2.0]), Tolerance(atol=9.0)))
    assert (row.worst, row.verdict) == (3.0, "passed")


def test_rows_of_ranks_are_joined():
    passed, failed = Row("x", 4, 0.5, "exact", "passed"), Row("x", 4, 1.5, "exact", "failed", "row 2", 3)
    (row,) = merge([[passed], [failed]])
    assert row == Row("x", 8, 1.5, "exact", "failed", "rank 1: row 2", 3)
    (row,) = merge([[passed], []])
    assert row.verdict == "failed" and "missing on ranks [1]" in row.detail
    assert merge([[passed], [Row("x", 0, 0.0, "exact", "not compared")]])[0].verdict == "not compared"


# Recordings.


def record(groups, folder, flags, name="cp-allgather", plant=None):
    """Verdicts by output of one recorded or replayed run."""
    fixture, options = BY_NAME[name], Options(local_t=3, seed=flags.pop("seed", 0))
    facts = facts_of(name, options, groups.topology, groups.rank, fixture.flags)
    recorder = Recorder(facts, **{flag: Path(folder) for flag in flags})
    with contextlib.ExitStack() as stack:
        if plant:
            original = context_gather.all_gather_rows
            stack.enter_context(
                mock.patch.object(
                    context_gather, "all_gather_rows", lambda *a, **k: PLANTS[plant](original(*a, **k), None)
                )
            )
        rows = run_fixture(fixture, Run(groups, options, recorder))
    return {row.output: [row.verdict, row.compared] for row in rows}


def test_what_was_recorded_is_replayed(ranks, tmp_path):
    topology, target = Topology(2, 2, 2), "test_fixtures_transports:record"
    saved = ranks.run(topology, target, folder=str(tmp_path), flags={"save": True})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rank0.msgpack",
        "rank0.safetensors",
        "rank1.msgpack",
        "rank1.safetensors",
    ]
    assert ranks.run(topology, target, folder=str(tmp_path), flags={"golden": True}) == saved
    faulty = ranks.run(topology, target, folder=str(tmp_path), flags={"golden": True}, plant="shift")[0]
    assert faulty["epoch 1 value"][0] == "failed"


def test_a_recording_of_another_run_is_refused(tmp_path):
    groups = Groups.single()
    record(groups, tmp_path, {"save": True})
    with pytest.raises(ValueError, match=r"options is .*'seed': 0.*this run has .*'seed': 5"):
        record(groups, tmp_path, {"golden": True, "seed": 5})
    with pytest.raises(ValueError, match="fixture is 'cp-allgather', this run has 'logits'"):
        record(groups, tmp_path, {"golden": True}, name="logits")
    data = (tmp_path / "rank0.safetensors").read_bytes()
    (tmp_path / "rank0.safetensors").write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"rank0\.safetensors"):
        record(groups, tmp_path, {"golden": True})
    (tmp_path / "rank0.msgpack").write_bytes(b"\x91")
    with pytest.raises(ValueError, match="is not msgpack"):
        record(groups, tmp_path, {"golden": True})
    (tmp_path / "rank0.msgpack").unlink()
    with pytest.raises(ValueError, match=r"holds no rank0\.msgpack"):
        record(groups, tmp_path, {"golden": True})


def test_recorded_outputs_are_goldens_only_for_replayed_inputs(tmp_path):
    saved = Recorder({"rank": 0}, save=tmp_path)
    x = torch.arange(3.0)
    saved.inputs("x", x)
    saved.output(Output("y", x + 1, None))
    saved.finish()
    replay = Recorder({"rank": 0}, golden=tmp_path)
    assert replay.output(Output("y", x + 2, None)).want is None
    assert torch.equal(replay.inputs("x", torch.zeros(3)), x)
    want = replay.output(Output("y", x + 2, None)).want
    assert torch.equal(want, x + 1)
    with pytest.raises(ValueError, match="holds no inputs/z"):
        replay.inputs("z", x)
    with pytest.raises(ValueError, match=r"inputs/x is torch.float32 \[3\], this run takes torch.float32 \[4\]"):
        replay.inputs("x", torch.zeros(4))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("cp-allgather", {"local_t": 0}, "--local-t is 0, allowed: 1 to 512"),
        ("cp-allgather", {"epochs": 1}, "--epochs is 1, allowed: 2 to"),
        ("cp-allgather", {"payload_kind": "swa"}, "--payload-kind is 'swa', allowed: csa-main"),
        ("publish", {"local_t": 17}, "with --case max"),
        ("publish", {"local_t": 128, "case": "subcapacity"}, "allowed: 1 to 127"),
        ("experts", {"skew": "cold"}, "--skew is 'cold', allowed: uniform"),
        ("logits", {"local_t": 129}, "allowed: 1 to 128"),
        ("weight-gather", {"epochs": 0}, "--epochs is 0"),
    ],
)
def test_options_out_of_range(name, options, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        run_fixture(BY_NAME[name], Run(Groups.single(), Options(**options)))
