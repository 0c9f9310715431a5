"""Runs in fresh processes: the same ids and caches every time, and the same refusals where asserts are off."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshspark.launch import generate
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.v4.config import tiny

HERE = Path(__file__).parent


FEW_AND_MANY = [(2, 8, 3)] + [pytest.param(tp, 64, 20, marks=pytest.mark.slow) for tp in (1, 2, 4)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("tp", "tokens", "times"), FEW_AND_MANY)
def test_start_ups_in_a_row_give_the_same_ids_and_caches(tp: int, tokens: int, times: int) -> None:
    """Nothing of the outcome comes from the time, a process or port number, a hash seed or who arrives first."""
    command = [sys.executable, "-m", "launch_jobs", "write", "--tokens", str(tokens)]
    command += ["--ranks", str(tp), "--tp", str(tp)]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    seen = []
    for _ in range(times):
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
        assert done.returncode == 0, done.stderr
        seen.append(json.loads(done.stdout.splitlines()[-1]))
    assert [len(ids) for ids in seen[0]["ids"]] == [tokens, tokens] and len(seen[0]["caches"]) == tp
    assert all(result == seen[0] for result in seen)


OPTIMIZED = """
import sys
from meshspark.launch import generate
assert False, "asserts are on"
folder, target = sys.argv[1:]
more = ["--checkpoint", folder, "--max-new-tokens", "4"]
bad = [["--ranks", "4", "--tp", "3"], ["--ranks", "4", "--ep", "3"], ["--ranks", "3"], ["--temperature", "-1"]]
for flags in [*bad, ["--max-new-tokens", "0"], ["--max-new-tokens", "9999"]]:
    print(generate.main([*more, "--prompt", "abc", *flags]), flush=True)
print(generate.main([*more, "--prompt", "abc", "--json", target]))
"""


def test_without_asserts_bad_input_is_refused_and_good_input_gives_the_same_ids(tmp_path, capsys) -> None:
    checkpoint, ours, theirs = tmp_path / "checkpoint", tmp_path / "ours.json", tmp_path / "theirs.json"
    synthesize(checkpoint, tiny(), 1)
    argv = ["--checkpoint", str(checkpoint), "--prompt", "abc", "--max-new-tokens", "4", "--json", str(ours)]
    assert generate.main(argv) == 0
    command = [sys.executable, "-O", "-c", OPTIMIZED, str(checkpoint), str(theirs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    codes = [line for line in done.stdout.splitlines() if line.isdecimal()]
    assert codes == ["2"] * 6 + ["0"], done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("meshspark: generate: ")]
    words = ["world % tp", "world % ep", "3", "temperature is -1", "max_new_tokens", "9999"]
    assert len(told) == 6 and all(word in line for word, line in zip(words, told, strict=True)), told
    assert json.loads(theirs.read_text())["requests"] == json.loads(ours.read_text())["requests"]
