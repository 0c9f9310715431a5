"""The draft as a whole: full-size names on the meta device, training of every parameter, recomputation, casts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from draft_toys import KINDS, kind_config, toy_config
from safetensors.torch import load_file, save_file
from torch import nn

from meshspark.models.drafts.cache import ContextCache
from meshspark.models.drafts.config import DraftConfig
from meshspark.models.drafts.draft import DraftOutput, DSparkDraft
from meshspark.models.drafts.layer import DraftLayer
from meshspark.models.drafts.presets import draft_preset
from meshspark.models.moe.layer import MoELayer

Sample = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
DENSE_KINDS = ("gqa-standard-dense", "mla-mhc-dense", "gqa-mhc-own-pre")


def made(config: DraftConfig, dtype: torch.dtype = torch.float64) -> DSparkDraft:
    """A draft whose parameters and biases are all random, so that nothing is neutral."""
    draft = DSparkDraft(config).to(dtype)
    generator = torch.Generator().manual_seed(7)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data += (0.3 * noise).to(parameter.dtype)
    return draft


def sample_of(config: DraftConfig, dtype: torch.dtype = torch.float64) -> Sample:
    """Noise, features of 9 positions, anchors (the last block of sample 1 is padding), keep."""
    generator = torch.Generator().manual_seed(8)
    anchors = torch.tensor([[2, 6, 8], [1, 9, 0]])
    keep = torch.tensor([[True, True, True], [True, True, False]])
    noise = torch.randn(2, 3 * config.block_size, config.hidden_size, generator=generator, dtype=torch.float64)
    features = torch.randn(2, 9, config.feature_width, generator=generator, dtype=torch.float64)
    return noise.to(dtype), features.to(dtype), anchors, keep


def simple_loss(draft: DSparkDraft, sample: Sample) -> torch.Tensor:
    """Cross entropy of corrected logits, and of confidences, over kept blocks."""
    config = draft.config
    generator = torch.Generator().manual_seed(9)
    shape = (*sample[2].shape, config.block_size)
    previous = torch.randint(config.vocab_size, shape, generator=generator)
    labels = torch.randint(config.vocab_size, shape, generator=generator)
    head = torch.randn(config.vocab_size, config.hidden_size, generator=generator, dtype=torch.float64)
    out = draft(*sample)
    hidden, readout = (part.view(*shape, -1) for part in out)
    assert draft.markov_head is not None and draft.confidence_head is not None
    logits = hidden @ head.to(hidden.dtype).T + draft.markov_head(previous, hidden)
    sure = draft.confidence_head(hidden, readout, draft.markov_head.embedding(previous))
    keep = sample[3]
    loss = F.cross_entropy(logits[keep].flatten(0, 1), labels[keep].flatten())
    return loss + F.binary_cross_entropy_with_logits(sure[keep], (labels[keep] % 2).to(sure.dtype))


def gradients(draft: DSparkDraft, sample: Sample) -> dict[str, torch.Tensor | None]:
    draft.zero_grad()
    simple_loss(draft, sample).backward()
    return {name: parameter.grad for name, parameter in draft.named_parameters()}


# Names, shapes and counts.


def official(config: DraftConfig, v4: bool) -> dict[str, tuple[int, ...]]:
    """Logical shapes of the release's mtp.* without scales and bias_vl, by training.md 8.2."""
    H, E, I = config.hidden_size, config.n_routed_experts or 0, config.moe_intermediate_size or 0
    q, heads, d = config.q_lora_rank or 0, config.num_attention_heads, config.head_dim
    groups, o, n = config.o_groups or 0, config.o_lora_rank or 0, 4
    table: dict[str, tuple[int, ...]] = {}
    for s in range(3):
        stage = {
            "attn.wq_a.weight": (q, H),
            "attn.q_norm.weight": (q,),
            "attn.wq_b.weight": (heads * d, q),
            "attn.wkv.weight": (d, H),
            "attn.kv_norm.weight": (d,),
            "attn.wo_a.weight": (groups * o, heads * d // groups),
            "attn.wo_b.weight": (H, groups * o),
            "attn.attn_sink": (heads,),
            "attn_norm.weight": (H,),
            "ffn_norm.weight": (H,),
            "ffn.gate.weight": (E, H),
            "ffn.gate.bias": (E,),
            "ffn.shared_experts.w1.weight": (I, H),
            "ffn.shared_experts.w3.weight": (I, H),
            "ffn.shared_experts.w2.weight": (H, I),
        }
        for e in range(E):
            sizes = {"w1": (I, H), "w3": (I, H), "w2": (H, I)}
            stage |= {f"ffn.experts.{e}.{w}.weight": size for w, size in sizes.items()}
        for place in ("attn", "ffn"):
            stage |= {f"hc_{place}_fn": (24, n * H), f"hc_{place}_base": (24,), f"hc_{place}_scale": (3,)}
        table |= {f"mtp.{s}.{name}": shape for name, shape in stage.items()}
    table |= {"mtp.0.main_proj.weight": (H, 3 * H), "mtp.0.main_norm.weight": (H,), "mtp.2.norm.weight": (H,)}
    if v4:
        table |= {"mtp.2.hc_head_fn": (n, n * H), "mtp.2.hc_head_base": (n,), "mtp.2.hc_head_scale": (1,)}
    pair = ("markov_w1.weight", "markov_w2.weight") if v4 else ("embed.weight", "head.weight")
    table |= {f"mtp.2.markov_head.{name}": (129280, 256) for name in pair}
    table["mtp.2.confidence_head.proj.weight"] = (1, H + 256)
    return table


OURS = {
    "attn.wq_a.": "self_attn.q_a_proj.",
    "attn.q_norm.": "self_attn.q_a_norm.",
    "attn.wq_b.": "self_attn.q_b_proj.",
    "attn.wkv.": "self_attn.kv_proj.",
    "attn.kv_norm.": "self_attn.kv_norm.",
    "attn.wo_a.": "self_attn.o_a_proj.",
    "attn.wo_b.": "self_attn.o_b_proj.",
    "attn.attn_sink": "self_attn.sinks",
    "attn_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.expert_bias",
    "ffn.shared_experts.w1.": "mlp.shared_experts.gate_proj.",
    "ffn.shared_experts.w3.": "mlp.shared_experts.up_proj.",
    "ffn.shared_experts.w2.": "mlp.shared_experts.down_proj.",
    "hc_attn_fn": "attn_residual.mix_weight",
    "hc_attn_base": "attn_residual.mix_bias",
    "hc_attn_scale": "attn_residual.mix_scale",
    "hc_ffn_fn": "ffn_residual.mix_weight",
    "hc_ffn_base": "ffn_residual.mix_bias",
    "hc_ffn_scale": "ffn_residual.mix_scale",
    "main_proj.": "fc.",
    "main_norm.": "hidden_norm.",
    "hc_head_fn": "residual_readout.mix_weight",
    "hc_head_base": "residual_readout.mix_bias",
    "hc_head_scale": "residual_readout.mix_scale",
    "markov_head.embed.": "markov_head.markov_w1.",
    "markov_head.head.": "markov_head.markov_w2.",
}


def expected(table: dict[str, tuple[int, ...]], experts: int) -> dict[str, tuple[int, ...]]:
    """Our names and shapes of an official table: experts stacked, the gate's rows above the up projection's."""
    ours: dict[str, tuple[int, ...]] = {}
    for name, shape in table.items():
        _, stage, rest = name.split(".", 2)
        if rest.startswith("ffn.experts."):
            w = rest.split(".")[3]
            stacked = (experts, 2 * shape[0], shape[1]) if w == "w1" else (experts, *shape)
            if w != "w3":
                leaf = "gate_up_proj" if w == "w1" else "down_proj"
                ours[f"layers.{stage}.mlp.experts.{leaf}"] = stacked
            continue
        renamed = next((mine + rest.removeprefix(old) for old, mine in OURS.items() if rest.startswith(old)), rest)
        inner = ("self_attn", "mlp", "attn_residual", "ffn_residual", "input_layernorm", "post_attention_layernorm")
        ours[f"layers.{stage}.{renamed}" if renamed.startswith(inner) else renamed] = shape
    return ours


@pytest.mark.parametrize(
    ("name", "tensors", "elements", "weights"),
    [
        ("deepseek-v4-flash-dspark", 78, 19_845_850_983, 2376),
        ("deepseek-v4.1-flash-dspark", 75, 14_225_362_146, 1221),
    ],
)
def test_full_size_names_and_shapes_are_the_releases(name: str, tensors: int, elements: int, weights: int) -> None:
    config = draft_preset(name)
    with torch.device("meta"):
        draft = DSparkDraft(config)
    held = {key: tuple(value.shape) for key, value in draft.state_dict().items()}
    table = official(config, v4=tensors == 78)
    assert len(table) == weights
    assert held == expected(table, config.n_routed_experts or 0)
    assert len(held) == tensors
    assert sum(value.numel() for value in draft.state_dict().values()) == elements
    assert sum(torch.Size(shape).numel() for shape in table.values()) == elements
    kept = {key for key, value in draft.bfloat16().state_dict().items() if value.dtype == torch.float32}
    assert kept == {key for key in held if "mix_" in key or key.endswith(("sinks", "expert_bias"))}


def test_qwen3_moe_draft_on_the_meta_device() -> None:
    with torch.device("meta"):
        draft = DSparkDraft(draft_preset("qwen3-8b-moe-dspark"))
    held = {key: tuple(value.shape) for key, value in draft.state_dict().items()}
    assert held["layers.4.mlp.experts.gate_up_proj"] == (8, 3072, 4096)
    assert held["layers.4.self_attn.k_proj.weight"] == (1024, 4096)
    assert held["fc.weight"] == (4096, 5 * 4096) and held["confidence_head.proj.bias"] == (1,)
    assert sum(isinstance(module, MoELayer) for module in draft.modules()) == 5


# Training.


@pytest.mark.parametrize("name", KINDS)
def test_every_parameter_trains(name: str) -> None:
    config = kind_config(name)
    draft = made(config)
    found = gradients(draft, sample_of(config))
    dead = [key for key, grad in found.items() if grad is None or not grad.any() or not grad.isfinite().all()]
    assert not dead
    before = simple_loss(draft, sample_of(config)).item()
    optimizer = torch.optim.SGD(draft.parameters(), 0.01)
    optimizer.step()
    assert simple_loss(draft, sample_of(config)).item() < before


def test_small_qwen3_moe_draft_trains_every_parameter() -> None:
    """One expert of eight: the router's weight has no gradient but that of the auxiliary loss."""
    full = draft_preset("qwen3-8b-moe-dspark")
    small = {"vocab_size": 40, "hidden_size": 16, "num_target_layers": 36, "head_dim": 4, "moe_intermediate_size": 6}
    raw = full.to_dict() | small
    raw["dflash_config"] |= {"mask_token_id": 39, "markov_rank": 4}
    config = DraftConfig.from_dict(raw)
    draft = made(config)
    layers = [module for module in draft.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        layer.aux = lambda scores, indices, mask: (scores.mean(0) * torch.arange(8)).sum()
    simple_loss(draft, sample_of(config)).backward()
    routers = [name for name, p in draft.named_parameters() if name.endswith("mlp.gate.weight")]
    assert len(routers) == 5
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and (parameter.grad.abs().max() < 1e-12) == (name in routers), name
    draft.zero_grad()
    loss = simple_loss(draft, sample_of(config))
    for layer in layers:
        assert layer.aux_loss is not None
        loss = loss + layer.aux_loss_coef * layer.aux_loss
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 1e-12 for p in draft.parameters())


def test_fresh_draft_adds_no_markov_term_and_is_drawn_by_the_config() -> None:
    torch.manual_seed(0)
    draft = DSparkDraft(replace(kind_config("v4"), initializer_range=0.5))
    assert draft.markov_head is not None and not draft.markov_head.markov_w2.weight.any()
    assert 0.4 < draft.fc.weight.std() < 0.6
    assert 0.4 < draft.state_dict()["layers.1.attn_residual.mix_weight"].std() < 0.6
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.fill_(7)
    draft.reset_parameters()
    assert not [name for name, p in draft.named_parameters() if (p == 7).any()]


@pytest.mark.parametrize("name", DENSE_KINDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_gives_the_same_gradients(name: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = kind_config(name)
    draft, sample = made(config), sample_of(config)
    if reentrant and config.residual.kind != "standard":
        with pytest.raises(ValueError, match=r"reentrant is True, allowed: False, for draft_residual\.kind is 'mhc'"):
            draft.enable_recompute(reentrant=True)
        return
    want = gradients(draft, sample)
    calls = 0
    forward = DraftLayer.forward

    def counted(self: DraftLayer, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(self, *args)

    monkeypatch.setattr(DraftLayer, "forward", counted)
    draft.enable_recompute(reentrant=reentrant)
    got = gradients(draft, sample)
    assert calls == 2 * config.num_hidden_layers
    for key, grad in want.items():
        # The reentrant form adds the layers' gradients of the context in another order.
        torch.testing.assert_close(got[key], grad, rtol=1e-9 if reentrant else 0, atol=1e-12 if reentrant else 0)


def test_recomputation_is_refused_for_mixtures() -> None:
    for name in ("v4", "mha-gr-mixed"):
        with pytest.raises(ValueError, match="gradient checkpointing is not supported with MoE drafts"):
            DSparkDraft(kind_config(name)).enable_recompute()


# Blocks, samples and masks.


@pytest.mark.parametrize("name", KINDS)
def test_blocks_and_samples_do_not_see_each_other(name: str) -> None:
    """Each block alone, with the context before its anchor alone, gives what it gives in company."""
    config = kind_config(name)
    draft = made(config)
    noise, features, anchors, keep = sample_of(config)
    with torch.no_grad():
        whole = draft(noise, features, anchors, keep)
        for sample, block in ((0, 0), (0, 2), (1, 1)):
            rows = slice(block * config.block_size, (block + 1) * config.block_size)
            anchor = int(anchors[sample, block])
            alone = draft(
                noise[sample : sample + 1, rows],
                features[sample : sample + 1, :anchor],
                anchors[sample : sample + 1, block : block + 1],
                torch.ones(1, 1, dtype=torch.bool),
            )
            for got, want in zip(alone, whole, strict=True):
                torch.testing.assert_close(got[0], want[sample, rows], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_block_by_block_with_a_cache_is_one_pass(name: str) -> None:
    config = kind_config(name)
    draft = made(config)
    noise, features, anchors, _ = (part[:1] for part in sample_of(config))
    keep, cache, held = torch.ones(1, 1, dtype=torch.bool), ContextCache(), 0
    with torch.no_grad():
        whole: DraftOutput = draft(noise, features, anchors, torch.ones(1, 3, dtype=torch.bool))
        for block, anchor in enumerate(anchors[0].tolist()):
            rows = slice(block * config.block_size, (block + 1) * config.block_size)
            out = draft(noise[:, rows], features[:, held:anchor], anchors[:, block : block + 1], keep, cache)
            held = anchor
            torch.testing.assert_close(out.readout_BQH, whole.readout_BQH[:, rows], rtol=1e-10, atol=1e-12)


def test_padding_is_not_counted() -> None:
    config = kind_config("v4")
    draft = made(config).train()
    draft(*sample_of(config))
    counts = [module.tokens_per_expert.sum().item() for module in draft.modules() if isinstance(module, MoELayer)]
    assert counts == [5 * config.block_size * 2] * config.num_hidden_layers


def test_hidden_is_the_normed_readout() -> None:
    config = kind_config("v41")
    out = made(config)(*sample_of(config))
    assert not torch.equal(out.hidden_BQH, out.readout_BQH)
    draft = made(config)
    torch.testing.assert_close(draft.norm(out.readout_BQH), out.hidden_BQH)
    gated = made(kind_config("mha-gr-mixed"))
    out = gated(*sample_of(gated.config))
    assert isinstance(gated.norm, nn.Identity) and torch.equal(out.hidden_BQH, out.readout_BQH)


def test_shapes_are_checked() -> None:
    config = toy_config()
    draft = made(config)
    noise, features, anchors, keep = sample_of(config)
    with pytest.raises(ValueError, match=r"noise has shape \(2, 8, 16\), allowed: \(2, 9, 16\)"):
        draft(noise[:, 1:], features, anchors, keep)
    with pytest.raises(ValueError, match=r"features have shape \(2, 9, 31\), allowed: \(2, context, 32\)"):
        draft(noise, features[..., 1:], anchors, keep)


# Dtypes.


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_near_float32(name: str, autocast: bool) -> None:
    """A cast draft and FP32 weights under autocast; confidences stay FP32, and gradients are finite."""
    config = kind_config(name)
    wide = made(config, torch.float32)
    state = {key: value.clone() for key, value in wide.state_dict().items()}
    want = wide(*sample_of(config, torch.float32)).readout_BQH
    draft = made(config, torch.float32)
    draft.load_state_dict(state)
    sample = sample_of(config, torch.float32 if autocast else torch.bfloat16)
    if not autocast:
        draft = draft.to(torch.bfloat16)
        assert all(torch.equal(draft.state_dict()[key], state[key]) for key in state if "mix_" in key or "sinks" in key)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = draft(*sample)
        loss = simple_loss(draft, sample)
    keep = sample[3].repeat_interleave(config.block_size, dim=1)
    error = (out.readout_BQH.float() - want)[keep].norm() / want[keep].norm()
    assert error < 0.1
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in draft.parameters())


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("assign", [False, True])
def test_a_draft_built_on_meta_and_loaded_is_the_saved_one(name: str, assign: bool, tmp_path: Path) -> None:
    config = kind_config(name)
    draft = made(config, torch.float32).bfloat16()
    save_file(draft.state_dict(), tmp_path / "draft.safetensors")
    with torch.device("meta"):
        other = DSparkDraft(config).bfloat16()
    if not assign:
        other = other.to_empty(device="cpu")
    other.load_state_dict(load_file(tmp_path / "draft.safetensors"), assign=assign)
    sample = sample_of(config, torch.bfloat16)
    got, want = other(*sample), draft(*sample)
    assert torch.equal(got.hidden_BQH, want.hidden_BQH)
    assert {key: value.dtype for key, value in other.state_dict().items()} == {
        key: value.dtype for key, value in draft.state_dict().items()
    }
    for mine, saved in zip(other.modules(), draft.modules(), strict=True):
        if isinstance(mine, MoELayer) and isinstance(saved, MoELayer):
            assert torch.equal(mine.tokens_per_expert, saved.tokens_per_expert)
