"""What a draft's config may be: limits of its numbers, and the rules between its keys."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..checkpoint.shown import shown_value
from ..moe.families import check_ffn
from .attention import SLIDING, AttentionConfig
from .dense import check_grouped, check_latent
from .v4_attention import check_v4

if TYPE_CHECKING:
    from .config import DFlashFields, DraftConfig, ResidualFields

DSPARK, MTP = "dspark", "mtp"
"""Values of projector_type: a DSpark draft, a plain MTP layer."""

MARKOV_KINDS = ("vanilla", "gated", "rnn")
CONFIDENCE_INPUTS = ("post_norm", "pre_norm")
AUX_LOSSES = ("batch_wise", "microbatch_wise")
DTYPES = ("bfloat16", "float32")

RESIDUAL_KEYS = {
    "standard": ("kind",),
    "gr": ("kind", "streams", "rank"),
    "mhc": ("kind", "streams", "sinkhorn_iters", "eps", "pre_from_prev"),
}
"""Kind of residual -> the keys of `draft_residual` that it reads."""

_WIDTH = (1, 1 << 17)
LIMITS: dict[str, tuple[float, float]] = {
    "vocab_size": (2, 1 << 22),
    "hidden_size": _WIDTH,
    "num_hidden_layers": (1, 64),
    "num_target_layers": (1, 1024),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (1, 8192),
    "block_size": (1, 1024),
    "rms_norm_eps": (1e-30, 1.0),
    "rope_theta": (2.0, 1e12),
    "intermediate_size": _WIDTH,
    "q_lora_rank": (1, 1 << 16),
    "kv_lora_rank": (1, 1 << 16),
    "qk_nope_head_dim": (1, 8192),
    "qk_rope_head_dim": (2, 8192),
    "v_head_dim": (1, 8192),
    "o_groups": (1, 4096),
    "o_lora_rank": (1, 1 << 16),
    "sliding_window": (1, 1 << 30),
    "num_experts": (1, 1 << 14),
    "n_routed_experts": (1, 1 << 14),
    "num_experts_per_tok": (1, 1 << 14),
    "moe_intermediate_size": _WIDTH,
    "shared_expert_intermediate_size": _WIDTH,
    "n_shared_experts": (0, 1024),
    "routed_scaling_factor": (1e-6, 1e6),
    "swiglu_limit": (-1e6, 1e6),
    "initializer_range": (0.0, 1.0),
    "max_position_embeddings": (1, 1 << 30),
    "bos_token_id": (0, 1 << 22),
    "eos_token_id": (0, 1 << 22),
    "pad_token_id": (0, 1 << 22),
}
"""Least and greatest of each number of a draft: whole where these are."""

DFLASH_LIMITS: dict[str, tuple[float, float]] = {
    "mask_token_id": (0, 1 << 22),
    "context_window": (1, 1 << 30),
    "markov_rank": (0, 1 << 16),
    "moe_router_bias_update_rate": (0.0, 1.0),
    "moe_router_aux_loss_coef": (0.0, 1e6),
}
RESIDUAL_LIMITS: dict[str, tuple[float, float]] = {
    "streams": (1, 64),
    "rank": (1, 1 << 16),
    "sinkhorn_iters": (1, 1000),
    "eps": (1e-30, 1.0),
}

KIND_CHECKS: Mapping[str, Callable[[AttentionConfig], None]] = MappingProxyType(
    {
        "gqa": check_grouped,
        "mha": check_grouped,
        "mla": check_latent,
        "deepseek_v4": check_v4,
        "deepseek_v41": check_v4,
    }
)
"""Kind of attention -> what refuses settings that it cannot have."""

_ONLY = {"hidden_act": "silu", "rope_scaling": None, "tie_word_embeddings": False}
"""Keys with one legal value here."""


def check_dflash(dflash: "DFlashFields") -> None:
    """ValueError naming the key of dflash_config, its value and what is allowed."""
    at = "dflash_config."
    _one_of(f"{at}projector_type", dflash.projector_type, (DSPARK, MTP))
    masked = dflash.projector_type != MTP
    if not masked and dflash.mask_token_id is not None:
        _refuse(f"{at}mask_token_id", dflash.mask_token_id, "null, for an MTP layer has no masks")
    _numbers(dflash, {name: each for name, each in DFLASH_LIMITS.items() if masked or name != "mask_token_id"}, at)
    layers = dflash.target_layer_ids
    if not isinstance(layers, tuple) or not layers or not all(_whole(layer) and layer >= 0 for layer in layers):
        _refuse(f"{at}target_layer_ids", layers, "one layer number at least, each 0 or more")
    if len(set(layers)) != len(layers):
        _refuse(f"{at}target_layer_ids", layers, "each layer once")
    _one_of(f"{at}attention_mode", dflash.attention_mode, tuple(KIND_CHECKS))
    _one_of(f"{at}markov_head_type", dflash.markov_head_type, MARKOV_KINDS)
    _one_of(f"{at}confidence_head_input", dflash.confidence_head_input, CONFIDENCE_INPUTS)
    _one_of(f"{at}moe_router_aux_loss_type", dflash.moe_router_aux_loss_type, AUX_LOSSES)
    names = ("enable_confidence_head", "confidence_head_with_markov", "confidence_head_bias")
    for name in (*names, "moe_router_enable_expert_bias", "attention_sinks", "qk_norm"):
        _one_of(at + name, getattr(dflash, name), (False, True))
    if dflash.confidence_head_with_markov and dflash.markov_rank == 0:
        _refuse(f"{at}confidence_head_with_markov", True, "false, for markov_rank is 0: there is no Markov head")
    if dflash.confidence_head_with_markov and not dflash.enable_confidence_head:
        _refuse(f"{at}confidence_head_with_markov", True, "false, for enable_confidence_head is false")
    if dflash.moe_router_bias_update_rate and not dflash.moe_router_enable_expert_bias:
        rate = dflash.moe_router_bias_update_rate
        _refuse(f"{at}moe_router_bias_update_rate", rate, "0, for moe_router_enable_expert_bias is false")


def check_residual(residual: "ResidualFields") -> None:
    """ValueError naming the key of draft_residual, its value and what is allowed."""
    _one_of("draft_residual.kind", residual.kind, tuple(RESIDUAL_KEYS))
    _numbers(residual, RESIDUAL_LIMITS, "draft_residual.")
    _one_of("draft_residual.pre_from_prev", residual.pre_from_prev, (False, True))


def check_draft(config: "DraftConfig") -> None:
    """ValueError naming the key, its value and what is allowed."""
    _numbers(config, LIMITS, "")
    for name, only in _ONLY.items():
        if getattr(config, name) != only:
            _refuse(name, getattr(config, name), f"{only!r}")
    _one_of("dtype", config.dtype, DTYPES)
    _one_of("attention_bias", config.attention_bias, (False, True))
    highest = max(config.dflash.target_layer_ids)
    if highest >= config.num_target_layers:
        _refuse("dflash_config.target_layer_ids", highest, f"below num_target_layers {config.num_target_layers}")
    mask = config.dflash.mask_token_id
    if mask is not None and mask >= config.vocab_size:
        _refuse("dflash_config.mask_token_id", mask, f"below vocab_size {config.vocab_size}")
    if config.layer_types is not None and len(config.layer_types) != config.num_hidden_layers:
        _refuse("layer_types", config.layer_types, f"one for each of num_hidden_layers {config.num_hidden_layers}")
    if config.is_mtp:
        check_mtp(config)
    check_attention(config.attention(), config.dflash.qk_norm)
    check_ffn(config)


def check_mtp(config: "DraftConfig") -> None:
    """ValueError naming the key in which a config is not that of a plain MTP layer, model.md 7."""
    last, dflash, residual = config.num_target_layers - 1, "dflash_config", "draft_residual"
    only: dict[str, tuple[Any, Any]] = {
        "num_hidden_layers": (config.num_hidden_layers, 1),
        "block_size": (config.block_size, 1),
        "layer_types": (config.layer_types, (SLIDING,)),
        f"{dflash}.target_layer_ids": (config.dflash.target_layer_ids, (last,)),
        f"{dflash}.attention_mode": (config.dflash.attention_mode, "deepseek_v4"),
        f"{dflash}.context_window": (config.dflash.context_window, None),
        f"{dflash}.markov_rank": (config.dflash.markov_rank, 0),
        f"{dflash}.enable_confidence_head": (config.dflash.enable_confidence_head, False),
        f"{residual}.kind": (config.residual.kind, "mhc"),
        f"{residual}.pre_from_prev": (config.residual.pre_from_prev, False),
    }
    for name, (value, wanted) in only.items():
        if value != wanted:
            shown = list(wanted) if isinstance(wanted, tuple) else wanted
            _refuse(name, value, f"{shown!r}, for projector_type is 'mtp': one layer over the target's last streams")


def check_attention(settings: AttentionConfig, qk_norm: bool) -> None:
    """ValueError for what no attention of its kind can be; what a backend refuses comes with the backend."""
    KIND_CHECKS[settings.attention_mode](settings)
    if not qk_norm and settings.attention_mode not in ("gqa", "mha"):
        _refuse("dflash_config.qk_norm", qk_norm, f"true, for attention_mode is {settings.attention_mode!r}")


def _numbers(held: Any, limits: dict[str, tuple[float, float]], prefix: str) -> None:
    defaults = type(held).__dataclass_fields__
    for name, (least, most) in limits.items():
        value = getattr(held, name)
        if value is None and defaults[name].default is None:
            continue
        whole = isinstance(most, int)
        fits = _whole(value) if whole else _whole(value) or isinstance(value, float)
        if not fits or not least <= value <= most:
            _refuse(prefix + name, value, f"{'a whole number' if whole else 'a number'} from {least} to {most}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(type(value) is type(each) and value == each for each in allowed):
        _refuse(name, value, ", ".join(repr(each) for each in allowed))


def _refuse(name: str, value: Any, allowed: str) -> None:
    raise ValueError(f"{name} is {shown_value(value)}, allowed: {allowed}")
