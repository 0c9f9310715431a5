"""What a model's shape may be: the limits of every number of config.json, and the rules between them."""

from typing import TYPE_CHECKING, Any

from ..checkpoint.shown import shown_value

if TYPE_CHECKING:
    from .config import DSparkFields, V4Config

KINDS = {0: "swa", 4: "csa", 128: "hca"}
"""Compression ratio of a layer -> its kind of attention."""

EXPERT_DTYPES = ("fp4", "fp8")

LIMITS: dict[str, tuple[float, float]] = {
    "hidden_size": (1, 1 << 17),
    "num_hidden_layers": (1, 1024),
    "vocab_size": (1, 1 << 22),
    "num_attention_heads": (1, 4096),
    "head_dim": (1, 8192),
    "qk_rope_head_dim": (2, 8192),
    "q_lora_rank": (1, 1 << 16),
    "o_groups": (1, 4096),
    "o_lora_rank": (1, 1 << 16),
    "sliding_window": (1, 1 << 20),
    "index_n_heads": (1, 4096),
    "index_head_dim": (1, 8192),
    "index_topk": (1, 1 << 24),
    "moe_intermediate_size": (1, 1 << 17),
    "n_routed_experts": (1, 1 << 14),
    "num_experts_per_tok": (1, 1 << 14),
    "n_shared_experts": (1, 1),
    "num_hash_layers": (0, 1024),
    "routed_scaling_factor": (1e-6, 1e6),
    "swiglu_limit": (1e-6, 1e6),
    "hc_mult": (1, 64),
    "hc_sinkhorn_iters": (1, 1000),
    "hc_eps": (1e-30, 1.0),
    "rms_norm_eps": (1e-30, 1.0),
    "rope_theta": (2.0, 1e12),
    "compress_rope_theta": (2.0, 1e12),
    "max_position_embeddings": (1, 1 << 30),
}
"""Least and greatest of each number: whole where these are. Many times the published models', but small enough
that a damaged config neither fills the memory with names nor overflows; epsilons stay normal numbers in FP32."""

YARN_LIMITS: dict[str, tuple[float, float]] = {
    "factor": (1.0, 1e6),
    "original_max_position_embeddings": (1, 1 << 30),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
}
_DRAFT_LIMIT = 64
_EXPERTS_LIMIT = 1 << 17
"""Of all layers together: each expert has names of its own in the table."""

_BLOCK_LIMITS = (1, 1 << 16)
_DSPARK_LIMITS: dict[str, tuple[float, float]] = {"block_size": (1, 1024), "markov_rank": (1, 1 << 16)}


def check_number(name: str, value: Any, limits: tuple[float, float]) -> None:
    """ValueError naming the key unless the value lies within its limits, and is whole where these are."""
    low, high = limits
    whole = isinstance(low, int)
    kind_fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    # NaN compares as false and so fails the range, too.
    if not kind_fits or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        allowed = f"{kind} from {low} to {high}" if low < high else f"{low}"
        raise ValueError(f"{name} is {shown_value(value)}, allowed: {allowed}")


def check_config(c: "V4Config") -> None:
    """ValueError naming the key, its value and what is allowed, unless the shape is one that the model can have."""
    for name, limits in LIMITS.items():
        check_number(name, getattr(c, name), limits)
    for name, limits in YARN_LIMITS.items():
        check_number(f"rope_scaling.{name}", getattr(c.yarn, name), limits)
    if c.yarn.beta_slow > c.yarn.beta_fast:
        raise ValueError(f"rope_scaling.beta_slow is {c.yarn.beta_slow}, allowed: at most beta_fast {c.yarn.beta_fast}")
    _check_block(c.weight_block_size)
    _check_layers(c)
    _check_attention(c)
    _check_experts(c)
    for name in ("bos_token_id", "eos_token_id"):
        check_number(name, getattr(c, name), (0, c.vocab_size - 1))
    if c.dspark is not None:
        _check_dspark(c, c.dspark)


def _check_block(block: Any) -> None:
    name = "quantization_config.weight_block_size"
    if not isinstance(block, tuple) or len(block) != 2:
        raise ValueError(f"{name} is {shown_value(block)}, allowed: two whole numbers")
    for index, size in enumerate(block):
        check_number(f"{name}[{index}]", size, _BLOCK_LIMITS)


def _check_layers(c: "V4Config") -> None:
    if len(c.compress_ratios) != c.num_hidden_layers:
        raise ValueError(
            f"compress_ratios has {len(c.compress_ratios)} entries, num_hidden_layers is {c.num_hidden_layers}"
        )
    if len(c.draft_ratios) > _DRAFT_LIMIT:
        raise ValueError(
            f"compress_ratios has {len(c.draft_ratios)} entries beyond num_hidden_layers {c.num_hidden_layers}, "
            f"allowed: at most {_DRAFT_LIMIT}"
        )
    for layer, ratio in enumerate(c.compress_ratios + c.draft_ratios):
        if type(ratio) is not int or ratio not in KINDS:
            raise ValueError(f"compress_ratios[{layer}] is {shown_value(ratio)}, allowed: {sorted(KINDS)}")
    check_number("num_hash_layers", c.num_hash_layers, (0, c.num_hidden_layers))


def _check_attention(c: "V4Config") -> None:
    heads = c.num_attention_heads
    if heads % c.o_groups:
        legal = [d for d in range(1, heads + 1) if heads % d == 0]
        raise ValueError(
            f"num_attention_heads % o_groups == 0 is violated: {heads} % {c.o_groups}; legal o_groups: {legal}"
        )
    if c.qk_rope_head_dim % 2 or c.qk_rope_head_dim > min(c.head_dim, c.index_head_dim):
        raise ValueError(
            f"qk_rope_head_dim is {c.qk_rope_head_dim}, allowed: even, 2 to min(head_dim {c.head_dim}, "
            f"index_head_dim {c.index_head_dim})"
        )


def _check_experts(c: "V4Config") -> None:
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ValueError(
            f"num_experts_per_tok is {c.num_experts_per_tok}, allowed: at most n_routed_experts {c.n_routed_experts}"
        )
    layers = c.num_hidden_layers + len(c.draft_ratios)
    if c.n_routed_experts * layers > _EXPERTS_LIMIT:
        raise ValueError(
            f"n_routed_experts is {c.n_routed_experts}, allowed: at most {_EXPERTS_LIMIT // layers}, "
            f"for {layers} layers and drafter stages hold {_EXPERTS_LIMIT} experts at most"
        )
    if c.expert_dtype not in EXPERT_DTYPES:
        raise ValueError(f"expert_dtype is {shown_value(c.expert_dtype)}, allowed: {EXPERT_DTYPES}")


def _check_dspark(c: "V4Config", dspark: "DSparkFields") -> None:
    for name, limits in _DSPARK_LIMITS.items():
        check_number(f"dspark_{name}", getattr(dspark, name), limits)
    check_number("dspark_noise_token_id", dspark.noise_token_id, (0, c.vocab_size - 1))
    layers = dspark.target_layer_ids
    if not isinstance(layers, tuple) or not layers:
        raise ValueError(f"dspark_target_layer_ids is {shown_value(layers)}, allowed: a list of layers, one at least")
    for index, layer in enumerate(layers):
        check_number(f"dspark_target_layer_ids[{index}]", layer, (0, c.num_hidden_layers - 1))
    if len(set(layers)) < len(layers):
        raise ValueError(f"dspark_target_layer_ids is {shown_value(layers)}, allowed: no layer twice")
