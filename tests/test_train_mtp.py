"""The plain MTP layer from its config to drafts: on line as from files, resumed, over ranks, attached, served."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_run import train_command, write_scene
from naive_v4 import naive_forward
from official_drafters import same_bytes, stored_tensors

from meshspark.launch import cli, train_drafter
from meshspark.launch.training_log import LOG_NAME, read_log
from meshspark.models.checkpoint.loader import load_weights
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.checkpoint.verify import open_checkpoint
from meshspark.models.conversion.attaching import attach_dspark
from meshspark.models.conversion.configs import draft_json
from meshspark.models.conversion.exporting import export_dspark
from meshspark.models.conversion.importing import import_dspark
from meshspark.models.conversion.loading import load_dspark
from meshspark.models.conversion.variants import MTP, VARIANTS
from meshspark.models.drafts.build import build_draft
from meshspark.models.drafts.config import DraftConfig
from meshspark.models.numerics import FLOAT64
from meshspark.models.training.feature_files import FeatureFiles
from meshspark.models.v4.config import tiny, tiny_dspark, tiny_mtp
from meshspark.parallel.topology import Topology


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, the layer's config draft.json, data, and the data's features."""
    folder = tmp_path_factory.mktemp("mtp")
    config = draft_json(MTP, replace(tiny_mtp(), sliding_window=tiny().sliding_window), {}, "float32")
    config["dflash_config"]["moe_router_bias_update_rate"] = 0.001
    write_scene(folder, config)
    return folder


def _log(out: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(out / LOG_NAME)]


def _same(one: Path, two: Path) -> list[str]:
    first, second = (stored_tensors(each / "draft") for each in (one, two))
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run from files, without a break."""
    assert train_drafter.main(train_command(place, place / "whole")) == 0
    return place / "whole"


def test_a_run_trains_every_parameter(place: Path, whole: Path) -> None:
    lines = read_log(whole / LOG_NAME)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {"tau_greedy", "ce_loss", "l1_loss", "accept_rate_0", "moe/step_balance"} <= lines[0].keys()
    assert "confidence_loss" not in lines[0] and "accept_rate_1" not in lines[0]
    config = DraftConfig.from_dict(json.loads((whole / "draft" / "config.json").read_text()))
    assert config == DraftConfig.from_dict(json.loads((place / "draft.json").read_text())) and config.is_mtp
    torch.manual_seed(0)
    fresh = build_draft(config).state_dict()
    assert [name for name, t in stored_tensors(whole / "draft").items() if torch.equal(t, fresh[name])] == []


def test_the_loss_falls(place: Path) -> None:
    """All samples and all anchors in every step."""
    more = ["--batch", "5", "--anchors", "64", "--steps", "12"]
    assert train_drafter.main(train_command(place, place / "falls", *more)) == 0
    lines = read_log(place / "falls" / LOG_NAME)
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"] and lines[-1]["ce_loss"] < 0.9 * lines[0]["ce_loss"]


def test_features_are_the_last_streams(place: Path) -> None:
    files, shape = FeatureFiles(place / "features"), tiny()
    spec = files.spec
    assert (spec.layers, spec.point, spec.streams) == ((shape.num_hidden_layers - 1,), "streams", shape.hc_mult)
    tokens = files[0]["input_ids"][0].tolist()
    config, weights = load_weights(place / "target", Topology(1, 1, 1), 0, FLOAT64)
    streams = naive_forward(config, dict(weights), tokens).streams[-1].flatten(1)
    assert files[0]["hidden_states"].shape == (1, 18, shape.hc_mult * shape.hidden_size)
    torch.testing.assert_close(files[0]["hidden_states"][0].double(), streams, rtol=1e-2, atol=1e-3)


def test_on_line_and_resumed_as_from_files(place: Path, whole: Path) -> None:
    assert train_drafter.main(train_command(place, place / "online", source="data")) == 0
    assert _log(place / "online") == _log(whole) and not _same(place / "online", whole)
    shutil.copytree(whole, place / "resumed")
    shutil.rmtree(place / "resumed" / "states" / "step-00000004")
    assert train_drafter.main(train_command(place, place / "resumed", "--resume")) == 0
    assert _log(place / "resumed") == _log(whole) and not _same(place / "resumed", whole)


@pytest.mark.slow
def test_ranks_of_the_target_ship_streams(place: Path, whole: Path, ranks) -> None:
    argv = train_command(place, place / "shipped", "--target-ranks", "1", source="data")
    ranks.run(Topology(2, 1, 2), "test_train_drafter:_job", timeout=150, argv=argv)
    assert _log(place / "shipped") == _log(whole) and not _same(place / "shipped", whole)


def test_two_ranks_fully_sharded_train_as_one(place: Path, whole: Path, ranks) -> None:
    argv = train_command(place, place / "two", "--batch", "1", "--tp", "2", "--fsdp", "--draft-ep", "2", source="data")
    ranks.run(Topology(2, 2, 2), "test_train_drafter:_job", timeout=150, argv=argv)
    for mine, alone in zip(_log(place / "two"), _log(whole), strict=True):
        assert mine["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    for name, tensor in stored_tensors(place / "two" / "draft").items():
        torch.testing.assert_close(tensor, stored_tensors(whole / "draft")[name], rtol=2e-2, atol=2e-3, msg=name)


def test_a_trained_layer_is_attached_and_drafts(place: Path, whole: Path, tmp_path: Path, capsys) -> None:
    """generate writes with it what the target writes; back in our form its values are what the official form holds."""
    out = tmp_path / "out"
    places = ["--checkpoint", str(place / "target"), str(whole / "draft"), str(out)]
    assert cli.main(["convert", "dspark", "attach", *places]) == 2
    assert "is a draft of kind mtp, allowed: v4" in capsys.readouterr().err
    assert cli.main(["convert", "mtp", "attach", *places, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["variant"] == "mtp" and "rounded to what official holds" in told["notes"][0]
    config = open_checkpoint(out).config
    assert config.drafter == "mtp" and config.draft_ratios == (0,)
    found = []
    for folder, more in ((place / "target", []), (out, ["--speculative", "mtp"])):
        argv = ["generate", "--checkpoint", str(folder), "--prompt", "def f(x):", "--max-new-tokens", "9", *more]
        assert cli.main([*argv, "--json", str(tmp_path / "ids.json")]) == 0
        found.append(json.loads((tmp_path / "ids.json").read_text())["requests"][0]["output_ids"])
    assert found[0] == found[1]
    import_dspark(out, tmp_path / "again", MTP, dtype="float32")
    trained, again = (stored_tensors(each) for each in (whole / "draft", tmp_path / "again"))
    assert trained.keys() == again.keys()
    for name, tensor in again.items():
        assert (tensor - trained[name]).abs().max() <= 0.3 * trained[name].abs().max(), name
    torch.testing.assert_close(again["enorm.weight"], trained["enorm.weight"], rtol=1e-2, atol=0)
    assert load_dspark(out).tensors.keys() == again.keys()


def test_official_layers_come_and_go(tmp_path: Path, capsys) -> None:
    """A release's mtp.0.*: imported, a draft of ours takes it, exported byte for byte; another kind is refused."""
    synthesize(tmp_path / "official", tiny_mtp(), 4)
    argv = [str(tmp_path / "official"), str(tmp_path / "draft")]
    assert cli.main(["convert", "mtp", "import", *argv, "--keep-scales"]) == 0
    loaded = load_dspark(tmp_path / "draft")
    draft = build_draft(DraftConfig.from_dict(loaded.config))
    draft.load_state_dict(dict(loaded.tensors), strict=True)
    argv = [str(tmp_path / "draft"), str(tmp_path / "out")]
    assert cli.main(["convert", "mtp", "export", *argv, "--format", "official", "--keep-scales"]) == 0
    official, out = (stored_tensors(tmp_path / name) for name in ("official", "out"))
    drafter = {name: tensor for name, tensor in official.items() if name.startswith("mtp.")}
    assert out.keys() == drafter.keys() and all(same_bytes(tensor, drafter[name]) for name, tensor in out.items())
    export_dspark(tmp_path / "draft", tmp_path / "plain", MTP)
    plain, config = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("plain", "official"))
    assert plain.keys() == config.keys() - {"quantization_config", "expert_dtype"}
    assert plain["architectures"] == config["architectures"], "no DSpark drafter's"
    capsys.readouterr()
    argv = [str(tmp_path / "official"), str(tmp_path / "no")]
    assert cli.main(["convert", "dspark", "import", "--variant", "v4", *argv]) == 2
    assert "mtp.* is a plain MTP layer by its tensors" in capsys.readouterr().err
    synthesize(tmp_path / "dspark", tiny_dspark(), 4)
    assert cli.main(["convert", "mtp", "import", str(tmp_path / "dspark"), str(tmp_path / "no")]) == 2
    assert "mtp.* is a DSpark drafter by its tensors" in capsys.readouterr().err
    import_dspark(tmp_path / "dspark", tmp_path / "other", VARIANTS["v4"])
    synthesize(tmp_path / "target", tiny(), 3)
    with pytest.raises(ValueError, match="is a draft of kind v4, allowed: mtp"):
        attach_dspark(tmp_path / "target", tmp_path / "other", tmp_path / "no", MTP)
    with pytest.raises(ValueError, match="variant is v41, allowed: v4 or mtp"):
        attach_dspark(tmp_path / "target", tmp_path / "other", tmp_path / "no", VARIANTS["v41"])
    assert not (tmp_path / "no").exists()


def test_what_does_not_fit_is_refused_before_a_rank_starts(place: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(train_drafter, "run_job", lambda *a, **k: pytest.fail("a rank starts"))
    config = json.loads((place / "draft.json").read_text())
    cases = (
        ({"num_target_layers": 4, "target_layer_ids": [3]}, "features", "layers is (4,), the draft needs (3,)"),
        ({"num_target_layers": 4, "target_layer_ids": [3]}, "data", "layers is [3], allowed at point 'streams': 4"),
        ({"streams": 2}, "features", "streams is 4, the draft needs 2"),
        ({"streams": 2}, "data", "streams is 2, but the target's is 4"),
    )
    for change, source, said in cases:
        changed = {key: change.get(key, value) for key, value in config.items()}
        changed["dflash_config"] = {key: change.get(key, each) for key, each in config["dflash_config"].items()}
        changed["draft_residual"] = {key: change.get(key, each) for key, each in config["draft_residual"].items()}
        (tmp_path / "draft.json").write_text(json.dumps(changed))
        command = train_command(place, tmp_path / "out", "--config", str(tmp_path / "draft.json"), source=source)
        assert train_drafter.main(command) == 2
        assert said in capsys.readouterr().err
    assert train_drafter.main(train_command(place, tmp_path / "out", "--confidence", "1")) == 2
    assert "the draft has no confidence head; allowed: 0" in capsys.readouterr().err
