"""MtpDraft: the serving MTP layer's values, packed or whole; every parameter trains; what its config may be."""

from typing import Any

import pytest
import torch
from draft_scene import draft_weights
from draft_toys import V4, V4_MOE, toy_json
from mtp_scene import Anchor, Row, Scene, mtp_config, mtp_layer, streams_of, text_of
from naive_v4 import Weights
from test_draft_parity import _stacked

from meshspark.models.conversion.configs import draft_json
from meshspark.models.conversion.names import draft_tensors
from meshspark.models.conversion.variants import MTP, official_table
from meshspark.models.drafts.build import build_draft
from meshspark.models.drafts.config import DraftConfig
from meshspark.models.drafts.contract import resume_contract
from meshspark.models.drafts.draft import DSparkDraft
from meshspark.models.drafts.mtp import MtpDraft
from meshspark.models.drafts.presets import draft_preset
from meshspark.models.training.config import ObjectiveConfig
from meshspark.models.training.feature_spec import FeatureSpec, draft_features
from meshspark.models.training.objective import Objective, TargetTables
from meshspark.models.training.packing import DraftBatch
from meshspark.models.training.prepare import draft_batch, draft_reach
from meshspark.models.training.samples import FeatureShape, collate
from meshspark.models.v4.config import V4Config, flash
from meshspark.parallel.groups import Groups

WINDOW, REQUEST = 16, 3
ANCHORS = (1, 2, 9, 15, 16, 17, 18, 31, 40)
"""Below, at and above the window, whose last row is that before the anchor."""


def mtp_json(shape: V4Config) -> dict[str, Any]:
    return draft_json(MTP, shape, {}, "float32")


def trained(shape: V4Config, weights: Weights, backend: str = "auto") -> MtpDraft:
    """A draft in FP64 that holds copies of mtp.0.*."""
    draft = MtpDraft(DraftConfig.from_dict(mtp_json(shape)), backend).double()
    state = {}
    for name in draft.state_dict():
        head = {"mix_weight": "fn", "mix_bias": "base", "mix_scale": "scale"}.get(name.split(".")[-1])
        single = f"mtp.0.hc_head_{head}" if name.startswith("residual_readout.") else f"mtp.0.{name}"
        state[name] = (_stacked(name, weights) if name.startswith("layers.") else weights[single]).double().clone()
    draft.load_state_dict(state)
    return draft


def features_of(shape: V4Config, length: int) -> torch.Tensor:
    """[1, S, F] of a request."""
    return torch.stack([streams_of(shape, REQUEST, p).double().flatten() for p in range(length)])[None]


@pytest.mark.parametrize(("backend", "window"), [("native", WINDOW), ("eager", WINDOW), ("native", 1), ("eager", 2)])
@torch.no_grad()
def test_trained_layer_is_the_serving_one(backend: str, window: int) -> None:
    """Logits and ids of the drafts behind all anchors in one call, to 1e-10."""
    shape = mtp_config(window)
    weights = draft_weights(shape, "float64")
    draft = trained(shape, weights, backend)
    length, anchors = max(ANCHORS) + 3, torch.tensor([ANCHORS])
    tokens = weights["embed.weight"].double()[torch.tensor(text_of(REQUEST)[1 : length + 1])][None]
    out = draft(tokens, features_of(shape, length), anchors, torch.ones_like(anchors, dtype=torch.bool))
    logits = out.hidden_BQH[0] @ weights["head.weight"].double().T
    for number, anchor in enumerate(ANCHORS):
        scene = Scene(mtp_layer(Groups.single(), "float64", shape), seed=anchor, fresh=160)
        streams = scene.keep([[Row(REQUEST, 5, position) for position in range(anchor)]])
        got = scene.propose([Anchor(REQUEST, 5, anchor)], streams, [anchor - 1])
        assert got.logits is not None
        torch.testing.assert_close(logits[number], got.logits[0, 0], rtol=0, atol=1e-10)
        assert int(logits[number].argmax()) == int(got.ids[0, 0])


def sample_of(shape: V4Config, length: int, documents: list[int] | None = None) -> dict[str, torch.Tensor]:
    """A sample of a request whose first tokens are supervised too."""
    generator = torch.Generator().manual_seed(length)
    sample = {
        "input_ids": torch.tensor([text_of(REQUEST)[:length]]),
        "loss_mask": torch.ones(1, length, dtype=torch.bool),
        "hidden_states": features_of(shape, length),
        "target_last_hidden_states": torch.randn(1, length, shape.hidden_size, generator=generator).double(),
    }
    if documents is not None:
        sample["document_ids"] = torch.tensor([documents])
    return sample


def batch_of(shape: V4Config, samples: list[dict[str, torch.Tensor]], count: int, reach: int | None) -> DraftBatch:
    size = FeatureShape(shape.hc_mult * shape.hidden_size, shape.hidden_size, dtype=torch.float64)
    drawn = [torch.Generator().manual_seed(7 + number) for number in range(len(samples))]
    config = ObjectiveConfig(1, 0, num_anchors=count)
    return draft_batch(collate(samples, size), config, reach, drawn, torch.float64, led=True)


def objective_of(draft: MtpDraft, weights: Weights, **changes: Any) -> Objective:
    tables = TargetTables(*(weights[f"{name}.weight"].double() for name in ("embed", "head")))
    given = {"num_anchors": 8, "confidence_head_alpha": 0.0, "chunk_blocks": 3} | changes
    return Objective(draft, tables, ObjectiveConfig(1, 0, **given), reads_next=True)


def test_packed_windows_are_whole_sequences() -> None:
    """Loss and all gradients of two samples, one of two documents, as from every row up to the last anchor."""
    shape = mtp_config(5)
    weights, found = draft_weights(shape, "float64"), []
    samples = [sample_of(shape, 40), sample_of(shape, 23, [0] * 9 + [1] * 14)]
    for reach in (draft_reach(DraftConfig.from_dict(mtp_json(shape))), None):
        draft = trained(shape, weights)
        batch = batch_of(shape, samples, 8, reach)
        out = objective_of(draft, weights)(batch)
        out.loss.backward()
        found.append((batch, out, {name: p.grad for name, p in draft.named_parameters()}))
    (packed, loss, gradients), (whole, want, wanted) = found
    assert packed.features_DPF.shape[1] < whole.features_DPF.shape[1]
    torch.testing.assert_close(loss.loss, want.loss, rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-9, atol=1e-12, msg=name)


def test_what_is_learned_is_the_serving_layers_draft() -> None:
    """CE and L1 of a batch, summed by hand from the serving layer: label t[a + 1], teacher the head at a."""
    shape = mtp_config()
    weights, sample = draft_weights(shape, "float64"), sample_of(shape, 30)
    batch = batch_of(shape, [sample], 6, WINDOW)
    out = objective_of(trained(shape, weights), weights)(batch)
    head, ids = weights["head.weight"].double(), sample["input_ids"][0]
    total, anchors = 0.0, batch.blocks.positions[0, :, 0].tolist()
    assert len(set(anchors)) == 6
    for anchor in anchors:
        scene = Scene(mtp_layer(Groups.single(), "float64", shape), seed=anchor, fresh=160)
        streams = scene.keep([[Row(REQUEST, 5, position) for position in range(anchor)]])
        got = scene.propose([Anchor(REQUEST, 5, anchor)], streams, [anchor - 1])
        assert got.logits is not None
        p, q = (
            torch.softmax(got.logits[0, 0], 0),
            torch.softmax(sample["target_last_hidden_states"][0, anchor] @ head.T, 0),
        )
        total += float(-0.1 * p[ids[anchor + 1]].log() + 0.9 * (p - q).abs().sum())
    assert float(out.loss.detach()) == pytest.approx(total / 6, abs=1e-9)


def test_no_anchor_without_a_row_before_it() -> None:
    shape = mtp_config(5)
    sample = sample_of(shape, 12, [0] * 5 + [1] * 7)
    batch = batch_of(shape, [sample], 64, 5)
    positions = batch.blocks.positions[..., 0][batch.keep_DN]
    assert sorted(positions.tolist()) == [1, 2, 3, 6, 7, 8, 9, 10]
    assert int(batch.anchors_DN[batch.keep_DN].min()) == 1
    # Behind each packed row stands its next token, within its document.
    rows = batch.context_positions_DP >= 0
    assert torch.equal(batch.next_ids_DP[rows], sample["input_ids"][0][batch.context_positions_DP[rows] + 1])
    nothing = batch_of(shape, [], 4, 5)
    out = objective_of(trained(shape, draft_weights(shape, "float64")), draft_weights(shape, "float64"))(nothing)
    assert float(out.loss.detach()) == 0
    out.loss.backward()


def test_every_parameter_trains() -> None:
    """All of them move, the experts' bias by its rule alone, and the loss falls."""
    shape = mtp_config()
    weights = draft_weights(shape, "float64")
    torch.manual_seed(1)
    draft = MtpDraft(DraftConfig.from_dict(mtp_json(shape))).double()
    batch = batch_of(shape, [sample_of(shape, 60)], 32, WINDOW)
    objective, optimizer, losses = objective_of(draft, weights), torch.optim.AdamW(draft.parameters(), 3e-3), []
    before = {name: p.detach().clone() for name, p in draft.named_parameters()}
    for _ in range(6):
        optimizer.zero_grad()
        loss = objective(batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    dead = [name for name, p in draft.named_parameters() if torch.equal(p.detach(), before[name]) or p.grad is None]
    assert not dead and losses[-1] < losses[0]


def test_the_release_s_tensors() -> None:
    """On the meta device: names and shapes are those of the official mtp.0.* of Flash."""
    config = draft_preset("deepseek-v4-flash-mtp")
    assert DraftConfig.from_dict({**mtp_json(flash()), "dtype": "bfloat16"}) == config
    with torch.device("meta"):
        draft = build_draft(config)
    wanted = {tensor.name: tensor.shape for tensor in draft_tensors(official_table(MTP, flash()))}
    assert {name: tuple(t.shape) for name, t in draft.state_dict().items()} == wanted
    assert len(wanted) == 31 and isinstance(draft, MtpDraft)
    assert DraftConfig.from_dict(config.to_dict()) == config
    assert config.to_dict()["architectures"] == ["MtpDraftModel"]
    assert draft_features(config, True) == FeatureSpec((42,), "streams", 4096, 129280, streams=4)
    contract = resume_contract(config, "auto", dict.fromkeys(OBJECTIVE, 0))
    assert contract["projector_type"] == "mtp" and contract["sliding_window"] == 128


OBJECTIVE = ("num_anchors", "loss_decay_gamma", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")
TOY: dict[str, Any] = {
    **V4,
    **V4_MOE,
    "num_hidden_layers": 1,
    "block_size": 1,
    "intermediate_size": None,
    "layer_types": ["sliding_attention"],
    "sliding_window": 4,
    "draft_residual": {"kind": "mhc", "pre_from_prev": False},
}
TOY_DFLASH: dict[str, Any] = {
    "projector_type": "mtp",
    "target_layer_ids": [4],
    "attention_mode": "deepseek_v4",
    "markov_rank": 0,
}


@pytest.mark.parametrize(
    ("dflash", "keys", "said"),
    [
        ({}, {"block_size": 2}, "block_size is 2, allowed: 1, for projector_type is 'mtp'"),
        ({}, {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}, "num_hidden_layers is 2, allowed: 1"),
        ({}, {"layer_types": ["full_attention"], "sliding_window": None}, r"allowed: \['sliding_attention'\]"),
        ({"target_layer_ids": [3]}, {}, r"target_layer_ids is .*allowed: \[4\]"),
        ({"context_window": 4}, {}, "context_window is 4, allowed: None"),
        ({"markov_rank": 4}, {}, "markov_rank is 4, allowed: 0"),
        ({"enable_confidence_head": True}, {}, "enable_confidence_head is True, allowed: False"),
        ({"attention_mode": "deepseek_v41"}, {}, "attention_mode is 'deepseek_v41'"),
        ({}, {"draft_residual": {"kind": "mhc"}}, "pre_from_prev is True, allowed: False"),
        ({"mask_token_id": 3}, {}, "mask_token_id is 3, allowed: null, for an MTP layer has no masks"),
        ({"projector_type": "dflash", "mask_token_id": 39}, {}, "projector_type is 'dflash', allowed: 'dspark', 'mtp'"),
    ],
)
def test_configs_that_no_mtp_layer_has(dflash: dict[str, Any], keys: dict[str, Any], said: str) -> None:
    def made(more: dict[str, Any], changed: dict[str, Any]) -> DraftConfig:
        raw = toy_json({**TOY_DFLASH, **more}, **{**TOY, **changed})
        if "mask_token_id" not in more:
            del raw["dflash_config"]["mask_token_id"]
        return DraftConfig.from_dict(raw)

    config = made({}, {})
    with pytest.raises(ValueError, match="projector_type is 'mtp', allowed: 'dspark'"):
        DSparkDraft(config)
    with pytest.raises(ValueError, match="gradient checkpointing is not supported with MoE drafts"):
        MtpDraft(config).enable_recompute()
    with pytest.raises(ValueError, match=said):
        made(dflash, keys)


def test_recomputation_and_shapes() -> None:
    keys = {**TOY, **dict.fromkeys(V4_MOE), "intermediate_size": 24}
    raw = toy_json(TOY_DFLASH, **keys)
    del raw["dflash_config"]["mask_token_id"]
    torch.manual_seed(2)
    draft = MtpDraft(DraftConfig.from_dict(raw)).double()
    tokens, features = torch.randn(1, 9, 16).double(), torch.randn(1, 9, 64).double()
    anchors, found = torch.tensor([[2, 5, 9]]), []
    for _ in range(2):
        draft.zero_grad()
        draft(tokens, features, anchors, anchors > 0).hidden_BQH.square().sum().backward()
        found.append([p.grad for p in draft.parameters()])
        draft.enable_recompute()
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"features have shape \(1, 9, 48\), allowed: \(1, positions, 64\)"):
        draft(tokens, features[..., :48], anchors, anchors > 0)
    with pytest.raises(ValueError, match=r"next tokens have shape \(1, 8, 16\)"):
        draft(tokens[:, :8], features, anchors, anchors > 0)
    with pytest.raises(ValueError, match="projector_type is 'dspark', allowed: 'mtp'"):
        MtpDraft(DraftConfig.from_dict(toy_json()))
