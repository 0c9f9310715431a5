"""`meshspark bench speculative`: sides take turns on one text, whatever they draft the text stays the same."""

import json
from pathlib import Path

import pytest
import torch
from episodes import single_model

from meshspark.benchmarks.drafted import Side, take_turns, write_text
from meshspark.benchmarks.speculative import main
from meshspark.models.dspark.schedule import parse_verify

SMALL = ["--rounds", "2", "--steps", "2", "--new-tokens", "40", "--prompt-tokens", "5"]


def test_tokens_of_a_turn_are_those_of_the_chance() -> None:
    model = single_model("tiny", "float32")
    prompts = torch.randint(2, model.config.vocab_size, (3, 4), generator=torch.Generator().manual_seed(1)).tolist()
    text = write_text(model, prompts, 60)
    assert [len(ids) for ids in text.continuations] == [60] * 3
    sides = [
        Side("none", 0),
        Side("right", 4, (1.0,)),
        Side("wrong", 4, (0.0,)),
        Side("sure", 4, (1.0,), parse_verify("threshold:0.5")),
    ]
    found = take_turns(model, text, sides, rounds=2, steps=3)
    assert found.tokens["none"] == found.tokens["wrong"] == [9, 9]
    assert found.tokens["right"] == found.tokens["sure"] == [45, 45]
    with pytest.raises(RuntimeError, match="right: the known text of 60 tokens is too short for 9 rounds"):
        take_turns(model, text, sides[1:2], rounds=9, steps=3)


@pytest.mark.parametrize("case", ["oracle", "widths", "rejected"])
def test_each_case_tells_its_rows(tmp_path: Path, case: str) -> None:
    target = tmp_path / "rows.json"
    lists = ["--batches", "2", "--gammas", "2", "--chances", "0.5,1"]
    picture = ["--plot", str(tmp_path / "plot.png")] if case == "widths" else []
    assert main(["--case", case, *SMALL, *lists, *picture, "--json", str(target)]) == 0
    told = json.loads(target.read_text())
    assert told["case"] == case and told["schema"] == 1
    sides = {
        "oracle": ["none", "gamma 2, p 0.5", "gamma 2, p 1"],
        "widths": ["none", "2 rows", "3 rows", "scheduled", "lagged"],
    }
    if case == "rejected":
        assert [(row["batch"], row["rows"], row["accepted"]) for row in told["rows"]] == [(2, 12, 0)]
        assert all(len(row["step_s"]) == 2 for row in told["rows"])
        return
    assert [row["side"] for row in told["rows"]] == sides[case]
    assert all(row["tokens_per_s"] > 0 and row["over_plain"] > 0 for row in told["rows"])
    assert told["rows"][0]["tokens_per_turn"] == 1
    assert not picture or (tmp_path / "plot.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gammas", "0"], "--gammas is '0', allowed: numbers from 1 to 64"),
        (["--chances", "1.5"], "--chances is '1.5', allowed: numbers from 0 to 1"),
        (["--case", "rejected", "--ranks", "2"], "--case rejected runs on 1 rank, not on 2"),
        (["--new-tokens", "65536"], "--prompt-tokens and --new-tokens are 65552, allowed: 65536 together"),
        (["--case", "rejected", "--plot", "a.png"], "--plot is for the cases oracle and widths"),
    ],
)
def test_wrong_flags_are_named(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert main(flags) == 2
    assert said in capsys.readouterr().err
