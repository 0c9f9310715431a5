"""The contract of a draft's attention: its settings, and what a call is given. The kinds are in kinds.py.

Letters: B samples, S context rows, C fresh context rows, N blocks a sample, b rows a block, Q = N * b, H hidden,
A query heads, G key heads, L keys, D head dim, V value dim.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from .cache import ContextCache
from .masks import MaskRule, check_window
from .plans import Need, Plan, choose_backend, make_plan
from .wide import WideParameters

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Settings of a draft's attention, named as in a draft's JSON (training.md 6).

    head_dim is the whole width of a query head; of kind mla it is qk_nope_head_dim + qk_rope_head_dim. layer_types
    has a type per layer, or None for full attention in all; sliding_window holds in layers of type
    "sliding_attention" alone, whose blocks are causal. attention_backend "auto" is chosen per device
    (`choose_backend`). attention_sinks gives a dense kind a sink per head; the V4 kinds always have them.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    attention_mode: str = "gqa"
    attention_backend: str = "auto"
    attention_bias: bool = False
    attention_sinks: bool = False
    qk_norm: bool = True
    is_causal: bool = False
    context_window: int | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    o_groups: int | None = None
    o_lora_rank: int | None = None
    flex_options: Mapping[str, int | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_window("context_window", self.context_window)
        check_window("sliding_window", self.sliding_window)
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        types = self.layer_types or ()
        for name in types:
            if name not in (FULL, SLIDING):
                raise ValueError(f"layer_types has {name!r}; a draft's layers are {FULL!r} or {SLIDING!r}")
        if (SLIDING in types) != (self.sliding_window is not None):
            raise ValueError(
                f"sliding_window is {self.sliding_window} and layer_types is {self.layer_types}: "
                f"the one is needed where the other has {SLIDING!r}, and has no effect elsewhere"
            )

    def rule(self, layer_idx: int) -> MaskRule:
        """What rows of the layer see."""
        if self.layer_types is not None and self.layer_types[layer_idx] == SLIDING:
            return MaskRule(True, self.context_window, self.sliding_window)
        return MaskRule(self.is_causal, self.context_window)


@dataclass(frozen=True)
class AttentionContext:
    """What all attentions of a draft are given in one call; made by `attention_context`.

    Positions are int64: query_position_BQ those of the blocks' rows, context_position_BS those of all context rows,
    ascending in each sample, cached rows first; rows of padding have a position beyond every anchor. keep_BN is False
    for blocks of padding. plans holds what each backend needs, one per distinct need of the layers.
    """

    anchors_BN: torch.Tensor
    keep_BN: torch.Tensor
    block_size: int
    query_position_BQ: torch.Tensor
    context_position_BS: torch.Tensor
    plans: Mapping[Need, Plan]
    cache: ContextCache | None = None


class Attention(WideParameters):
    """Attention of blocks over context rows and their own. A kind owns its projections and its forward."""

    def __init__(self, config: AttentionConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.rule = config.rule(layer_idx)

    def forward(self, hidden_BQH: torch.Tensor, context_BCH: torch.Tensor, given: AttentionContext) -> torch.Tensor:
        """[B, Q, H] of the blocks' normed rows over the context and their own block.

        context_BCH: all context rows, or with a cache the fresh ones, the last C of the S whose positions are given;
        the cache then takes their keys. A row that sees nothing (a block of padding) gives what zeros give.
        """
        raise NotImplementedError

    def keys(self, rows_BLH: torch.Tensor, position_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turned keys [B, G, L, D] and values [B, G, L, V] of rows, context or block; the same tensor where K is V."""
        raise NotImplementedError

    def reset_parameters(self, std: float) -> None:
        """Linear weights normal(0, std), biases and sinks zero, norms one."""
        raise NotImplementedError

    prefers_window = False
    """Whether "auto" takes `native` on a CPU."""

    def need(self, device: torch.device) -> Need:
        """(rule, backend) of this layer on the device."""
        return self.rule, choose_backend(self.config.attention_backend, self.prefers_window, self.rule, device)


def attention_context(
    attentions: Iterable[Attention],
    anchors_BN: torch.Tensor,
    keep_BN: torch.Tensor,
    context_position_BS: torch.Tensor,
    block_size: int,
    cache: ContextCache | None = None,
) -> AttentionContext:
    """What the attentions of a draft need for these blocks; each distinct mask is made once.

    anchors_BN int64, keep_BN bool, context_position_BS int64, on the device of the attentions' input.
    """
    offset_b = torch.arange(block_size, device=anchors_BN.device)
    query_position_BQ = (anchors_BN.unsqueeze(2) + offset_b).flatten(1)
    needs = {attention.need(anchors_BN.device) for attention in attentions}
    plans = {need: make_plan(*need, anchors_BN, keep_BN, context_position_BS, block_size) for need in needs}
    return AttentionContext(anchors_BN, keep_BN, block_size, query_position_BQ, context_position_BS, plans, cache)
