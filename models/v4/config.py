"""V4Config: the model's shape under the field names of config.json, and its presets."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..checkpoint.shown import shown_value
from .config_checks import KINDS, LIMITS, YARN_LIMITS, check_config, check_number

CONFIG_LIMIT = 1 << 20
"""Bytes of a config.json at most."""


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
        check_config(self)

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

    @property
    def drafter(self) -> str:
        """What mtp.* is: the stages of a "dspark" drafter, a plain "mtp" layer, or "none" where the config has none."""
        if not self.draft_ratios:
            return "none"
        return "mtp" if self.dspark is None else "dspark"

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
    MTP layer or the drafter stages. Raises ValueError naming the key, its value and what is allowed, whatever
    the source holds.
    """
    raw = source if isinstance(source, Mapping) else _read_json(Path(source))
    if raw.get("model_type", "deepseek_v4") != "deepseek_v4":
        raise ValueError(f"model_type is {shown_value(raw['model_type'])}, allowed: 'deepseek_v4'")
    for key, only in _FIXED.items():
        if key in raw and key != "torch_dtype" and not _same(raw[key], only):
            raise ValueError(f"{key} is {shown_value(raw[key])}, allowed: {only!r}")
    kept = {f.name: _plain(f.name, f.default, raw[f.name]) for f in fields(V4Config) if _is_plain(f.name, raw)}
    layers = kept.get("num_hidden_layers", V4Config.num_hidden_layers)
    ratios = _ratios(raw, layers)
    return V4Config(
        **kept,
        compress_ratios=ratios[:layers],
        draft_ratios=ratios[layers:],
        yarn=_yarn_of(raw.get("rope_scaling")),
        weight_block_size=_block_of(raw.get("quantization_config")),
        dspark=_dspark_of(raw, len(ratios) - layers),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        if not path.is_file():
            raise ValueError("no such file")
        with path.open("rb") as file:
            data = file.read(CONFIG_LIMIT + 1)
        if len(data) > CONFIG_LIMIT:
            raise ValueError(f"larger than {CONFIG_LIMIT} bytes")
        raw = json.loads(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a readable config.json: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: not a JSON object")
    return raw


def _is_plain(name: str, raw: Mapping[str, Any]) -> bool:
    return name not in _DERIVED and raw.get(name) is not None


def _same(value: Any, only: Any) -> bool:
    # True equals 1 in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(only, bool) and bool(value == only)


def _plain(name: str, default: Any, value: Any) -> Any:
    """The value of a key, of its default's type; what has no limits of its own is checked with the whole."""
    if name not in LIMITS:
        return value
    check_number(name, value, LIMITS[name])
    return type(default)(value)


def _ratios(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    ratios = raw.get("compress_ratios")
    if not isinstance(ratios, list):
        raise ValueError(f"compress_ratios is {shown_value(ratios)}, allowed: a list of integers from {sorted(KINDS)}")
    if len(ratios) < layers:
        raise ValueError(f"compress_ratios has {len(ratios)} entries, allowed: at least num_hidden_layers {layers}")
    return tuple(ratios)


def _yarn_of(scaling: Any) -> YarnScaling:
    if scaling is None:
        return YarnScaling(factor=1.0)
    if not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling is {shown_value(scaling)}, allowed: an object of type 'yarn', or null")
    kind = scaling.get("type", scaling.get("rope_type"))
    if kind != "yarn":
        raise ValueError(f"rope_scaling.type is {shown_value(kind)}, allowed: 'yarn' (or no rope_scaling)")
    known: dict[str, Any] = {}
    for name, default in asdict(YarnScaling()).items():
        if name in scaling:
            check_number(f"rope_scaling.{name}", scaling[name], YARN_LIMITS[name])
            known[name] = type(default)(scaling[name])
    return YarnScaling(**known)


def _block_of(quantization: Any) -> tuple[int, int]:
    if quantization is None:
        return V4Config.weight_block_size
    if not isinstance(quantization, Mapping):
        raise ValueError(f"quantization_config is {shown_value(quantization)}, allowed: an object, or null")
    block = quantization.get("weight_block_size", V4Config.weight_block_size)
    # Anything but a list is left to the check of the whole config.
    pair: tuple[int, int] = tuple(block) if isinstance(block, list) else block
    return pair


def _dspark_of(raw: Mapping[str, Any], num_stages: int) -> DSparkFields | None:
    keys = list(_dspark_json(DSparkFields(1, 0, (), 1, 1)))
    missing = [key for key in keys if raw.get(key) is None]
    if len(missing) == len(keys):
        return None
    if missing:
        raise ValueError(f"config.json has {[k for k in keys if k not in missing]} but lacks {missing}")
    layers = raw["dspark_target_layer_ids"]
    return DSparkFields(
        block_size=raw["dspark_block_size"],
        noise_token_id=raw["dspark_noise_token_id"],
        target_layer_ids=tuple(layers) if isinstance(layers, list) else layers,
        markov_rank=raw["dspark_markov_rank"],
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


def tiny_dspark() -> V4Config:
    """tiny() with a DSpark drafter of three stages behind its last three layers."""
    return replace(tiny(), draft_ratios=(0, 0, 0), dspark=DSparkFields(5, 262, (2, 3, 4), 8, 3))


def tiny_mtp() -> V4Config:
    """tiny() with a single MTP layer."""
    return replace(tiny(), draft_ratios=(0,))


PRESETS = {
    "flash": flash,
    "flash-dspark": flash_dspark,
    "pro": pro,
    "tiny": tiny,
    "tiny-thirds": tiny_thirds,
    "tiny-dspark": tiny_dspark,
    "tiny-mtp": tiny_mtp,
}
