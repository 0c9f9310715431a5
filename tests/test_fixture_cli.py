"""The verb `fixture`: its flags, its list, and whole runs through the command line and torchrun."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshspark.launch import cli, fixture
from meshspark.launch.fixtures.harness import Fixture, Output, Row
from meshspark.launch.worker import unranked_environment
from meshspark.parallel.groups import Groups

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MODULE = "meshspark.launch.fixture"


def _run(command):
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=unranked_environment())


def test_a_transport_through_the_command_line(tmp_path):
    """Two ranks that the verb starts: JSON on standard output, the table on standard error, a recording."""
    command = [sys.executable, "-m", "meshspark.launch.cli", "fixture", "run", "cp-allgather", "--tp", "2"]
    command += ["--local-t", "3", "--raw-bits", "--payload-kind", "csa-aux", "--seed", "5", "--json"]
    done = _run([*command, "--save-data", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["schema"], told["fixture"], told["kind"], told["verdict"]) == (
        1,
        "cp-allgather",
        "transport",
        "passed",
    )
    assert told["topology"] == {"world": 2, "tp": 2, "ep": 2}
    assert told["options"] == {"seed": 5, "payload_kind": "csa-aux", "raw_bits": True, "local_t": 3, "epochs": 2}
    outputs = {row["output"]: row for row in told["outputs"]}
    assert outputs["epoch 2 kv"]["compared"] == 2 * 6 * 512 and outputs["epoch 2 kv"]["verdict"] == "passed"
    assert "epoch 1 index_value" in done.stderr and "cp-allgather: passed" in done.stderr
    assert len(list(tmp_path.iterdir())) == 4


def test_a_transport_under_torchrun(tmp_path):
    target = tmp_path / "out.json"
    done = _run([*TORCHRUN, "-m", MODULE, "run", "experts", "--local-t", "9", "--skew", "hot", "--json", str(target)])
    assert done.returncode == 0, done.stderr
    told = json.loads(target.read_text())
    assert told["verdict"] == "passed" and told["topology"]["ep"] == 2
    assert done.stdout.count("experts: passed") == 1, "rank 0 alone speaks"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "nothing"], "fixture is 'nothing', allowed: cp-allgather, publish"),
        (["run", "agreement", "--skew", "hot"], "--skew has no effect on agreement, which takes --epochs"),
        (["run", "agreement", "--numerics", "float32"], "--numerics has no effect on agreement"),
        (["run", "cp-allgather", "--preset", "flash"], "--preset has no effect on cp-allgather"),
        (["run", "cp-allgather", "--local-t", "0"], "--local-t is 0, allowed: 1 to 512 rows"),
        (["run", "cp-allgather", "--payload-kind", "q"], "invalid choice: 'q'"),
        (["run", "cp-allgather", "--save-data", "x", "--golden-data", "./x"], "are both x, allowed: two folders"),
        (["run", "agreement", "--chunk", "1,-2"], "allowed: whole numbers from 0"),
        ([], "list|run"),
    ],
)
def test_wrong_command_lines(argv, says, capsys):
    assert fixture.main(argv) == 2
    assert says in capsys.readouterr().err


def test_list(tmp_path, capsys):
    target = tmp_path / "list.json"
    assert cli.main(["fixture", "list", "--json", str(target)]) == 0
    shown, listed = capsys.readouterr().out, json.loads(target.read_text())["fixtures"]
    names = [entry["name"] for entry in listed]
    assert names[:6] == ["cp-allgather", "publish", "weight-gather", "experts", "logits", "agreement"]
    assert all(name in shown for name in names)
    assert all(entry["summary"] and entry["kind"] in ("transport", "stage", "composition") for entry in listed)


def test_one_rank_says_that_nothing_moved(capsys):
    assert fixture.main(["run", "agreement", "--epochs", "3"]) == 0
    told = capsys.readouterr().out
    assert "the world group has one rank" in told and "agreement: passed" in told
    assert "epoch 3 records" in told


def test_a_replay_is_compared_with_what_was_recorded(tmp_path, capsys):
    assert fixture.main(["run", "agreement", "--save-data", str(tmp_path)]) == 0
    assert fixture.main(["run", "agreement", "--golden-data", str(tmp_path)]) == 0
    assert fixture.main(["run", "agreement", "--golden-data", str(tmp_path), "--seed", "1"]) == 1
    assert "options is" in capsys.readouterr().err


def test_a_failure_on_another_rank_through_the_command_line(tmp_path):
    """One word of rank 1's recorded golden is wrong: exit code 1, and rank 0 shows where."""
    command = [sys.executable, "-m", MODULE, "run", "agreement", "--ranks", "2"]
    done = _run([*command, "--save-data", str(tmp_path)])
    assert done.returncode == 0, done.stderr
    recorded = load_file(tmp_path / "rank1.safetensors")
    recorded["goldens/epoch 2 records"][1, 7] += 1
    save_file(recorded, tmp_path / "rank1.safetensors")
    done = _run([*command, "--golden-data", str(tmp_path)])
    assert done.returncode == 1
    assert re.search(r"epoch 2 records: rank 1: 1 wrong; row 1, column 7 ", done.stdout), done.stdout
    assert "agreement: failed" in done.stdout
    assert "fixture agreement failed: 1 of 4 outputs, epoch 2 records first" in done.stderr


def _job(*outputs):
    fake = Fixture("fake", "stage", "gives what it is told to", lambda run: outputs)
    return fixture._job(fake, fixture.Options(), None, None, "-")


def test_a_failure_ends_with_its_place(capsys):
    good = Output("good", torch.ones(2), torch.ones(2))
    bad = Output("bad", torch.tensor([[1.0, float("nan")]]), torch.ones(1, 2))
    with pytest.raises(fixture.FixtureFailed, match="fixture fake failed: 1 of 2 outputs, bad first"):
        _job(good, bad)(Groups.single())
    told = capsys.readouterr()
    assert "bad: 1 wrong; element [0, 1] is nan, wanted 1.0" in told.err and "fake: failed" in told.err
    read = json.loads(told.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [row["verdict"] for row in read["outputs"]] == ["passed", "failed"]
    assert read["verdict"] == "failed" and read["outputs"][1]["worst"] is None


def test_without_a_golden_nothing_passes(capsys):
    _job(Output("free", torch.ones(2), None), Output("good", torch.ones(2), torch.ones(2)))(Groups.single())
    told = capsys.readouterr()
    assert json.loads(told.out)["verdict"] == "not compared" and "fake: not compared" in told.err


def test_the_worst_verdict_is_the_fixtures():
    rows = [Row("a", 1, 0.0, "exact", verdict) for verdict in ("passed", "not compared", "failed")]
    assert [fixture.verdict_of(rows[:n]) for n in (1, 2, 3)] == ["passed", "not compared", "failed"]
    empty = Row("d", 0, 0.0, "exact", "not compared", "no elements")
    assert [fixture.verdict_of([empty, *more]) for more in ([], rows[:1], rows[:2])] == [
        "not compared",
        "passed",
        "not compared",
    ]


def test_the_docs_name_every_transport_and_flag():
    text = (Path(__file__).parent.parent / "docs" / "fixtures.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z0-9-]+)`", text)) | set(re.findall(r"`--([a-z-]+)", text))
    for name, one in fixture.registry().items():
        if one.kind == "transport":
            assert name in named
    assert set(fixture.OPTIONS) | {"save-data", "golden-data"} <= named
