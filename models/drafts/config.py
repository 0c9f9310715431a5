"""DraftConfig: a draft's shape under the key names of its config.json, training.md 6."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoint.shown import shown_value
from ..moe.families import ffn_kinds
from .attention import AttentionConfig
from .config_checks import DSPARK, MTP, RESIDUAL_KEYS, check_dflash, check_draft, check_residual

CONFIG_LIMIT = 1 << 20
"""Bytes of a config.json at most."""

ARCHITECTURES = {DSPARK: "DSparkDraftModel", MTP: "MtpDraftModel"}
"""projector_type -> what config.json calls the model."""

_INFORMATION = ("architectures", "model_type", "transformers_version", "torch_dtype")
"""Keys that say nothing which a draft is built of; torch_dtype is another name of dtype."""

C = TypeVar("C")


@dataclass(frozen=True)
class DFlashFields:
    """The keys of `dflash_config`. Defaults are those of an absent key.

    projector_type: "dspark", or "mtp" for a plain MTP layer. target_layer_ids: captured layers of the target, in the
    order in which their states stand side by side. mask_token_id: None for an MTP layer, which has no masks.
    context_window: how many context rows before its anchor a block sees, None for all. attention_sinks and qk_norm:
    a sink per head, and norms of each head's query and key, where the kind of attention leaves a choice.
    confidence_head_input: "post_norm" or "pre_norm", the readout after or before the final norm.
    """

    target_layer_ids: tuple[int, ...]
    mask_token_id: int | None
    projector_type: str = DSPARK
    attention_mode: str = "gqa"
    attention_sinks: bool = False
    qk_norm: bool = True
    context_window: int | None = None
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    confidence_head_bias: bool = True
    confidence_head_input: str = "post_norm"
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 0.0
    moe_router_aux_loss_coef: float = 0.0
    moe_router_aux_loss_type: str = "batch_wise"

    def __post_init__(self) -> None:
        check_dflash(self)


@dataclass(frozen=True)
class ResidualFields:
    """The keys of `draft_residual`: kind "standard", "gr" (streams, rank) or "mhc" (streams, sinkhorn_iters, eps,
    pre_from_prev). Keys of another kind than the config's are refused in JSON."""

    kind: str = "standard"
    streams: int = 4
    rank: int = 320
    sinkhorn_iters: int = 20
    eps: float = 1e-6
    pre_from_prev: bool = True

    def __post_init__(self) -> None:
        check_residual(self)


@dataclass(frozen=True)
class DraftConfig:
    """A draft's shape. A size of None is one that its kinds have no use for.

    intermediate_size is that of dense feed-forward networks. moe_preset, ffn_layer_types and the sizes of experts:
    training.md 2.4 and 2.5; num_experts is family qwen3_5_moe's name, n_routed_experts that of deepseek_v4.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_target_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    dflash: DFlashFields
    residual: ResidualFields = field(default_factory=ResidualFields)
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    intermediate_size: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    o_groups: int | None = None
    o_lora_rank: int | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    moe_preset: str | None = None
    ffn_layer_types: tuple[str, ...] | None = None
    num_experts: int | None = None
    n_routed_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    n_shared_experts: int | None = None
    scoring_func: str | None = None
    routed_scaling_factor: float | None = None
    swiglu_limit: float | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    rope_scaling: None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int | None = None
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        check_draft(self)

    @property
    def is_mtp(self) -> bool:
        """Whether this is a plain MTP layer (mtp.py), not a DSpark draft."""
        return self.dflash.projector_type == MTP

    @property
    def feature_width(self) -> int:
        """Width of the context's features: the captured layers' states side by side, or the last one's streams."""
        states = self.residual.streams if self.is_mtp else len(self.dflash.target_layer_ids)
        return states * self.hidden_size

    @property
    def has_moe(self) -> bool:
        """Whether a layer of this draft is a mixture of experts."""
        return "moe" in ffn_kinds(self)

    def attention(self, backend: str = "auto", flex_options: Mapping[str, int | bool] | None = None) -> AttentionConfig:
        """The settings of this draft's attention, to be served by `backend`."""
        own = {f.name for f in fields(AttentionConfig)}
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name in own}
        given |= {f.name: getattr(self.dflash, f.name) for f in fields(self.dflash) if f.name in own}
        return AttentionConfig(**given, attention_backend=backend, flex_options=flex_options or {})

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> "DraftConfig":
        """The config of a parsed config.json. ValueError naming the key, its value and what is allowed, for keys that
        are unknown, missing, or do not fit together."""
        if not isinstance(raw, Mapping):
            raise ValueError(f"a draft's config is {shown_value(raw)}, allowed: a JSON object")
        plain = {key: value for key, value in raw.items() if key not in _INFORMATION}
        if "torch_dtype" in raw:
            plain.setdefault("dtype", raw["torch_dtype"])
        dflash = _dflash(plain.pop("dflash_config", {}))
        residual = _residual(plain.pop("draft_residual", {"kind": "standard"}))
        return _build(DraftConfig, {**plain, "dflash": dflash, "residual": residual}, "")

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` inverts: JSON types under the JSON's key names. Absent are keys of value None, and of
        `draft_residual` those of other kinds."""
        own = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name not in ("dflash", "residual")}
        return {
            "architectures": [ARCHITECTURES[self.dflash.projector_type]],
            **{key: value for key, value in own.items() if value is not None},
            "dflash_config": {
                f.name: _plain(getattr(self.dflash, f.name))
                for f in fields(self.dflash)
                if getattr(self.dflash, f.name) is not None
            },
            "draft_residual": {key: getattr(self.residual, key) for key in RESIDUAL_KEYS[self.residual.kind]},
        }


def read_config(path: Path) -> DraftConfig:
    """The config in a JSON file. ValueError for a file that is none."""
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_LIMIT + 1)
        if len(data) > CONFIG_LIMIT:
            raise ValueError(f"larger than {CONFIG_LIMIT} bytes")
        raw = json.loads(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"config {path} cannot be read: {error}") from None
    return DraftConfig.from_dict(raw)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _dflash(raw: Any) -> DFlashFields:
    if isinstance(raw, Mapping) and raw.get("projector_type") == MTP:
        raw = {"mask_token_id": None, **raw}
    return _part(DFlashFields, raw, "dflash_config")


def _residual(raw: Any) -> ResidualFields:
    found = _part(ResidualFields, raw, "draft_residual")
    other = sorted(set(raw) - set(RESIDUAL_KEYS[found.kind]))
    if other:
        raise ValueError(
            f"draft_residual has {other[0]}, allowed for kind {found.kind!r}: {', '.join(RESIDUAL_KEYS[found.kind])}"
        )
    return found


def _part(kind: type[C], raw: Any, name: str) -> C:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{name} is {shown_value(raw)}, allowed: a JSON object")
    return _build(kind, raw, f"{name}.")


def _build(kind: type[C], raw: Mapping[str, Any], prefix: str) -> C:
    known: dict[str, Field[Any]] = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(str(key) for key in raw if key not in known)
    if unknown:
        raise ValueError(f"unknown keys of a draft's config: {', '.join(prefix + shown_value(key) for key in unknown)}")
    missing = [key for key, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    missing = [key for key in missing if key not in raw]
    if missing:
        raise ValueError(f"a draft's config lacks {', '.join(prefix + key for key in missing)}")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()})
