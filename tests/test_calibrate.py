"""`meshspark calibrate`: blocks of all ranks come together, halves stay apart, the file is beside the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from rank_pool import RankPools

from meshspark.launch.calibrate import gather_halves, main
from meshspark.launch.generate import main as generate
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.dspark.calibration import FILE_NAME, load_calibration
from meshspark.models.dspark.step import Judged
from meshspark.models.v4.config import PRESETS
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

TEXT = ["--prompt", "some words", "--prompt", "others", "--max-new-tokens", "24", "--ignore-eos"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    synthesize(tmp_path / "ck", PRESETS["tiny-dspark"](), 3)
    return tmp_path / "ck"


def test_a_fit_is_kept_told_and_used(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, picture = tmp_path / "told.json", tmp_path / "reliability.png"
    files = ["--json", str(told), "--plot", str(picture)]
    assert main(["--checkpoint", str(checkpoint), *TEXT, *files]) == 0
    found = load_calibration(checkpoint, 5)
    assert found is not None and found.gamma == 5
    document = json.loads(told.read_text())
    assert document["calibration"]["temperatures"] == list(found.temperatures)
    # Two texts of 24 tokens of which nearly no draft is right: a block for each token but those at the ends.
    assert 2 * 8 <= document["judged"] + found.rollouts <= 2 * 24
    assert Path(document["file"]) == checkpoint / FILE_NAME and picture.stat().st_size > 0
    assert "ECE before" in capsys.readouterr().out
    run = ["--checkpoint", str(checkpoint), *TEXT, "--speculative", "dspark", "--verify", "threshold:0.5"]
    assert generate(run) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--speculative", "none"], "--speculative is none, allowed: the drafter to calibrate"),
        (["--verify", "scheduled"], "--verify and --compare are for generate"),
        (["--compare"], "--verify and --compare are for generate"),
    ],
)
def test_what_a_calibration_cannot_have(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert main(["--checkpoint", str(checkpoint), *TEXT, *flags]) == 2
    assert said in capsys.readouterr().err


def test_too_little_text_is_said(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--prompt", "some words", "--max-new-tokens", "2"]
    assert main(["--checkpoint", str(checkpoint), *short]) != 0
    assert "0 and 0 blocks were verified whole" in capsys.readouterr().err
    assert not (checkpoint / FILE_NAME).exists()


def blocks(groups: Groups) -> dict[str, Any]:
    """Rank r brings r + 1 whole blocks, and one that was cut."""
    mine = [Judged((float(groups.rank), float(number)), number % 3, 3) for number in range(groups.rank + 1)]
    first, second = gather_halves([*mine, Judged((9.0, 9.0), 0, 2), Judged((float("nan"), 0.0), 0, 3)], 2, groups)
    return {"first": [first.logit_NY.tolist(), first.accepted_N.tolist()], "second": second.logit_NY.tolist()}


def test_blocks_of_all_ranks_in_their_order(ranks: RankPools) -> None:
    first, second = ranks.run(Topology(2, 1, 2), "test_calibrate:blocks", timeout=60)
    assert first == second
    assert first["first"] == [[[0.0, 0.0], [1.0, 0.0]], [0, 0]]
    assert first["second"] == [[1.0, 1.0]]


def test_no_rank_has_a_block() -> None:
    empty = gather_halves([], 3, Groups.single(topology=Topology()))
    assert [len(half.width_N) for half in empty] == [0, 0]
