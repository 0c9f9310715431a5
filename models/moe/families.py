"""Mixture layers and feed-forward networks from a draft's config, by family. training.md 2.4, 2.5.

A config here is anything with the attributes of a draft's config.json, None where a key is absent, and `dflash` with
those of `dflash_config`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..checkpoint.shown import shown_value
from .experts import Experts
from .layer import GatedMLP, MoELayer, SharedExpert
from .router import INITIAL_STD, TopKRouter
from .scores import SCORES

FFN_KINDS = ("dense", "moe")


@dataclass(frozen=True)
class Shape:
    """What a family reads from a config: sizes, the score's name, scale, clamp, and the shared expert's width."""

    num_experts: int
    top_k: int
    width: int
    score: str
    route_scale: float
    limit: float | None
    shared_width: int | None
    shared_gate: bool


def _refuse(name: str, value: Any, allowed: str) -> None:
    raise ValueError(f"{name} is {shown_value(value)}, allowed: {allowed}")


def _size(config: Any, name: str, reason: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(name, value, f"a positive whole number, for {reason} needs it")
    assert isinstance(value, int)
    return value


def _given(config: Any, name: str, default: Any) -> Any:
    value = getattr(config, name, None)
    return default if value is None else value


def _unused(config: Any, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            _refuse(name, value, f"null, for {reason}")


def _qwen3_5_moe(config: Any) -> Shape:
    """Softmax, a shared expert behind a sigmoid gate if its width is given, no scale, no clamp."""
    reason = "moe_preset 'qwen3_5_moe'"
    foreign = ("n_routed_experts", "n_shared_experts", "scoring_func", "routed_scaling_factor", "swiglu_limit")
    _unused(config, foreign, f"{reason} has no use for it")
    shared = None
    if getattr(config, "shared_expert_intermediate_size", None) is not None:
        shared = _size(config, "shared_expert_intermediate_size", reason)
    num_experts, top_k = _size(config, "num_experts", reason), _size(config, "num_experts_per_tok", reason)
    width = _size(config, "moe_intermediate_size", reason)
    return Shape(num_experts, top_k, width, "softmax", 1.0, None, shared, shared_gate=True)


def _deepseek_v4(config: Any) -> Shape:
    """sqrtsoftplus, scaled and clamped, one shared expert as wide as the others and without a gate."""
    reason = "moe_preset 'deepseek_v4'"
    _unused(config, ("num_experts", "shared_expert_intermediate_size"), f"{reason} has no use for it")
    if _given(config, "num_hash_layers", 0) or "hash_moe" in (_given(config, "mlp_layer_types", None) or ()):
        raise ValueError("hash routing belongs to the target's first layers: a draft's tokens have no table of experts")
    if _given(config, "n_shared_experts", 1) != 1:
        _refuse("n_shared_experts", config.n_shared_experts, f"1, for {reason}")
    score = _given(config, "scoring_func", "sqrtsoftplus")
    if score not in SCORES:
        _refuse("scoring_func", score, ", ".join(map(repr, SCORES)))
    scale = _given(config, "routed_scaling_factor", 1.5)
    if not isinstance(scale, int | float) or scale <= 0:
        _refuse("routed_scaling_factor", scale, "a positive number")
    num_experts, top_k = _size(config, "n_routed_experts", reason), _size(config, "num_experts_per_tok", reason)
    width = _size(config, "moe_intermediate_size", reason)
    limit = _given(config, "swiglu_limit", 10.0)
    return Shape(num_experts, top_k, width, score, scale, limit, width, shared_gate=False)


FAMILIES: dict[str, Callable[[Any], Shape]] = {"qwen3_5_moe": _qwen3_5_moe, "deepseek_v4": _deepseek_v4}
"""Values of moe_preset."""

_EXPERT_KEYS = (
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "n_shared_experts",
    "scoring_func",
    "routed_scaling_factor",
    "swiglu_limit",
)


def _check_activation(config: Any) -> None:
    if _given(config, "hidden_act", "silu") != "silu":
        _refuse("hidden_act", config.hidden_act, "'silu'")


def moe_shape(config: Any) -> Shape:
    """The sizes and rules of the config's mixture layers; ValueError names the key, its value and what is allowed."""
    if config.moe_preset not in FAMILIES:
        _refuse("moe_preset", config.moe_preset, ", ".join(map(repr, FAMILIES)))
    _check_activation(config)
    shape = FAMILIES[config.moe_preset](config)
    if shape.top_k > shape.num_experts:
        _refuse("num_experts_per_tok", shape.top_k, f"the number of experts, {shape.num_experts}, at most")
    return shape


def ffn_kinds(config: Any) -> tuple[str, ...]:
    """ "dense" or "moe" for each layer. Without ffn_layer_types all are dense, or all "moe" where there is a preset."""
    layers, types = config.num_hidden_layers, getattr(config, "ffn_layer_types", None)
    preset = getattr(config, "moe_preset", None)
    if types is None:
        return ("dense" if preset is None else "moe",) * layers
    if preset is None:
        _refuse("ffn_layer_types", types, "null, for there is no moe_preset")
    if len(types) != layers:
        _refuse("ffn_layer_types", types, f"one for each of num_hidden_layers {layers}")
    for kind in types:
        if kind not in FFN_KINDS:
            _refuse("ffn_layer_types", kind, ", ".join(map(repr, FFN_KINDS)))
    return tuple(types)


def check_ffn(config: Any) -> None:
    """ValueError, naming the key, for feed-forward keys that do not fit together or that nothing would read."""
    kinds = ffn_kinds(config)
    _check_activation(config)
    if getattr(config, "moe_preset", None) is None:
        _unused(config, _EXPERT_KEYS, "there is no moe_preset")
    else:
        moe_shape(config)
    if "dense" in kinds:
        _size(config, "intermediate_size", "a dense layer")
    if "moe" not in kinds:
        for name, default in (("enable_expert_bias", False), ("bias_update_rate", 0.0), ("aux_loss_coef", 0.0)):
            value = getattr(config.dflash, f"moe_router_{name}", default)
            if value != default:
                _refuse(f"dflash_config.moe_router_{name}", value, f"{default}, for no layer is a mixture")


def build_moe(config: Any) -> MoELayer:
    """A mixture layer of the config's moe_preset, its weights drawn; on the meta device under torch.device("meta")."""
    shape, hidden, knobs = moe_shape(config), _size(config, "hidden_size", "a layer"), config.dflash
    router = TopKRouter(
        hidden,
        shape.num_experts,
        shape.top_k,
        shape.score,
        route_scale=shape.route_scale,
        enable_expert_bias=knobs.moe_router_enable_expert_bias,
        bias_update_rate=knobs.moe_router_bias_update_rate,
    )
    experts = Experts(shape.num_experts, hidden, shape.width, shape.limit)
    shared = None if shape.shared_width is None else SharedExpert(hidden, shape.shared_width, shape.limit)
    gate = nn.Linear(hidden, 1, bias=False) if shared is not None and shape.shared_gate else None
    return MoELayer(router, experts, shared, gate, knobs.moe_router_aux_loss_coef, knobs.moe_router_aux_loss_type)


def build_ffn(config: Any, layer_idx: int) -> GatedMLP | MoELayer:
    """The feed-forward network of a layer: the one place where dense and mixture part. Dense ones are not clamped."""
    check_ffn(config)
    ffn: GatedMLP | MoELayer
    if ffn_kinds(config)[layer_idx] == "moe":
        ffn = build_moe(config)
    else:
        ffn = GatedMLP(_size(config, "hidden_size", "a layer"), _size(config, "intermediate_size", "a dense layer"))
    std = _given(config, "initializer_range", INITIAL_STD)
    if std != INITIAL_STD:
        ffn.reset_parameters(std)
    return ffn
