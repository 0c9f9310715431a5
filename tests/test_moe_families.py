"""Families of mixture layers: keys, refusals, weights and state. training.md 2.4 to 2.6."""

import pytest
import torch
from moe_layers import QWEN, V4, B, E, H, K, Q, W, config, hidden, layer

from meshspark.models.moe.experts import Experts
from meshspark.models.moe.families import FAMILIES, build_ffn, build_moe, check_ffn, ffn_kinds
from meshspark.models.moe.layer import GatedMLP, MoELayer, SharedExpert
from meshspark.models.moe.router import TopKRouter


def test_v4_family_reads_its_keys() -> None:
    made = build_moe(config(V4, {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3}))
    router = made.gate
    assert type(router) is TopKRouter and router.score_name == "sqrtsoftplus" and router.normalize
    assert (router.num_experts, router.top_k, router.route_scale, router.bias_update_rate) == (E, K, 1.5, 1e-3)
    assert router.expert_bias is not None and not router.expert_bias.any()
    assert isinstance(made.shared_experts, SharedExpert) and made.shared_expert_gate is None
    assert made.experts.limit == made.shared_experts.limit == 0.6
    absent = dict.fromkeys(("n_shared_experts", "scoring_func", "routed_scaling_factor", "swiglu_limit"))
    default = build_moe(config(V4, None, **absent))
    assert (default.gate.score_name, default.gate.route_scale, default.experts.limit) == ("sqrtsoftplus", 1.5, 10.0)
    assert default.gate.expert_bias is None and default.shared_experts is not None
    assert build_moe(config(V4, None, scoring_func="sigmoid")).gate.score_name == "sigmoid"
    assert {name: tuple(value.shape) for name, value in made.state_dict().items()} == {
        "gate.weight": (E, H),
        "gate.expert_bias": (E,),
        "experts.gate_up_proj": (E, 2 * W, H),
        "experts.down_proj": (E, H, W),
        "shared_experts.gate_proj.weight": (W, H),
        "shared_experts.up_proj.weight": (W, H),
        "shared_experts.down_proj.weight": (H, W),
    }


def test_qwen_family_reads_its_keys() -> None:
    made = build_moe(config(QWEN, {"moe_router_aux_loss_coef": 0.005, "moe_router_aux_loss_type": "microbatch_wise"}))
    assert made.gate.score_name == "softmax" and made.gate.normalize and made.gate.route_scale == 1.0
    assert made.experts.limit is None and isinstance(made.shared_experts, SharedExpert)
    assert made.shared_experts.limit is None and made.shared_experts.gate_proj.weight.shape == (12, H)
    assert made.shared_expert_gate is not None and made.shared_expert_gate.weight.shape == (1, H)
    assert (made.aux_loss_coef, made.aux_loss_type) == (0.005, "microbatch_wise")
    alone = build_moe(config(QWEN, None, shared_expert_intermediate_size=None))
    assert alone.shared_experts is None and alone.shared_expert_gate is None
    assert alone(hidden()).shape == (B, Q, H)


@pytest.mark.parametrize("base", [V4, QWEN])
def test_weights_always_sum_to_the_scale(base: dict) -> None:
    weights = layer(base, moe_router_enable_expert_bias=True).gate(hidden().flatten(0, 1))[2]
    torch.testing.assert_close(weights.sum(1), torch.full((B * Q,), 1.5 if base is V4 else 1.0))


def test_layers_of_both_kinds() -> None:
    both = config(V4, None, ffn_layer_types=["dense", "moe"], intermediate_size=40)
    check_ffn(both)
    assert ffn_kinds(both) == ("dense", "moe")
    dense, moe = build_ffn(both, 0), build_ffn(both, 1)
    assert type(dense) is GatedMLP and dense.gate_proj.weight.shape == (40, H) and dense.limit is None
    assert isinstance(moe, MoELayer) and moe.experts.down_proj.shape == (E, H, W)
    assert dense(hidden()).shape == moe(hidden()).shape == (B, Q, H)
    assert ffn_kinds(config(V4)) == ("moe", "moe")
    assert ffn_kinds(config({}, None, intermediate_size=40)) == ("dense", "dense")
    assert type(build_ffn(config({}, None, intermediate_size=40), 1)) is GatedMLP


def _refusals() -> list[tuple[str, dict, dict]]:
    dense = {"intermediate_size": 40}
    return [
        ("moe_preset is 'mixtral', allowed: 'qwen3_5_moe', 'deepseek_v4'", V4, {"moe_preset": "mixtral"}),
        ("hidden_act is 'gelu', allowed: 'silu'", V4, {"hidden_act": "gelu"}),
        ("hidden_act is 'gelu', allowed: 'silu'", dense, {"hidden_act": "gelu"}),
        ("n_shared_experts is 2, allowed: 1", V4, {"n_shared_experts": 2}),
        ("n_shared_experts is 0, allowed: 1", V4, {"n_shared_experts": 0}),
        ("num_experts_per_tok is 9, allowed: the number of experts, 8, at most", V4, {"num_experts_per_tok": 9}),
        ("num_experts_per_tok is 9, allowed: the number of experts, 8, at most", QWEN, {"num_experts_per_tok": 9}),
        ("n_routed_experts is 0, allowed: a positive whole number", V4, {"n_routed_experts": 0}),
        ("n_routed_experts is None, allowed: a positive whole number", V4, {"n_routed_experts": None}),
        ("num_experts is -1, allowed: a positive whole number", QWEN, {"num_experts": -1}),
        ("moe_intermediate_size is None", V4, {"moe_intermediate_size": None}),
        ("moe_intermediate_size is 2.5", QWEN, {"moe_intermediate_size": 2.5}),
        ("shared_expert_intermediate_size is 0", QWEN, {"shared_expert_intermediate_size": 0}),
        ("num_experts_per_tok is True", QWEN, {"num_experts_per_tok": True}),
        ("routed_scaling_factor is 0, allowed: a positive number", V4, {"routed_scaling_factor": 0}),
        ("routed_scaling_factor is '1', allowed: a positive number", V4, {"routed_scaling_factor": "1"}),
        ("scoring_func is 'relu', allowed: 'softmax', 'sigmoid', 'sqrtsoftplus'", V4, {"scoring_func": "relu"}),
        ("hash routing belongs to the target", V4, {"num_hash_layers": 3}),
        ("hash routing belongs to the target", V4, {"mlp_layer_types": ["hash_moe", "moe"]}),
        ("swiglu_limit is 10.0, allowed: null", QWEN, {"swiglu_limit": 10.0}),
        ("num_experts is 8, allowed: null", V4, {"num_experts": 8}),
        ("ffn_layer_types is .*, allowed: null, for there is no moe_preset", dense, {"ffn_layer_types": ["dense"] * 2}),
        ("ffn_layer_types is .*, allowed: one for each of num_hidden_layers 2", V4, {"ffn_layer_types": ["moe"]}),
        ("ffn_layer_types is 'sparse', allowed: 'dense', 'moe'", V4, {"ffn_layer_types": ["moe", "sparse"]}),
        ("intermediate_size is None, .* for a dense layer needs it", V4, {"ffn_layer_types": ["moe", "dense"]}),
        ("intermediate_size is None, .* for a dense layer needs it", {}, {}),
        ("swiglu_limit is 10.0, allowed: null, for there is no moe_preset", dense, {"swiglu_limit": 10.0}),
    ]


@pytest.mark.parametrize("message, base, keys", _refusals())
def test_refusals_name_key_value_and_allowed(message: str, base: dict, keys: dict) -> None:
    for call in (check_ffn, lambda given: build_ffn(given, 0)):
        with pytest.raises(ValueError, match=message):
            call(config(base, None, **keys))


@pytest.mark.parametrize(
    "message, knobs",
    [
        ("moe_router_bias_update_rate is 0.001, allowed: 0, for", {"moe_router_bias_update_rate": 1e-3}),
        ("moe_router_aux_loss_coef is -1.0", {"moe_router_aux_loss_coef": -1.0}),
        ("moe_router_aux_loss_type is 'step', allowed: 'batch_wise'", {"moe_router_aux_loss_type": "step"}),
    ],
)
def test_refusals_of_balancing_keys(message: str, knobs: dict) -> None:
    with pytest.raises(ValueError, match=message):
        build_ffn(config(V4, knobs), 0)


def test_balancing_keys_without_a_mixture_are_refused() -> None:
    for knobs in ({"moe_router_enable_expert_bias": True}, {"moe_router_aux_loss_coef": 0.005}):
        with pytest.raises(ValueError, match=r"dflash_config.moe_router_.* for no layer is a mixture"):
            build_ffn(config({}, knobs, intermediate_size=40), 0)


def test_layers_refuse_parts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="the router has 8 experts, the layer 4"):
        MoELayer(TopKRouter(H, 8, 2), Experts(4, H, W))
    with pytest.raises(ValueError, match="needs a shared expert"):
        MoELayer(TopKRouter(H, 4, 2), Experts(4, H, W), None, torch.nn.Linear(H, 1, bias=False))


# Weights and state.


@pytest.mark.parametrize("base", [V4, QWEN])
def test_reset_reaches_every_parameter(base: dict) -> None:
    made = layer(base, moe_router_enable_expert_bias=True)
    made(hidden())
    for tensor in (*made.parameters(), *made.buffers()):
        tensor.data.fill_(7)
    made.reset_parameters(0.02)
    for name, value in made.named_parameters():
        # Many small tensors: the bound is wide for the smallest, 16 numbers.
        assert 0.008 < float(value.detach().std()) < 0.04 and float(value.detach().abs().max()) < 0.2, name
    assert not made.gate.expert_bias.any() and not made.tokens_per_expert.any()
    dense = GatedMLP(H, 40)
    dense.reset_parameters(0.1)
    assert all(0.08 < float(p.detach().std()) < 0.12 for p in dense.parameters())


def test_a_config_draws_with_its_own_deviation() -> None:
    made = build_ffn(config(V4, None, initializer_range=0.5), 0)
    assert all(0.3 < float(value.detach().std()) < 0.7 for value in made.parameters())


@pytest.mark.parametrize("base", [V4, QWEN])
def test_state_round_trip(base: dict) -> None:
    made = layer(base, moe_router_enable_expert_bias=True)
    made(hidden())
    other = layer(base, seed=9, moe_router_enable_expert_bias=True)
    assert not torch.equal(other(hidden()), made(hidden()))
    other.reset_counts()
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.gate.expert_bias, made.gate.expert_bias) and not other.tokens_per_expert.any()
    assert torch.equal(other(hidden()), made(hidden()))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("base", [V4, QWEN])
def test_meta_build_then_load(base: dict, assign: bool) -> None:
    source = layer(base, moe_router_enable_expert_bias=True)
    with torch.device("meta"):
        made = build_moe(config(base, {"moe_router_enable_expert_bias": True}))
    made.reset_parameters(0.02)
    assert all(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))
    assert made.gate(hidden().flatten(0, 1).to("meta"))[1].shape == (B * Q, K)
    assert {n: v.shape for n, v in made.state_dict().items()} == {n: v.shape for n, v in source.state_dict().items()}
    if not assign:
        made.to_empty(device="cpu")
        assert not made.tokens_per_expert.any()
    made.load_state_dict(source.state_dict(), assign=assign)
    assert torch.equal(made(hidden()), source(hidden()))
    assert torch.equal(made.tokens_per_expert, source.tokens_per_expert) and made.tokens_per_expert.any()
    assert not any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers()))


def test_counter_comes_zeroed_out_of_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        made = build_moe(config(V4))
    dirty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *given, **more: dirty(*given, **more).fill_(5))
    made.to_empty(device="cpu")
    assert (made.gate.weight == 5).all() and not made.tokens_per_expert.any()


def test_full_size_layers_have_the_official_sizes() -> None:
    """Routed and shared experts, gate and bias of one stage, training.md 8.2."""
    sizes = {"n_routed_experts": 256, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "swiglu_limit": 10.0}
    with torch.device("meta"):
        made = build_ffn(config(V4, {"moe_router_enable_expert_bias": True}, hidden_size=4096, **sizes), 0)
    assert sum(value.numel() for value in made.state_dict().values()) == 257 * 3 * 2048 * 4096 + 256 * 4096 + 256


def test_every_family_is_tested() -> None:
    assert set(FAMILIES) == {V4["moe_preset"], QWEN["moe_preset"]}
