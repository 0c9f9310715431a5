"""The common flags: what they resolve to, and what is refused how."""

import argparse
import os
from pathlib import Path

import pytest

from meshspark.launch.flags import (
    FlagError,
    FlagParser,
    add_common,
    check_range,
    parse_device,
    resolve,
    resolve_topology,
    without_ranks,
)
from meshspark.launch.output import write_json
from meshspark.parallel.topology import Topology


def _resolve(text, world_size=None, local_ranks=None, rank=None, leave_out=()):
    parser = FlagParser(prog="test", allow_abbrev=False)
    add_common(parser, leave_out)
    return resolve(parser.parse_args(text.split()), world_size, local_ranks, rank)


@pytest.mark.parametrize(
    "text, world_size, expected",
    [
        ("", None, (1, 1, 1)),
        ("--tp 2", None, (2, 2, 2)),
        ("--ep 4", None, (4, 1, 4)),
        ("--tp 2 --ep 4", None, (4, 2, 4)),
        ("--ranks 8 --tp 2 --ep 4", None, (8, 2, 4)),
        ("--ranks 4", None, (4, 1, 4)),
        ("", 8, (8, 1, 8)),
        ("--tp 4 --ep 4", 8, (8, 4, 4)),
        ("--ranks=6 --tp=3", None, (6, 3, 6)),
    ],
)
def test_topology(text, world_size, expected):
    assert _resolve(text, world_size).topology == Topology(*expected)


@pytest.mark.parametrize(
    "text, world_size, message",
    [
        ("--ranks 4 --tp 3", None, r"world % tp must be 0, but world is 4 and tp is 3; .*\[1, 2, 4\]"),
        ("--tp 2 --ep 3", None, r"world % tp must be 0, but world is 3 and tp is 2; .*\[1, 3\]"),
        ("--ranks 4 --ep 8", None, r"world % ep must be 0, but world is 4 and ep is 8; .*\[1, 2, 4\]"),
        ("--ranks 4 --ep 3", None, r"world % ep must be 0, but world is 4 and ep is 3"),
        ("--ranks 4 --tp 4 --ep 2", None, r"ep % tp must be 0, but ep is 2 and tp is 4; .*\[4\]"),
        ("--ranks 0", None, "--ranks is 0, allowed"),
        ("--tp -1", None, "--tp is -1, allowed"),
        ("--ranks 2", 2, r"--ranks is 2, but torchrun has started 2 ranks already \(WORLD_SIZE\)"),
        ("--numerics float8", None, r"invalid choice: 'float8' \(choose from '?float64'?, .*'?w8a8'?\)"),
        ("--timeout 0", None, "--timeout is 0.0, allowed: seconds above 0"),
        ("--timeout nan", None, "--timeout is nan"),
        ("--seed -1", None, "--seed is -1, allowed"),
        ("--backend nccl", None, "--backend is nccl, but --device cpu moves its rows with gloo"),
        ("--rank 2", None, "unrecognized arguments: --rank"),
        ("--ranks two", None, "invalid int value: 'two'"),
        ("--device cuda:0 --ranks 2", None, "lists 1 ids, but local rank 1 needs id number 2"),
        ("--device npu:1,0,1", None, "gives id 1 to local rank 0 and again to local rank 2"),
    ],
)
def test_refusals_name_values_and_what_is_legal(text, world_size, message):
    with pytest.raises(ValueError, match=message):
        _resolve(text, world_size)


@pytest.mark.parametrize("text", ["gpu", "cuda:", "cuda:a", "cuda:0,", "cuda:-1", "cpu:0", "", "cuda:0;1"])
def test_devices_that_do_not_exist(text):
    with pytest.raises(ValueError, match="--device is"):
        parse_device(text)


def test_local_ranks_pick_their_devices():
    assert [parse_device("cuda:3,1").of(i) for i in (0, 1)] == ["cuda:3", "cuda:1"]
    assert [parse_device("npu").of(i) for i in (0, 5)] == ["npu:0", "npu:5"]
    assert parse_device("cpu").of(7) == "cpu"
    # Over two machines of two ranks each, two ids are enough.
    assert _resolve("--device cuda:0,1", world_size=4, local_ranks=2).backend == "nccl"


def test_the_rest():
    flags = _resolve("--json --numerics bfloat16 --seed 7 --timeout 5")
    assert (flags.json, flags.numerics, flags.seed, flags.timeout) == ("-", "bfloat16", 7, 5.0)
    assert _resolve("--json out.json").json == "out.json"
    assert flags.facts()["seed"] == 7 and "json" not in flags.facts()
    assert flags.facts() != _resolve("--tp 2").facts()


def test_facts_are_plain_values():
    assert all(isinstance(value, str | int | float) for value in _resolve("").facts().values())
    assert {"world", "tp", "ep", "numerics"} <= set(_resolve("").facts())


def test_ranks_leave_the_command_line():
    assert without_ranks(["--ranks", "2", "--tp", "2"]) == ["--tp", "2"]
    assert without_ranks(["--prompt=--ranks", "--ranks=2", "x"]) == ["--prompt=--ranks", "x"]


def test_resolution_needs_no_parser():
    assert resolve_topology(None, 2, None) == Topology(2, 2, 2)
    assert isinstance(FlagParser(), argparse.ArgumentParser)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing/out.json", "cannot be made, for the folder .*missing does not exist"),
        ("folder", "is a folder"),
        ("file/out.json", "cannot be made, for the folder .*file does not exist|cannot be looked at"),
    ],
)
def test_a_place_where_json_cannot_go(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match=f"--json is .*, which ({message}); allowed: a file"):
        _resolve(f"--json {tmp_path / name}")


@pytest.mark.parametrize("exists", [True, False])
def test_json_without_permission(tmp_path, monkeypatch, exists):
    # By hand: for root every file may be written.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) not in (tmp_path, tmp_path / "out.json"))
    if exists:
        (tmp_path / "out.json").write_text("kept")
    with pytest.raises(ValueError, match="may not be written; allowed"):
        _resolve(f"--json {tmp_path / 'out.json'}")


def test_looking_at_json_changes_nothing(tmp_path):
    (tmp_path / "old.json").write_text("kept")
    assert _resolve(f"--json {tmp_path / 'old.json'}").json
    assert _resolve(f"--json {tmp_path / 'new.json'}").json
    assert (tmp_path / "old.json").read_text() == "kept" and not (tmp_path / "new.json").exists()


def test_only_rank_0_looks_at_json(tmp_path):
    text = f"--json {tmp_path / 'missing' / 'out.json'}"
    assert _resolve(text, 2, 1, rank=1).json
    with pytest.raises(ValueError, match="--json"):
        _resolve(text, 2, 1, rank=0)


def test_json_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"--json is .*could not be written"):
        write_json(str(tmp_path / "missing" / "out.json"), {})


def test_flags_that_would_have_no_effect_can_be_left_out():
    assert _resolve("--seed 3", leave_out=("json", "numerics")).numerics == "float32"
    for given in ("--json", "--numerics float64"):
        with pytest.raises(FlagError, match=f"unrecognized arguments: {given}"):
            _resolve(given, leave_out=("json", "numerics"))


@pytest.mark.parametrize("value", [0, 4, float("nan"), float("inf")])
def test_ranges(value):
    check_range("--x", 3, 1, 3)
    with pytest.raises(FlagError, match=f"--x is {value}, allowed: 1 to 3"):
        check_range("--x", value, 1, 3)
