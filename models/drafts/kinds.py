"""The kinds of a draft's attention by name. training.md 4.1, 4.2."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from .attention import Attention, AttentionConfig
from .dense import GroupedAttention, LatentAttention
from .plans import check_backend
from .v4_attention import V4Attention

ATTENTION_KINDS: Mapping[str, Callable[[AttentionConfig, int], Attention]] = MappingProxyType(
    {
        "gqa": GroupedAttention,
        "mha": GroupedAttention,
        "mla": LatentAttention,
        "deepseek_v4": V4Attention,
        "deepseek_v41": V4Attention,
    }
)


def build_attention(config: AttentionConfig, layer_idx: int) -> Attention:
    """The attention of a layer, of the kind that config.attention_mode names. ValueError for what cannot be."""
    kind = ATTENTION_KINDS.get(config.attention_mode)
    if kind is None:
        raise ValueError(f"attention_mode is {config.attention_mode!r}; the kinds are {', '.join(ATTENTION_KINDS)}")
    attention = kind(config, layer_idx)
    sinks = attention._parameters.get("sinks") is not None
    check_backend(config.attention_backend, attention.rule, sinks, config.attention_mode)
    return attention
