"""The drafts of a step: slabs through the stages, then token after token through the Markov loop.

Letters: B blocks, Y drafts of a block (gamma), H hidden, V vocabulary, M stages, S pool slots, X fresh rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..sampling import greedy
from .drafter import Drafter, Net
from .heads import base_logits, confidence_logits, markov_bias
from .plan import DraftPlan, Slab
from .stage import block_readout

Choose = Callable[[torch.Tensor, int, range], torch.Tensor]
"""(corrected logits [B, V], number of the draft from 0, blocks of the plan) -> ids int64 [B]."""


@dataclass(frozen=True)
class Drafts:
    """Of each of the plan's blocks, in its order: drafts [B, Y] int64, where draft b is for position anchor + 1 + b;
    the logits of their confidences [B, Y]; the logits [B, Y, V] from which they were chosen, where asked for.

    Both in the accumulation dtype. An id is -1 where logits were not finite.
    """

    ids: torch.Tensor
    confidence: torch.Tensor
    logits: torch.Tensor | None


def choose_greedy(logits_BV: torch.Tensor, draft: int, blocks: range) -> torch.Tensor:
    """The highest logit's id, the lowest of equals."""
    return greedy(logits_BV)


def draft(
    plan: DraftPlan,
    drafter: Drafter,
    pool_MSD: torch.Tensor | None = None,
    fresh_MXD: torch.Tensor | None = None,
    *,
    choose: Choose = choose_greedy,
    keep_logits: bool = False,
) -> Drafts:
    """Draft for all blocks of the plan. Every rank of the group and of its expert block calls it, with equal slabs."""
    plan = plan.to(drafter.embed.device)
    parts = []
    for slab in plan.slabs:
        readout_BRH = block_readout(slab, drafter, pool_MSD, fresh_MXD)
        with drafter.clock("draft_head"):
            base_BYV = base_logits(readout_BRH, slab, drafter)
        with drafter.clock("markov"):
            parts.append(markov_drafts(base_BYV, readout_BRH, slab, drafter, choose, keep_logits))
    return join_slabs(parts, drafter, keep_logits)


def markov_drafts(
    base_BYV: torch.Tensor,
    readout_BRH: torch.Tensor,
    slab: Slab,
    drafter: Drafter,
    choose: Choose = choose_greedy,
    keep_logits: bool = False,
) -> Drafts:
    """One draft after the other: each token's Markov term is added to the base logits of the next row. No exchange."""
    heads, wide = drafter.weights.heads, drafter.numerics.accumulation
    previous, ids, kept = [slab.anchor_B], [], []
    blocks = range(slab.first, slab.first + slab.blocks)
    for number, base_BV in enumerate(base_BYV.unbind(1)):
        logits_BV = base_BV + markov_bias(previous[-1], heads, wide, drafter.in_kernels)
        ids.append(choose(logits_BV, number, blocks))
        previous.append(ids[-1])
        if keep_logits:
            kept.append(logits_BV)
    before_BY = torch.stack(previous[:-1], dim=1)
    readout_NH = readout_BRH[:, : len(ids)].flatten(0, 1)
    confidence_N = confidence_logits(readout_NH, before_BY.flatten(), heads, wide)
    logits_BYV = torch.stack(kept, dim=1) if keep_logits else None
    return Drafts(torch.stack(ids, dim=1), confidence_N.view(before_BY.shape), logits_BYV)


def join_slabs(parts: Sequence[Drafts], drafter: Net, keep_logits: bool) -> Drafts:
    """The drafts of a plan from those of its slabs, of which there may be none."""
    if len(parts) == 1:
        return parts[0]
    device, wide, drafts = drafter.embed.device, drafter.numerics.accumulation, drafter.shape.gamma
    ids = [torch.zeros((0, drafts), dtype=torch.int64, device=device), *(part.ids for part in parts)]
    confidence = [torch.zeros((0, drafts), dtype=wide, device=device), *(part.confidence for part in parts)]
    logits = [part.logits for part in parts if part.logits is not None]
    empty = torch.zeros((0, drafts, drafter.config.vocab_size), dtype=wide, device=device)
    return Drafts(torch.cat(ids), torch.cat(confidence), torch.cat([empty, *logits]) if keep_logits else None)
