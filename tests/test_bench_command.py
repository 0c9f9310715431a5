"""The command line of the benchmarks of collectives: flags, files, comparison, plot."""

import json
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest

from meshspark.benchmarks import collectives, exchanges, report
from meshspark.benchmarks.driver import Row
from meshspark.launch import cli


def test_sizes():
    assert collectives.parse_sizes("1K:256M:4x") == tuple(1024 * 4**i for i in range(10))
    assert collectives.parse_sizes("0,1,3M") == (0, 1, 3 << 20)
    assert collectives.parse_sizes("5:20:2x") == (5, 10, 20)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--sizes 0:4:2x", "a first size from 1"),
        ("--sizes 8:4:2x", "not above the last"),
        ("--sizes 1:4:1x", "N from 2"),
        ("--sizes 1:4", "FIRST:LAST:Nx"),
        ("--sizes 1Q", "numbers with K, M or G"),
        ("--sizes -1", "--sizes"),
        ("--sizes 1:64G:2x,1", "FIRST:LAST:Nx"),
        ("--sizes 1:999G:4x", "at most"),
        ("--ops all-gather,scan", "--ops has 'scan', allowed: all-gather"),
        ("--preset decode --ops control", "leave --ops and --sizes out"),
        ("--dtype int8", "add floating point"),
        ("--dtype int16", "--dtype"),
        ("--iterations 0", "--iterations is 0, allowed: 1"),
        ("--warm-up -1", "--warm-up is -1, allowed: 0"),
        ("--samples /nowhere/x", "--samples is '/nowhere/x'"),
        ("--plot /nowhere/x.png", "--plot is '/nowhere/x.png'"),
        ("--preset decode --ranks 3 --tp 3", "o_groups % tp must be 0"),
    ],
)
def test_wrong_flags(given, message, capsys):
    assert cli.main(["bench", "collectives", *given.split()]) == 2
    assert message in capsys.readouterr().err


def test_plot_says_what_it_misses(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main(["bench", "collectives", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'meshspark[plot]'" in capsys.readouterr().err


def test_command_writes_all_that_it_promises(capfd, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MESHSPARK_SECRET", "hush")
    paths = [tmp_path / name for name in ("a.json", "a.msgpack", "a.png")]
    files = [part for flag, path in zip(("--json", "--samples", "--plot"), paths, strict=True) for part in (flag, path)]
    given = ["--ranks", "2", "--ops", "all-gather,control,all-reduce", "--sizes", "1K,16K", "--iterations", "3"]
    assert cli.main(["bench", "collectives", *given, *map(str, files)]) == 0
    shown = capfd.readouterr().out
    assert "3 warm-up iterations, 3 counted" in shown and "#wrong" in shown
    told = json.loads(paths[0].read_text())
    assert (told["schema"], told["iterations"], told["warm_up"]) == (1, 3, 3)
    assert "hush" not in paths[0].read_text() and told["environment"]["WORLD_SIZE"] == "2"
    times, speeds = ["p50_us", "p99_us", "min_us"], ["algbw_gbs", "busbw_gbs"]
    required = ["op", "bytes", "count", "dtype", "ranks", "transport", *times, *speeds, "wrong", "limit"]
    assert list(told["rows"][0])[: len(required)] == required
    assert [row["bytes"] for row in told["rows"] if row["transport"] == "c10d"] == [1024, 16384, 1024, 16384]
    assert all(row["wrong"] == 0 and row["limit"] > 0 for row in told["rows"])
    samples = msgpack.unpackb(paths[1].read_bytes())["exchanges"]
    assert len(samples) == 5 and np.array(samples[0]["seconds"]["copy"]).shape == (2, 3)
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    assert cli.main(["bench", "compare", str(paths[0]), str(paths[0]), "--tolerance", "0"]) == 0
    assert "0 of" in capfd.readouterr().out


def _run_file(path, **changes):
    row = Row("all-gather", 1024, 512, "bfloat16", 2, "torch", 100.0, 110.0, 90.0, 1.0, 0.5, 0, 0.5, None, None)
    rows = [asdict(replace(row, **one)) for one in changes.get("rows", [{}])]
    path.write_text(json.dumps({"schema": 1, "benchmark": "collectives", "rows": rows}))
    return str(path)


@pytest.mark.parametrize(
    ("rows", "given", "code", "verdicts"),
    [
        ([{"p50_us": 109.0}], [], 0, ["ok"]),
        ([{"p50_us": 111.0}], [], 1, ["slower"]),
        ([{"p50_us": 111.0}], ["--tolerance", "0.2"], 0, ["ok"]),
        ([{"p50_us": 50.0}], [], 0, ["faster"]),
        ([{"bytes": 2048}], [], 1, ["missing", "new"]),
        ([{"transport": "local"}, {}], [], 0, ["ok", "new"]),
        ([], [], 1, ["missing"]),
        ([{"p50_us": 900.0, "limit": 0.49}], ["--by", "limit"], 0, ["ok"]),
        ([{"limit": 0.4}], ["--by", "limit"], 1, ["slower"]),
        ([{"limit": None}], ["--by", "limit"], 1, ["missing"]),
    ],
)
def test_compare(tmp_path, capsys, rows, given, code, verdicts):
    old, new = _run_file(tmp_path / "a.json"), _run_file(tmp_path / "b.json", rows=rows)
    assert cli.main(["bench", "compare", old, new, *given, "--json"]) == code
    found = json.loads(capsys.readouterr().out)["rows"]
    assert [one["verdict"] for one in found] == verdicts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "with schema 1"),
        ('{"schema": 1, "benchmark": "collectives", "rows": [{"op": 1}]}', "rows is no list"),
        ("two", "is there twice"),
        ("text", "is no number"),
        ("nan", "is no number"),
    ],
)
def test_compare_refuses(tmp_path, capsys, text, message):
    path, good = tmp_path / "b.json", _run_file(tmp_path / "a.json")
    known = {"two": [{}, {}], "text": [{"p50_us": "fast"}], "nan": [{"p50_us": float("nan")}]}
    if text in known:
        _run_file(path, rows=known[text])
    elif text is not None:
        path.write_text(text)
    assert cli.main(["bench", "compare", good, str(path)]) == 2
    assert message in capsys.readouterr().err


def test_plot_has_a_panel_for_each_op(tmp_path):
    pytest.importorskip("matplotlib")
    row = Row("all-gather", 1024, 512, "bfloat16", 2, "torch", 100.0, 110.0, 90.0, 1.0, 0.5, 0, 0.5)
    rows = [asdict(one) for one in (row, replace(row, bytes=0, limit=None), replace(row, op="control", limit=None))]
    report.plot(rows, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    report.plot([], tmp_path / "b.png")
    with pytest.raises(ValueError, match=r"--plot is .*could not be written"):
        report.plot(rows, tmp_path / "none" / "a.png")


def test_mpi_joins_only_where_it_started_these_ranks(monkeypatch):
    group = SimpleNamespace(device="cpu", size=2, rank=1)
    found = []
    monkeypatch.setattr(exchanges.importlib.util, "find_spec", lambda name: found.append(name))
    assert exchanges.mpi_world(group) is None and found == ["mpi4py"]
    monkeypatch.setattr(exchanges.importlib.util, "find_spec", lambda name: object())
    for size, rank, joins in ((1, 0, False), (2, 0, False), (2, 1, True)):
        world = SimpleNamespace(size=size, rank=rank)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(COMM_WORLD=world))
        assert (exchanges.mpi_world(group) is world) == joins
    assert exchanges.mpi_world(SimpleNamespace(device="cuda:0", size=2, rank=1)) is None
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    assert exchanges.mpi_world(group) is None
