"""Dense attention over the context and the own block: kinds gqa, mha and mla on one class. training.md 4.1.

Letters: B samples, C context rows, Q block rows, L rows, H hidden, A query heads, G key heads, D head dim, V value
dim, P unturned part and E turned part of an mla key, R latent rank.
"""

import torch
from torch import nn

from .attention import Attention, AttentionConfig, AttentionContext
from .backends import attend
from .rotary import Rotary
from .wide import RMSNorm


class DenseAttention(Attention):
    """What the dense kinds share: attention by a backend, the optional sinks [A] (FP32), the output projection."""

    wide = ("sinks",)

    def __init__(self, config: AttentionConfig, layer_idx: int, value_dim: int) -> None:
        super().__init__(config, layer_idx)
        heads = config.num_attention_heads
        self.o_proj = nn.Linear(heads * value_dim, config.hidden_size, bias=config.attention_bias)
        if config.attention_sinks:
            self.sinks: nn.Parameter | None = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        else:
            self.register_parameter("sinks", None)

    def forward(self, hidden_BQH: torch.Tensor, context_BCH: torch.Tensor, given: AttentionContext) -> torch.Tensor:
        q_BAQD = self.queries(hidden_BQH, given.query_position_BQ)
        scale = self.config.head_dim**-0.5
        o_BAQV = attend(self, q_BAQD, hidden_BQH, context_BCH, given, scale, self.sinks)
        return self.o_proj(o_BAQV.transpose(1, 2).flatten(2))

    def queries(self, hidden_BQH: torch.Tensor, position_BQ: torch.Tensor) -> torch.Tensor:
        """[B, A, Q, D], turned."""
        raise NotImplementedError

    def reset_parameters(self, std: float) -> None:
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, RMSNorm):
                module.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)


class GroupedAttention(DenseAttention):
    """gqa, and mha, which has a key head per query head; with Qwen3's norms of each head's query and key."""

    def __init__(self, config: AttentionConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.head_dim)
        check_grouped(config)
        hidden, dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * dim, bias=bias)
        self.q_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.rotary = Rotary(dim, config.rope_theta)

    def queries(self, hidden_BQH: torch.Tensor, position_BQ: torch.Tensor) -> torch.Tensor:
        q_BQAD = self.q_norm(self._heads(self.q_proj(hidden_BQH)))
        return self.rotary.turn(q_BQAD.transpose(1, 2), position_BQ)

    def keys(self, rows_BLH: torch.Tensor, position_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k_BLGD = self.k_norm(self._heads(self.k_proj(rows_BLH)))
        v_BLGD = self._heads(self.v_proj(rows_BLH))
        return self.rotary.turn(k_BLGD.transpose(1, 2), position_BL), v_BLGD.transpose(1, 2)

    def _heads(self, x_BLX: torch.Tensor) -> torch.Tensor:
        return x_BLX.unflatten(-1, (-1, self.config.head_dim))


class LatentAttention(DenseAttention):
    """mla: keys and values of all heads out of one latent row, and one turned key part that all heads share.

    Names are those of DeepSeek-V3 in transformers; turned channels are half-split. Keys and values are cached whole.
    """

    def __init__(self, config: AttentionConfig, layer_idx: int) -> None:
        check_latent(config)
        value, nope, rope = config.v_head_dim, config.qk_nope_head_dim, config.qk_rope_head_dim
        latent = config.kv_lora_rank
        assert value is not None and nope is not None and rope is not None and latent is not None
        super().__init__(config, layer_idx, value)
        hidden, heads, eps, bias = (
            config.hidden_size,
            config.num_attention_heads,
            config.rms_norm_eps,
            config.attention_bias,
        )
        self.parts = (nope, rope, value, latent)
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * config.head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent + rope, bias=bias)
        self.kv_a_layernorm = RMSNorm(latent, eps)
        self.kv_b_proj = nn.Linear(latent, heads * (nope + value), bias=False)
        self.rotary = Rotary(rope, config.rope_theta)

    def queries(self, hidden_BQH: torch.Tensor, position_BQ: torch.Tensor) -> torch.Tensor:
        if self.config.q_lora_rank is None:
            q_BQX = self.q_proj(hidden_BQH)
        else:
            q_BQX = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_BQH)))
        q_BQAD = q_BQX.unflatten(-1, (-1, self.config.head_dim))
        return self.rotary.turn(q_BQAD.transpose(1, 2), position_BQ)

    def keys(self, rows_BLH: torch.Tensor, position_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nope, rope, value, latent = self.parts
        latent_BLR, turned_BLE = self.kv_a_proj_with_mqa(rows_BLH).split((latent, rope), dim=-1)
        both_BLX = self.kv_b_proj(self.kv_a_layernorm(latent_BLR))
        both_BALX = both_BLX.unflatten(-1, (-1, nope + value)).transpose(1, 2)
        k_BALP, v_BALV = both_BALX.split((nope, value), dim=-1)
        turned_B1LE = self.rotary.turn(turned_BLE.unsqueeze(1), position_BL)
        shared_BALE = turned_B1LE.expand(-1, k_BALP.shape[1], -1, -1)
        return torch.cat((k_BALP, shared_BALE), dim=-1), v_BALV


def check_grouped(config: AttentionConfig) -> None:
    """ValueError for settings that no gqa or mha has."""
    if config.head_dim % 2:
        raise ValueError(f"head_dim is {config.head_dim}; rotation needs an even one")
    if config.attention_mode == "mha" and config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(
            f"attention_mode 'mha' has a key head per query head; num_key_value_heads is {config.num_key_value_heads}, "
            f"num_attention_heads is {config.num_attention_heads}"
        )


def check_latent(config: AttentionConfig) -> None:
    """ValueError for settings that no mla has."""
    needed = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    missing = [name for name in needed if getattr(config, name) is None]
    if missing:
        raise ValueError(f"attention_mode 'mla' needs {', '.join(missing)}")
    nope, rope = config.qk_nope_head_dim or 0, config.qk_rope_head_dim or 0
    if rope < 2 or rope % 2 or nope + rope != config.head_dim:
        raise ValueError(
            f"qk_rope_head_dim is {rope} and qk_nope_head_dim {nope}; the first must be even and above 0, "
            f"and both together head_dim {config.head_dim}"
        )
    if config.num_key_value_heads != config.num_attention_heads:
        raise ValueError(
            f"attention_mode 'mla' has a key per query head; num_key_value_heads is {config.num_key_value_heads}, "
            f"num_attention_heads is {config.num_attention_heads}"
        )
