"""DSparkDraft: blocks of rows in parallel, over a projected context of the target's states, to a readout and its heads.

Legend: B samples, S context positions, C fresh ones, N blocks of a sample, b rows of a block, Q = N * b, H hidden,
F feature width.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .attention import AttentionContext, attention_context
from .cache import ContextCache
from .config import DraftConfig
from .heads import build_confidence_head, build_markov_head
from .layer import DraftLayer, build_norm
from .residual import GatedRead, HyperConnectionHead, ResidualState, build_residual_readout, expand
from .wide import RMSNorm


class DraftOutput(NamedTuple):
    """hidden_BQH after the final norm, for the target's head; readout_BQH before it. Of kind gr both are one."""

    hidden_BQH: torch.Tensor
    readout_BQH: torch.Tensor


class DSparkDraft(nn.Module):
    """A draft of any attention kind, residual kind and feed-forward network; training.md 0 and 8.2.

    It has no embedding and no vocabulary head: the target's are used, frozen, outside. markov_head and confidence_head
    are None where the config has none, and are called by whoever makes logits, not in forward. Parameters are FP32
    until cast; sinks, expert biases and mix_* stay so. Nothing is drawn under `torch.device("meta")`.
    """

    def __init__(
        self,
        config: DraftConfig,
        attention_backend: str = "auto",
        flex_options: Mapping[str, int | bool] | None = None,
    ) -> None:
        super().__init__()
        if config.is_mtp:
            raise ValueError("projector_type is 'mtp', allowed: 'dspark', for DSparkDraft")
        self.config = config
        settings = config.attention(attention_backend, flex_options)
        self.fc = nn.Linear(config.feature_width, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, settings, i) for i in range(config.num_hidden_layers))
        self.residual_readout = build_residual_readout(config)
        self.norm = build_norm(config)
        self.markov_head = build_markov_head(config)
        self.confidence_head = build_confidence_head(config)
        self.recompute: str | None = None
        if not self.fc.weight.is_meta:
            self.reset_parameters()

    def forward(
        self,
        noise_BQH: torch.Tensor,
        features_BCF: torch.Tensor,
        anchors_BN: torch.Tensor,
        keep_BN: torch.Tensor,
        cache: ContextCache | None = None,
    ) -> DraftOutput:
        """Readouts of all blocks of all samples.

        noise_BQH: embedded rows, each block's anchor token and b - 1 mask tokens. features_BCF: the target's captured
        states at positions 0 to S - 1, or with a cache, which takes them, those behind the positions that it holds.
        anchors_BN int64: positions of the blocks' first rows, which see positions below alone. keep_BN bool: False for
        blocks of padding, whose readouts mean nothing. ValueError for shapes that do not fit.
        """
        self._check_shapes(noise_BQH, features_BCF, anchors_BN)
        context_BCH = self.hidden_norm(self.fc(features_BCF))
        given = self.given(features_BCF, anchors_BN, keep_BN, cache)
        mask_BQ = keep_BN.repeat_interleave(self.config.block_size, dim=1)
        state = expand(noise_BQH, self.config)
        for layer in self.layers:
            state = self._layer(layer, state, context_BCH, given, mask_BQ)
        readout_BQH = self.residual_readout(state)
        return DraftOutput(self.norm(readout_BQH), readout_BQH)

    def given(
        self,
        features_BCF: torch.Tensor,
        anchors_BN: torch.Tensor,
        keep_BN: torch.Tensor,
        cache: ContextCache | None = None,
    ) -> AttentionContext:
        """Positions and masks of these blocks for all layers."""
        (samples, fresh), held = features_BCF.shape[:2], 0 if cache is None else cache.length()
        position_BS = torch.arange(held + fresh, device=anchors_BN.device).expand(samples, -1)
        attentions = (layer.self_attn for layer in self.layers if isinstance(layer, DraftLayer))
        return attention_context(attentions, anchors_BN, keep_BN, position_BS, self.config.block_size, cache)

    def _layer(
        self,
        layer: nn.Module,
        state: ResidualState,
        context_BSH: torch.Tensor,
        given: AttentionContext,
        mask_BQ: torch.Tensor,
    ) -> ResidualState:
        if self.recompute is None or not torch.is_grad_enabled():
            return layer(state, context_BSH, given, mask_BQ)
        if self.recompute == "non_reentrant":
            return checkpoint(layer, state, context_BSH, given, mask_BQ, use_reentrant=False)

        # The reentrant form sees gradients of the tensors among its arguments only.
        def streams_after(streams_BQH: torch.Tensor, context_BSH: torch.Tensor) -> torch.Tensor:
            return layer(ResidualState(streams_BQH), context_BSH, given, mask_BQ).streams

        return ResidualState(checkpoint(streams_after, state.streams, context_BSH, use_reentrant=True))

    def enable_recompute(self, *, reentrant: bool = False) -> None:
        """Keep no activations of the layers; backward computes them once more. training.md 3.5 and 5.

        ValueError for a mixture of experts, whose counts a second forward would double, and for the reentrant form
        where the residual is not standard: it would lose gradients of what layers carry beside the streams.
        """
        if self.config.has_moe:
            raise ValueError(
                f"gradient checkpointing is not supported with MoE drafts (moe_preset is {self.config.moe_preset!r}): "
                "a recomputed forward would count its tokens twice"
            )
        if reentrant and self.config.residual.kind != "standard":
            raise ValueError(
                f"reentrant is True, allowed: False, for draft_residual.kind is {self.config.residual.kind!r}"
            )
        self.recompute = "reentrant" if reentrant else "non_reentrant"

    def reset_parameters(self, std: float | None = None) -> None:
        """Fresh parameters: weights normal(0, std), by default the config's initializer_range; norms 1; biases, sinks
        and markov_w2 0."""
        std = self.config.initializer_range if std is None else std
        nn.init.normal_(self.fc.weight, std=std)
        for norm in (self.hidden_norm, self.norm):
            if isinstance(norm, RMSNorm):
                norm.reset_parameters()
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            layer.reset_parameters(std)
        if isinstance(self.residual_readout, (GatedRead, HyperConnectionHead)):
            self.residual_readout.reset_parameters(std)
        for head in (self.markov_head, self.confidence_head):
            if head is not None:
                head.reset_parameters(std)

    def _check_shapes(self, noise_BQH: torch.Tensor, features_BCF: torch.Tensor, anchors_BN: torch.Tensor) -> None:
        config, (samples, blocks) = self.config, anchors_BN.shape
        rows = (samples, blocks * config.block_size, config.hidden_size)
        if noise_BQH.shape != rows:
            raise ValueError(f"noise has shape {tuple(noise_BQH.shape)}, allowed: {rows} for these anchors")
        if features_BCF.shape[::2] != (samples, config.feature_width):
            layers = len(config.dflash.target_layer_ids)
            raise ValueError(
                f"features have shape {tuple(features_BCF.shape)}, allowed: ({samples}, context, "
                f"{config.feature_width}) for {layers} target_layer_ids of width {config.hidden_size}"
            )
