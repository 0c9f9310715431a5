"""bench quality: what numerics cost, on a little held-out text."""

import json
from pathlib import Path

import pytest
import torch

from meshspark.benchmarks import quality
from meshspark.launch import cli


def bench(*given: str) -> int:
    return cli.main(["bench", "quality", *given])


def test_quality_of_all_numerics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tmp_path / "q.json"
    assert bench("--windows", "2", "--length", "160", "--json", str(told)) == 0
    rows = {row["numerics"]: row for row in json.loads(told.read_text())["rows"]}
    assert list(rows) == ["float32", "bfloat16", "w8a8"] and all(row["tokens"] == 320 for row in rows.values())
    assert (rows["float32"]["top1"], rows["float32"]["kl"]) == (1, 0)
    for name in ("bfloat16", "w8a8"):
        assert 0 < rows[name]["kl"] < 0.01 and 0.9 < rows[name]["top1"] <= 1
        assert abs(rows[name]["loss"] - rows["float32"]["loss"]) < 0.05
    # A trained model: random weights would give log(1024) = 6.9.
    assert rows["float32"]["loss"] < 4
    assert "held-out" in capsys.readouterr().out


def test_windows_are_spread_over_the_text() -> None:
    stream = torch.arange(101)
    windows = quality.windows_of(stream, 3, 10)
    assert [w[0] for w in windows] == [0, 45, 90] and all(len(w) == 11 for w in windows)
    with pytest.raises(ValueError, match="held-out text has 101 tokens"):
        quality.windows_of(stream, 3, 100)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--windows", "0"), "--windows is 0"),
        (("--length", "4096000"), "--length is 4096000"),
        (("--numerics", "int4"), "int4"),
        (("--checkpoint", "/nowhere"), "/nowhere"),
    ],
)
def test_wrong_flags(given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*given) == 2
    assert message in capsys.readouterr().err
