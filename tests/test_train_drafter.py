"""train-drafter: on line as from files, stopped and resumed bit for bit, shipped as on the same ranks; refusals."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from drafter_run import train_command, write_scene
from safetensors.torch import load_file, save_file

from meshspark.launch import train_drafter, training
from meshspark.launch.flags import resolve
from meshspark.launch.training_flags import base_arguments, parser, prepare
from meshspark.launch.training_log import CURVES_NAME, LOG_NAME, TrainingLog, draw_curves, read_log
from meshspark.launch.worker import config_facts
from meshspark.models.drafts.config import DraftConfig
from meshspark.models.drafts.draft import DSparkDraft
from meshspark.models.drafts.presets import draft_preset
from meshspark.models.training.capture import Features
from meshspark.models.training.draft_files import check_draft_files, load_draft_files
from meshspark.models.training.feature_files import ShardWriter, plan_features, write_index
from meshspark.models.training.feature_spec import draft_features
from meshspark.models.training.order import DataOrder
from meshspark.models.training.token_files import TokenSample
from meshspark.parallel.topology import Topology

CONFIG = {
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_target_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "block_size": 3,
    "moe_preset": "deepseek_v4",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "dtype": "float32",
    "draft_residual": {"kind": "mhc", "pre_from_prev": False, "streams": 2, "sinkhorn_iters": 3, "eps": 1e-6},
    "dflash_config": {
        "target_layer_ids": [2, 3, 4],
        "mask_token_id": 262,
        "attention_mode": "deepseek_v4",
        "context_window": 8,
        "markov_rank": 4,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.001,
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, a draft's config, data, and the data's features."""
    folder = tmp_path_factory.mktemp("training")
    write_scene(folder, CONFIG)
    return folder


def _draft(out):
    return load_file(out / "draft" / "model-00001-of-00001.safetensors")


def _same(one, two):
    first, second = _draft(one), _draft(two)
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def _log(out):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(out / LOG_NAME)]


@pytest.fixture(scope="module")
def whole(place):
    """A run from files, without a break."""
    assert train_drafter.main(train_command(place, place / "whole")) == 0
    return place / "whole"


def test_a_run_leaves_a_log_a_state_and_a_draft(whole, place):
    lines = read_log(whole / LOG_NAME)
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and lines[-1]["samples"] == 8
    assert {"tau_greedy", "ce_loss", "accept_rate_2", "moe/step_balance", "gradient_norm"} <= lines[0].keys()
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (whole / CURVES_NAME).read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (whole / "states").iterdir()) == ["step-00000003", "step-00000004"]
    config = DraftConfig.from_dict(json.loads((whole / "draft" / "config.json").read_text()))
    assert config == DraftConfig.from_dict(CONFIG)
    check_draft_files(whole / "draft", config)
    draft = DSparkDraft(config)
    load_draft_files(whole / "draft", draft)
    assert all(torch.equal(tensor, _draft(whole)[name]) for name, tensor in draft.state_dict().items())
    fresh = DSparkDraft(config).state_dict()
    moved = [name for name, tensor in _draft(whole).items() if not torch.equal(tensor, fresh[name])]
    assert "layers.0.mlp.gate.expert_bias" in moved and "markov_head.markov_w2.weight" in moved


def test_on_line_is_as_from_files(whole, place):
    out = place / "online"
    assert train_drafter.main(train_command(place, out, source="data")) == 0
    assert _log(out) == _log(whole) and not _same(out, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_by_a_signal_goes_on_bit_for_bit(whole, place, number, monkeypatch, capsys):
    out = place / f"stopped{int(number)}"
    show = training.show_step

    def show_and_signal(line, steps, stream):
        show(line, steps, stream)
        if line["step"] == 2:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(training, "show_step", show_and_signal)
    with pytest.raises(SystemExit) as ended:
        train_drafter.main(train_command(place, out))
    assert ended.value.code == 128 + number
    assert "stopped behind step 2, state saved; --resume goes on" in capsys.readouterr().out
    assert not (out / "draft").exists() and (out / CURVES_NAME).exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    assert train_drafter.main(train_command(place, out)) == 2
    assert "holds a run; give --resume" in capsys.readouterr().err
    assert train_drafter.main(train_command(place, out, "--resume")) == 0
    assert "step 2 of 4" in capsys.readouterr().out
    assert _log(out) == _log(whole) and not _same(out, whole)


def test_steps_that_are_taken_again_are_logged_once(whole, place):
    """The run died behind step 4, the last state that is left is of step 3."""
    out = place / "died"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "states" / "step-00000004")
    with (out / LOG_NAME).open("a") as file:
        file.write('{"step": 5, "lo')
    assert train_drafter.main(train_command(place, out, "--resume")) == 0
    assert _log(out) == _log(whole) and not _same(out, whole)


@pytest.mark.parametrize(
    "more, said",
    [
        (["--lr", "0.02"], "learning_rate"),
        (["--seed", "1"], "seed"),
        (["--accumulate", "2"], "accumulate"),
        (["--anchors", "7"], "num_anchors"),
        (["--placement", "sharded"], "placement"),
        (["--steps", "5"], "steps"),
    ],
)
def test_a_resumed_run_names_what_differs(whole, place, more, said, capsys):
    assert train_drafter.main(train_command(place, whole, "--resume", *more)) == 1
    assert said in capsys.readouterr().err


def test_a_run_may_start_from_a_draft(whole, place):
    out = place / "started"
    more = ["--init", str(whole / "draft"), "--lr", "0", "--steps", "1"]
    assert train_drafter.main(train_command(place, out, *more)) == 0
    assert _same(out, whole) == ["layers.0.mlp.gate.expert_bias"]


def _job(groups, argv):
    args = parser().parse_args(argv)
    flags = resolve(base_arguments(args), groups.topology.world)
    train_drafter.run(groups, prepare(args, flags), flags)


def test_shipped_states_train_as_the_target_s_own_ranks(whole, place, ranks):
    """One rank trains, another one runs the target."""
    out = place / "shipped"
    argv = train_command(place, out, "--target-ranks", "1", source="data")
    ranks.run(Topology(2, 1, 2), "test_train_drafter:_job", timeout=150, argv=argv)
    assert _log(out) == _log(whole) and not _same(out, whole)


def test_two_ranks_of_a_tensor_group_train_as_one_rank(whole, place, ranks):
    """The same samples a step; the target's rows lie on both ranks, the draft's experts and weights are divided."""
    out = place / "two"
    argv = train_command(place, out, "--batch", "1", "--tp", "2", "--fsdp", "--draft-ep", "2", source="data")
    ranks.run(Topology(2, 2, 2), "test_train_drafter:_job", timeout=150, argv=argv)
    for mine, alone in zip(_log(out), _log(whole), strict=True):
        assert mine["samples"] == alone["samples"]
        assert mine["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert mine["tau_probabilistic"] == pytest.approx(alone["tau_probabilistic"], rel=1e-3)
    for name, tensor in _draft(out).items():
        torch.testing.assert_close(tensor, _draft(whole)[name], rtol=2e-2, atol=2e-3, msg=name)


@pytest.mark.slow
def test_a_target_of_two_ranks_ships_to_two_that_train(whole, place, ranks):
    """Rows of the target's tensor group lie on both of its ranks; each sends to the one drafter that it serves."""
    out = place / "shipped-by-two"
    more = ["--batch", "1", "--target-ranks", "2", "--tp", "2", "--draft-ep", "2"]
    argv = train_command(place, out, *more, source="data")
    ranks.run(Topology(4, 1, 4), "test_train_drafter:_job", timeout=250, argv=argv)
    for mine, alone in zip(_log(out), _log(whole), strict=True):
        assert mine["samples"] == alone["samples"]
        assert mine["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert mine["tau_probabilistic"] == pytest.approx(alone["tau_probabilistic"], rel=1e-3)


def test_a_resumed_run_of_another_config_names_the_key(whole, place, tmp_path, capsys):
    (tmp_path / "draft.json").write_text(json.dumps({**CONFIG, "rope_theta": 500.0}))
    assert train_drafter.main(train_command(place, whole, "--resume", "--config", str(tmp_path / "draft.json"))) == 1
    assert "rope_theta: saved 10000.0, now 500.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, said",
    [
        (["--data", "x"], "give --data DIR for a target"),
        (["--batch", "0"], "--batch is 0"),
        (["--lr", "nan"], "--lr is nan"),
        (["--numerics", "w8a8"], "do not train"),
        (["--recompute"], "not supported with MoE drafts"),
        (["--tp", "1"], "are the target's, which does not run with --features"),
        (["--target-ranks", "1"], "does not run with --features"),
        (["--draft-ep", "3"], "ep"),
        (["--ce", "0", "--l1", "0", "--confidence", "0"], "nothing would be learned"),
        (["--checkpoint", "x"], "there is no checkpoint"),
        (["--init", "x"], "no such folder"),
        (["--attention", "flash"], "flash"),
        (["--epochs", "2"], "not allowed with"),
    ],
)
def test_wrong_runs_are_refused_before_a_rank_starts(place, more, said, capsys, monkeypatch):
    monkeypatch.setattr(train_drafter, "run_job", lambda *a, **k: pytest.fail("a rank starts"))
    out = place / "refused"
    assert train_drafter.main(train_command(place, out, *more)) == 2
    assert said in capsys.readouterr().err and not out.exists()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"target_layer_ids": [2, 4, 3]}, r"layers is (2, 3, 4), the draft needs (2, 4, 3)"),
        ({"attention_mode": "deepseek_v41"}, "point is mean_out, the draft needs mean_in"),
    ],
)
def test_features_of_another_draft_are_refused(place, change, said, tmp_path, capsys):
    config = {**CONFIG, "dflash_config": {**CONFIG["dflash_config"], **change}}
    (tmp_path / "draft.json").write_text(json.dumps(config))
    command = train_command(place, tmp_path / "out", "--config", str(tmp_path / "draft.json"))
    assert train_drafter.main(command) == 2
    assert said in capsys.readouterr().err


def test_features_of_another_target_are_refused(place, tmp_path, capsys):
    shutil.copytree(place / "features", tmp_path / "features")
    index = tmp_path / "features" / "features.msgpack"
    index.write_bytes(msgpack.packb({**msgpack.unpackb(index.read_bytes()), "target": "other"}))
    assert train_drafter.main(train_command(place, tmp_path / "out", "--features", str(tmp_path / "features"))) == 2
    assert "its target's config.json has digest other" in capsys.readouterr().err


def _reduced_qwen():
    """The mixture draft for Qwen3-8B with every width small."""
    config = draft_preset("qwen3-8b-moe-dspark")
    small = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_target_layers": 12, "head_dim": 8}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "block_size": 3, "moe_intermediate_size": 16}
    dflash = replace(config.dflash, target_layer_ids=(1, 5, 9), mask_token_id=95, markov_rank=4)
    return replace(config, **small, layer_types=("full_attention",) * 2, dflash=dflash)


def test_a_draft_of_another_target_trains_from_features_and_its_tables(tmp_path):
    """Named as Qwen3's checkpoints name them; nothing else of the target is there."""
    config, draw = _reduced_qwen(), np.random.default_rng(1)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text('{"model_type": "qwen3"}')
    table = torch.randn(96, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    tables = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    save_file(tables, tmp_path / "target" / "model.safetensors")
    spec = draft_features(config, True)
    target = config_facts(tmp_path / "target")["config.json"]
    plan = plan_features(spec, [12, 9, 17], target=target, data="d")
    (tmp_path / "features").mkdir()
    writer = ShardWriter(tmp_path / "features", spec, plan.shards[0])
    for n in plan.shards[0].lengths:
        ids, states = draw.integers(0, 95, n).astype(np.int32), torch.randn(n, spec.width + 32).bfloat16()
        writer.add(TokenSample(ids, np.ones(n, np.uint8)), Features(states[:, : spec.width], states[:, spec.width :]))
    writer.close()
    write_index(tmp_path / "features", plan)
    (tmp_path / "draft.json").write_text(json.dumps(config.to_dict()))
    command = train_command(tmp_path, tmp_path / "out", "--steps", "6")
    assert train_drafter.main(command) == 0
    lines = read_log(tmp_path / "out" / LOG_NAME)
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[0]["moe/aux_loss"] > 0
    assert _draft(tmp_path / "out")["fc.weight"].dtype == torch.bfloat16
    (tmp_path / "draft.json").write_text(json.dumps(replace(config, vocab_size=97).to_dict()))
    assert train_drafter.main(command) == 2


def test_every_sample_comes_once_an_epoch_however_many_share_a_step():
    one, many = DataOrder(7, 1, batch=6, seed=3), DataOrder(7, 3, batch=1, accumulate=2, seed=3)
    for step in range(5):
        mine = one.micro_batch(step, 0, 0)
        theirs = [d for micro in range(2) for rank in range(3) for d in many.micro_batch(step, micro, rank)]
        assert mine == theirs
    draws = [d for step in range(7) for d in one.micro_batch(step, 0, 0)]
    for epoch in range(6):
        assert sorted(d.sample for d in draws if d.epoch == epoch) == list(range(7))
    orders = [[d.sample for d in draws if d.epoch == epoch] for epoch in range(6)]
    assert len(set(map(tuple, orders))) == 6
    # Asked again, and out of order, it is the same.
    assert one.micro_batch(0, 0, 0) == draws[:6]
    assert DataOrder(7, 1, 6, seed=4).micro_batch(0, 0, 0) != draws[:6]
    with pytest.raises(ValueError, match="batch is 0"):
        DataOrder(7, 1, 0)


def test_logs(tmp_path):
    log = TrainingLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.add({"step": step, "loss": 2.0 / step, "tau_greedy": float("nan"), "accept_rate_0": 0.5})
    log.close()
    assert read_log(tmp_path / LOG_NAME)[2] == {"step": 3, "loss": 2 / 3, "tau_greedy": None, "accept_rate_0": 0.5}
    assert draw_curves(log.lines, tmp_path) == tmp_path / CURVES_NAME and draw_curves([], tmp_path) is None
    assert [line["step"] for line in TrainingLog(tmp_path, 2).lines] == [1, 2]
    (tmp_path / LOG_NAME).write_text('{"step": 1}\n{"stop": 2}\n')
    with pytest.raises(ValueError, match=r"log.jsonl:2: is no line of a training log"):
        read_log(tmp_path / LOG_NAME)
    assert Path(tmp_path / LOG_NAME).exists()
