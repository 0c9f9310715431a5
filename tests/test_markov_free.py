"""A draft without a Markov head in the official form: zeros, and the drafts of a naive drafter without one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from naive_dspark import naive_context, naive_draft
from naive_v4 import naive_forward
from official_drafters import VARIANT_NAMES, official_json, same_bytes, stored_tensors, write_official
from safetensors.torch import save_file

from meshspark.launch import cli
from meshspark.models.checkpoint.loader import load_weights
from meshspark.models.checkpoint.reader import CheckpointError
from meshspark.models.checkpoint.synthetic import synthesize
from meshspark.models.conversion.attaching import attach_dspark
from meshspark.models.conversion.exporting import export_dspark
from meshspark.models.conversion.importing import import_dspark
from meshspark.models.conversion.loading import load_dspark
from meshspark.models.conversion.variants import VARIANTS
from meshspark.models.drafts.config import DraftConfig
from meshspark.models.drafts.draft import DSparkDraft
from meshspark.models.dspark.proposer import DSparkProposer
from meshspark.models.numerics import FLOAT64
from meshspark.models.v4.config import V4Config, tiny, tiny_dspark
from meshspark.parallel.topology import Topology

HEADS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
CONFIDENCE = "confidence_head.proj.weight"


def without_markov(draft: Path) -> Path:
    """The draft without its Markov head, in place."""
    path = draft / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"] |= {"markov_rank": 0, "confidence_head_with_markov": False}
    path.write_text(json.dumps(config))
    kept = {name: t for name, t in stored_tensors(draft).items() if name not in HEADS}
    kept[CONFIDENCE] = kept[CONFIDENCE][:, : config["hidden_size"]].clone()
    for old in draft.glob("*.safetensors"):
        old.unlink()
    save_file(kept, draft / "model.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(kept, "model.safetensors")}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    return draft


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, whole (a drafting checkpoint), draft (its drafter without the Markov head), out (target and draft)."""
    root = tmp_path_factory.mktemp("markov_free")
    synthesize(root / "target", tiny(), 3)
    synthesize(root / "whole", tiny_dspark(), 4)
    import_dspark(root / "whole", root / "draft", VARIANTS["v4"])
    done = attach_dspark(root / "target", without_markov(root / "draft"), root / "out")
    assert done.notes == (
        "the draft has no Markov head, so these are zeros: "
        "mtp.2.markov_head.markov_w1.weight, mtp.2.markov_head.markov_w2.weight",
    )
    return root


def test_zeros_beside_what_the_draft_has(made: Path) -> None:
    config, whole, out = (f(made / name) for f, name in ((_config, "out"), (stored_tensors, "whole"), (_mtp, "out")))
    assert config.dspark is not None and config.dspark.markov_rank == 1
    wide = config.hidden_size + 1
    for name, tensor in out.items():
        if ".markov_head." in name:
            assert tensor.shape == (config.vocab_size, 1) and tensor.dtype == torch.bfloat16 and not tensor.any()
        elif name.endswith(CONFIDENCE):
            assert tensor.shape == (1, wide) and not tensor[:, -1:].any()
            assert torch.equal(tensor[:, :-1], whole[name][:, : config.hidden_size]) and tensor.any()
        else:
            assert same_bytes(tensor, whole[name]), name


def _config(folder: Path) -> V4Config:
    return load_weights(folder, Topology(1, 1, 1), 0, FLOAT64)[0]


def _mtp(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for name, each in stored_tensors(folder).items() if name.startswith("mtp.")}


@torch.no_grad()
def test_generate_drafts_as_a_naive_drafter_without_a_markov_term(made: Path, tmp_path: Path, monkeypatch) -> None:
    """Every block of a run in FP64: ids of the target's head on the readouts, confidences of the readouts alone."""
    seen: list[tuple[int, list[int], list[float]]] = []
    propose = DSparkProposer.propose

    def noted(self: DSparkProposer, anchors: Any, *args: Any, **kwargs: Any) -> Any:
        got = propose(self, anchors, *args, **kwargs)
        for number, block in enumerate(anchors.blocks):
            seen.append((block.position, got.ids[number].tolist(), got.confidence[number].tolist()))
        return got

    monkeypatch.setattr(DSparkProposer, "propose", noted)
    argv = ["generate", "--checkpoint", str(made / "out"), "--numerics", "float64", "--prompt", "def f(x):"]
    argv += ["--max-new-tokens", "5", "--ignore-eos", "--speculative", "dspark", "--json", str(tmp_path / "told.json")]
    assert cli.main(argv) == 0
    told = json.loads((tmp_path / "told.json").read_text())["requests"][0]
    assert len(told["output_ids"]) == 5 and len(seen) > 2
    config, weights = load_weights(made / "out", Topology(1, 1, 1), 0, FLOAT64, draft=True)
    assert config.dspark is not None
    text = told["prompt_ids"] + told["output_ids"]
    streams = naive_forward(config, dict(weights), text).streams
    taps = torch.cat([streams[layer].mean(1) for layer in config.dspark.target_layer_ids], dim=1)
    context = naive_context(config, weights, taps)
    w = weights[f"mtp.2.{CONFIDENCE}"].double()[0, : config.hidden_size]
    for position, ids, confidence in seen:
        naive = naive_draft(config, dict(weights), context[:, :position], text[position], 5, 5)
        assert ids == naive.base.argmax(1).tolist()
        torch.testing.assert_close(torch.tensor(confidence, dtype=torch.float64), naive.readout @ w, rtol=0, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_export_in_the_official_config_s_rank(tmp_path: Path, variant: str) -> None:
    """Zeros of the rank that the config names; what is read from our folder has no Markov head."""
    write_official(tmp_path / "official", variant)
    import_dspark(tmp_path / "official", tmp_path / "draft", VARIANTS[variant])
    loaded = load_dspark(without_markov(tmp_path / "draft"))
    draft = DSparkDraft(DraftConfig.from_dict(loaded.config))
    assert draft.markov_head is None and draft.load_state_dict(dict(loaded.tensors), strict=True)
    export_dspark(tmp_path / "draft", tmp_path / "out", VARIANTS[variant])
    out, rank = _mtp(tmp_path / "out"), official_json(variant)["dspark_markov_rank"]
    tables = [out[name] for name in out if ".markov_head." in name]
    assert len(tables) == 2 and all(table.shape == (264, rank) and not table.any() for table in tables)
    (confidence,) = (tensor for name, tensor in out.items() if name.endswith(CONFIDENCE))
    assert confidence.shape == (1, 160 + rank) and not confidence[:, 160:].any() and confidence[:, :160].all()


def test_a_confidence_of_a_markov_head_that_is_not_there(tmp_path: Path) -> None:
    write_official(tmp_path / "official", "v4")
    import_dspark(tmp_path / "official", tmp_path / "draft", VARIANTS["v4"])
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    config["dflash_config"]["markov_rank"] = 0
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="confidence_head_with_markov is True, allowed: False"):
        export_dspark(tmp_path / "draft", tmp_path / "out", VARIANTS["v4"])
