"""The trained form of a V4 drafter against the serving one; V4 and V4.1 with every gradient against a naive form."""

from dataclasses import replace

import pytest
import torch
from draft_scene import MAX_FRESH, PAGE, Pages, anchor_of, draft_config, draft_model, draft_weights, feed, taps_of
from naive_dspark import stage_weights
from naive_v4 import Weights, attend, expand, experts, norm, rope_frequencies, stream_products, turn

from meshspark.models.drafts.config import DFlashFields, DraftConfig, ResidualFields
from meshspark.models.drafts.draft import DSparkDraft
from meshspark.models.dspark.drafter import Drafter
from meshspark.models.dspark.heads import base_logits, confidence_logits, markov_bias
from meshspark.models.dspark.plan import DraftBlock, plan_draft
from meshspark.models.dspark.stage import block_readout
from meshspark.models.v4.config import V4Config
from meshspark.parallel.groups import Groups

WINDOW, REQUEST = 16, 3
ANCHORS = (1, 9, 15, 16, 17, 31, 40)
"""Below, at and above the window."""

NAMES = {
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.sinks": "attn.attn_sink",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.expert_bias": "ffn.gate.bias",
    "mlp.experts.down_proj": "ffn.experts.w2.weight",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
}
PARTS = {"mix_weight": "fn", "mix_bias": "base", "mix_scale": "scale"}


def trained_config(shape: V4Config, v41: bool) -> DraftConfig:
    dspark = shape.dspark
    assert dspark is not None
    own = (
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "qk_rope_head_dim",
        "q_lora_rank",
        "o_groups",
    )
    own += ("o_lora_rank", "rms_norm_eps", "rope_theta", "n_routed_experts", "num_experts_per_tok")
    own += ("moe_intermediate_size", "routed_scaling_factor", "swiglu_limit")
    return DraftConfig(
        **{
            name: getattr(shape, name)
            for name in (*own, "moe_intermediate_size", "routed_scaling_factor", "swiglu_limit")
        },
        num_hidden_layers=len(shape.draft_ratios),
        num_target_layers=shape.num_hidden_layers,
        num_key_value_heads=1,
        block_size=dspark.block_size,
        moe_preset="deepseek_v4",
        dflash=DFlashFields(
            target_layer_ids=dspark.target_layer_ids,
            mask_token_id=dspark.noise_token_id,
            attention_mode="deepseek_v41" if v41 else "deepseek_v4",
            context_window=shape.sliding_window,
            markov_rank=dspark.markov_rank,
            enable_confidence_head=True,
            confidence_head_with_markov=True,
            confidence_head_bias=False,
            confidence_head_input="pre_norm",
            moe_router_enable_expert_bias=True,
        ),
        residual=ResidualFields("mhc", shape.hc_mult, 320, shape.hc_sinkhorn_iters, shape.hc_eps, v41),
    )


def trained_draft(shape: V4Config, weights: Weights, v41: bool, backend: str = "auto") -> DSparkDraft:
    """A draft in FP64 that holds copies of mtp.*."""
    draft = DSparkDraft(trained_config(shape, v41), backend).double()
    last = f"mtp.{len(shape.draft_ratios) - 1}."
    state = {}
    for name in draft.state_dict():
        state[name] = (_stacked(name, weights) if name.startswith("layers.") else _single(name, last, weights)).clone()
    draft.load_state_dict(state)
    return draft


def _stacked(name: str, weights: Weights) -> torch.Tensor:
    _, stage, rest = name.split(".", 2)
    prefix = f"mtp.{stage}."
    if rest == "mlp.experts.gate_up_proj":
        return torch.cat([weights[f"{prefix}ffn.experts.{w}.weight"] for w in ("w1", "w3")], dim=1)
    if "_residual." in rest:
        place, part = rest.split("_residual.")
        return weights[f"{prefix}hc_{place}_{PARTS[part]}"]
    return weights[prefix + NAMES[rest]]


def _single(name: str, last: str, weights: Weights) -> torch.Tensor:
    if name.startswith("residual_readout."):
        return weights[f"{last}hc_head_{PARTS[name.split('.')[1]]}"]
    return weights[
        {"fc.weight": "mtp.0.main_proj.weight", "hidden_norm.weight": "mtp.0.main_norm.weight"}.get(name) or last + name
    ]


def noise_of(shape: V4Config, embed: torch.Tensor) -> torch.Tensor:
    assert shape.dspark is not None
    masks = [shape.dspark.noise_token_id] * (shape.dspark.block_size - 1)
    ids = [token for anchor in ANCHORS for token in (anchor_of(REQUEST, anchor), *masks)]
    return embed[torch.tensor(ids)][None]


def served(drafter: Drafter, anchor: int, previous: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """readout [1, b, H], corrected logits [1, b, V] and confidences [b] of a block in the serving drafter, given the
    tokens before each row."""
    pages = Pages(drafter, 2, MAX_FRESH, PAGE, seed=anchor)
    feed(drafter, pages, REQUEST, 1, 0, anchor)
    block = DraftBlock(1, anchor, anchor_of(REQUEST, anchor))
    slab = plan_draft([block], drafter, pages.pool.table).slabs[0]
    readout = block_readout(slab, drafter, pages.pool.keys_MSD)
    heads, wide = drafter.weights.heads, torch.float64
    logits = base_logits(readout, slab, drafter) + markov_bias(previous, heads, wide)
    return readout, logits, confidence_logits(readout[0], previous, heads, wide)


@pytest.mark.parametrize("backend", ["native", "eager"])
@torch.no_grad()
def test_trained_draft_is_the_serving_one(backend: str) -> None:
    """The same readouts, corrected logits and confidences to 1e-10, all anchors in one call."""
    drafter = draft_model(Groups.single(), "float64")
    shape = drafter.config
    weights = {name: w.double() for name, w in draft_weights(shape, "float64").items()}
    draft = trained_draft(shape, weights, v41=False, backend=backend)
    anchors = torch.tensor([ANCHORS])
    features = taps_of(REQUEST, range(max(ANCHORS) + 3), drafter)[None]
    out = draft(noise_of(shape, weights["embed.weight"]), features, anchors, torch.ones_like(anchors, dtype=torch.bool))
    rows = draft.config.block_size
    hidden, readout = (part.view(len(ANCHORS), rows, -1) for part in out)
    previous = torch.randint(2, 260, (len(ANCHORS), rows), generator=torch.Generator().manual_seed(5))
    assert draft.markov_head is not None and draft.confidence_head is not None
    logits = hidden @ weights["head.weight"].T + draft.markov_head(previous, hidden)
    sure = draft.confidence_head(hidden, readout, draft.markov_head.embedding(previous))
    for number, anchor in enumerate(ANCHORS):
        want = served(drafter, anchor, previous[number])
        for got, value in zip((readout[number], logits[number], sure[number]), want, strict=True):
            torch.testing.assert_close(got, value.view(got.shape), rtol=0, atol=1e-10)


# A naive form of both, differentiable in every weight.


def naive_pre(streams: torch.Tensor, block: Weights, place: str, config: V4Config) -> torch.Tensor:
    h = config.hc_mult
    m = stream_products(streams, block[f"{place}_fn"], config)[:, :h]
    return torch.sigmoid(m * block[f"{place}_scale"][0] + block[f"{place}_base"][:h]) + config.hc_eps


def naive_mix(streams: torch.Tensor, block: Weights, place: str, config: V4Config) -> tuple[torch.Tensor, torch.Tensor]:
    h, eps = config.hc_mult, config.hc_eps
    m = stream_products(streams, block[f"{place}_fn"], config)
    scale, base = block[f"{place}_scale"], block[f"{place}_base"]
    mix = m[:, 2 * h :].reshape(-1, h, h) * scale[2] + base[2 * h :].reshape(h, h)
    mix = torch.softmax(mix, dim=2) + eps
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    return 2 * torch.sigmoid(m[:, h : 2 * h] * scale[1] + base[h : 2 * h]), mix


def naive_attention(
    x: torch.Tensor, block: Weights, context: torch.Tensor, anchor: int, config: V4Config, v41: bool
) -> torch.Tensor:
    heads, dim, frequencies = config.num_attention_heads, config.head_dim, rope_frequencies(config, 0)
    positions = list(range(anchor, anchor + len(x)))
    q = norm(x @ block["attn.wq_a.weight"].T, block["attn.q_norm.weight"], config) @ block["attn.wq_b.weight"].T
    q = q.reshape(-1, heads, dim)
    q = turn(q if v41 else norm(q, 1.0, config), positions, frequencies)
    rows = torch.cat((context, x))
    kv = norm(rows @ block["attn.wkv.weight"].T, block["attn.kv_norm.weight"], config)
    kv = turn(kv, list(range(anchor - len(context), anchor)) + positions, frequencies)
    o = torch.stack([attend(one, kv, block["attn.attn_sink"]) for one in q])
    o = turn(o, positions, frequencies, sign=-1).reshape(len(x), config.o_groups, -1)
    down = block["attn.wo_a.weight"].reshape(config.o_groups, config.o_lora_rank, -1)
    return torch.cat([o[:, g] @ down[g].T for g in range(config.o_groups)], dim=1) @ block["attn.wo_b.weight"].T


def naive_readout(
    noise: torch.Tensor, features: torch.Tensor, anchor: int, weights: Weights, config: V4Config, v41: bool
) -> torch.Tensor:
    """[b, H] of a block whose context is the window before its anchor."""
    stages = [stage_weights(weights, stage) for stage in range(len(config.draft_ratios))]
    taken = features[max(0, anchor - config.sliding_window) : anchor]
    context = norm(taken @ stages[0]["main_proj.weight"].T, stages[0]["main_norm.weight"], config)
    streams = noise[:, None].repeat(1, config.hc_mult, 1)
    carried = torch.zeros(len(noise), config.hc_mult, dtype=torch.float64)
    carried[:, 0] = 1
    ids = torch.zeros(len(noise), dtype=torch.int64)
    for block in stages:
        for place, gain in (("hc_attn", "attn_norm.weight"), ("hc_ffn", "ffn_norm.weight")):
            own = naive_pre(streams, block, place, config)
            post, mix = naive_mix(streams, block, place, config)
            x = ((carried if v41 else own)[:, :, None] * streams).sum(1)
            x = norm(x, block[gain], config)
            if place == "hc_attn":
                y = naive_attention(x, block, context, anchor, config, v41)
            else:
                y = experts(x, ids, block, config, config.num_hidden_layers)
            streams, carried = expand(y, streams, post, mix), own
    if not v41:
        last = stages[-1]
        raw = stream_products(streams, last["hc_head_fn"], config)
        carried = torch.sigmoid(raw * last["hc_head_scale"] + last["hc_head_base"]) + config.hc_eps
    return (carried[:, :, None] * streams).sum(1)


def naive_heads(
    readout: torch.Tensor, previous: torch.Tensor, last: Weights, head: torch.Tensor, config: V4Config
) -> tuple[torch.Tensor, torch.Tensor]:
    w1, w2 = (last[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
    logits = norm(readout, last["norm.weight"], config) @ head.T + w1[previous] @ w2.T
    return logits, torch.cat((readout, w1[previous]), dim=1) @ last["confidence_head.proj.weight"][0]


@pytest.mark.parametrize("v41", [False, True])
def test_draft_and_all_gradients_are_the_naive_ones(v41: bool) -> None:
    """Readouts, logits and confidences of several anchors, and the gradient of every parameter, in FP64."""
    shape = draft_config(2, WINDOW)
    plain = {name: w.double() for name, w in draft_weights(shape, "float64").items()}
    if v41:
        shape = replace(shape, rms_norm_eps=1e-20)
        plain = {name: w for name, w in plain.items() if "hc_head" not in name}
    draft = trained_draft(shape, plain, v41)
    weights = {name: w.clone().requires_grad_() for name, w in plain.items()}
    drafter = draft_model(Groups.single(), "float64")
    anchors = torch.tensor([ANCHORS])
    features = taps_of(REQUEST, range(max(ANCHORS) + 3), drafter)[None]
    noise = noise_of(shape, plain["embed.weight"])
    rows = draft.config.block_size
    previous = torch.randint(2, 260, (len(ANCHORS), rows), generator=torch.Generator().manual_seed(5))
    out = draft(noise, features, anchors, torch.ones_like(anchors, dtype=torch.bool))
    hidden, readout = (part.view(len(ANCHORS), rows, -1) for part in out)
    assert draft.markov_head is not None and draft.confidence_head is not None
    logits = hidden @ plain["head.weight"].T + draft.markov_head(previous, hidden)
    sure = draft.confidence_head(hidden, readout, draft.markov_head.embedding(previous))
    last = stage_weights(weights, len(shape.draft_ratios) - 1)
    naive = []
    for number, anchor in enumerate(ANCHORS):
        own = noise[0, number * rows : (number + 1) * rows]
        row = naive_readout(own, features[0], anchor, weights, shape, v41)
        naive.append((row, *naive_heads(row, previous[number], last, plain["head.weight"], shape)))
    want = [torch.stack(parts) for parts in zip(*naive, strict=True)]
    got = [readout, logits, sure]
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
    factors = [torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view(x.shape) for x in got]
    sum((x * f).sum() for x, f in zip(got, factors, strict=True)).backward()
    sum((x * f).sum() for x, f in zip(want, factors, strict=True)).backward()
    naive_gradients = {name: w.grad for name, w in weights.items() if w.grad is not None}
    reference = trained_draft(shape, plain | naive_gradients, v41).state_dict()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None
        scale = reference[name].abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(parameter.grad, reference[name], rtol=1e-8, atol=1e-10 * max(1, scale))
