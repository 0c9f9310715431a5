"""The official config.json of a drafter's target, and the draft's own. training.md 6 and 8.4."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.reader import CheckpointError, parse_json_object
from ..checkpoint.shown import shown_value
from ..dspark.mtp import require_mtp
from ..dspark.shape import require_dspark
from ..v4.config import CONFIG_LIMIT, V4Config, from_config_json
from .variants import MTP, VARIANTS, Variant

ARCHITECTURES = {"dspark": "DSparkDraftModel", "mtp": "MtpDraftModel"}
"""Kind of drafter -> what config.json of a draft of ours calls it."""

EXPORTED_ARCHITECTURE = "DeepseekV4ForCausalLMDSpark"
QUANTISATION_KEYS = ("quantization_config", "expert_dtype", "scale_fmt")
"""What an unquantised export's config leaves out."""

_V41_KEYS = (
    "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "moe_intermediate_size", "rms_norm_eps", "rope_theta",
    "hc_mult", "hc_sinkhorn_iters", "hc_eps", "routed_scaling_factor", "swiglu_limit", "dspark_block_size",
    "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank",
)  # fmt: skip
"""Keys that V4.1's config must have: what is absent would silently become Flash's."""

_V41_MORE = (
    "bos_token_id", "eos_token_id", "max_position_embeddings", "n_shared_experts", "scoring_func", "hidden_act",
    "attention_bias", "tie_word_embeddings", "norm_topk_prob", "topk_method", "expert_dtype",
)  # fmt: skip
_V41_OWN = {
    "n_routed_experts": "dspark_n_routed_experts",
    "num_experts_per_tok": "dspark_num_experts_per_tok",
    "stages": "num_nextn_predict_layers",
}
"""What the drafter has for itself -> the key that says how much of it."""

_STAGES_LIMIT = 64

NO_MARKOV_RANK = 1
"""Width of the Markov tables of zeros that `attach` gives a draft without a Markov head: the least that there is."""


def parse_official(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object of an official config; CheckpointError naming `what` for anything else, or for too many bytes."""
    if len(data) > CONFIG_LIMIT:
        raise CheckpointError(f"{what}: {len(data)} bytes, allowed: at most {CONFIG_LIMIT}")
    return parse_json_object(data, what)


def official_shape(variant: Variant, raw: Mapping[str, Any], path: Path | str) -> V4Config:
    """The drafter's sizes out of an official config, as the V4 config whose mtp.* has them.

    V4's number of stages is that of the entries of compress_ratios beyond the layers, V4.1's is
    num_nextn_predict_layers. CheckpointError naming file, key, value and what is allowed.
    """
    try:
        shape = from_config_json(_as_v4(variant, raw) if variant.name == "v41" else raw)
        _require(variant, shape)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return shape


def draft_json(
    variant: Variant, shape: V4Config, raw: Mapping[str, Any], dtype: str, markov: bool = True
) -> dict[str, Any]:
    """The draft's config.json: its shape under the keys of training.md 6.

    dtype: of its weights. markov: whether a DSpark draft has the Markov head that the official form has always.
    """
    stages = len(shape.draft_ratios)
    own = {
        "architectures": [ARCHITECTURES[variant.drafter]],
        **{name: getattr(shape, name) for name in ("vocab_size", "hidden_size")},
        "num_hidden_layers": stages,
        "num_target_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": 1,
        **{name: getattr(shape, name) for name in ("head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups")},
        **{name: getattr(shape, name) for name in ("o_lora_rank", "rms_norm_eps", "rope_theta")},
        "block_size": 1 if shape.dspark is None else shape.dspark.block_size,
        "moe_preset": "deepseek_v4",
        **{name: getattr(shape, name) for name in ("n_routed_experts", "num_experts_per_tok")},
        **{name: getattr(shape, name) for name in ("moe_intermediate_size", "n_shared_experts")},
        "scoring_func": "sqrtsoftplus",
        **{name: getattr(shape, name) for name in ("routed_scaling_factor", "swiglu_limit")},
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["sliding_attention" if variant == MTP else "full_attention"] * stages,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **{name: getattr(shape, name) for name in ("bos_token_id", "eos_token_id")},
    }
    if type(raw.get("pad_token_id")) is int:
        own["pad_token_id"] = raw["pad_token_id"]
    own["draft_residual"] = {
        "kind": "mhc",
        "streams": shape.hc_mult,
        "sinkhorn_iters": shape.hc_sinkhorn_iters,
        "eps": shape.hc_eps,
        "pre_from_prev": variant.pre_from_prev,
    }
    if variant == MTP:
        own["sliding_window"] = shape.sliding_window
    own["dflash_config"] = {
        **(_mtp_keys(shape) if variant == MTP else _dspark_keys(shape, markov)),
        "projector_type": variant.drafter,
        "attention_mode": variant.attention_mode,
        "moe_router_enable_expert_bias": True,
    }
    return own


def _mtp_keys(shape: V4Config) -> dict[str, Any]:
    return {"target_layer_ids": [shape.num_hidden_layers - 1]}


def _dspark_keys(shape: V4Config, markov: bool) -> dict[str, Any]:
    dspark = require_dspark(shape)
    return {
        "target_layer_ids": list(dspark.target_layer_ids),
        "mask_token_id": dspark.noise_token_id,
        "context_window": shape.sliding_window,
        "markov_rank": dspark.markov_rank if markov else 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": markov,
        "confidence_head_bias": False,
        "confidence_head_input": "pre_norm",
    }


def has_markov(config: Mapping[str, Any]) -> bool:
    """Whether a draft of ours has a Markov head, by its config.json: not where markov_rank is 0."""
    dflash = config.get("dflash_config")
    rank = dflash.get("markov_rank") if isinstance(dflash, Mapping) else None
    return not (type(rank) is int and rank == 0)


def own_shape(config: Mapping[str, Any], path: Path) -> tuple[Variant, V4Config]:
    """(variant, sizes) of a draft by its own config.json, where it is one of the official forms.

    Without a Markov head the sizes have one of NO_MARKOV_RANK, as the official form of such a draft has.
    CheckpointError naming file, key, value and what is allowed.
    """
    parts = [config.get(key) for key in ("dflash_config", "draft_residual")]
    dflash, residual = (part if isinstance(part, Mapping) else {} for part in parts)
    mode, markov = dflash.get("attention_mode"), has_markov(config)
    kinds = [each for each in VARIANTS.values() if each.attention_mode == mode]
    kinds = [MTP] if kinds and dflash.get("projector_type") == MTP.drafter else kinds
    variant = next(iter(kinds), None)
    if variant is None:
        allowed = " or ".join(each.attention_mode for each in VARIANTS.values())
        raise CheckpointError(f"{path}: dflash_config.attention_mode is {shown_value(mode)}, allowed: {allowed}")
    raw = {
        **{key: config.get(key) for key in (*_V41_KEYS, *_V41_MORE)},
        "num_hidden_layers": config.get("num_target_layers"),
        "num_nextn_predict_layers": config.get("num_hidden_layers"),
        "sliding_window": config.get("sliding_window") if variant == MTP else dflash.get("context_window"),
        "hc_mult": residual.get("streams"),
        "hc_sinkhorn_iters": residual.get("sinkhorn_iters"),
        "hc_eps": residual.get("eps"),
        "dspark_n_routed_experts": config.get("n_routed_experts"),
        "dspark_num_experts_per_tok": config.get("num_experts_per_tok"),
    }
    if variant != MTP:
        raw |= {
            "dspark_block_size": config.get("block_size"),
            "dspark_noise_token_id": dflash.get("mask_token_id"),
            "dspark_target_layer_ids": dflash.get("target_layer_ids"),
            "dspark_markov_rank": dflash.get("markov_rank") if markov else NO_MARKOV_RANK,
        }
    try:
        shape = from_config_json(_as_v4(variant, raw))
        _require(variant, shape)
    except ValueError as error:
        raise CheckpointError(f"{path}: as an official config: {error}") from error
    check_draft_json(config, draft_json(variant, shape, config, "", markov), path)
    return variant, shape


def check_draft_json(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """CheckpointError unless a draft's config says what the official one makes of it; keys beyond that are its own."""
    differs = []
    for key, value in wanted.items():
        if key in ("dtype", "architectures"):
            continue
        if isinstance(value, Mapping):
            inner = found.get(key)
            inner = inner if isinstance(inner, Mapping) else {}
            differs += [_differs(f"{key}.{name}", inner.get(name), each) for name, each in value.items()]
        else:
            differs.append(_differs(key, found.get(key), value))
    wrong = [text for text in differs if text]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(f"{path}: does not fit the official config: {'; '.join(wrong[:3])}{more}")


def unquantised(raw: Mapping[str, Any], drafter: str = "dspark") -> dict[str, Any]:
    """The official config of an unquantised export: its quantisation left out, its architecture named where a DSpark
    drafter changes it."""
    kept = {key: value for key, value in raw.items() if key not in QUANTISATION_KEYS}
    return {**kept, "architectures": [EXPORTED_ARCHITECTURE]} if drafter == "dspark" else kept


def _differs(key: str, found: Any, wanted: Any) -> str:
    same = isinstance(found, bool) == isinstance(wanted, bool) and found == wanted
    return "" if same else f"{key} is {shown_value(found)}, allowed: {shown_value(wanted)}"


def _require(variant: Variant, shape: V4Config) -> None:
    """ValueError where the sizes are those of a drafter of another kind, or of none."""
    if variant == MTP:
        require_mtp(shape)
    else:
        require_dspark(shape)


def _as_v4(variant: Variant, raw: Mapping[str, Any]) -> dict[str, Any]:
    """V4.1's config, or a draft's own, as a V4 config of the same drafter; its target's layers are not asked about."""
    needed = [key for key in _V41_KEYS if variant != MTP or not key.startswith("dspark_")]
    missing = [key for key in (*needed, *_V41_OWN.values()) if raw.get(key) is None]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}, which a {variant.title} drafter's sizes come from")
    layers, stages = raw["num_hidden_layers"], raw[_V41_OWN["stages"]]
    for name, value, most in (("num_hidden_layers", layers, 1024), (_V41_OWN["stages"], stages, _STAGES_LIMIT)):
        if type(value) is not int or not 1 <= value <= most:
            raise ValueError(f"{name} is {shown_value(value)}, allowed: a whole number from 1 to {most}")
    quantised = raw.get("quantization_config")
    if quantised is not None and not isinstance(quantised, Mapping):
        raise ValueError(f"quantization_config is {shown_value(quantised)}, allowed: an object, or null")
    return {
        **{key: raw[key] for key in (*needed, *_V41_MORE) if raw.get(key) is not None},
        **{name: raw[key] for name, key in _V41_OWN.items() if name != "stages"},
        "compress_ratios": [0] * (layers + stages),
        "num_hash_layers": 0,
        # The target's indexer is no part of the drafter; its width only has to be legal.
        "index_head_dim": raw["head_dim"],
        "quantization_config": {"weight_block_size": [variant.block] * 2, **(quantised or {})},
    }
