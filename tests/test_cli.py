"""The verbs: a frozen list of flags, help without torch, checkpoint and doctor."""

import argparse
import json
import subprocess
import sys
from importlib import metadata

import pytest

from meshspark.benchmarks import decode, drafters, prefill
from meshspark.launch import (
    bench,
    checkpoint,
    cli,
    continuations,
    convert,
    doctor,
    exchange,
    features,
    generate,
    make_sample,
    training_flags,
)
from meshspark.launch.flags import ALONE

COMMON = sorted(
    [
        "--backend",
        "--check",
        "--control",
        "--device",
        "--ep",
        "--json",
        "--numerics",
        "--ranks",
        "--record",
        "--seed",
        "--timeout",
        "--tp",
        "--trace",
        "--transport",
    ]
)
GENERATE = ["--chat", "--checkpoint", "--max-new-tokens", "--prompt", "--prompt-file", "--stop"]
SAMPLING = ["--min-p", "--temperature", "--top-k", "--top-p"]
DRAFTING = ["--compare", "--gamma", "--ignore-eos", "--point-drafts", "--speculative", "--verify"]
ENGINE = ["--batch", "--block-size", "--cache-gib", "--prefill-rows", "--prefix-points", "--projection"]
TRAINING = ["--config", "--checkpoint", "--data", "--features", "--out", "--resume", "--init"]
TRAINING += ["--target-ranks", "--depth", "--placement", "--fsdp", "--draft-ep", "--attention", "--recompute"]
TRAINING += ["--steps", "--epochs", "--batch", "--accumulate", "--anchors", "--anchor-rule", "--decay-gamma", "--ce"]
TRAINING += ["--l1", "--confidence", "--chunk-blocks", "--lr", "--warmup", "--schedule", "--weight-decay", "--clip"]
TRAINING += ["--save-every", "--keep", "--log-every"]


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
    point = ["--context", "--deployment"]
    assert _flags(generate.parser()) == sorted([*COMMON, *GENERATE, *SAMPLING, *ENGINE, *DRAFTING, *point])
    assert _flags(doctor.parser()) == [f for f in COMMON if f not in ("--control", "--record", "--trace")]
    assert _flags(exchange.parser()) == [flag for flag in COMMON if flag not in ("--json", "--numerics")]
    own = ["--docs", "--log-every", "--minutes", "--output", "--threads", "--work"]
    alone = [flag for flag in COMMON if flag.removeprefix("--") not in ALONE]
    assert _flags(make_sample.parser()) == sorted([*alone, *own])
    both = ["--case", "--json", "--layers", "--numerics", "--plot", "--rounds", "--seed", "--stages", "--threads"]
    own = ["--batch", "--checkpoint", "--context", "--new-tokens", "--prompt-tokens", "--steps", "--verify"]
    assert _flags(decode.parser()) == sorted([*both, *own])
    assert _flags(prefill.parser()) == sorted([*both, "--tokens"])
    own = ["--against", "--batch", "--domains", "--drafter", "--new-tokens", "--plot", "--prompt-tokens", "--prompts"]
    own += ["--reliability", "--rounds", "--temperature", "--text", "--thresholds"]
    assert _flags(drafters.parser()) == sorted([*COMMON, *own])
    assert _flags(checkpoint.parser()) == [
        "inspect --json",
        "inspect --preset",
        "synthesize --json",
        "synthesize --preset",
        "synthesize --seed",
    ]
    own = ["--checkpoint", "--config", "--data", "--layers", "--out", "--point", "--rows", "--size-only"]
    assert _flags(features.parser()) == sorted([*COMMON, *own, "--without-teacher"])
    own = [
        "--text",
        "--checkpoint",
        "--out",
        "--prompts",
        "--prompt-tokens",
        "--new-tokens",
        "--temperature",
        "--top-p",
    ]
    assert _flags(continuations.parser()) == sorted([*COMMON, *ENGINE, *own])
    assert _flags(training_flags.parser()) == sorted([*COMMON, *TRAINING])
    places = ["--json", "--keep-scales", "--max-shard-size", "--overwrite", "--variant"]
    assert _flags(convert.parser()) == [
        *(f"dspark attach {flag}" for flag in ("--checkpoint", "--json", "--max-shard-size", "--replace")),
        *(f"dspark export {flag}" for flag in sorted([*places, "--format", "--official-config"])),
        *(f"dspark import {flag}" for flag in sorted([*places, "--dtype", "--ep-slices", "--revision"])),
        *(f"mtp attach {flag}" for flag in ("--checkpoint", "--json", "--max-shard-size", "--replace")),
        *(f"mtp export {flag}" for flag in sorted([*places[:-1], "--format", "--official-config"])),
        *(f"mtp import {flag}" for flag in sorted([*places[:-1], "--dtype", "--ep-slices", "--revision"])),
        "w8a8 --json",
    ]


def test_defaults():
    args = generate.parser().parse_args([])
    assert (args.max_new_tokens, args.temperature, args.top_p, args.numerics) == (128, 0, 1, "float32")
    assert args.checkpoint == generate.SAMPLE and args.chat is None
    assert generate.parser().parse_args(["--chat", "--prompt", "x"]).chat == "chat"


def test_verbs_are_frozen():
    assert list(cli.VERBS) == [
        "generate",
        "doctor",
        "checkpoint",
        "convert",
        "calibrate",
        "features",
        "train-drafter",
        "make-sample",
        "plan",
        "fixture",
        "diagnose",
        "bench",
    ]
    assert list(bench.BENCHMARKS) == [
        "collectives",
        "context",
        "decode",
        "drafters",
        "failures",
        "prefill",
        "quality",
        "replay",
        "speculative",
        "compare",
    ]


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
    """The doctor without its trials; the list of the commands that it would have run, with their time limits."""
    modes, commands = [], []

    def independent(modes_tried):
        modes.extend(modes_tried)
        return {"holds": True, "details": []}

    def run(command, **options):
        commands.append((command, options["timeout"]))
        return subprocess.CompletedProcess([], exchange_code, "", "rank 1 died")

    monkeypatch.setattr("meshspark.models.selfcheck.row_independence", lambda modes: independent(modes))
    monkeypatch.setattr(doctor.subprocess, "run", run)
    return modes, commands


def test_doctor_says_all_well(monkeypatch, capsys):
    _doctor(monkeypatch, 0)
    monkeypatch.setenv("HF_TOKEN", "hidden")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert cli.main(["doctor", "--json", "--ranks", "2"]) == 0
    out = capsys.readouterr()
    result = json.loads(out.out)
    assert result["schema"] == 1 and result["ok"] and result["checks"]["row independence, float32"] == "holds"
    assert result["versions"]["torch"] and result["backends"]["gloo"] == "available"
    assert result["devices"]["local rank 1"] == "cpu"
    assert result["environment"]["NCCL_DEBUG"] == "INFO" and "hidden" not in out.out + out.err


def test_doctor_ends_with_1_if_something_is_broken(monkeypatch, capsys):
    _doctor(monkeypatch, 1)
    assert cli.main(["doctor"]) == 1
    assert "broken: two ranks over gloo failed: rank 1 died" in capsys.readouterr().out


def _option(command, flag):
    return command[command.index(flag) + 1]


def test_doctor_tries_what_its_flags_say(monkeypatch, capsys):
    modes, commands = _doctor(monkeypatch, 0)
    assert cli.main(["doctor", "--numerics", "bfloat16", "--timeout", "7", "--seed", "11", "--backend", "gloo"]) == 0
    assert [mode.name for mode in modes] == ["bfloat16"]
    ((command, limit),) = commands
    assert (_option(command, "--timeout"), _option(command, "--seed")) == ("7.0", "11")
    assert _option(command, "--device") == "cpu" and 14 < limit < 100
    out = capsys.readouterr().out
    assert "row independence, bfloat16" in out and "bit-equal over gloo on cpu" in out
    assert exchange.parser().parse_args(command[command.index("--ranks") :]).seed == 11


def test_doctor_promises_nothing_in_float64(monkeypatch, capsys):
    modes, _ = _doctor(monkeypatch, 0)
    assert cli.main(["doctor", "--numerics", "float64"]) == 0
    assert not modes and "not tried: float64 promises no equal bits" in capsys.readouterr().out


def test_a_long_time_limit_is_one_that_a_wait_can_take(monkeypatch):
    _, commands = _doctor(monkeypatch, 0)
    assert cli.main(["doctor", "--timeout", "9e8"]) == 0
    assert commands[0][1] * 1000 < 2**31


@pytest.mark.parametrize(
    ("device", "present", "tried", "noted"),
    [
        ("cuda", 2, "cuda:0,1", ""),
        ("cuda:3,1,0", 4, "cuda:3,1", ""),
        (
            "cuda",
            1,
            "cpu",
            "nccl was not tried: two ranks need 2 devices, but --device is cuda and this process sees 1",
        ),
        ("cuda:3", 4, "cpu", "nccl was not tried: two ranks need 2 devices, but --device is cuda:3"),
        ("npu", 2, "cpu", "hccl was not tried: this torch has none"),
    ],
)
def test_doctor_tries_the_first_two_devices_or_says_why_not(monkeypatch, capsys, device, present, tried, noted):
    _, commands = _doctor(monkeypatch, 0)
    monkeypatch.setattr(doctor, "device_count", lambda kind: present)
    monkeypatch.setattr("meshspark.launch.worker.device_count", lambda kind: present)
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda name: name != "hccl")
    assert cli.main(["doctor", "--device", device]) == 0
    assert _option(commands[0][0], "--device") == tried
    out = capsys.readouterr().out
    assert noted in out and ("not tried" in out) == bool(noted)
    assert f"over {'gloo' if tried == 'cpu' else 'nccl'} on {tried}" in out
    assert f"of {device.partition(':')[0]} nothing is promised" in out


def test_doctor_looks_at_the_devices_of_its_own_machine_alone(monkeypatch, capsys):
    """Under torchrun over two machines of two devices each, ranks 2 and 3 have theirs elsewhere."""
    _doctor(monkeypatch, 0)
    monkeypatch.setattr(doctor, "device_count", lambda kind: 2)
    monkeypatch.setattr("meshspark.launch.worker.device_count", lambda kind: 2)
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "a", "MASTER_PORT": 1}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    assert cli.main(["doctor", "--device", "cuda:0,1", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["devices"]
    assert [name for name in devices if name.startswith("local rank")] == ["local rank 0", "local rank 1"]


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


def test_json_that_cannot_be_written_is_told_before_the_work(tmp_path, monkeypatch, capsys):
    _, commands = _doctor(monkeypatch, 0)
    target = tmp_path / "missing" / "out.json"
    assert cli.main(["doctor", "--json", str(target)]) == 2
    assert not commands
    assert f"--json is {str(target)!r}" in capsys.readouterr().err


def test_json_that_fails_at_last_is_one_message(tmp_path, monkeypatch, capsys):
    """The folder goes away while the doctor works."""
    _doctor(monkeypatch, 0)
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.setattr(doctor, "examine", lambda *_: folder.rmdir() or doctor.Findings())
    assert cli.main(["doctor", "--json", str(folder / "out.json")]) == 2
    err = capsys.readouterr().err
    assert "could not be written" in err and "Traceback" not in err
