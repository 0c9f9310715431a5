"""The benchmark of failures: its figures, and that every rank learns of a fault whose rank it can name."""

import json

import pytest

from meshspark.benchmarks import failures


def test_summary_counts_the_ranks_that_were_not_told():
    found = [(n / 1000, True) for n in range(1, 200)] + [(0.2, False)]
    row = failures.summary("death", 3, "local", 101, found)
    assert row["p50_ms"] == pytest.approx(100.5) and row["p99_ms"] == 198.0 and row["max_ms"] == 200.0
    assert row["not_named"] == 1 + 101 * 2 - 200


@pytest.mark.parametrize("transport", ["local", "torch"])
def test_every_rank_learns_of_a_fault(tmp_path, transport):
    target = tmp_path / "out.json"
    assert failures.main(["--rounds", "1", "--transport", transport, "--json", str(target)]) == 0
    rows = json.loads(target.read_text())["failures"]
    assert [(row["fault"], row["not_named"]) for row in rows] == [("death", 0), ("mismatch", 0)]
    assert all(0 < row["p50_ms"] <= row["max_ms"] < 10_000 for row in rows)


@pytest.mark.parametrize("flags", [["--ranks", "1"], ["--rounds", "0"]])
def test_wrong_numbers_are_named(flags, capsys):
    assert failures.main(flags) == 2
    assert flags[0] in capsys.readouterr().err
