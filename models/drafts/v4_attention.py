"""Attention of V4 and V4.1 drafts: one vector per row is key and value of all heads. training.md 4.1, 4.2.

Letters: B samples, C context rows, Q block rows, L rows, H hidden, R query rank, A heads, D head dim, g output groups,
O rank of one group's output.
"""

import torch
from torch import nn

from ..functions import mean_square_rsqrt
from .attention import Attention, AttentionConfig, AttentionContext
from .backends import attend
from .rotary import Rotary
from .wide import RMSNorm, wide_dtype

NEEDED = ("q_lora_rank", "qk_rope_head_dim", "o_groups", "o_lora_rank")


class V4Attention(Attention):
    """Kinds `deepseek_v4` and `deepseek_v41`; q_head_norm, the unweighted norm of each query head, is V4's alone.

    sinks [A] are FP32 whatever the module is cast to.
    """

    wide = ("sinks",)
    prefers_window = True

    def __init__(self, config: AttentionConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        check_v4(config)
        rank, rope = config.q_lora_rank, config.qk_rope_head_dim
        groups, group_rank = config.o_groups, config.o_lora_rank
        assert rank is not None and rope is not None and groups is not None and group_rank is not None
        hidden, heads, dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.q_head_norm = config.attention_mode == "deepseek_v4"
        self.groups = groups
        self.rotary = Rotary(rope, config.rope_theta, interleaved=True)
        self.q_a_proj = nn.Linear(hidden, rank, bias=False)
        self.q_a_norm = RMSNorm(rank, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(rank, heads * dim, bias=False)
        self.kv_proj = nn.Linear(hidden, dim, bias=False)
        self.kv_norm = RMSNorm(dim, config.rms_norm_eps)
        self.sinks = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        self.o_a_proj = nn.Linear(heads * dim // groups, groups * group_rank, bias=False)
        self.o_b_proj = nn.Linear(groups * group_rank, hidden, bias=False)

    def forward(self, hidden_BQH: torch.Tensor, context_BCH: torch.Tensor, given: AttentionContext) -> torch.Tensor:
        q_BAQD = self.queries(hidden_BQH, given.query_position_BQ)
        o_BAQD = attend(self, q_BAQD, hidden_BQH, context_BCH, given, self.config.head_dim**-0.5, self.sinks)
        # Values carry their position's turn; turned back by the query's, what is left is relative.
        o_BAQD = self.rotary.turn(o_BAQD, given.query_position_BQ, inverse=True)
        return self._grouped_output(o_BAQD)

    def queries(self, hidden_BQH: torch.Tensor, position_BQ: torch.Tensor) -> torch.Tensor:
        """[B, A, Q, D], turned."""
        q_BQX = self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden_BQH)))
        q_BQAD = q_BQX.unflatten(-1, (self.config.num_attention_heads, self.config.head_dim))
        if self.q_head_norm:
            wide_BQAD = q_BQAD.to(wide_dtype(q_BQAD.dtype))
            q_BQAD = (wide_BQAD * mean_square_rsqrt(wide_BQAD, self.config.rms_norm_eps)).to(q_BQAD.dtype)
        return self.rotary.turn(q_BQAD.transpose(1, 2), position_BQ)

    def keys(self, rows_BLH: torch.Tensor, position_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kv_B1LD = self.rotary.turn(self.kv_norm(self.kv_proj(rows_BLH)).unsqueeze(1), position_BL)
        return kv_B1LD, kv_B1LD

    def _grouped_output(self, o_BAQD: torch.Tensor) -> torch.Tensor:
        o_BQgX = o_BAQD.transpose(1, 2).flatten(2).unflatten(2, (self.groups, -1))
        a_gOX = self.o_a_proj.weight.unflatten(0, (self.groups, -1))
        latent_BQgO = torch.einsum("bqgx,gox->bqgo", o_BQgX, a_gOX)
        return self.o_b_proj(latent_BQgO.flatten(2))

    def reset_parameters(self, std: float) -> None:
        for linear in (self.q_a_proj, self.q_b_proj, self.kv_proj, self.o_a_proj, self.o_b_proj):
            nn.init.normal_(linear.weight, std=std)
        self.q_a_norm.reset_parameters()
        self.kv_norm.reset_parameters()
        nn.init.zeros_(self.sinks)


def check_v4(config: AttentionConfig) -> None:
    """ValueError for settings that no V4 attention has. training.md 4.1."""
    mode = config.attention_mode
    missing = [name for name in NEEDED if getattr(config, name) is None]
    if missing:
        raise ValueError(f"attention_mode {mode!r} needs {', '.join(missing)}")
    heads, dim, rope, groups = (
        config.num_attention_heads,
        config.head_dim,
        config.qk_rope_head_dim or 0,
        config.o_groups or 0,
    )
    if config.num_key_value_heads != 1:
        raise ValueError(
            f"attention_mode {mode!r} has one key head; num_key_value_heads is {config.num_key_value_heads}"
        )
    if not 0 < rope < dim or rope % 2:
        raise ValueError(f"qk_rope_head_dim is {rope}; it must be even, above 0 and below head_dim {dim}")
    if groups < 1 or heads % groups or (heads * dim) % groups:
        raise ValueError(f"o_groups is {groups}; it must divide num_attention_heads {heads}")
    if min(config.q_lora_rank or 0, config.o_lora_rank or 0) < 1:
        raise ValueError(f"q_lora_rank {config.q_lora_rank} and o_lora_rank {config.o_lora_rank} must be 1 or more")
    if config.attention_bias:
        raise ValueError(f"attention_mode {mode!r} has no biases; attention_bias must be false")
    if config.attention_sinks:
        raise ValueError(f"attention_mode {mode!r} has sinks always; attention_sinks is for the dense kinds")
