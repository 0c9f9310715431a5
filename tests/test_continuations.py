"""Continuations: cuts of texts, lines in order, resumed behind the last whole line, alike on two ranks; refusals."""

import json
from pathlib import Path

import pytest
from episodes import make_model

from meshspark.launch import continuations as module
from meshspark.launch.continuations import FILE_NAME, PromptCuts, Writer, continuations
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.request import SamplingParams
from meshspark.models.training.token_files import TokenFiles, parse_sample
from meshspark.models.v4.config import tiny
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

DOCUMENTS = [list(range(2, 80)), [7] * 3, list(range(100, 140))]


@pytest.fixture(scope="module")
def model():
    return make_model(Groups.single(), "tiny", "float32")


def _writer(new_tokens=5, temperature=1.0):
    return Writer(SamplingParams(new_tokens, temperature, seed=3), at_once=2)


def test_cuts_differ_and_more_of_them_begin_alike():
    few = PromptCuts(DOCUMENTS, 20, 6, seed=4, begin=1)
    many = PromptCuts(DOCUMENTS, 110, 6, seed=4, begin=1)
    assert [list(p) for p in many][:20] == [list(p) for p in few] == many[:20]
    assert all(p[0] == 1 and len(p) == 6 for p in many)
    assert len({tuple(p) for p in many}) == 110
    inside = [tuple(d[i : i + 5]) for d in DOCUMENTS for i in range(len(d) - 4)]
    assert sorted(tuple(p[1:]) for p in many) == sorted(inside)
    assert few[:20] != PromptCuts(DOCUMENTS, 20, 6, seed=5, begin=1)[:20]
    with pytest.raises(ValueError, match="have 110 places for prompts of 6 tokens, needed: 111"):
        PromptCuts(DOCUMENTS, 111, 6, seed=4, begin=1)
    with pytest.raises(ValueError, match="prompts of 1 tokens"):
        PromptCuts(DOCUMENTS, 2, 1, seed=4, begin=1)


def test_lines_in_order_and_a_run_that_is_cut_anywhere_ends_the_same(model, tmp_path):
    prompts, told = PromptCuts(DOCUMENTS, 7, 6, seed=4, begin=1), []
    assert continuations(model, prompts, _writer(), tmp_path / "whole", told.append) == 7
    whole = (tmp_path / "whole" / FILE_NAME).read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    assert [line["number"] for line in lines] == list(range(7))
    assert [line["prompt_ids"] for line in lines] == [list(p) for p in prompts]
    assert all(len(line["output_ids"]) == 5 for line in lines) and told[-1].prompts == 7
    cut = tmp_path / "cut"
    assert continuations(model, prompts[:3], _writer(), cut) == 3
    kept = (cut / FILE_NAME).read_bytes()
    assert whole.startswith(kept)
    (cut / FILE_NAME).write_bytes(kept + whole[len(kept) : len(kept) + 30])
    assert continuations(model, prompts, _writer(), cut) == 7
    assert (cut / FILE_NAME).read_bytes() == whole
    assert TokenFiles(cut, 264).lengths == [11] * 7


def test_what_ends_at_once_gets_no_line(model, tmp_path):
    prompts = PromptCuts(DOCUMENTS, 6, 6, seed=4, begin=1)
    continuations(model, prompts, _writer(temperature=0.0), tmp_path / "a")
    first = json.loads((tmp_path / "a" / FILE_NAME).read_text().splitlines()[2])["output_ids"][1]
    writer = Writer(SamplingParams(5, 0.0, seed=3, eos_id=first), at_once=2)
    count = continuations(model, prompts, writer, tmp_path / "b")
    numbers = [json.loads(line)["number"] for line in (tmp_path / "b" / FILE_NAME).read_text().splitlines()]
    assert count == len(numbers) < 6 and 2 not in numbers
    assert continuations(model, prompts, writer, tmp_path / "b") == count


def test_lines_wait_for_earlier_prompts(model, tmp_path):
    """A prompt that ends before an earlier one, beside which it runs."""
    prompts = PromptCuts(DOCUMENTS, 2, 6, seed=4, begin=1)
    continuations(model, prompts, _writer(9), tmp_path / "a")
    first, second = (json.loads(line)["output_ids"] for line in (tmp_path / "a" / FILE_NAME).read_text().splitlines())
    end = next(i for i in range(2, 8) if second[i] not in first + second[:i])
    writer = Writer(SamplingParams(9, 1.0, seed=3, eos_id=second[end]), at_once=2)
    continuations(model, prompts, writer, tmp_path / "b")
    lines = [json.loads(line) for line in (tmp_path / "b" / FILE_NAME).read_text().splitlines()]
    assert [(line["number"], line["output_ids"]) for line in lines] == [(0, first), (1, second[:end])]


def test_another_run_s_folder_is_refused(model, tmp_path):
    prompts = PromptCuts(DOCUMENTS, 3, 6, seed=4, begin=1)
    continuations(model, prompts, _writer(), tmp_path)
    with pytest.raises(ValueError, match=r"continuations.json: temperature was 1.0, now it is 0.5"):
        continuations(model, prompts, _writer(temperature=0.5), tmp_path)
    with pytest.raises(ValueError, match=r"jsonl:1: prompt_ids are not those of prompt 0"):
        continuations(model, PromptCuts(DOCUMENTS, 3, 6, seed=5, begin=1), _writer(), tmp_path)
    (tmp_path / FILE_NAME).write_text("{}\n")
    with pytest.raises(ValueError, match=r"jsonl:1: is no line of a continuation"):
        continuations(model, prompts, _writer(), tmp_path)


def _on_ranks(groups, out):
    prompts = PromptCuts(DOCUMENTS, 5, 6, seed=4, begin=1)
    continuations(make_model(groups, "tiny", "float64"), prompts, _writer(3), Path(out))


def test_two_ranks_write_what_one_writes(ranks, tmp_path):
    """Two tensor groups, so that requests end in another order than they are written."""
    _on_ranks(Groups.single(), tmp_path / "one")
    ranks.run(Topology(2, 1, 2), "test_continuations:_on_ranks", timeout=120, out=str(tmp_path / "two"))
    one, two = ((tmp_path / name / FILE_NAME).read_text() for name in ("one", "two"))
    assert one == two and one.count("\n") == 5


def test_the_command(tmp_path, capsys):
    synthesize(tmp_path / "c", tiny(), 1)
    text = tmp_path / "text.py"
    text.write_text("import os\nfor each in os.environ:\n    print(each)\n" * 3)
    command = ["--checkpoint", str(tmp_path / "c"), "--text", str(text), "--out", str(tmp_path / "out")]
    few = ["--prompts", "3", "--prompt-tokens", "8", "--new-tokens", "4", "--json"]
    assert module.main([*command, *few]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["lines"] == 3 and "3 of 3 prompts" in shown.err
    assert TokenFiles(tmp_path / "out", 264).lengths == [12, 12, 12]
    assert module.main([*command, *few, "--temperature", "1"]) == 2
    assert "temperature was 0.0" in capsys.readouterr().err
    for wrong, said in (
        (["--text", str(tmp_path / "none")], "--text"),
        (["--prompt-tokens", "0"], "--prompt-tokens is 0"),
        (["--new-tokens", "1"], "--new-tokens is 1"),
        (["--prompts", "9999"], "places for prompts"),
        (["--out", str(text)], "allowed: a folder"),
    ):
        assert module.main([*command, *few, *wrong]) == 2
        assert said in capsys.readouterr().err


GOOD = {"prompt_ids": [1, 2], "output_ids": [3, 4], "text": "left alone"}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"prompt_ids": None}, "f:3: prompt_ids is None, allowed: a list of ids"),
        ({"prompt_ids": [1, True]}, r"f:3: prompt_ids\[1\] is True, allowed: 0 to 9"),
        ({"output_ids": [3, 10]}, r"output_ids\[1\] is 10, allowed: 0 to 9"),
        ({"output_ids": [3, -1]}, r"output_ids\[1\] is -1"),
        ({"output_ids": [3, 4.0]}, r"output_ids\[1\] is 4.0"),
        ({"output_ids": [3]}, "no two tokens in a row are learned"),
        ({"loss_mask": [0, 1, 0, 1]}, "no two tokens in a row are learned"),
        ({"loss_mask": [0, 1, 1]}, "loss_mask is 3 values, allowed: a list of 4"),
        ({"loss_mask": [0, 1, 1, 2]}, r"loss_mask\[3\] is 2, allowed: 0 or 1"),
        ({"output_ids": [3, 4, 5, 6]}, "are 6 tokens, allowed: 5"),
    ],
)
def test_a_faulty_line_is_named(change, said):
    with pytest.raises(ValueError, match=said):
        parse_sample(json.dumps({**GOOD, **change}), "f:3", 10, longest=5)


def test_lines_that_are_no_objects_are_named():
    for text, said in (("[1]", "f:3: is a list"), ("{", "f:3: no JSON"), ("[" * 100000, "f:3: no JSON")):
        with pytest.raises(ValueError, match=said):
            parse_sample(text, "f:3", 10)


def test_masks():
    sample = parse_sample(json.dumps(GOOD), "f:1", 10)
    assert sample.input_ids.tolist() == [1, 2, 3, 4] and sample.loss_mask.tolist() == [0, 0, 1, 1]
    sample = parse_sample(json.dumps({**GOOD, "loss_mask": [True, True, False, 1]}), "f:1", 10)
    assert sample.loss_mask.tolist() == [1, 1, 0, 1]


def test_a_folder_of_files(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        TokenFiles(tmp_path / "none", 10)
    with pytest.raises(ValueError, match=r"has no \*.jsonl file"):
        TokenFiles(tmp_path, 10)
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps(GOOD) + "\n\n" + json.dumps({**GOOD, "output_ids": [5, 6, 7]}))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="have no line"):
        TokenFiles(tmp_path / "empty", 10)
    (tmp_path / "a.jsonl").write_text(json.dumps({**GOOD, "output_ids": [8, 9]}) + "\n")
    files = TokenFiles(tmp_path, 10)
    assert files.lengths == [4, 4, 5] and files[0].input_ids.tolist() == [1, 2, 8, 9]
    assert files[2].input_ids.tolist() == [1, 2, 5, 6, 7]
    assert TokenFiles(tmp_path, 10).digest == files.digest
    (tmp_path / "a.jsonl").write_text(json.dumps(GOOD) + "\n")
    assert TokenFiles(tmp_path, 10).digest != files.digest
    (tmp_path / "b.jsonl").write_text("\n" + json.dumps(GOOD) + "\nx\n")
    with pytest.raises(ValueError, match=r"b.jsonl:3: no JSON"):
        TokenFiles(tmp_path, 10)
    with pytest.raises(ValueError, match=r"b.jsonl:4"):
        files[2]
