"""A draft's decoder layer: attention and feed-forward network, each between the read and the write of a residual site.

Legend: B samples, S context rows, Q draft rows, H hidden.
"""

import torch
from torch import nn

from ..moe.families import build_ffn
from ..moe.layer import MoELayer
from .attention import AttentionConfig, AttentionContext
from .config import DraftConfig
from .kinds import build_attention
from .residual import ResidualState, build_residual
from .wide import RMSNorm


class DraftLayer(nn.Module):
    """One layer. Kind gr's read is the norm of the sub-layers' inputs, so that such a layer has no norms of its own."""

    def __init__(self, config: DraftConfig, settings: AttentionConfig, layer_idx: int) -> None:
        super().__init__()
        self.attn_residual = build_residual(config)
        self.input_layernorm = build_norm(config)
        self.self_attn = build_attention(settings, layer_idx)
        self.ffn_residual = build_residual(config)
        self.post_attention_layernorm = build_norm(config)
        self.mlp = build_ffn(config, layer_idx)

    def forward(
        self,
        state: ResidualState,
        context_BSH: torch.Tensor,
        given: AttentionContext,
        moe_token_mask_BQ: torch.Tensor | None = None,
    ) -> ResidualState:
        """The state after the layer. The context goes to the attention as it is: it has its own norm, and no residual.

        moe_token_mask_BQ (bool, False for rows of padding) is for a mixture of experts, which counts by it.
        """
        x_BQH, site = self.attn_residual.read(state)
        y_BQH = self.self_attn(self.input_layernorm(x_BQH), context_BSH, given)
        state = self.attn_residual.write(state, y_BQH, site)
        x_BQH, site = self.ffn_residual.read(state)
        x_BQH = self.post_attention_layernorm(x_BQH)
        y_BQH = self.mlp(x_BQH, moe_token_mask_BQ) if isinstance(self.mlp, MoELayer) else self.mlp(x_BQH)
        return self.ffn_residual.write(state, y_BQH, site)

    def reset_parameters(self, std: float) -> None:
        """Fresh parameters, weights normal(0, std), norms 1."""
        for site in (self.attn_residual, self.ffn_residual):
            site.reset_parameters(std)
        for norm in (self.input_layernorm, self.post_attention_layernorm):
            if isinstance(norm, RMSNorm):
                norm.reset_parameters()
        self.self_attn.reset_parameters(std)
        self.mlp.reset_parameters(std)


def build_norm(config: DraftConfig) -> nn.Module:
    """The norm behind a read, or nothing where the read has normed already."""
    return nn.Identity() if config.residual.kind == "gr" else RMSNorm(config.hidden_size, config.rms_norm_eps)
