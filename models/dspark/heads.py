"""The readout's heads: logits of the shared vocabulary, the Markov term of the token before, and confidences.

Letters: B blocks, R rows of a block, Y drafts of a block (gamma), H hidden, V vocabulary, N rows, C the Markov rank.
"""

import torch
import torch.nn.functional as F

from ...comm.logits import gather_asked, return_logits
from ..functions import cast, rms_norm
from ..kernels.calls import Kernels
from ..matrix import product
from .drafter import Net
from .plan import Slab
from .weights import MarkovHeads


def base_logits(readout_BRH: torch.Tensor, slab: Slab, drafter: Net) -> torch.Tensor:
    """Logits [B, Y, V] of this rank's blocks in the accumulation dtype, before the Markov term.

    Every rank of the tensor group multiplies the group's rows with its rows of the target's head, and whole rows come
    back to their owners: two exchanges a slab, however many drafts there are.
    """
    group, drafts, act = drafter.groups.tp, slab.shape.gamma, drafter.numerics.activation
    rows = slab.blocks * drafts
    hidden_NH = readout_BRH[:, :drafts].reshape(rows, drafter.config.hidden_size)
    hidden_NH = rms_norm(hidden_NH, drafter.weights.norm, drafter.config.rms_norm_eps, act, drafter.in_kernels)
    counts = [rows]
    if group.size > 1:
        counts = [blocks * drafts for blocks in slab.room]
        hidden_NH = F.pad(hidden_NH, (0, 0, 0, counts[group.rank] - rows))
    hidden_NH = gather_asked(hidden_NH, counts, group, stage="draft_head")
    local_NV = cast(product(hidden_NH, drafter.head, drafter.in_kernels), drafter.numerics.accumulation)
    destination = [rank for rank, count in enumerate(counts) for _ in range(count)]
    logits_NV = return_logits(local_NV, destination, group, stage="draft_logits")
    return logits_NV[:rows].view(slab.blocks, drafts, drafter.config.vocab_size)


def markov_bias(
    previous_N: torch.Tensor, heads: MarkovHeads, wide: torch.dtype, kernels: Kernels | None = None
) -> torch.Tensor:
    """What a token adds to the logits of the one after it: [N, V] in `wide`, over the whole vocabulary."""
    return cast(product(markov_embedding(previous_N, heads, wide), heads.w2, kernels), wide)


def markov_embedding(previous_N: torch.Tensor, heads: MarkovHeads, wide: torch.dtype) -> torch.Tensor:
    """[N, C] in `wide`; an id of -1, which a row without finite logits gives, counts as 0."""
    return cast(heads.w1[previous_N.clamp(min=0)], wide)


def confidence_logits(
    readout_NH: torch.Tensor, previous_N: torch.Tensor, heads: MarkovHeads, wide: torch.dtype
) -> torch.Tensor:
    """Logits [N] in `wide` of a draft's acceptance, given that all before it are accepted.

    readout_NH is that before the final norm; previous_N is the token before the draft, so nothing of the draft itself
    is used. A sum of products rather than a product of one output: its bits do not depend on other rows.
    """
    inputs_NI = torch.cat((cast(readout_NH, wide), markov_embedding(previous_N, heads, wide)), dim=1)
    return (inputs_NI * cast(heads.confidence, wide)).sum(1)
