"""Configs of drafts at test size."""

from typing import Any

from meshspark.models.drafts.config import DraftConfig

DENSE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_target_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "block_size": 3,
    "intermediate_size": 24,
}
V4: dict[str, Any] = {
    "num_key_value_heads": 1,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 6,
}


def toy_json(dflash: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """The JSON of a small dense draft, with these keys instead; a key of None is left out."""
    base = {"target_layer_ids": [1, 3], "mask_token_id": 39, "markov_rank": 4}
    raw = DENSE | keys | {"dflash_config": base | (dflash or {})}
    return {key: value for key, value in raw.items() if value is not None}


def toy_config(dflash: dict[str, Any] | None = None, **keys: Any) -> DraftConfig:
    return DraftConfig.from_dict(toy_json(dflash, **keys))


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gqa-standard-dense": ({}, {}),
    "mha-gr-mixed": (
        {"attention_mode": "mha", "context_window": 4, "markov_head_type": "gated"},
        {
            "num_key_value_heads": 4,
            "draft_residual": {"kind": "gr", "streams": 3, "rank": 5},
            "moe_preset": "qwen3_5_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "ffn_layer_types": ["dense", "moe"],
        },
    ),
    "mla-mhc-dense": (
        {"attention_mode": "mla", "markov_head_type": "rnn", "confidence_head_with_markov": False},
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 6,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "draft_residual": {"kind": "mhc", "streams": 3},
        },
    ),
    "gqa-mhc-own-pre": (
        {"attention_sinks": True},
        {"draft_residual": {"kind": "mhc", "pre_from_prev": False}},
    ),
    "v4": (
        {"attention_mode": "deepseek_v4", "context_window": 4, "confidence_head_input": "pre_norm"},
        V4 | {"draft_residual": {"kind": "mhc", "pre_from_prev": False}},
    ),
    "v41": (
        {"attention_mode": "deepseek_v41", "context_window": 4, "confidence_head_input": "pre_norm"},
        V4 | {"draft_residual": {"kind": "mhc"}, "rms_norm_eps": 1e-20},
    ),
}
"""Small drafts that have every kind of part among them: keys of dflash_config, and of the config."""

V4_MOE: dict[str, Any] = {
    "moe_preset": "deepseek_v4",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "swiglu_limit": 1.0,
}


def kind_config(name: str) -> DraftConfig:
    """The small draft of this name, with both heads; the V4 ones are mixtures with an expert bias."""
    dflash, keys = KINDS[name]
    dflash = {"enable_confidence_head": True, "confidence_head_with_markov": True} | dflash
    if name.startswith("v4"):
        dflash, keys = dflash | {"moe_router_enable_expert_bias": True, "confidence_head_bias": False}, keys | V4_MOE
    return toy_config(dflash, **keys)
