"""The config of a draft: its JSON, what it refuses, presets, and the contract of a resumed training."""

import json
from pathlib import Path
from typing import Any

import pytest
from draft_toys import V4, toy_config, toy_json

from meshspark.models.drafts.config import DraftConfig, read_config
from meshspark.models.drafts.contract import resume_contract
from meshspark.models.drafts.presets import PRESETS, draft_preset
from meshspark.models.drafts.resume import check_contract

MLA = {"attention_mode": "mla"}
MLA_SIZES = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
MOE = {"moe_preset": "qwen3_5_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
OBJECTIVE = {
    "num_anchors": 512,
    "loss_decay_gamma": 4.0,
    "ce_loss_alpha": 0.1,
    "l1_loss_alpha": 0.9,
    "confidence_head_alpha": 1.0,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_json(name: str, tmp_path: Path) -> None:
    config = draft_preset(name)
    text = json.dumps(config.to_dict())
    assert DraftConfig.from_dict(json.loads(text)) == config
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert read_config(tmp_path / "config.json") == config


BOTH: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "vocab_size": 129280,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "rope_theta": 10000.0,
    "block_size": 5,
    "moe_preset": "deepseek_v4",
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
    "layer_types": ["full_attention"] * 3,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BOTH_DFLASH: dict[str, Any] = {
    "context_window": 128,
    "mask_token_id": 128799,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "confidence_head_bias": False,
    "confidence_head_input": "pre_norm",
    "projector_type": "dspark",
    "moe_router_enable_expert_bias": True,
}
RELEASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "deepseek-v4-flash-dspark": (
        {
            "hidden_size": 4096,
            "num_target_layers": 43,
            "q_lora_rank": 1024,
            "rms_norm_eps": 1e-6,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 2048,
        },
        {"attention_mode": "deepseek_v4", "target_layer_ids": [40, 41, 42]},
        False,
    ),
    "deepseek-v4.1-flash-dspark": (
        {
            "hidden_size": 5120,
            "num_target_layers": 40,
            "q_lora_rank": 1280,
            "rms_norm_eps": 1e-20,
            "n_routed_experts": 128,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 2304,
            "pad_token_id": 2,
        },
        {"attention_mode": "deepseek_v41", "target_layer_ids": [37, 38, 39]},
        True,
    ),
}


@pytest.mark.parametrize("name", RELEASES)
def test_presets_of_the_releases_field_by_field(name: str) -> None:
    """The table of training.md 6; what it does not name is at the defaults of absent keys."""
    own, dflash, pre_from_prev = RELEASES[name]
    residual = {"kind": "mhc", "streams": 4, "sinkhorn_iters": 20, "eps": 1e-6, "pre_from_prev": pre_from_prev}
    raw = BOTH | own | {"dflash_config": BOTH_DFLASH | dflash, "draft_residual": residual}
    assert DraftConfig.from_dict(raw) == draft_preset(name)
    written = draft_preset(name).to_dict()
    assert all(written["dflash_config"][key] == value for key, value in raw.pop("dflash_config").items())
    assert all(written[key] == value for key, value in raw.items())


def test_qwen3_preset_is_a_mixture_in_every_layer() -> None:
    raw = draft_preset("qwen3-8b-moe-dspark").to_dict()
    own = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts", "num_experts_per_tok")
    assert [raw[key] for key in (*own, "moe_intermediate_size")] == [5, 32, 8, 8, 1, 1536]
    assert "ffn_layer_types" not in raw and raw["moe_preset"] == "qwen3_5_moe"
    dflash = raw["dflash_config"]
    assert dflash["moe_router_aux_loss_coef"] == 0.005 and dflash["moe_router_aux_loss_type"] == "batch_wise"
    assert dflash["moe_router_enable_expert_bias"] and dflash["moe_router_bias_update_rate"] == 1e-3


def test_defaults_are_those_of_absent_keys() -> None:
    config = toy_config()
    assert config.residual.kind == "standard" and config.to_dict()["draft_residual"] == {"kind": "standard"}
    assert config.dflash.confidence_head_bias and config.dflash.confidence_head_input == "post_norm"
    assert config.dflash.context_window is None and not config.has_moe
    assert toy_config(torch_dtype="float32").dtype == "float32"
    assert toy_config(**MOE).has_moe
    assert toy_config(**MOE, ffn_layer_types=["dense", "moe"]).ffn_layer_types == ("dense", "moe")


@pytest.mark.parametrize(
    ("dflash", "keys", "message"),
    [
        ({}, {"hidden_size": 0}, "hidden_size is 0"),
        ({}, {"hidden_size": True}, "hidden_size is True"),
        ({}, {"vocab_size": 40.0}, "vocab_size is 40.0"),
        ({}, {"head_count": 3}, "unknown keys of a draft's config: 'head_count'"),
        ({"window": 3}, {}, "unknown keys of a draft's config: dflash_config.'window'"),
        ({}, {"hidden_act": "gelu"}, "hidden_act is 'gelu', allowed: 'silu'"),
        ({}, {"rope_scaling": {"type": "yarn"}}, "rope_scaling is "),
        ({}, {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({}, {"dtype": "float16"}, "dtype is 'float16'"),
        ({}, {"draft_residual": {"kind": "hc"}}, "draft_residual.kind is 'hc', allowed: 'standard', 'gr', 'mhc'"),
        ({}, {"draft_residual": {"kind": "gr", "eps": 1e-6}}, "draft_residual has eps, allowed for kind 'gr'"),
        ({}, {"draft_residual": {"kind": "mhc", "sinkhorn_iters": 0}}, "draft_residual.sinkhorn_iters is 0"),
        ({}, {"draft_residual": {"kind": "mhc", "pre_from_prev": 1}}, "draft_residual.pre_from_prev is 1"),
        ({}, {"draft_residual": "mhc"}, "draft_residual is 'mhc', allowed: a JSON object"),
        ({"target_layer_ids": [5]}, {}, "target_layer_ids is 5, allowed: below num_target_layers 5"),
        ({"target_layer_ids": []}, {}, "target_layer_ids is ()"),
        ({"target_layer_ids": [1, 1]}, {}, "allowed: each layer once"),
        ({"mask_token_id": 40}, {}, "mask_token_id is 40, allowed: below vocab_size 40"),
        ({"projector_type": "dflash"}, {}, "projector_type is 'dflash'"),
        ({"attention_mode": "mqa"}, {}, "attention_mode is 'mqa', allowed: 'gqa', 'mha', 'mla', 'deepseek_v4'"),
        ({"markov_head_type": "lstm"}, {}, "markov_head_type is 'lstm', allowed: 'vanilla', 'gated', 'rnn'"),
        ({"markov_rank": -1}, {}, "markov_rank is -1"),
        (
            {"markov_rank": 0, "enable_confidence_head": True, "confidence_head_with_markov": True},
            {},
            "confidence_head_with_markov is True, allowed: false, for markov_rank is 0",
        ),
        ({"confidence_head_with_markov": True}, {}, "allowed: false, for enable_confidence_head is false"),
        ({"confidence_head_input": "norm"}, {}, "confidence_head_input is 'norm', allowed: 'post_norm', 'pre_norm'"),
        ({"context_window": 0}, {}, "context_window is 0"),
        ({"context_window": 2.5}, {}, "context_window is 2.5"),
        ({"moe_router_bias_update_rate": 0.1}, MOE, "moe_router_bias_update_rate is 0.1, allowed: 0"),
        ({"moe_router_aux_loss_type": "global"}, MOE, "moe_router_aux_loss_type is 'global'"),
        ({"moe_router_aux_loss_coef": -0.1}, MOE, "moe_router_aux_loss_coef is -0.1"),
        ({"qk_norm": False} | MLA, MLA_SIZES, "dflash_config.qk_norm is False"),
        ({}, {"num_attention_heads": 3}, "num_attention_heads 3"),
        ({}, {"head_dim": 7}, "head_dim is 7"),
        ({"attention_mode": "mha"}, {}, "num_key_value_heads is 2"),
        (MLA, MLA_SIZES | {"v_head_dim": None}, "v_head_dim"),
        ({"attention_mode": "deepseek_v4"}, V4 | {"q_lora_rank": None}, "q_lora_rank"),
        ({"attention_mode": "deepseek_v4"}, V4 | {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"attention_mode": "deepseek_v41"}, V4 | {"qk_rope_head_dim": 8}, "qk_rope_head_dim is 8"),
        ({"attention_mode": "deepseek_v41"}, V4 | {"o_groups": 3}, "o_groups is 3"),
        ({"attention_mode": "deepseek_v4"}, V4 | {"attention_bias": True}, "attention_bias"),
        ({}, {"layer_types": ["full_attention"]}, "layer_types is ('full_attention',), allowed: one for each"),
        ({}, {"layer_types": ["full_attention"] * 2, "sliding_window": 4}, "sliding_window is 4"),
        ({}, {"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
        ({}, {"intermediate_size": None}, "intermediate_size is None"),
        ({}, {"ffn_layer_types": ["dense", "moe"]}, "ffn_layer_types is ('dense', 'moe'), allowed: null"),
        ({}, MOE | {"ffn_layer_types": ["moe"]}, "ffn_layer_types is ('moe',), allowed: one for each"),
        ({}, MOE | {"num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({}, MOE | {"moe_preset": "mixtral"}, "moe_preset is 'mixtral'"),
    ],
)
def test_refusals_name_the_key(dflash: dict[str, Any], keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        toy_config(dflash, **keys)
    assert message in str(refused.value)


def test_missing_keys_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks head_dim, block_size"):
        DraftConfig.from_dict({k: v for k, v in toy_json().items() if k not in ("head_dim", "block_size")})
    with pytest.raises(ValueError, match=r"lacks dflash_config\.target_layer_ids, dflash_config\.mask_token_id"):
        DraftConfig.from_dict(toy_json() | {"dflash_config": {}})
    with pytest.raises(ValueError, match=r"config .*config\.json cannot be read"):
        read_config(tmp_path / "config.json")
    with pytest.raises(ValueError, match="no draft config is named 'v5', allowed: deepseek-v4-flash-dspark"):
        draft_preset("v5")


def test_contract_has_windows_residual_and_mixtures_only_where_set() -> None:
    plain = resume_contract(toy_config(), "auto", OBJECTIVE | {"chunk": 3})
    assert plain == {
        "draft_layers": 2,
        "target_layer_ids": [1, 3],
        "block_size": 3,
        "mask_token_id": 39,
        "attention_backend": "auto",
        "attention_mode": "gqa",
        **OBJECTIVE,
    }
    sliding = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
    full = toy_config({"context_window": 4}, draft_residual={"kind": "mhc"}, **MOE, **sliding)
    contract = resume_contract(full, "eager", OBJECTIVE)
    assert contract["context_window"] == 4 and contract["sliding_window"] == 6
    assert contract["draft_residual.pre_from_prev"] is True and contract["draft_residual.kind"] == "mhc"
    assert contract["moe_preset"] == "qwen3_5_moe" and contract["moe_router_aux_loss_type"] == "batch_wise"
    assert json.loads(json.dumps(contract)) == contract
    with pytest.raises(ValueError, match="lack num_anchors"):
        resume_contract(toy_config(), "auto", {k: v for k, v in OBJECTIVE.items() if k != "num_anchors"})


def test_contract_names_what_differs() -> None:
    mhc = toy_config({"context_window": 4}, draft_residual={"kind": "mhc"})
    saved = resume_contract(mhc, "auto", OBJECTIVE)
    check_contract(saved | {"target_layer_ids": (1, 3)}, saved)
    other = toy_config({"context_window": 5}, draft_residual={"kind": "mhc", "pre_from_prev": False})
    with pytest.raises(ValueError) as refused:
        check_contract(saved, resume_contract(other, "auto", OBJECTIVE | {"num_anchors": 8}))
    text = str(refused.value)
    differing = ("context_window: 4 when saved, 5 now", "num_anchors: 512 when saved, 8 now")
    for part in (*differing, "draft_residual.pre_from_prev: True when saved, False now"):
        assert part in text
    assert text.count("when saved") == 3
    with pytest.raises(ValueError, match=r"context_window: 4 when saved, not set now; draft_residual\.eps"):
        check_contract(saved, resume_contract(toy_config(), "auto", OBJECTIVE))
