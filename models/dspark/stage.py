"""One stage over the rows of a slab, and the stages one after another.

Letters: B blocks, R rows of a block, T = B * R rows, C context lanes, L = C + R lanes, A heads, D head dim, h streams,
H hidden, M stages, S pool slots, X fresh rows.
"""

import torch
import torch.nn.functional as F

from ..functions import cast, rms_norm, tile_product
from ..v4.hyper import hc_head, hc_post, hc_pre
from ..v4.output import project_output
from ..v4.pools import DRAFT_FAMILY
from ..v4.projections import Rotation, by_head, queries, query_latent
from ..v4.rope import rotate
from .drafter import Drafter, Net
from .plan import Slab
from .projector import stage_keys
from .weights import StageWeights


def block_readout(
    slab: Slab, drafter: Drafter, pool_MSD: torch.Tensor | None = None, fresh_MXD: torch.Tensor | None = None
) -> torch.Tensor:
    """What DSpark's stages make of the blocks' tokens, `read_blocks` of their embedding. Differentiable in that too."""
    with drafter.clock("draft_embed"):
        x_TH = drafter.embed[slab.token_T].to(drafter.numerics.stream)
        streams_ThH = x_TH[:, None].expand(-1, drafter.config.hc_mult, -1)
    return read_blocks(streams_ThH, slab, drafter, pool_MSD, fresh_MXD)


def read_blocks(
    streams_ThH: torch.Tensor,
    slab: Slab,
    drafter: Net,
    pool_MSD: torch.Tensor | None = None,
    fresh_MXD: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the stages make of the streams of blocks' rows: [B, R, H] in the activation dtype, before the final norm.

    Context rows come from the pool and from fresh_MXD as the plan says. Every rank of the group and of its expert block
    calls it, with an empty slab too. Differentiable in the streams, fresh_MXD and the weights.
    """
    with drafter.clock("draft_embed"):
        rotation = drafter.rotation(slab.position_T)
    for number, stage in enumerate(drafter.weights.stages):
        context_BCD = _context(slab, number, drafter, pool_MSD, fresh_MXD)
        streams_ThH = stage_forward(streams_ThH, stage, context_BCD, slab, rotation, drafter)
    with drafter.clock("draft_readout"):
        x_TH = hc_head(streams_ThH, drafter.weights.hc_head, drafter.config, drafter.numerics.activation)
    return x_TH.view(slab.blocks, slab.shape.rows, drafter.config.hidden_size)


def _context(
    slab: Slab, number: int, drafter: Net, pool_MSD: torch.Tensor | None, fresh_MXD: torch.Tensor | None
) -> torch.Tensor:
    """Context rows of a stage [B, C, D] in the kv dtype, zero in empty lanes."""
    if fresh_MXD is None:
        fresh_XD = drafter.embed.new_zeros((0, drafter.config.head_dim), dtype=drafter.numerics.kv)
    else:
        fresh_XD = fresh_MXD[number]
    return slab.context.fill(fresh_XD, None if pool_MSD is None else pool_MSD[number], DRAFT_FAMILY)


def stage_forward(
    streams_ThH: torch.Tensor,
    stage: StageWeights,
    context_BCD: torch.Tensor,
    slab: Slab,
    rotation: Rotation,
    drafter: Net,
) -> torch.Tensor:
    """Streams [T, h, H] after the stage."""
    config, eps, act, kernels = (
        drafter.config,
        drafter.config.rms_norm_eps,
        drafter.numerics.activation,
        drafter.in_kernels,
    )
    with drafter.clock("draft_hyper"):
        x_TH, post_Th, mix_Thh = attention_input(streams_ThH, stage, drafter)
    y_TH = _attention(x_TH, stage, context_BCD, slab, rotation, drafter)
    with drafter.clock("draft_hyper"):
        streams_ThH = hc_post(y_TH, streams_ThH, post_Th, mix_Thh, kernels)
        x_TH, post_Th, mix_Thh = hc_pre(streams_ThH, stage.hc_ffn, config, act, kernels)
        x_TH = rms_norm(x_TH, stage.ffn_norm, eps, drafter.numerics.accumulation, kernels)
    with drafter.clock("draft_moe"):
        y_TH, _ = stage.moe.forward(x_TH, slab.token_T, None, drafter.groups.ep, drafter.watch, kernels)
    with drafter.clock("draft_hyper"):
        return hc_post(y_TH, streams_ThH, post_Th, mix_Thh, kernels)


def attention_input(
    streams_ThH: torch.Tensor, stage: StageWeights, drafter: Net
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(normed rows [T, H], post [T, h], mix [T, h, h]): what a stage's attention takes of the streams, and what spreads
    its output over them."""
    act, kernels = drafter.numerics.activation, drafter.in_kernels
    x_TH, post_Th, mix_Thh = hc_pre(streams_ThH, stage.hc_attn, drafter.config, act, kernels)
    return rms_norm(x_TH, stage.attn_norm, drafter.config.rms_norm_eps, act, kernels), post_Th, mix_Thh


def _attention(
    x_TH: torch.Tensor,
    stage: StageWeights,
    context_BCD: torch.Tensor,
    slab: Slab,
    rotation: Rotation,
    drafter: Net,
) -> torch.Tensor:
    """Attention output [T, H] of the normed rows."""
    config, projections, head_rotation = drafter.config, stage.projections, by_head(rotation)
    kernels = drafter.in_kernels
    with drafter.clock("draft_qkv"):
        latent_TR = query_latent(x_TH, projections, config, drafter.watch, kernels)
        q_TAD = queries(latent_TR, projections, config, head_rotation, x_TH.dtype, kernels)
        own_TD = stage_keys(x_TH, stage, rotation, drafter)
    with drafter.clock("draft_attend"):
        keys_BLD = torch.cat((context_BCD, own_TD.view(slab.blocks, slab.shape.rows, config.head_dim)), dim=1)
        o_TAD = attend_block(q_TAD, keys_BLD, slab.hidden_BC, stage.sink)
        o_TAD = rotate(o_TAD, *head_rotation, inverse=True, kernels=kernels)
    with drafter.clock("draft_publish"):
        return _publish(o_TAD, stage, slab, drafter)


def attend_block(
    q_TAD: torch.Tensor, keys_BLD: torch.Tensor, hidden_BC: torch.Tensor, sink_A: torch.Tensor
) -> torch.Tensor:
    """Output [T, A, D] in q's (wide) dtype: every row of a block sees all lanes of its block that are not hidden.

    hidden_BC covers the first lanes, those of the context; the block's own rows see each other, without a causal mask.
    Keys are values. The scale is D^-0.5; the sink joins the denominator only.
    """
    (blocks, lanes, dim), heads = keys_BLD.shape, q_TAD.shape[1]
    keys_BLD = cast(keys_BLD, q_TAD.dtype)
    own = lanes - hidden_BC.shape[1]
    q_BXD = (q_TAD * dim**-0.5).view(blocks, own * heads, dim)
    scores_BXL = tile_product(q_BXD, keys_BLD.mT)
    scores_BXL = scores_BXL.masked_fill(F.pad(hidden_BC, (0, own)).unsqueeze(1), float("-inf"))
    sink_BX1 = cast(sink_A, q_TAD.dtype).repeat(own).view(1, -1, 1).expand(blocks, -1, 1)
    probability_BXL = torch.softmax(torch.cat((scores_BXL, sink_BX1), dim=2), dim=2)[:, :, :lanes]
    return tile_product(probability_BXL, keys_BLD).view(blocks * own, heads, dim)


def _publish(o_TAD: torch.Tensor, stage: StageWeights, slab: Slab, drafter: Net) -> torch.Tensor:
    """The output projection over the group, in which all ranks have the same number of rows."""
    group, rows = drafter.groups.tp, len(o_TAD)
    if group.size > 1:
        o_TAD = F.pad(o_TAD, (0, 0, 0, 0, 0, slab.publish_rows - rows))
    return project_output(o_TAD, stage.output, drafter.config, group, watch=drafter.watch, kernels=drafter.in_kernels)[
        :rows
    ]
