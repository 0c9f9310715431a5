"""What fixtures stand on: origins, guards, verdicts, recordings."""

import contextlib
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from test_fixtures_transports import BY_NAME, PLANTS

from meshspark.comm import context_gather
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
from meshspark.launch.fixtures.origin import Block, OriginMap, Stamp, guarded
from meshspark.launch.fixtures.record import Recorder, facts_of
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

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
        ([], [], Tolerance(), "not compared", 0),
        ([], [], Tolerance(bits=True), "not compared", 0),
        ([], None, Tolerance(), "not compared", 0),
        ([], [1.0], Tolerance(), "failed", 0),
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


def test_a_rank_without_rows_neither_passes_nor_spoils_what_others_compared():
    some, none = torch.ones(3), torch.ones(0)
    full, empty = compare(Output("x", some, some)), compare(Output("x", none, none))
    blind, failed = compare(Output("x", some, None)), compare(Output("x", some, some + 1))
    assert (empty.verdict, empty.compared, empty.detail) == ("not compared", 0, "no elements")
    assert [(row.verdict, row.compared, row.detail) for row in merge([[full], [empty]])] == [("passed", 3, "")]
    assert [(row.verdict, row.detail) for row in merge([[empty], [empty]])] == [("not compared", "no elements")]
    assert [(row.verdict, row.detail) for row in merge([[empty], [blind], [full]])] == [("not compared", "no golden")]
    assert merge([[empty], [failed]])[0].verdict == "failed"
    assert merge([[full], []])[0].verdict == "failed"


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
    topology, target = Topology(2, 2, 2), "test_fixture_harness:record"
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
