"""Small attentions of every kind, and blocks at the places where windows begin and end."""

from dataclasses import dataclass, replace

import torch
from torch.nn.attention import flex_attention

from meshspark.models.drafts.attention import Attention, AttentionConfig, attention_context
from meshspark.models.drafts.kinds import build_attention

WINDOW = 4

COMMON = {"hidden_size": 12, "num_attention_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
KINDS = {
    "gqa": {"num_key_value_heads": 2},
    "mha": {"num_key_value_heads": 4, "qk_norm": False, "attention_bias": True},
    "mla": {
        "num_key_value_heads": 4,
        "q_lora_rank": 6,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "deepseek_v4": {"num_key_value_heads": 1, "q_lora_rank": 6, "qk_rope_head_dim": 4, "o_groups": 2, "o_lora_rank": 3},
    "deepseek_v41": {
        "num_key_value_heads": 1,
        "q_lora_rank": 6,
        "qk_rope_head_dim": 4,
        "o_groups": 2,
        "o_lora_rank": 3,
        "rms_norm_eps": 1e-20,
    },
}
DENSE = ("gqa", "mha", "mla")


def without_compiler(monkeypatch) -> None:
    """flex's reference as it is: its compiler takes a second for each shape, and has a limit of them."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def config(mode: str, **changes) -> AttentionConfig:
    return AttentionConfig(**(COMMON | {"attention_mode": mode, "context_window": WINDOW} | KINDS[mode] | changes))


def attention(settings: AttentionConfig, layer_idx: int = 0, seed: int = 0) -> Attention:
    """In FP64, every parameter random: sinks and norms too."""
    made = build_attention(settings, layer_idx).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(made.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.5 * noise)
    return made


def on(made: Attention, backend: str) -> Attention:
    """The same weights on another backend."""
    other = build_attention(replace(made.config, attention_backend=backend), made.layer_idx).double()
    other.load_state_dict(made.state_dict())
    return other


@dataclass(frozen=True)
class Blocks:
    """Blocks and the rows they read: anchors [B, N], keep [B, N], positions [B, S], hidden [B, Q, H], context."""

    anchors: torch.Tensor
    keep: torch.Tensor
    positions: torch.Tensor
    size: int
    hidden: torch.Tensor
    context: torch.Tensor

    def places(self):
        return self.anchors, self.keep, self.positions, self.size


def blocks(anchors, keep, rows: int, size: int = 3, hidden: int = 12, first: int = 0) -> Blocks:
    """With `rows` context rows from position `first` on."""
    generator = torch.Generator().manual_seed(7)
    anchors = torch.tensor(anchors)
    batch, count = anchors.shape
    return Blocks(
        anchors,
        torch.tensor(keep, dtype=torch.bool),
        torch.arange(first, first + rows).repeat(batch, 1),
        size,
        torch.randn(batch, count * size, hidden, generator=generator, dtype=torch.float64),
        torch.randn(batch, rows, hidden, generator=generator, dtype=torch.float64),
    )


def edge_blocks() -> Blocks:
    """Anchors at 0, 1, around the window's length and at the end; ragged; one block of padding in each sample."""
    return blocks([[0, 1, WINDOW - 1, WINDOW, 0], [WINDOW + 1, 9, 7, 2, 5]], [[1, 1, 1, 1, 0], [1, 1, 0, 1, 1]], rows=9)


def run(made: Attention, given: Blocks) -> torch.Tensor:
    context = attention_context([made], *given.places())
    return made(given.hidden, given.context, context)
