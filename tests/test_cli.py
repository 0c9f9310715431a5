"""The verbs: a frozen list of flags, help without torch, checkpoint and doctor."""

import argparse
import json
import subprocess
import sys
from importlib import metadata

import pytest

from meshspark.launch import bench, checkpoint, cli, doctor, generate

COMMON = ["--backend", "--device", "--ep", "--json", "--numerics", "--ranks", "--seed", "--timeout", "--tp"]
GENERATE = ["--chat", "--checkpoint", "--max-new-tokens", "--prompt", "--prompt-file", "--stop", "--temperature"]


def _flags(parser):
    """Long options, those of sub-verbs behind their names."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [f"{name} {flag}" for name, sub in action.choices.items() for flag in _flags(sub)]
        else:
            found += [flag for flag in action.option_strings if flag.startswith("--") and flag != "--help"]
    return sorted(found)


def test_flags_are_frozen():
    assert _flags(generate.parser()) == sorted([*COMMON, *GENERATE, "--top-p"])
    assert _flags(doctor.parser()) == COMMON
    assert _flags(checkpoint.parser()) == [
        "inspect --json",
        "inspect --preset",
        "synthesize --json",
        "synthesize --preset",
        "synthesize --seed",
    ]


def test_defaults():
    args = generate.parser().parse_args([])
    assert (args.max_new_tokens, args.temperature, args.top_p, args.numerics) == (128, 0, 1, "float32")
    assert args.checkpoint == generate.SAMPLE and args.chat is None
    assert generate.parser().parse_args(["--chat", "--prompt", "x"]).chat == "chat"


def test_verbs_are_frozen():
    assert list(cli.VERBS) == ["generate", "doctor", "checkpoint", "make-sample", "bench"]
    assert list(bench.BENCHMARKS) == ["decode"]


def test_help_imports_no_torch():
    code = (
        "import sys; from meshspark.launch import cli; code = cli.main(['--help']); "
        "sys.exit(code or 3 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert all(verb in done.stdout for verb in cli.VERBS)


def test_the_console_script_is_the_table():
    scripts = metadata.entry_points(group="console_scripts", name="meshspark")
    assert [script.value for script in scripts] == ["meshspark.launch.cli:main"]


@pytest.mark.parametrize("argv", [[], ["write"], ["bench", "nothing"], ["bench"], ["doctor", "--what"], ["checkpoint"]])
def test_wrong_command_lines_end_with_2(argv, capsys):
    assert cli.main(argv) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    "preset, tensors, num_bytes", [("flash", 69187, 159609485896), ("flash-dspark", 72317, 166878536440)]
)
def test_inspect_a_preset(preset, tensors, num_bytes, capsys):
    assert cli.main(["checkpoint", "inspect", "--preset", preset, "--json"]) == 0
    out = capsys.readouterr()
    result = json.loads(out.out)
    assert result["schema"] == 1
    found = result["inventories"][f"preset {preset}"]
    assert (found["tensors"], found["bytes"]) == (tensors, num_bytes)
    assert f"{num_bytes:,}" in out.err


def test_synthesize_and_inspect(tmp_path, capsys):
    folder = tmp_path / "new" / "tiny"
    assert cli.main(["checkpoint", "synthesize", str(folder), "--seed", "3"]) == 0
    target = tmp_path / "out.json"
    assert cli.main(["checkpoint", "inspect", str(folder), "--json", str(target)]) == 0
    assert "all" in capsys.readouterr().out
    found = json.loads(target.read_text())["inventories"][str(folder)]
    assert found["tensors"] > 100 and found["shards"] >= 1
    (folder / "config.json").write_text("{")
    assert cli.main(["checkpoint", "inspect", str(folder)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_inspect_needs_something(capsys):
    assert cli.main(["checkpoint", "inspect"]) == 2
    assert "DIR" in capsys.readouterr().err


def _doctor(monkeypatch, exchange_code):
    monkeypatch.setattr("meshspark.models.selfcheck.row_independence", lambda: {"holds": True, "details": []})
    ended = subprocess.CompletedProcess([], exchange_code, "", "rank 1 died")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: ended)


def test_doctor_says_all_well(monkeypatch, capsys):
    _doctor(monkeypatch, 0)
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert cli.main(["doctor", "--json", "--ranks", "2"]) == 0
    out = capsys.readouterr()
    result = json.loads(out.out)
    assert result["schema"] == 1 and result["ok"] and result["checks"]["row independence"] == "holds"
    assert result["versions"]["torch"] and result["backends"]["gloo"] == "available"
    assert result["devices"]["local rank 1"] == "cpu"
    assert result["environment"]["NCCL_DEBUG"] == "INFO" and "hidden" not in out.out + out.err


def test_doctor_ends_with_1_if_something_is_broken(monkeypatch, capsys):
    _doctor(monkeypatch, 1)
    assert cli.main(["doctor"]) == 1
    assert "broken: two ranks over gloo failed: rank 1 died" in capsys.readouterr().out


def test_doctor_explains_a_device_extension_that_does_not_load():
    problem = RuntimeError("Failed to load the backend extension: torch_npu.")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in doctor.explain_import(problem)
    assert "AUTOLOAD" not in doctor.explain_import(ImportError("no such library"))


@pytest.mark.slow
def test_doctor_for_real():
    done = subprocess.run(
        [sys.executable, "-m", "meshspark.launch.doctor", "--json"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "bit-equal" in json.loads(done.stdout)["checks"]["two ranks"]
