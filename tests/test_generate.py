"""generate on a synthetic checkpoint: one rank here, two ranks started, the same ids; stops, JSON, refusals."""

import json
import subprocess
import sys

import pytest

from meshspark.launch import generate
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.v4.config import tiny

PATIENCE = 200.0
PROMPTS = ["--prompt", "def f(x):", "--prompt", "import os, sys", "--prompt", "\u20ac"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    synthesize(folder, tiny(), 1)
    return folder


@pytest.fixture
def run(checkpoint, tmp_path, capsys):
    """generate in this process: its JSON and what it printed."""

    def call(*argv):
        target = tmp_path / "out.json"
        code = generate.main(["--checkpoint", str(checkpoint), *argv, "--json", str(target)])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return json.loads(target.read_text()), shown.out

    return call


def test_two_ranks_write_what_one_writes(checkpoint, run):
    more = [*PROMPTS, "--max-new-tokens", "6", "--numerics", "float64"]
    alone, shown = run(*more)
    command = [sys.executable, "-m", "meshspark.launch.generate", "--checkpoint", str(checkpoint), *more]
    done = subprocess.run(
        [*command, "--tp", "2", "--json"], capture_output=True, text=True, timeout=PATIENCE, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    together = json.loads(done.stdout)
    assert together["requests"] == alone["requests"]
    assert together["topology"] == {"world": 2, "tp": 2, "ep": 2, "dp": 1}
    assert alone["topology"] == {"world": 1, "tp": 1, "ep": 1, "dp": 1}
    for number in (1, 2, 3):
        assert f"--- prompt {number}: 6 tokens, length ---" in done.stderr
        assert f"--- prompt {number}: 6 tokens, length ---" in shown
    assert "rank 1 (ep_rank 1 of block 0)" in done.stderr


def test_a_prompt_given_again_draws_other_numbers(run):
    sampling = ["--max-new-tokens", "8", "--temperature", "1", "--seed", "5"]
    twice, _ = run("--prompt", "x", "--prompt", "x", *sampling)
    first, second = (request["output_ids"] for request in twice["requests"])
    assert first != second
    next_seed, _ = run("--prompt", "x", *sampling[:-1], "6")
    assert second == next_seed["requests"][0]["output_ids"]


def test_a_nan_ends_the_request_with_its_name(checkpoint, tmp_path, capsys, monkeypatch):
    """Unusable logits: the request's reason is error, the exit code 1, and the message names prompt and rank."""
    load = generate.load_with_drafter

    def load_and_spoil(*args):
        model, proposer = load(*args)
        model.head[7] = float("nan")
        return model, proposer

    monkeypatch.setattr(generate, "load_with_drafter", load_and_spoil)
    target = tmp_path / "out.json"
    argv = ["--checkpoint", str(checkpoint), "--prompt", "a", "--prompt", "bc", "--json", str(target)]
    assert generate.main(argv) == 1
    assert "prompt 1 on rank 0, prompt 2 on rank 0: ended as error" in capsys.readouterr().err
    assert [r["finish_reason"] for r in json.loads(target.read_text())["requests"]] == ["error"] * 2


def test_json_and_the_streamed_text(run):
    result, shown = run("--prompt", "def f(x):", "--max-new-tokens", "5")
    assert set(result) == {"schema", "requests", "topology", "metrics"} and result["schema"] == 1
    (request,) = result["requests"]
    assert set(request) == {"prompt_ids", "output_ids", "text", "finish_reason"}
    assert request["prompt_ids"][0] == tiny().bos_token_id and len(request["prompt_ids"]) == 10
    assert len(request["output_ids"]) == 5 and request["finish_reason"] == "length"
    assert shown.startswith("def f(x):" + request["text"] + "\n")
    metrics = result["metrics"]
    assert metrics["prefill_tokens"] == 10 and metrics["decode_tokens"] == 4
    assert metrics["prefill_tokens_per_s"] > 0 and metrics["decode_tokens_per_s"] > 0
    assert metrics["stages"]["moe"] > 0
    assert metrics["time_to_first_token"]["count"] == 1 and metrics["time_between_tokens"]["count"] == 4
    assert metrics["most_rows"] == 10 and metrics["rows_per_step"] == 14 / 5
    assert 0 < metrics["pools"]["window_kv"]["peak"] <= metrics["pools"]["window_kv"]["pages"]


def test_engine_flags_change_nothing_that_is_written(run):
    """Chunks of 3 rows, two seats, one page budget, prefixes on and off: the same ids."""
    plain, _ = run(*PROMPTS, "--max-new-tokens", "6")
    flags = ("--prefill-rows", "3", "--batch", "2", "--block-size", "64", "--cache-gib", "0.01", "--prefix-points", "0")
    other, _ = run(*PROMPTS, "--max-new-tokens", "6", *flags, "--projection", "weights", "--context", "200")
    assert other["requests"] == plain["requests"]
    assert other["metrics"]["most_rows"] <= 5 and other["metrics"]["steps"] > plain["metrics"]["steps"]


@pytest.mark.parametrize(
    "flags,said",
    [
        (["--batch", "0"], "--batch is 0, allowed: 1 to 65,536"),
        (["--prefill-rows", "0"], "--prefill-rows is 0"),
        (["--prefix-points", "-1"], "--prefix-points is -1, allowed: 0"),
        (["--cache-gib", "nan"], "--cache-gib is nan"),
        (["--block-size", "48"], "invalid choice: 48"),
        (["--context", "4"], "allowed: 4"),
        (["--cache-gib", "0.0001"], "the cache budget is 107,374 bytes, allowed: "),
        (["--top-k", "-1"], "top_k is -1"),
        (["--min-p", "1.5"], "min_p is 1.5"),
    ],
)
def test_wrong_engine_flags_are_named(checkpoint, capsys, flags, said):
    assert generate.main(["--checkpoint", str(checkpoint), "--prompt", "abc", *flags]) != 0
    assert said in capsys.readouterr().err


def test_a_deployment_fills_what_no_flag_says(checkpoint, capsys, tmp_path):
    target = tmp_path / "out.json"
    own = ["--numerics", "float32", "--ep", "1", "--tp", "1", "--context", "64", "--batch", "3"]
    plain = ["--speculative", "none"]
    argv = ["--checkpoint", str(checkpoint), "--prompt", "abc", "--max-new-tokens", "2", "--json", str(target)]
    assert generate.main([*argv, "--deployment", "flash-dspark-16", *own, *plain]) == 0
    said = capsys.readouterr().out
    assert "--gamma" not in said
    shown = {row.split()[1]: row.replace("\u2502", " ").split()[1:] for row in said.splitlines() if "\u2502 --" in row}
    assert shown["--batch"] == ["64", "3", "3"] and shown["--prefill-rows"] == ["512", "512"]
    assert shown["--numerics"] == ["w8a8", "float32", "float32"] and "--verify-rows" not in shown
    assert generate.main([*argv, "--deployment", "flash-dspark-16", *plain]) != 0
    assert "--context is 1048576, allowed" in capsys.readouterr().err


def test_a_prompt_does_not_depend_on_its_company(run):
    sampling = ["--max-new-tokens", "5", "--temperature", "0.9", "--top-p", "0.9", "--seed", "5"]
    together, _ = run(*PROMPTS, *sampling)
    alone, _ = run(*PROMPTS[2:4], *sampling)
    assert alone["requests"] == together["requests"][1:2]
    again, _ = run(*PROMPTS[2:4], *sampling[:-1], "6")
    assert again["requests"] != alone["requests"]


def test_text_ends_before_a_stop(run):
    whole, _ = run("--prompt", "abc", "--max-new-tokens", "12", "--seed", "3", "--temperature", "1")
    text = whole["requests"][0]["text"]
    stop = text[4:6]
    cut, shown = run(
        "--prompt",
        "abc",
        "--max-new-tokens",
        "12",
        "--seed",
        "3",
        "--temperature",
        "1",
        "--stop",
        "never",
        "--stop",
        stop,
    )
    request = cut["requests"][0]
    assert request["text"] == text[: text.find(stop)] and request["finish_reason"] == "stop"
    assert request["output_ids"] == whole["requests"][0]["output_ids"][: len(request["output_ids"])]
    assert shown.startswith("abc" + request["text"] + "\n")


def test_eos_ends_and_is_not_printed(run, monkeypatch):
    free, _ = run("--prompt", "abc", "--max-new-tokens", "4")
    ids = free["requests"][0]["output_ids"]
    read = generate.read_config
    third = ids[2]
    assert ids.index(third) == 2

    def with_eos(folder):
        config = read(folder)
        object.__setattr__(config, "eos_token_id", third)
        return config

    monkeypatch.setattr(generate, "read_config", with_eos)
    ended, _ = run("--prompt", "abc", "--max-new-tokens", "4")
    assert ended["requests"][0]["output_ids"] == ids[:2]
    assert ended["requests"][0]["finish_reason"] == "eos"


def test_chat_and_prompt_files(run, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("a\nb", encoding="utf-8")
    plain, _ = run("--prompt-file", str(path), "--max-new-tokens", "1")
    assert len(plain["requests"][0]["prompt_ids"]) == 4
    chat, _ = run("--prompt-file", str(path), "--max-new-tokens", "1", "--chat")
    thinking, _ = run("--prompt-file", str(path), "--max-new-tokens", "1", "--chat", "thinking")
    first, second = (r["requests"][0]["prompt_ids"] for r in (chat, thinking))
    assert len(first) == 7 and first[:-1] == second[:-1] and first[-1] != second[-1]


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "there is no prompt; give --prompt"),
        (["--prompt", "x", "--ep", "5"], "n_routed_experts % ep must be 0"),
        (["--prompt", "x", "--tp", "3"], "o_groups % tp must be 0, but o_groups is"),
        (["--prompt", "x", "--ranks", "4", "--tp", "3"], "world % tp must be 0"),
        (["--prompt", "x", "--numerics", "w8a9"], "invalid choice: 'w8a9'"),
        (["--prompt", "x", "--stop", ""], "--stop is empty"),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0, allowed"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens is 0, allowed"),
        (["--prompt", "x", "--max-new-tokens", "99999999"], "positions, allowed"),
        (["--prompt-file", "/nowhere/x"], "--prompt-file /nowhere/x"),
        (["--prompt", "x", "--device", "cuda:0,0"], "--device cuda:0,0 gives id 0"),
    ],
)
def test_refusals_come_before_any_rank_starts(checkpoint, argv, message, capsys, monkeypatch):
    monkeypatch.setattr(generate, "run_job", lambda *_: pytest.fail("ranks were started"))
    assert generate.main(["--checkpoint", str(checkpoint), *argv]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_a_missing_checkpoint_is_named(tmp_path, capsys, monkeypatch):
    assert generate.main(["--checkpoint", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert f"there is no checkpoint: {tmp_path / 'none'}" in capsys.readouterr().err
    monkeypatch.setattr(generate, "SAMPLE", tmp_path)
    assert generate.main(["--prompt", "x"]) == 2
    assert "the bundled sample is not there" in capsys.readouterr().err


def test_a_faulty_checkpoint_is_one_message(checkpoint, tmp_path, capsys):
    for path in checkpoint.iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[:-64] if path.suffix == ".safetensors" else data)
    assert generate.main(["--checkpoint", str(tmp_path), "--prompt", "x"]) == 1
    err = capsys.readouterr().err
    assert "rank 0 failed in stage load" in err and "safetensors" in err and len(err.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [("--ranks", "1"), ("--tp", "2"), ("--tp", "2", "--ep", "4"), ("--tp", "4")])
def test_fresh_processes_write_the_same_text(checkpoint, run, sizes):
    """Three starts of one command give one result, and every topology gives the one of a single rank."""
    words = [*PROMPTS, "--max-new-tokens", "16", "--temperature", "0.8", "--seed", "3"]
    alone, _ = run(*words)
    command = [sys.executable, "-m", "meshspark.launch.generate", "--checkpoint", str(checkpoint), *words, *sizes]
    for _ in range(3):
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=PATIENCE, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["requests"] == alone["requests"]
