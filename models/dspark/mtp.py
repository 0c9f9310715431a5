"""A plain checkpoint's single MTP layer as a drafter: one stage over the target's streams joined with the next token.

The row at position q, whose next token t[q+1] is known, drafts the token at q + 2: the one behind the anchor t[q+1].
Its key depends on nothing but its own streams and that token, so it is final once the row is kept. model.md 7.

Letters: T rows, h streams, H hidden, B blocks, V vocabulary, D head dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ...comm.experts import index_tensor
from ...parallel.groups import Groups
from ..functions import cast, rms_norm
from ..matrix import Matrix, Watch, held_matrix, operand, product
from ..numerics import Numerics
from ..stages import StageClock
from ..v4.caches import Caches
from ..v4.config import V4Config
from ..v4.model import Tap
from .context import draft_pool, name_rows, write_context
from .draft import Choose, Drafts, choose_greedy, join_slabs
from .drafter import DraftNet, make_net
from .heads import base_logits
from .plan import Slab, plan_draft, slabs_needed
from .projector import stage_keys
from .proposer import Anchors, KeptRows
from .shape import SLAB_BLOCKS, DraftShape
from .stage import attention_input, read_blocks
from .weights import NetWeights, net_weights


@dataclass(frozen=True)
class MtpWeights(NetWeights):
    """Beside the stage: e_proj [H, H] and enorm [H] for the next token, h_proj [H, H] and hnorm [H] for each stream."""

    e_proj: Matrix
    enorm: torch.Tensor
    h_proj: Matrix
    hnorm: torch.Tensor


MtpLayer = DraftNet[MtpWeights]
"""One rank's share of an MTP layer."""


def require_mtp(config: V4Config) -> None:
    """ValueError where a config has no plain MTP layer, more than one, or one that is not a sliding window."""
    if config.drafter != "mtp":
        raise ValueError(f"the checkpoint's drafter is {config.drafter!r}, allowed: 'mtp', a plain MTP layer")
    if config.draft_ratios != (0,):
        raise ValueError(f"compress_ratios of MTP layers are {config.draft_ratios}, allowed: one of 0")


def mtp_shape(config: V4Config, gamma: int | None = None, slab_blocks: int = SLAB_BLOCKS) -> DraftShape:
    """Blocks of one row, that of the position before the anchor. ValueError for another gamma than 1."""
    require_mtp(config)
    if gamma not in (None, 1):
        raise ValueError(f"gamma is {gamma}, allowed: 1, for an MTP layer drafts one token")
    if slab_blocks < 1:
        raise ValueError(f"slab_blocks is {slab_blocks}, allowed: 1 or more")
    return DraftShape(1, 1, slab_blocks, lead=1)


def mtp_weights(
    weights: Mapping[str, torch.Tensor], config: V4Config, groups: Groups, numerics: Numerics
) -> MtpWeights:
    """A rank's MTP layer from its share of mtp.*, on the terms of `net_weights`."""
    require_mtp(config)
    net = net_weights(weights, config, groups, numerics)
    return MtpWeights(
        net.stages,
        net.hc_head,
        net.norm,
        e_proj=held_matrix(weights, "mtp.0.e_proj", numerics),
        enorm=weights["mtp.0.enorm.weight"],
        h_proj=held_matrix(weights, "mtp.0.h_proj", numerics),
        hnorm=weights["mtp.0.hnorm.weight"],
    )


def make_mtp(
    config: V4Config,
    weights: Mapping[str, torch.Tensor],
    embed: torch.Tensor,
    head: Matrix,
    groups: Groups,
    numerics: Numerics,
    *,
    shape: DraftShape | None = None,
    kv_group: int = 0,
    watch: Watch | None = None,
    clock: StageClock | None = None,
) -> MtpLayer:
    """A rank's MTP layer from its share of mtp.*; ValueError where weights, config and topology do not fit."""
    held = mtp_weights(weights, config, groups, numerics)
    shape = mtp_shape(config) if shape is None else shape
    return make_net(
        config, held, embed, head, groups, numerics, shape=shape, kv_group=kv_group, watch=watch, clock=clock
    )


def mtp_tap(config: V4Config) -> Tap:
    """What a step of the target must export: the streams that come out of its last layer."""
    return Tap(config.num_hidden_layers - 1, "streams")


def join_next(streams_ThH: torch.Tensor, next_T: torch.Tensor, layer: MtpLayer) -> torch.Tensor:
    """The layer's input streams [T, h, H] in the stream dtype: of each stream what h_proj makes of it, plus what e_proj
    makes of the next token's embedding. Norms are over one stream's H; the sum is in the accumulation dtype."""
    config, numerics, weights = layer.config, layer.numerics, layer.weights
    eps, act, wide = config.rms_norm_eps, numerics.activation, numerics.accumulation
    streams_NH = rms_norm(streams_ThH.flatten(0, 1), weights.hnorm, eps, act)
    own_NH = product(operand(streams_NH, weights.h_proj, act, "draft_join", layer.watch), weights.h_proj)
    token_TH = rms_norm(layer.embed[next_T], weights.enorm, eps, act)
    token_TH = product(operand(token_TH, weights.e_proj, act, "draft_join", layer.watch), weights.e_proj)
    return cast(cast(own_NH, wide).view(streams_ThH.shape) + cast(token_TH, wide)[:, None], numerics.stream)


def mtp_keys(joined_ThH: torch.Tensor, position_T: torch.Tensor, layer: MtpLayer) -> torch.Tensor:
    """Key rows [1, T, D] in the kv dtype of joined rows at these positions: what the stage makes of them itself."""
    stage = layer.weights.stages[0]
    x_TH, _, _ = attention_input(joined_ThH, stage, layer)
    return stage_keys(x_TH, stage, layer.rotation(position_T), layer)[None]


def draft_odds(logits_BV: torch.Tensor, id_B: torch.Tensor) -> torch.Tensor:
    """Log-odds [B] of the draft by its own logits, log(p / (1 - p)) with p = softmax(logits)[id], in their dtype.

    A layer without a confidence head has no better estimate of its draft's acceptance. They are always finite: p is
    kept from 0 and 1 by what the dtype can tell, and where there is no draft (-1) its chance is the least one.
    """
    limits = torch.finfo(logits_BV.dtype)
    p_B = torch.softmax(logits_BV, dim=1).gather(1, id_B.clamp(min=0)[:, None]).squeeze(1)
    p_B = p_B.masked_fill(id_B < 0, 0).clamp(limits.tiny, 1 - limits.eps)
    return p_B.log() - torch.log1p(-p_B)


@dataclass(frozen=True)
class MtpProposer:
    """The MTP layer of a rank: a Proposer of one draft."""

    layer: MtpLayer

    @property
    def gamma(self) -> int:
        return self.layer.shape.gamma

    @property
    def stages(self) -> int:
        return self.layer.stages

    @property
    def taps(self) -> tuple[Tap, ...]:
        return (mtp_tap(self.layer.config),)

    @property
    def pins_prompt_end(self) -> bool:
        """The token behind a prompt is sampled by its owner, who alone knows it in time."""
        return True

    def keep(self, rows: KeptRows, taps: Mapping[Tap, torch.Tensor], caches: Caches) -> None:
        """Join rows with their next tokens and write the keys; one exchange over the group.

        A row without a next token has no key: that of a request which fails, for its logits were not finite. Nobody
        commits such a row; `Caches.commit` refuses it.
        """
        streams_ThH = taps[self.taps[0]]
        with self.layer.clock("draft_context"):
            next_T = index_tensor(rows.next_T.clip(0), streams_ThH.device)
            position_T = index_tensor(rows.position_T.clip(0), streams_ThH.device)
            keys_MTD = mtp_keys(join_next(streams_ThH, next_T, self.layer), position_T, self.layer)
        names_T3 = name_rows(rows.slot_T, rows.generation_T, rows.position_T, rows.next_T >= 0)
        write_context(keys_MTD, names_T3, draft_pool(caches), self.layer)

    def propose(
        self, anchors: Anchors, caches: Caches, *, choose: Choose = choose_greedy, keep_logits: bool = False
    ) -> Drafts:
        """One draft behind each anchor, from the row before it and the context that is kept.

        Confidence is `draft_odds`. RuntimeError where a row before an anchor is another rank's.
        """
        away = [block for block, row in zip(anchors.blocks, anchors.last_rows, strict=True) if row < 0]
        if away:
            raise RuntimeError(
                f"the row before position {away[0].position} of request slot {away[0].slot} is not in its owner's band"
            )
        layer, pool, room, streams_ThH = self.layer, draft_pool(caches), anchors.room, anchors.taps[self.taps[0]]
        slabs = slabs_needed(room.most, layer.shape)
        plan = plan_draft(anchors.blocks, layer, pool.table, slabs=slabs, bounds=room.blocks).to(layer.embed.device)
        row_B = index_tensor(np.array(anchors.last_rows, dtype=np.int64), streams_ThH.device)
        parts = []
        for slab in plan.slabs:
            before_BhH = streams_ThH[row_B[slab.first : slab.first + slab.blocks]]
            parts.append(_draft_slab(before_BhH, slab, layer, pool.keys_MSD, choose, keep_logits))
        return join_slabs(parts, layer, keep_logits)


def _draft_slab(
    before_BhH: torch.Tensor, slab: Slab, layer: MtpLayer, pool_MSD: torch.Tensor, choose: Choose, keep_logits: bool
) -> Drafts:
    """Drafts of a slab's blocks, from the target's streams at the rows before their anchors."""
    with layer.clock("draft_embed"):
        joined_BhH = join_next(before_BhH, slab.anchor_B, layer)
    readout_B1H = read_blocks(joined_BhH, slab, layer, pool_MSD)
    with layer.clock("draft_head"):
        logits_BV = base_logits(readout_B1H, slab, layer).squeeze(1)
        id_B = choose(logits_BV, 0, range(slab.first, slab.first + slab.blocks))
        odds_B = draft_odds(logits_BV, id_B)
    return Drafts(id_B[:, None], odds_B[:, None], logits_BV[:, None] if keep_logits else None)
