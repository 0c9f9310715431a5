"""V4Config: the model's shape under the field names of config.json, and its presets."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

KINDS = {0: "swa", 4: "csa", 128: "hca"}
"""Compression ratio of a layer -> its kind of attention."""

EXPERT_DTYPES = ("fp4", "fp8")


@dataclass(frozen=True)
class YarnScaling:
    """Static YaRN of the compressed layers' rotary frequencies; factor 1 turns it off."""

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class DSparkFields:
    """The dspark_* keys of config.json: they mark a checkpoint whose mtp.* stages are a DSpark drafter."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    num_stages: int


@dataclass(frozen=True)
class V4Config:
    """Shape of a V4 target. Defaults are Flash's. Field names are config.json's.

    compress_ratios holds exactly num_hidden_layers entries of {0, 4, 128}; draft_ratios what
    config.json lists beyond them (one 0 per MTP layer or drafter stage).
    """

    hidden_size: int = 4096
    num_hidden_layers: int = 43
    vocab_size: int = 129280
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = (0, 0) + (4, 128) * 20 + (4,)
    draft_ratios: tuple[int, ...] = (0,)
    index_n_heads: int = 64
    index_head_dim: int = 128
    index_topk: int = 512
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    num_experts_per_tok: int = 6
    n_shared_experts: int = 1
    num_hash_layers: int = 3
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: YarnScaling = field(default_factory=YarnScaling)
    max_position_embeddings: int = 1048576
    bos_token_id: int = 0
    eos_token_id: int = 1
    expert_dtype: str = "fp4"
    weight_block_size: tuple[int, int] = (128, 128)
    dspark: DSparkFields | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Attention kind of each layer: 'swa', 'csa' or 'hca'."""
        return tuple(KINDS[ratio] for ratio in self.compress_ratios)

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.o_groups

    @property
    def group_columns(self) -> int:
        """Width of one output group's input: its heads side by side."""
        return self.heads_per_group * self.head_dim

    def layers_of(self, ratio: int) -> tuple[int, ...]:
        """Layer indices with this compression ratio, ascending."""
        return tuple(i for i, r in enumerate(self.compress_ratios) if r == ratio)

    def is_hash_layer(self, layer: int) -> bool:
        return layer < self.num_hash_layers

    def to_json(self) -> dict[str, Any]:
        """The config.json of this shape, with the official keys; from_config_json inverts it."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _DERIVED}
        return {
            "model_type": "deepseek_v4",
            "architectures": ["DeepseekV4ForCausalLM"],
            **plain,
            "compress_ratios": list(self.compress_ratios + self.draft_ratios),
            "num_nextn_predict_layers": min(1, len(self.draft_ratios)),
            **_FIXED,
            "rope_scaling": _yarn_json(self.yarn),
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "scale_fmt": "ue8m0",
                "weight_block_size": list(self.weight_block_size),
            },
            **_dspark_json(self.dspark),
        }


_DERIVED = ("compress_ratios", "draft_ratios", "yarn", "dspark", "weight_block_size")
_FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Keys that have one legal value here; config.json must agree where it names them."""


def _check(c: V4Config) -> None:
    if len(c.compress_ratios) != c.num_hidden_layers:
        raise ValueError(
            f"compress_ratios has {len(c.compress_ratios)} entries, num_hidden_layers is {c.num_hidden_layers}"
        )
    for layer, ratio in enumerate(c.compress_ratios + c.draft_ratios):
        if ratio not in KINDS:
            raise ValueError(f"compress_ratios[{layer}] is {ratio}, allowed: {sorted(KINDS)}")
    for name in _POSITIVE:
        if getattr(c, name) < 1:
            raise ValueError(f"{name} is {getattr(c, name)}, allowed: 1 or more")
    _divides("num_attention_heads", c.num_attention_heads, "o_groups", c.o_groups)
    if c.qk_rope_head_dim % 2 or not 2 <= c.qk_rope_head_dim <= min(c.head_dim, c.index_head_dim):
        raise ValueError(
            f"qk_rope_head_dim is {c.qk_rope_head_dim}, allowed: even, 2 to min(head_dim {c.head_dim}, "
            f"index_head_dim {c.index_head_dim})"
        )
    if c.num_experts_per_tok > c.n_routed_experts:
        raise ValueError(
            f"num_experts_per_tok is {c.num_experts_per_tok}, allowed: at most n_routed_experts {c.n_routed_experts}"
        )
    if not 0 <= c.num_hash_layers <= c.num_hidden_layers:
        raise ValueError(f"num_hash_layers is {c.num_hash_layers}, allowed: 0 to {c.num_hidden_layers}")
    if c.n_shared_experts != 1:
        raise ValueError(f"n_shared_experts is {c.n_shared_experts}, allowed: 1")
    if c.expert_dtype not in EXPERT_DTYPES:
        raise ValueError(f"expert_dtype is {c.expert_dtype!r}, allowed: {EXPERT_DTYPES}")
    for name in ("bos_token_id", "eos_token_id"):
        if not 0 <= getattr(c, name) < c.vocab_size:
            raise ValueError(f"{name} is {getattr(c, name)}, allowed: 0 to {c.vocab_size - 1}")


_POSITIVE = [
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
]


def _divides(name: str, value: int, by_name: str, by: int) -> None:
    if value % by:
        legal = [d for d in range(1, value + 1) if value % d == 0]
        raise ValueError(f"{name} % {by_name} == 0 is violated: {value} % {by}; legal {by_name}: {legal}")


def _yarn_json(yarn: YarnScaling) -> dict[str, Any] | None:
    if yarn.factor == 1:
        return None
    return {"type": "yarn", **{f.name: getattr(yarn, f.name) for f in fields(yarn)}}


def _dspark_json(dspark: DSparkFields | None) -> dict[str, Any]:
    if dspark is None:
        return {}
    return {
        "dspark_block_size": dspark.block_size,
        "dspark_noise_token_id": dspark.noise_token_id,
        "dspark_target_layer_ids": list(dspark.target_layer_ids),
        "dspark_markov_rank": dspark.markov_rank,
    }


def from_config_json(source: Path | str | Mapping[str, Any]) -> V4Config:
    """V4Config of an official config.json (a path, or its parsed mapping).

    Only the first num_hidden_layers entries of compress_ratios are the target's; the rest belong to the
    MTP layer or the drafter stages. Raises ValueError naming the key, its value and what is allowed.
    """
    raw = source if isinstance(source, Mapping) else _read_json(Path(source))
    if raw.get("model_type", "deepseek_v4") != "deepseek_v4":
        raise ValueError(f"model_type is {raw['model_type']!r}, allowed: 'deepseek_v4'")
    for key, only in _FIXED.items():
        if key in raw and key != "torch_dtype" and raw[key] != only:
            raise ValueError(f"{key} is {raw[key]!r}, allowed: {only!r}")
    kept = {f.name: _typed(f.name, f.default, raw[f.name]) for f in fields(V4Config) if _is_plain(f.name, raw)}
    layers = int(kept.get("num_hidden_layers", V4Config.num_hidden_layers))
    ratios = _ratios(raw, layers)
    quantization = raw.get("quantization_config") or {}
    block = tuple(int(v) for v in quantization.get("weight_block_size", (128, 128)))
    if len(block) != 2 or min(block) < 1:
        raise ValueError(f"quantization_config.weight_block_size is {block}, allowed: two positive integers")
    return V4Config(
        **kept,
        compress_ratios=ratios[:layers],
        draft_ratios=ratios[layers:],
        yarn=_yarn_of(raw.get("rope_scaling")),
        weight_block_size=(block[0], block[1]),
        dspark=_dspark_of(raw, len(ratios) - layers),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a readable config.json: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: not a JSON object")
    return raw


def _is_plain(name: str, raw: Mapping[str, Any]) -> bool:
    return name not in _DERIVED and raw.get(name) is not None


def _typed(name: str, default: Any, value: Any) -> Any:
    wanted = (int, float) if isinstance(default, float) else type(default)
    if isinstance(value, bool) or not isinstance(value, wanted):
        raise ValueError(f"{name} is {value!r}, allowed: a value of type {type(default).__name__}")
    return type(default)(value)


def _ratios(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    ratios = raw.get("compress_ratios")
    if not isinstance(ratios, list) or not all(isinstance(r, int) for r in ratios):
        raise ValueError(f"compress_ratios is {ratios!r}, allowed: a list of integers from {sorted(KINDS)}")
    if len(ratios) < layers:
        raise ValueError(f"compress_ratios has {len(ratios)} entries, allowed: at least num_hidden_layers {layers}")
    return tuple(ratios)


def _yarn_of(scaling: Mapping[str, Any] | None) -> YarnScaling:
    if scaling is None:
        return YarnScaling(factor=1.0)
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind != "yarn":
        raise ValueError(f"rope_scaling.type is {kind!r}, allowed: 'yarn' (or no rope_scaling)")
    off = YarnScaling()
    known = {f.name: _typed(f.name, getattr(off, f.name), scaling[f.name]) for f in fields(off) if f.name in scaling}
    return YarnScaling(**known)


def _dspark_of(raw: Mapping[str, Any], num_stages: int) -> DSparkFields | None:
    if "dspark_block_size" not in raw:
        return None
    missing = [k for k in _dspark_json(DSparkFields(1, 0, (), 1, 1)) if k not in raw]
    if missing:
        raise ValueError(f"config.json has dspark_block_size but lacks {missing}")
    return DSparkFields(
        block_size=int(raw["dspark_block_size"]),
        noise_token_id=int(raw["dspark_noise_token_id"]),
        target_layer_ids=tuple(int(i) for i in raw["dspark_target_layer_ids"]),
        markov_rank=int(raw["dspark_markov_rank"]),
        num_stages=num_stages,
    )


def flash() -> V4Config:
    """DeepSeek-V4-Flash, with its single MTP layer."""
    return V4Config()


def flash_dspark() -> V4Config:
    """DeepSeek-V4-Flash with the three-stage DSpark drafter in place of the MTP layer."""
    return replace(
        flash(),
        draft_ratios=(0, 0, 0),
        dspark=DSparkFields(5, 128799, (40, 41, 42), 256, 3),
    )


def pro() -> V4Config:
    """DeepSeek-V4-Pro."""
    return V4Config(
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        compress_ratios=(128, 128) + (4, 128) * 29 + (4,),
        index_topk=1024,
        moe_intermediate_size=3072,
        n_routed_experts=384,
        routed_scaling_factor=2.5,
    )


def tiny() -> V4Config:
    """All layer kinds at test size; every width fits FP4's groups of 32."""
    return V4Config(
        hidden_size=64,
        num_hidden_layers=5,
        vocab_size=264,
        num_attention_heads=8,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_groups=8,
        o_lora_rank=32,
        sliding_window=16,
        compress_ratios=(0, 4, 128, 4, 0),
        draft_ratios=(),
        index_n_heads=24,
        index_head_dim=32,
        index_topk=8,
        moe_intermediate_size=32,
        n_routed_experts=16,
        num_experts_per_tok=3,
        num_hash_layers=1,
        swiglu_limit=1.0,
        max_position_embeddings=4096,
        yarn=YarnScaling(factor=16.0, original_max_position_embeddings=256),
    )


def tiny_thirds() -> V4Config:
    """tiny() whose groups, experts and vocabulary divide by three."""
    return replace(tiny(), num_attention_heads=12, o_groups=6, n_routed_experts=12, vocab_size=96)


PRESETS = {"flash": flash, "flash-dspark": flash_dspark, "pro": pro, "tiny": tiny, "tiny-thirds": tiny_thirds}
