"""The bundled sample's maker: data, tokenizer, shape, training that resumes, judging and writing."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer

from meshspark.launch import make_sample, sample_report, sample_train
from meshspark.launch.sample_data import (
    LEADING_TOKENS,
    LEFT_OUT,
    TRAILING_TOKENS,
    VOCABULARY,
    is_held_out,
    sample_config,
    source_files,
    token_stream,
    train_tokenizer,
)
from meshspark.launch.sample_judge import definition_prompts, distinct_share, judge
from meshspark.launch.sample_report import ReportSettings, smoothed, write_sample
from meshspark.launch.sample_train import Trainer, TrainSettings, initial_weights
from meshspark.models.checkpoint.loader import load_weights
from meshspark.models.checkpoint.names import held_table, tensor_table
from meshspark.models.checkpoint.writer import stored_bytes
from meshspark.models.numerics import FLOAT32
from meshspark.models.v4.config import V4Config, tiny
from meshspark.parallel.topology import Topology

MAX_BYTES = 8_000_000
STEPS = 8


@pytest.fixture(scope="module")
def files() -> list[tuple[str, str]]:
    return list(source_files())


@pytest.fixture(scope="module")
def tokenizer(files: list[tuple[str, str]]) -> Tokenizer:
    return train_tokenizer([text for _, text in files[:40]])


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_config() -> V4Config:
    return replace(tiny(), num_hidden_layers=3, compress_ratios=(0, 4, 128), num_hash_layers=1)


def small_settings() -> TrainSettings:
    """A run of STEPS steps when each takes one second: warm-up, long windows, decay and storage all occur."""
    return TrainSettings(
        minutes=STEPS / 60, sequences=2, length=80, long_every=3, warm_up_steps=2, decay_share=0.5, quantised_share=0.25
    )


def small_stream(vocabulary: int) -> torch.Tensor:
    return torch.arange(3000) ** 2 % 97 % vocabulary


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes one second, so that the schedule, which follows time, is the same in every run."""
    seconds = count()
    monkeypatch.setattr(sample_train, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))


def test_source_files_are_python_of_the_library_alone(files: list[tuple[str, str]]) -> None:
    names = [name for name, _ in files]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert len(set(names)) == len(names) > 300
    assert {"ast.py", "asyncio/tasks.py", "tokenize.py"} <= set(names)
    assert not [name for name in names if set(name.split("/")) & set(LEFT_OUT) or not name.endswith(".py")]


def test_held_out_files_are_a_small_part_decided_by_name(files: list[tuple[str, str]]) -> None:
    held = [name for name, _ in files if is_held_out(name)]
    assert 0.02 < len(held) / len(files) < 0.08
    assert {name: is_held_out(name) for name in ("ast.py", "heapq.py")} == {"ast.py": True, "heapq.py": False}


def test_training_and_held_out_streams_share_no_file(
    files: list[tuple[str, str]], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [next(f for f in files if is_held_out(f[0]) == held) for held in (True, False)]
    monkeypatch.setattr(make_sample, "source_files", lambda: iter(few))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    train, held_out = make_sample.prepare(tmp_path)
    (_, held_text), (_, train_text) = few
    config = sample_config()
    assert torch.equal(train, token_stream(tokenizer, [train_text], config))
    assert torch.equal(held_out, token_stream(tokenizer, [held_text], config))
    assert (train[0], train[-1]) == (config.bos_token_id, config.eos_token_id)


def test_tokenizer_reserves_the_official_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert [tokenizer.token_to_id(token) for token in LEADING_TOKENS] == [0, 1, 2]
    last = range(VOCABULARY - len(TRAILING_TOKENS), VOCABULARY)
    assert [tokenizer.token_to_id(token) for token in TRAILING_TOKENS] == list(last)
    ids = tokenizer.encode("<\uff5cUser\uff5c>def<\uff5cAssistant\uff5c></think>").ids
    assert [i for i in ids if i in last] == [VOCABULARY - 4, VOCABULARY - 3, VOCABULARY - 1]


def test_tokenizer_is_lossless_and_keeps_indentation_whole(files: list[tuple[str, str]], tokenizer: Tokenizer) -> None:
    odd = ["", " ", "\t\r\n\x00\x7f", "a  b   c\n\n\n  d\r\n\t\te", "caf\u00e9 \u6f22\u5b57 \U0001f600", "x=1;y=-2.5e3"]
    for text in [*odd, *(text for _, text in files[300:330])]:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("\n        ").ids) == 1
    total = sum(len(text) for _, text in files[300:330])
    assert sum(len(tokenizer.encode(text).ids) for _, text in files[300:330]) < 0.5 * total


def test_sample_shape_has_every_part_and_fits_the_file() -> None:
    config = sample_config()
    assert config.num_hidden_layers >= 10 and config.compress_ratios[:6] == (0, 0, 4, 128, 4, 128)
    assert (config.num_hash_layers, config.n_routed_experts, config.hc_mult) == (2, 16, 4)
    assert config.o_groups % 4 == 0 and config.vocab_size % 8 == 0 and config.index_n_heads >= 24
    assert 4 * config.index_topk < 512
    assert config.hidden_size % 32 == 0 and config.moe_intermediate_size % 32 == 0
    assert sum(stored_bytes(spec) for spec in tensor_table(config)) < 0.98 * MAX_BYTES


def test_hash_tables_name_distinct_experts_evenly() -> None:
    config = sample_config()
    table = initial_weights(config, 1)["layers.0.ffn.gate.tid2eid"]
    assert table.shape == (config.vocab_size, config.num_experts_per_tok)
    assert all(len(set(row)) == len(row) for row in table.tolist())
    load = torch.bincount(table.flatten(), minlength=config.n_routed_experts)
    assert load.max() == load.min()


def test_initial_weights_cover_the_table_and_depend_on_the_seed() -> None:
    config = small_config()
    first, again, other = (initial_weights(config, seed) for seed in (1, 1, 2))
    assert set(first) == set(held_table(config))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])


def test_loss_falls(clock: None) -> None:
    config = small_config()
    settings = replace(small_settings(), minutes=1000.0, warm_up_steps=1)
    trainer = Trainer(config, settings, small_stream(config.vocab_size))
    losses = [trainer.step() for _ in range(12)]
    assert losses[0] > 5.0
    assert losses[-1] < losses[0] - 1.0


def test_resumed_run_is_the_uninterrupted_run(clock: None, tmp_path: Path) -> None:
    config, stream = small_config(), small_stream(tiny().vocab_size)
    whole = Trainer(config, small_settings(), stream)
    for step in range(STEPS):
        whole.step()
        if step == 2:
            whole.save(tmp_path)
    resumed = Trainer(config, small_settings(), stream)
    resumed.restore(tmp_path)
    assert resumed.step_number == 3 and not resumed.quantised
    while resumed.progress < 1:
        resumed.step()
    assert whole.quantised and resumed.curve == whole.curve
    for name, weight in whole.weights.items():
        assert torch.equal(weight, resumed.weights[name]), name
    assert any(bool(whole.weights[name].any()) for name in whole.weights if name.endswith("gate.bias"))


def test_restore_refuses_another_shape(clock: None, tmp_path: Path) -> None:
    stream = small_stream(tiny().vocab_size)
    Trainer(small_config(), small_settings(), stream).save(tmp_path)
    other = Trainer(replace(small_config(), moe_intermediate_size=64), small_settings(), stream)
    with pytest.raises(ValueError, match="does not belong to this run"):
        other.restore(tmp_path)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("def f(x):\n    return (x +\n            1)\n", "whole"),
        ("def f(x):\n    return x\n  half a line that is indented badly", "whole"),
        ("x = (1,\n     2,\n", "cut"),
        ('def f():\n    """Say\n    more\n', "cut"),
        ("if x:\n        y\n    z\n", "fault"),
        ("x = 'open\ny = 1\n", "fault"),
        ("x = 1 $ 2\n", "fault"),
    ],
)
def test_judge(text: str, verdict: str) -> None:
    assert judge(text) == verdict


def test_prompts_are_definitions_that_end_closed() -> None:
    doc = '    """One\n    two\n    three\n    four\n    """\n'
    text = f"import x\n\ndef f(a,\n      b):\n{doc}    y\n\nclass C:\n    z = [\n"
    assert definition_prompts([text], 2) == [
        ("def f(a,\n      b):\n", f"{doc}    y\n\nclass C:\n    z = [\n"),
        ("class C:\n", "    z = [\n"),
    ]
    with pytest.raises(ValueError, match="2 definitions"):
        definition_prompts([text], 3)


def test_distinct_share_and_smoothed_curve() -> None:
    assert distinct_share([(1, 2, 1, 2, 1, 2)]) == 2 / 3
    assert distinct_share([(1, 2, 3, 4), (1, 2, 3, 4)]) == 0.5
    curve = [(step, float(step)) for step in range(1, 11)]
    assert smoothed(curve, 5) == [(2, 1.5), (4, 3.5), (6, 5.5), (8, 7.5), (10, 9.5)]


def test_written_sample_loads_and_reports(
    clock: None, files: list[tuple[str, str]], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = [f for f in files if is_held_out(f[0]) and "\ndef " in f[1]][:2]
    monkeypatch.setattr(sample_report, "source_files", lambda: iter(held))
    config = replace(small_config(), vocab_size=VOCABULARY)
    trainer = Trainer(config, small_settings(), small_stream(VOCABULARY))
    trainer.step()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = ReportSettings(windows=2, length=64, continuations=2, new_tokens=5)
    figures = write_sample(trainer, tmp_path, tmp_path / "out", docs=tmp_path / "docs", settings=settings)
    loaded_config, weights = load_weights(tmp_path / "out", Topology(), 0, FLOAT32)
    assert loaded_config == config
    stored = trainer.as_stored()
    assert all(torch.equal(weights[name], stored[name].detach()) for name in stored)
    assert abs(figures.loss_float - figures.loss_stored) < 0.5
    assert [len(c.ids) <= 5 and c.verdict in ("whole", "cut", "fault") for c in figures.continuations] == [True, True]
    assert sum(figures.originals.values()) == 2
    assert "held-out loss as stored" in (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "docs" / "sample_loss.csv").read_text().startswith("step,loss\n1,")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--minutes 0", "--minutes is 0.0, allowed: 0.01 to"),
        ("--minutes -3", "--minutes is -3.0, allowed"),
        ("--minutes nan", "--minutes is nan, allowed"),
        ("--threads 0", "--threads is 0, allowed: 1"),
        ("--log-every 0", "--log-every is 0, allowed: 1"),
        ("--ranks 2", "--ranks (world) is 2, but make-sample is one process"),
        ("--device cuda", "--device is cuda, but make-sample"),
        ("--numerics float64", "--numerics is float64, but make-sample"),
        ("--timeout 5", "--timeout is 5.0, but make-sample"),
        ("--docs docs", "without --output no loss curve is written"),
        ("--json no/such/folder/x", "--json is 'no/such/folder/x'"),
        ("--step 3", "unrecognized arguments: --step 3"),
    ],
)
def test_flags_that_are_refused(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(make_sample, "train", lambda *_: pytest.fail("training began"))
    assert make_sample.main(["--work", str(tmp_path / "work"), *given.split()]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err
    assert not (tmp_path / "work").exists()


def test_a_work_folder_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "work").write_text("")
    assert make_sample.main(["--work", str(tmp_path / "work")]) == 2
    assert "--work is" in capsys.readouterr().err


def test_a_run_keeps_its_seed(tmp_path: Path) -> None:
    make_sample.check_seed(tmp_path, 5)
    make_sample.check_seed(tmp_path, 6)
    (tmp_path / "state.safetensors").touch()
    make_sample.check_seed(tmp_path, 6)
    with pytest.raises(ValueError, match=r"--seed is 5, but the run in .* was begun with 6"):
        make_sample.check_seed(tmp_path, 5)


def test_flags_reach_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = {}

    def train(work: Path, settings: TrainSettings, log_every: int, out: object) -> SimpleNamespace:
        seen.update(settings=settings, log_every=log_every)
        print("progress", file=out)  # type: ignore[call-overload]
        return SimpleNamespace(step_number=2, seconds=1.5, progress=0.5, curve=[(1, 9.0), (2, 8.0)])

    monkeypatch.setattr(make_sample, "train", train)
    given = ["--work", str(tmp_path), "--minutes", "3", "--log-every", "7", "--seed", "9", "--threads", "1", "--json"]
    assert make_sample.main(given) == 0
    assert (seen["settings"], seen["log_every"]) == (TrainSettings(minutes=3.0, seed=9), 7)
    out = capsys.readouterr()
    expected = {"schema": 1, "step": 2, "seconds": 1.5, "progress": 0.5, "loss": 8.0, "written": False}
    assert json.loads(out.out) == expected and "progress" in out.err
    assert make_sample.parser().parse_args(["--work", "x"]).seed == TrainSettings.seed
