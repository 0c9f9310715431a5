"""What carries a draft's rows past its sub-layers: one row (standard), gated branches (gr), or mixed streams (mhc).

A layer has two sites, one around its attention and one around its feed-forward network. A site's `read` makes the
sub-layer's input of the state, `write` brings its output back; training.md 5.

Legend: B samples, Q draft rows, T = B * Q, n streams, H hidden, M = (2 + n) * n mixing logits, r rank of the gates.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..functions import cast, mean_square_rsqrt, row_linear
from ..v4.hyper import hc_post, sinkhorn
from .config import DraftConfig
from .wide import WideParameters, wide_dtype


class ResidualState(NamedTuple):
    """What one layer hands to the next.

    streams: [B, Q, H] for kind standard, [B, Q, n, H] otherwise, in the model's dtype. pre: weights [B, Q, n] with
    which the next site reads, FP32 or wider, where sites read with their predecessor's; None elsewhere. A tuple of
    tensors, so that recomputation, sharding hooks and pipelines carry both; none may round pre.
    """

    streams: torch.Tensor
    pre: torch.Tensor | None = None


class SiteContext(NamedTuple):
    """What a site's `write` needs of its `read`: post [B, Q, n], mix [B, Q, n, n], and pre [B, Q, n] for the next
    site. All None where the kind has no such thing."""

    post: torch.Tensor | None = None
    mix: torch.Tensor | None = None
    pre: torch.Tensor | None = None


class Residual(nn.Module):
    """One site. This class is kind standard: the sub-layer's output is added; no parameters."""

    def read(self, state: ResidualState) -> tuple[torch.Tensor, SiteContext]:
        """(input of the sub-layer [B, Q, H] in the streams' dtype, context for `write`). Mutates nothing."""
        return state.streams, SiteContext()

    def write(self, state: ResidualState, y_BQH: torch.Tensor, context: SiteContext) -> ResidualState:
        """The state after the sub-layer gave y_BQH. Mutates nothing."""
        return state._replace(streams=state.streams + y_BQH)

    def reset_parameters(self, std: float) -> None:
        """Fresh parameters, normal(0, std) where they are weights."""


class GatedRead(nn.Module):
    """Gated mean over branches, training.md 5.2: each branch normed by itself with gain 1 + w, a low-rank gate for
    every channel. Parameters norm_weight [n * H], down [r, n * H], up [n * H, r], in the model's dtype."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.streams, self.eps = config.residual.streams, config.rms_norm_eps
        width = self.streams * config.hidden_size
        self.norm_weight = nn.Parameter(torch.zeros(width))
        self.down = nn.Linear(width, config.residual.rank, bias=False)
        self.up = nn.Linear(config.residual.rank, width, bias=False)

    def normed(self, streams_BQnH: torch.Tensor) -> torch.Tensor:
        """Branches [B, Q, n * H] after their norms, computed in FP32 or wider, in the streams' dtype."""
        wide = wide_dtype(streams_BQnH.dtype)
        normed_BQnH = cast(streams_BQnH, wide)
        normed_BQnH = normed_BQnH * mean_square_rsqrt(normed_BQnH, self.eps)
        gain_nH = 1 + cast(self.norm_weight, wide).view(self.streams, -1)
        return cast(normed_BQnH * gain_nH, streams_BQnH.dtype).flatten(-2)

    def gated(self, normed_BQI: torch.Tensor) -> torch.Tensor:
        gate_BQI = torch.sigmoid(self.up(F.silu(self.down(normed_BQI) / self.streams)))
        return (gate_BQI * normed_BQI).unflatten(-1, (self.streams, -1)).mean(-2)

    def forward(self, state: ResidualState) -> torch.Tensor:
        """The readout of kind gr: [B, Q, H], already normed."""
        return self.gated(self.normed(state.streams))

    def reset_parameters(self, std: float) -> None:
        nn.init.zeros_(self.norm_weight)
        for linear in self.children():
            assert isinstance(linear, nn.Linear)
            nn.init.normal_(linear.weight, std=std)


class GatedResidual(Residual, GatedRead):
    """Kind gr: reads a gated mean of the normed branches, adds its sub-layer's output to each branch with a gate of its
    own, twice a sigmoid. `inject` [n, n * H] makes those gates. The read is the sub-layer's norm too."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.inject = nn.Linear(config.residual.streams * config.hidden_size, config.residual.streams, bias=False)

    def read(self, state: ResidualState) -> tuple[torch.Tensor, SiteContext]:
        normed_BQI = self.normed(state.streams)
        post_BQn = 2 * torch.sigmoid(self.inject(normed_BQI) / self.streams)
        return self.gated(normed_BQI), SiteContext(post=post_BQn)

    def write(self, state: ResidualState, y_BQH: torch.Tensor, context: SiteContext) -> ResidualState:
        assert context.post is not None
        added_BQnH = context.post.unsqueeze(-1) * y_BQH.unsqueeze(-2)
        return state._replace(streams=state.streams + cast(added_BQnH, state.streams.dtype))

    def reset_parameters(self, std: float) -> None:
        GatedRead.reset_parameters(self, std)


class StreamMixing(WideParameters):
    """mix_weight [rows, n * H], mix_scale [scales], mix_bias [rows], all FP32: of these kind mhc makes coefficients."""

    wide = ("mix_weight", "mix_scale", "mix_bias")

    def __init__(self, config: DraftConfig, rows: int, scales: int) -> None:
        super().__init__()
        residual = config.residual
        self.streams, self.rms_eps, self.eps = residual.streams, config.rms_norm_eps, residual.eps
        self.mix_weight = nn.Parameter(torch.zeros(rows, self.streams * config.hidden_size, dtype=torch.float32))
        self.mix_scale = nn.Parameter(torch.ones(scales, dtype=torch.float32))
        self.mix_bias = nn.Parameter(torch.zeros(rows, dtype=torch.float32))

    def reset_parameters(self, std: float) -> None:
        """Weights normal(0, std), biases 0, scales 1."""
        nn.init.normal_(self.mix_weight, std=std)
        nn.init.ones_(self.mix_scale)
        nn.init.zeros_(self.mix_bias)

    def raw(self, wide_TnH: torch.Tensor) -> torch.Tensor:
        """Products [T, rows] of the rows' streams, normed together: one statistic over all n * H."""
        flat_TI = wide_TnH.flatten(1)
        return row_linear(flat_TI, cast(self.mix_weight, flat_TI.dtype)) * mean_square_rsqrt(flat_TI, self.rms_eps)

    def widened(self, streams_BQnH: torch.Tensor) -> torch.Tensor:
        """Streams [T, n, H] in the dtype of the coefficients."""
        dtype = torch.promote_types(streams_BQnH.dtype, self.mix_weight.dtype)
        return cast(streams_BQnH.flatten(0, 1), dtype)


class HyperConnection(Residual, StreamMixing):
    """Kind mhc, training.md 5.3: coefficients from the streams at the site's entry, in FP32, autocast or not.

    pre_from_prev: the site reads with the state's `pre` and leaves its own for the next; else it reads with its own.
    """

    def __init__(self, config: DraftConfig) -> None:
        n = config.residual.streams
        super().__init__(config, (2 + n) * n, 3)
        self.iterations, self.pre_from_prev = config.residual.sinkhorn_iters, config.residual.pre_from_prev

    def coefficients(self, streams_BQnH: torch.Tensor) -> SiteContext:
        """post, mix and pre of the streams, in FP32 or wider. mix[a, b] is the part of stream a in the new stream b;
        its columns sum to 1."""
        with full_precision(streams_BQnH):
            return self._coefficients(self.widened(streams_BQnH), streams_BQnH.shape[:2])

    def _coefficients(self, wide_TnH: torch.Tensor, rows: torch.Size) -> SiteContext:
        n = self.streams
        parts = (n, n, n * n)
        scale_M = torch.cat([scale.expand(count) for scale, count in zip(self.mix_scale, parts, strict=True)])
        logits_TM = torch.addcmul(
            cast(self.mix_bias, wide_TnH.dtype), self.raw(wide_TnH), cast(scale_M, wide_TnH.dtype)
        )
        pre_Tn, post_Tn, mix_TN = logits_TM.split(parts, dim=1)
        mix_Tnn = sinkhorn(mix_TN.unflatten(1, (n, n)), self.iterations, self.eps)
        found = 2 * torch.sigmoid(post_Tn), mix_Tnn, torch.sigmoid(pre_Tn) + self.eps
        return SiteContext(*(part.unflatten(0, rows) for part in found))

    def read(self, state: ResidualState) -> tuple[torch.Tensor, SiteContext]:
        context = self.coefficients(state.streams)
        pre_BQn = state.pre if self.pre_from_prev else context.pre
        assert pre_BQn is not None
        return collapse(pre_BQn, state.streams), context

    def write(self, state: ResidualState, y_BQH: torch.Tensor, context: SiteContext) -> ResidualState:
        """new[b] = post[b] * y + sum over a of mix[a, b] * old[a], cast once to the streams' dtype."""
        streams_BQnH = state.streams
        assert context.post is not None and context.mix is not None
        with full_precision(streams_BQnH):
            post_Tn, mix_Tnn = context.post.flatten(0, 1), context.mix.flatten(0, 1)
            new_TnH = hc_post(y_BQH.flatten(0, 1), streams_BQnH.flatten(0, 1), post_Tn, mix_Tnn)
            streams_BQnH = new_TnH.view(streams_BQnH.shape)
        return ResidualState(streams_BQnH, context.pre if self.pre_from_prev else None)

    def reset_parameters(self, std: float) -> None:
        StreamMixing.reset_parameters(self, std)


class HyperConnectionHead(StreamMixing):
    """Readout of mhc without pre_from_prev: weights of their own for every stream, sigmoid + eps, no Sinkhorn."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config, config.residual.streams, 1)

    def forward(self, state: ResidualState) -> torch.Tensor:
        """[B, Q, H] in the streams' dtype; computed in FP32 or wider, autocast or not."""
        streams_BQnH = state.streams
        with full_precision(streams_BQnH):
            wide_TnH = self.widened(streams_BQnH)
            scale_1, bias_n = cast(self.mix_scale, wide_TnH.dtype), cast(self.mix_bias, wide_TnH.dtype)
            pre_Tn = torch.sigmoid(torch.addcmul(bias_n, self.raw(wide_TnH), scale_1)) + self.eps
        return collapse(pre_Tn.unflatten(0, streams_BQnH.shape[:2]), streams_BQnH)


class PlainReadout(nn.Module):
    """Readout without parameters: the row itself, or the streams under the last site's `pre`."""

    def forward(self, state: ResidualState) -> torch.Tensor:
        return state.streams if state.pre is None else collapse(state.pre, state.streams)


def collapse(pre_BQn: torch.Tensor, streams_BQnH: torch.Tensor) -> torch.Tensor:
    """Sum over the streams under these weights: [B, Q, H] in the streams' dtype, summed in the weights'."""
    with full_precision(streams_BQnH):
        row_BQ1H = torch.matmul(pre_BQn.unsqueeze(-2), cast(streams_BQnH, pre_BQn.dtype))
    return cast(row_BQ1H.squeeze(-2), streams_BQnH.dtype)


def full_precision(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Autocast off on x's device, where that has autocast at all."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def expand(x_BQH: torch.Tensor, config: DraftConfig) -> ResidualState:
    """The state at the first layer: the row, n times over except for kind standard. Where sites read with their
    predecessor's weights, the first reads stream 0 alone."""
    residual = config.residual
    if residual.kind == "standard":
        return ResidualState(x_BQH)
    streams_BQnH = x_BQH.unsqueeze(2).expand(-1, -1, residual.streams, -1)
    if residual.kind == "gr" or not residual.pre_from_prev:
        return ResidualState(streams_BQnH)
    pre_BQn = x_BQH.new_zeros((*x_BQH.shape[:2], residual.streams), dtype=wide_dtype(x_BQH.dtype))
    pre_BQn[..., 0] = 1
    return ResidualState(streams_BQnH, pre_BQn)


def build_residual(config: DraftConfig) -> Residual:
    """A site of the config's kind."""
    kinds = {
        "standard": lambda: Residual(),
        "gr": lambda: GatedResidual(config),
        "mhc": lambda: HyperConnection(config),
    }
    return kinds[config.residual.kind]()


def build_residual_readout(config: DraftConfig) -> nn.Module:
    """What collapses the state behind the last layer: `forward(state) -> [B, Q, H]`, before the final norm."""
    residual = config.residual
    if residual.kind == "gr":
        return GatedRead(config)
    if residual.kind == "mhc" and not residual.pre_from_prev:
        return HyperConnectionHead(config)
    return PlainReadout()
