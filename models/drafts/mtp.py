"""MtpDraft: a plain MTP layer as a module that trains, model.md 7. models/dspark/mtp.py serves it.

The row at position q joins the target's streams at q with the embedding of the token at q + 1 and predicts the token at
q + 2. Behind an anchor, the newest token that is known, stands the draft of the row before it: q = anchor - 1.

Legend: B samples, S positions, N anchors a sample, n streams, H hidden, F = n * H.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..functions import cast
from ..moe.balancing import refuse_recompute
from .attention import AttentionContext, attention_context
from .config import DraftConfig
from .draft import DraftOutput
from .layer import DraftLayer, build_norm
from .residual import HyperConnectionHead, ResidualState, build_residual_readout
from .wide import RMSNorm, wide_dtype


class MtpLayer(DraftLayer):
    """A draft's layer whose context rows are rows of its own: their keys come from what its attention takes of them."""

    def forward(
        self,
        state: ResidualState,
        context_BSH: torch.Tensor,
        given: AttentionContext,
        moe_token_mask_BQ: torch.Tensor | None = None,
    ) -> ResidualState:
        """The state after the layer; context_BSH are joined streams [B, S, n, H] here."""
        x_BSH, _ = self.attn_residual.read(ResidualState(context_BSH))
        return super().forward(state, self.input_layernorm(x_BSH), given, moe_token_mask_BQ)


class MtpDraft(nn.Module):
    """A config with projector_type "mtp" as a module: e_proj, enorm, h_proj, hnorm, one layer, its readout and norm.

    Embedding and vocabulary head are the target's, frozen, outside. Parameters are FP32 until cast; sinks, expert
    biases and mix_* stay so. Nothing is drawn under `torch.device("meta")`. ValueError for another config.
    """

    markov_head = None
    confidence_head = None

    def __init__(
        self,
        config: DraftConfig,
        attention_backend: str = "auto",
        flex_options: Mapping[str, int | bool] | None = None,
    ) -> None:
        super().__init__()
        if not config.is_mtp or config.sliding_window is None:
            raise ValueError(f"projector_type is {config.dflash.projector_type!r}, allowed: 'mtp', for MtpDraft")
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        # What the sliding window leaves of the context; a window of one row leaves none, and the mask says so.
        reach = max(config.sliding_window - 1, 1)
        settings = replace(config.attention(attention_backend, flex_options), context_window=reach)
        self.e_proj, self.enorm = nn.Linear(hidden, hidden, bias=False), RMSNorm(hidden, eps)
        self.h_proj, self.hnorm = nn.Linear(hidden, hidden, bias=False), RMSNorm(hidden, eps)
        self.layers = nn.ModuleList([MtpLayer(config, settings, 0)])
        self.residual_readout = build_residual_readout(config)
        self.norm = build_norm(config)
        self.recompute = False
        if not self.e_proj.weight.is_meta:
            self.reset_parameters()

    def forward(
        self, next_BSH: torch.Tensor, features_BSF: torch.Tensor, anchors_BN: torch.Tensor, keep_BN: torch.Tensor
    ) -> DraftOutput:
        """Readouts of the rows before all anchors, [B, N, H].

        features_BSF: the streams behind the target's last layer at positions 0 to S - 1, one after the other;
        next_BSH: the embedding of the token behind each. anchors_BN int64: positions from 1 of the newest tokens;
        keep_BN bool: False for anchors of padding, whose readouts mean nothing. ValueError for shapes that do not fit.
        """
        self._check_shapes(next_BSH, features_BSF, anchors_BN)
        joined_BSnH = self.join(next_BSH, features_BSF)
        # A kept anchor has a row before it; of padding any row will do.
        row_BN = (anchors_BN - 1).clamp(min=0)
        index_BN11 = row_BN[:, :, None, None].expand(-1, -1, *joined_BSnH.shape[2:])
        state = ResidualState(joined_BSnH.gather(1, index_BN11))
        position_BS = torch.arange(features_BSF.shape[1], device=row_BN.device).expand(len(row_BN), -1)
        (layer,) = self.layers
        assert isinstance(layer, MtpLayer)
        given = attention_context([layer.self_attn], row_BN, keep_BN, position_BS, 1)
        if self.recompute and torch.is_grad_enabled():
            state = checkpoint(layer, state, joined_BSnH, given, keep_BN, use_reentrant=False)
        else:
            state = layer(state, joined_BSnH, given, keep_BN)
        readout_BNH = self.residual_readout(state)
        return DraftOutput(self.norm(readout_BNH), readout_BNH)

    def join(self, next_BSH: torch.Tensor, features_BSF: torch.Tensor) -> torch.Tensor:
        """The layer's input streams [B, S, n, H] in the features' dtype, added in FP32 or wider: of each stream what
        h_proj makes of it, plus what e_proj makes of the next token."""
        streams_BSnH = features_BSF.unflatten(2, (self.config.residual.streams, -1))
        own_BSnH, token_BSH = self.h_proj(self.hnorm(streams_BSnH)), self.e_proj(self.enorm(next_BSH))
        wide = wide_dtype(own_BSnH.dtype)
        return cast(cast(own_BSnH, wide) + cast(token_BSH, wide).unsqueeze(2), features_BSF.dtype)

    def enable_recompute(self) -> None:
        """Keep no activations of the layer; backward computes them once more. ValueError for a mixture of experts."""
        refuse_recompute(self)
        self.recompute = True

    def reset_parameters(self, std: float | None = None) -> None:
        """Fresh parameters: weights normal(0, std), by default the config's initializer_range; norms 1; biases and
        sinks 0."""
        std = self.config.initializer_range if std is None else std
        for linear in (self.e_proj, self.h_proj):
            nn.init.normal_(linear.weight, std=std)
        for norm in (self.enorm, self.hnorm, self.norm):
            assert isinstance(norm, RMSNorm)
            norm.reset_parameters()
        (layer,) = self.layers
        assert isinstance(layer, MtpLayer) and isinstance(self.residual_readout, HyperConnectionHead)
        layer.reset_parameters(std)
        self.residual_readout.reset_parameters(std)

    def _check_shapes(self, next_BSH: torch.Tensor, features_BSF: torch.Tensor, anchors_BN: torch.Tensor) -> None:
        config, samples = self.config, len(anchors_BN)
        if features_BSF.shape[::2] != (samples, config.feature_width):
            raise ValueError(
                f"features have shape {tuple(features_BSF.shape)}, allowed: ({samples}, positions, "
                f"{config.feature_width}) for {config.residual.streams} streams of width {config.hidden_size}"
            )
        rows = (*features_BSF.shape[:2], config.hidden_size)
        if next_BSH.shape != rows:
            raise ValueError(f"next tokens have shape {tuple(next_BSH.shape)}, allowed: {rows} for these features")
