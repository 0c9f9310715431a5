"""One layer: hyper-connection, attention, hyper-connection, mixture of experts.

Legend: T local rows, G group rows, h streams, H hidden, D head dim, E entries completed in the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ...comm.context_gather import gather_context
from ...layouts.pages import Tables
from ...layouts.payloads import Payload
from ...layouts.rowplan import RowPlan
from ...parallel.groups import Groups
from ..functions import rms_norm
from ..kernels.calls import Kernels
from ..matrix import Watch
from ..numerics import Numerics
from ..stages import StageClock
from .attention import IndexInputs, KeySource, TileMasks, attend
from .caches import Caches
from .compressor import CompressorWeights, pool_entries, project, state_rows
from .config import V4Config
from .hyper import HyperWeights, hc_post, hc_pre
from .indexer import IndexerWeights, index_queries, quantise_keys
from .moe import MoELayer
from .output import OutputWeights, project_output
from .payloads import GATHERED
from .projections import ProjectionWeights, Rotation, key_value, queries, query_latent
from .rope import rotate
from .weight_prefetch import WeightPrefetch


@dataclass(frozen=True)
class StepContext:
    """What all layers of one step share. rotation: by frequency set (0 plain, 1 compressed), of the local rows;
    entry_rotation: by ratio, of the entries completed in the step. head_rotation: `rotation` for rows with heads.
    valid (None: all are), token and position of rows. masks: what attention keeps for the next layer. kernels: those in
    use, None for the plain forms. scales: (layer, stage, row scales) of all that the step quantised so far, None where
    nothing is."""

    config: V4Config
    numerics: Numerics
    groups: Groups
    plan: RowPlan
    caches: Caches | None
    tables: Tables | None
    payloads: Mapping[str, Payload]
    rotation: Mapping[int, Rotation]
    head_rotation: Mapping[int, Rotation]
    entry_rotation: Mapping[int, Rotation]
    token_T: torch.Tensor
    valid_T: torch.Tensor | None
    position_G: torch.Tensor
    clock: StageClock
    gather_weights: bool
    prefetch: WeightPrefetch | None = None
    masks: TileMasks = field(default_factory=TileMasks)
    kernels: Kernels | None = None
    scales: list[tuple[int, str, torch.Tensor]] | None = None

    def watch(self, layer: int) -> Watch | None:
        """Keeps the scales of a layer's quantised rows, which tell whether the rows were finite."""
        scales = self.scales
        return None if scales is None else lambda stage, scale_T: scales.append((layer, stage, scale_T))

    def pool(self, family: str, place: int) -> torch.Tensor | None:
        return None if self.caches is None else self.caches.pool(family, place)


@dataclass(frozen=True)
class AttentionLayer:
    """Attention of one layer. place: its index among the layers of its ratio, where its compressed caches are."""

    layer: int
    place: int
    ratio: int
    projections: ProjectionWeights
    output: OutputWeights
    sink: torch.Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None

    def forward(self, x_TH: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Attention output [T, H] of the normed local rows; writes the group's rows to the caches at its end."""
        config, kind = step.config, min(self.ratio, 1)
        rotation, head_rotation = step.rotation[kind], step.head_rotation[kind]
        watch = step.watch(self.layer)
        with step.clock("qkv"):
            latent_TR = query_latent(x_TH, self.projections, config, watch, step.kernels)
            q_TAD = queries(latent_TR, self.projections, config, head_rotation, x_TH.dtype, step.kernels)
            fields = self._context_rows(x_TH, step, rotation)
        with step.clock("gather"):
            fields = self._gather(fields, step)
        with step.clock("compress"):
            written, entries = self._compress(fields, step)
        index = None
        tiles = step.plan.tiles[self.ratio]
        if self.indexer is not None and tiles.selects(config.index_topk):
            with step.clock("index"):
                q_TID, head_TI = index_queries(
                    x_TH, latent_TR, self.indexer, config, head_rotation, watch, step.kernels
                )
                keys = KeySource("csa_index", written["csa_index"], step.pool("csa_index", self.place))
                index = IndexInputs(q_TID, head_TI, keys, config.index_topk)
        with step.clock("attend"):
            window = KeySource("window_kv", written["window_kv"], step.pool("window_kv", self.layer))
            o_TAD = attend(q_TAD, window, entries, index, self.sink, tiles, step.tables, step.masks, step.kernels)
            o_TAD = rotate(o_TAD, *head_rotation, inverse=True, kernels=step.kernels)
        self._write(written, step)
        with step.clock("publish"):
            shards = None if step.prefetch is None else step.prefetch.take(self.layer)
            return project_output(
                o_TAD,
                self.output,
                config,
                step.groups.tp,
                gather_weights=step.gather_weights,
                shards=shards,
                watch=watch,
                kernels=step.kernels,
            )

    def _context_rows(self, x_TH: torch.Tensor, step: StepContext, rotation: Rotation) -> dict[str, torch.Tensor]:
        fields = {"kv": key_value(x_TH, self.projections, step.config, rotation, step.numerics.kv, step.kernels)}
        if self.compressor is not None:
            fields["value"], fields["score"] = project(x_TH, self.compressor, step.kernels)
        if self.indexer is not None:
            fields["index_value"], fields["index_score"] = project(x_TH, self.indexer.compressor, step.kernels)
        return fields

    def _gather(self, fields: dict[str, torch.Tensor], step: StepContext) -> dict[str, torch.Tensor]:
        gathered: dict[str, torch.Tensor] = {}
        for kind in GATHERED[self.ratio]:
            payload = step.payloads[kind]
            part = {span.name: fields[span.name] for span in payload.spans}
            gathered.update(gather_context(part, payload, step.groups.tp, stage="gather"))
        return gathered

    def _compress(
        self, fields: dict[str, torch.Tensor], step: StepContext
    ) -> tuple[dict[str, torch.Tensor], KeySource | None]:
        """Rows for each cache family this layer has, and the compressed keys."""
        written = {"window_kv": fields["kv"]}
        if self.compressor is None:
            return written, None
        kind = "csa" if self.ratio == 4 else "hca"
        self._pool(written, fields, ("value", "score"), (f"{kind}_state", f"{kind}_kv"), self.compressor, step)
        if self.indexer is not None:
            families, names = ("index_state", "csa_index"), ("index_value", "index_score")
            self._pool(written, fields, names, families, self.indexer.compressor, step)
            if self.indexer.quantised:
                written["csa_index"] = quantise_keys(written["csa_index"])
        return written, KeySource(f"{kind}_kv", written[f"{kind}_kv"], step.pool(f"{kind}_kv", self.place))

    def _pool(
        self,
        written: dict[str, torch.Tensor],
        fields: dict[str, torch.Tensor],
        names: tuple[str, str],
        families: tuple[str, str],
        weights: CompressorWeights,
        step: StepContext,
    ) -> None:
        state_family, entry_family = families
        state_GC = state_rows(fields[names[0]], fields[names[1]], step.position_G, weights, step.kernels)
        written[state_family] = state_GC
        written[entry_family] = pool_entries(
            state_GC,
            step.pool(state_family, self.place),
            state_family,
            step.plan.boundaries[self.ratio],
            weights,
            step.entry_rotation[self.ratio],
            step.config.rms_norm_eps,
            step.numerics.kv,
            step.kernels,
        )

    def _write(self, written: dict[str, torch.Tensor], step: StepContext) -> None:
        if step.caches is None:
            return
        with step.clock("write"):
            for family, rows in written.items():
                place = self.layer if family == "window_kv" else self.place
                step.caches.write(family, place, rows, step.plan.writes[family], step.kernels)


@dataclass(frozen=True)
class Block:
    """One layer over the residual streams."""

    hc_attn: HyperWeights
    attn_norm: torch.Tensor
    attention: AttentionLayer
    hc_ffn: HyperWeights
    ffn_norm: torch.Tensor
    moe: MoELayer

    def forward(self, streams_ThH: torch.Tensor, step: StepContext) -> tuple[torch.Tensor, torch.Tensor]:
        """(streams after the layer [T, h, H], rows this rank sent to each expert [experts])."""
        config, eps, act = step.config, step.config.rms_norm_eps, step.numerics.activation
        with step.clock("hyper"):
            x_TH, post_Th, mix_Thh = hc_pre(streams_ThH, self.hc_attn, config, act, step.kernels)
            x_TH = rms_norm(x_TH, self.attn_norm, eps, act, step.kernels)
        y_TH = self.attention.forward(x_TH, step)
        with step.clock("hyper"):
            streams_ThH = hc_post(y_TH, streams_ThH, post_Th, mix_Thh, step.kernels)
            x_TH, post_Th, mix_Thh = hc_pre(streams_ThH, self.hc_ffn, config, act, step.kernels)
            x_TH = rms_norm(x_TH, self.ffn_norm, eps, step.numerics.accumulation, step.kernels)
        with step.clock("moe"):
            watch = step.watch(self.attention.layer)
            y_TH, counts_E = self.moe.forward(x_TH, step.token_T, step.valid_T, step.groups.ep, watch, step.kernels)
        with step.clock("hyper"):
            return hc_post(y_TH, streams_ThH, post_Th, mix_Thh, step.kernels), counts_E
