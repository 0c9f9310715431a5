"""The V4 target: one row-based forward for decode, verification, prefill chunks, mixtures and training.

Legend: T local rows, G group rows, A asked rows, h streams, H hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ...comm.logits import gather_asked, return_best, return_logits
from ...layouts.payloads import KINDS as PAYLOAD_KINDS
from ...layouts.rowplan import Geometry, RowPlan, plan_rows
from ...layouts.rows import RequestRows
from ...parallel.groups import Groups
from ...parallel.ownership import vocab_slice
from ..checkpoint.share import RankWeights
from ..functions import rms_norm
from ..int8.finite import require_finite
from ..kernels.calls import Kernels
from ..kernels.choice import choose_kernels
from ..matrix import held_matrix, product
from ..numerics import Numerics
from ..stages import StageClock
from .block import AttentionLayer, Block, StepContext
from .caches import Caches
from .compressor import CompressorWeights
from .config import V4Config
from .hyper import hc_head, hyper_weights
from .indexer import IndexerWeights
from .integrity import check_unique
from .moe import make_moe
from .output import held_output
from .payloads import model_payload
from .pools import CacheShape
from .projections import by_head, projection_weights
from .rope import angles, frequencies, spread
from .weight_prefetch import WeightPrefetch

TAP_POINTS = ("mean_out", "mean_in", "streams")


@dataclass(frozen=True)
class Tap:
    """A point of the forward to export, local rows only.

    mean_out: mean over the streams of the layer's output [T, H]; mean_in: of what enters the layer [T, H];
    streams: the layer's output streams [T, h, H].
    """

    layer: int
    point: Literal["mean_out", "mean_in", "streams"] = "mean_out"

    def __post_init__(self) -> None:
        if self.point not in TAP_POINTS:
            raise ValueError(f"tap point is {self.point!r}, allowed: {TAP_POINTS}")


@dataclass(frozen=True)
class StepOutput:
    """What a step gives this rank.

    owned: (request of the plan, offset) of the asked rows that this tp_rank owns; logits [A, V] in the
    accumulation dtype or ids [A] int64, whichever was wanted, in that order. taps: local rows. counts: per layer,
    rows that this rank sent to each expert.
    """

    owned: tuple[tuple[int, int], ...]
    logits: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    taps: Mapping[Tap, torch.Tensor] = field(default_factory=dict)
    counts: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Model:
    """One rank's share of a V4 target, built for one topology."""

    def __init__(
        self,
        config: V4Config,
        weights: dict[str, torch.Tensor],
        groups: Groups,
        numerics: Numerics,
        kernels: Kernels | Literal["auto"] | None = "auto",
    ) -> None:
        """weights: this rank's tensors by official name, as models.checkpoint.loader gives them; kept, not copied."""
        groups.topology.check_model(config.o_groups, config.vocab_size, config.n_routed_experts)
        if isinstance(weights, RankWeights):
            weights.require(groups.topology, groups.rank, numerics)
        self.config, self.groups, self.numerics = config, groups, numerics
        self.clock = StageClock(device=groups.device, ledger=groups.ledger)
        self.embed, self.norm = weights["embed.weight"], weights["norm.weight"]
        self.hc_head = hyper_weights(weights, "hc_head")
        self.blocks = tuple(
            _block(weights, config, layer, groups, numerics) for layer in range(config.num_hidden_layers)
        )
        self.geometry = Geometry(config.sliding_window, tuple(sorted(set(config.compress_ratios))), config.index_topk)
        self._payloads = {kind: model_payload(kind, config, numerics) for kind in PAYLOAD_KINDS}
        device = self.embed.device
        width = max(config.head_dim, config.index_head_dim)
        self._frequencies = {kind: spread(frequencies(config, kind, device), width) for kind in (0, 4)}
        shard = vocab_slice(groups.tp.rank, groups.topology.tp, config.vocab_size)
        expected = (shard.stop - shard.start, config.hidden_size)
        found = tuple(weights["head.weight"].shape)
        if found != expected:
            raise ValueError(f"head.weight is {found}, allowed: {expected} at {groups.topology}")
        self.head = held_matrix(weights, "head", numerics)
        self._vocab_offset = shard.start
        self.kernels = choose_kernels(config, numerics, groups) if kernels == "auto" else kernels
        self._prefetch: WeightPrefetch | None = None

    def make_caches(self, shape: CacheShape) -> Caches:
        return Caches(self.config, shape, self.numerics, self.groups.topology, self.embed.device)

    def plan(self, requests: Sequence[RequestRows], caches: Caches | None = None) -> RowPlan:
        """The plan of a step for this rank; all ranks of its TP group pass the same requests.

        Maps the pages that the rows are written to. RuntimeError where two rows would go to one place.
        """
        if caches is not None:
            for request in requests:
                caches.extend(request.slot, request.start, len(request.tokens))
        plan = plan_rows(
            requests,
            self.geometry,
            tp=self.groups.topology.tp,
            tp_rank=self.groups.tp.rank,
            tables=None if caches is None else caches.tables,
            families=() if caches is None else caches.layer_families,
        )
        check_unique(plan.writes)
        return plan

    def plan_sequences(self, sequences: Sequence[Sequence[int]], asked: str = "all") -> RowPlan:
        """A plan of whole sequences without caches; asked 'all' or 'last' rows of each, owned by tp_rank 0."""
        if asked not in ("all", "last"):
            raise ValueError(f"asked is {asked!r}, allowed: 'all', 'last'")
        return self.plan(
            [
                RequestRows(i, 0, tokens, asked=range(len(tokens) if asked == "all" else 0) or (len(tokens) - 1,))
                for i, tokens in enumerate(sequences)
            ]
        )

    def forward(
        self,
        plan: RowPlan,
        caches: Caches | None = None,
        taps: Sequence[Tap] = (),
        *,
        want: Literal["logits", "ids"] = "logits",
        gather_weights: bool = False,
    ) -> StepOutput:
        """Run one step. Mutates the caches; differentiable where there are none.

        want 'ids' asks for the highest logit's id only (ties to the lowest id). gather_weights picks the second
        form of the output projection; same bits; all ranks of a TP group pick alike (`ProjectionCosts.choose`).
        The next layer's weights are on their way while a layer computes, unless gradients are recorded. In w8a8 a row
        that is NaN or infinite where it is quantised is a NonFiniteActivation: INT8 codes would hide it.
        """
        if caches is not None and caches.topology != self.groups.topology:
            caches.topology.require_same(self.groups.topology, "caches")
        for tap in taps:
            if not 0 <= tap.layer < len(self.blocks):
                raise ValueError(f"tap layer is {tap.layer}, allowed: 0 to {len(self.blocks) - 1}")
        plan = plan.to(self.embed.device)
        prefetch = self._weights_ahead(gather_weights)
        step = self.step_context(plan, caches, gather_weights, prefetch)
        with self.clock("embed"):
            x_TH = self.embed[step.token_T].to(self.numerics.stream)
            streams_ThH = x_TH[:, None].expand(-1, self.config.hc_mult, -1)
        tapped: dict[Tap, torch.Tensor] = {}
        counts: dict[int, torch.Tensor] = {}
        for layer, block in enumerate(self.blocks):
            before_ThH = streams_ThH
            try:
                streams_ThH, counts[layer] = block.forward(streams_ThH, step)
            except BaseException:
                if prefetch is not None:
                    prefetch.drop()
                raise
            for tap in taps:
                if tap.layer == layer:
                    tapped[tap] = self._tap(tap, before_ThH, streams_ThH)
        if step.scales is not None:
            with self.clock("finite"):
                require_finite(step.scales)
        with self.clock("lm_head"):
            logits, ids = self.read_out(streams_ThH, plan, want)
        return StepOutput(plan.asked.owned(self.groups.tp.rank), logits, ids, tapped, counts)

    def _tap(self, tap: Tap, before_ThH: torch.Tensor, after_ThH: torch.Tensor) -> torch.Tensor:
        if tap.point == "streams":
            return after_ThH
        streams = before_ThH if tap.point == "mean_in" else after_ThH
        return streams.to(self.numerics.accumulation).mean(1).to(self.numerics.activation)

    def _weights_ahead(self, gather_weights: bool) -> WeightPrefetch | None:
        """The first layer's weights are on their way; buffers are made once, when weights first travel."""
        if not gather_weights or self.groups.tp.size == 1 or torch.is_grad_enabled():
            # What autograd keeps must not be overwritten by the layer after the next one.
            return None
        if self._prefetch is None:
            stored = [block.attention.output.stored for block in self.blocks]
            owned = [weights for weights in stored if weights is not None]
            self._prefetch = WeightPrefetch(owned, self.groups.tp)
        self._prefetch.begin()
        return self._prefetch

    def step_context(
        self, plan: RowPlan, caches: Caches | None, gather_weights: bool, prefetch: WeightPrefetch | None = None
    ) -> StepContext:
        """What all layers of a step share; `plan` is on the model's device."""
        position_T, wide = plan.local(plan.rows.position_G), self.numerics.accumulation
        valid_T = plan.local(plan.rows.valid_G)
        rotation = {kind: angles(position_T, self._frequencies[4 * kind], wide) for kind in (0, 1)}
        return StepContext(
            config=self.config,
            numerics=self.numerics,
            groups=self.groups,
            plan=plan,
            caches=caches,
            tables=None if caches is None else caches.lookup(self.embed.device),
            payloads=self._payloads,
            rotation=rotation,
            head_rotation={kind: by_head(parts) for kind, parts in rotation.items()},
            entry_rotation={
                ratio: angles(boundaries.start_E, self._frequencies[4], wide)
                for ratio, boundaries in plan.boundaries.items()
            },
            token_T=plan.local(plan.rows.token_G),
            valid_T=None if bool(valid_T.all()) else valid_T,
            position_G=plan.rows.position_G,
            clock=self.clock,
            gather_weights=gather_weights,
            prefetch=prefetch,
            kernels=self._kernels(),
            scales=None if self.numerics.quantisation is None else [],
        )

    def _kernels(self) -> Kernels | None:
        """None while gradients are recorded: kernels record none."""
        return None if torch.is_grad_enabled() else self.kernels

    def read_out(
        self, streams_ThH: torch.Tensor, plan: RowPlan, want: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(logits [M, V] or None, ids [M] or None) of the asked rows that this rank owns, as want says.

        Final norm of the asked rows, their logits on this rank's vocabulary, and the exchange to the owners.
        """
        group, asked, kernels = self.groups.tp, plan.asked, self._kernels()
        hidden_AH = self.head_input(streams_ThH[asked.local_rows])
        hidden_AH = gather_asked(hidden_AH, asked.counts, group, stage="lm_head")
        local_AV = product(hidden_AH, self.head, kernels)
        if want == "logits":
            return return_logits(local_AV, asked.destination, group, stage="exchange_logits"), None
        ids, _ = return_best(local_AV, self._vocab_offset, asked.destination, group, stage="exchange_logits")
        return None, ids

    def head_input(self, streams_ThH: torch.Tensor) -> torch.Tensor:
        """The state [T, H] that the LM head multiplies: the last layer's streams collapsed, and the final norm."""
        hidden_TH = hc_head(streams_ThH, self.hc_head, self.config, self.numerics.activation)
        return rms_norm(hidden_TH, self.norm, self.config.rms_norm_eps, self.numerics.activation, self._kernels())


def _compressor(weights: dict[str, torch.Tensor], prefix: str, numerics: Numerics) -> CompressorWeights:
    wkv, wgate = (held_matrix(weights, f"{prefix}compressor.{name}", numerics) for name in ("wkv", "wgate"))
    ape, norm = weights[f"{prefix}compressor.ape"], weights[f"{prefix}compressor.norm.weight"]
    return CompressorWeights(wkv, wgate, ape, norm)


def _block(weights: dict[str, torch.Tensor], config: V4Config, layer: int, groups: Groups, numerics: Numerics) -> Block:
    prefix = f"layers.{layer}."
    attn = f"{prefix}attn."
    ratio = config.compress_ratios[layer]
    indexer = None
    if ratio == 4:
        wq, proj = (held_matrix(weights, f"{attn}indexer.{name}", numerics) for name in ("wq_b", "weights_proj"))
        own = _compressor(weights, f"{attn}indexer.", numerics)
        indexer = IndexerWeights(wq, proj, own, quantised=numerics.quantisation is not None)
    attention = AttentionLayer(
        layer=layer,
        place=config.layers_of(ratio).index(layer),
        ratio=ratio,
        projections=projection_weights(weights, attn, numerics),
        output=held_output(weights, attn, config, groups.topology, numerics),
        sink=weights[f"{attn}attn_sink"],
        compressor=_compressor(weights, attn, numerics) if ratio else None,
        indexer=indexer,
    )
    return Block(
        hc_attn=hyper_weights(weights, f"{prefix}hc_attn"),
        attn_norm=weights[f"{prefix}attn_norm.weight"],
        attention=attention,
        hc_ffn=hyper_weights(weights, f"{prefix}hc_ffn"),
        ffn_norm=weights[f"{prefix}ffn_norm.weight"],
        moe=make_moe(weights, prefix, config, config.is_hash_layer(layer), numerics.activation),
    )
