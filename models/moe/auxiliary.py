"""The auxiliary loss that pulls the load of experts together. training.md 3.6.

Legend: T tokens, E experts, K experts of a token, N ranks of a group.
"""

import torch

from ...comm.collectives import all_gather_rows
from ...parallel.groups import Group
from .scores import SUM_FLOOR


def routed_counts(indices_TK: torch.Tensor, mask_T: torch.Tensor | None, num_experts: int) -> torch.Tensor:
    """Kept tokens by expert, [E] int64; mask_T bool, None keeps all. No host sync."""
    flat = indices_TK.reshape(-1)
    kept = torch.ones_like(flat) if mask_T is None else mask_T.to(torch.int64).repeat_interleave(indices_TK.shape[1])
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, kept)


def pool_counts(counts: torch.Tensor, group: Group, *, stage: str) -> torch.Tensor:
    """The sum over ranks of int64 counts of any shape, the same on all: one exchange, exact. Collective."""
    return all_gather_rows(counts.unsqueeze(0), group, stage=stage).sum(0)


def load_balancing_loss(
    scores_TE: torch.Tensor,
    counts_E: torch.Tensor,
    mask_T: torch.Tensor | None,
    top_k: int,
    *,
    normalise: bool,
) -> torch.Tensor:
    """E * sum_e f_e P_e, a scalar in the scores' dtype: K for a uniform load, E where K experts take all.

    P_e is the mean score of the kept tokens and carries the gradient. f_e = c_e / M with counts_E int64 of any set of
    tokens and M = sum(c) / K their number. normalise makes each token's scores sum to 1, as a softmax already does.
    Without a kept token it is 0, with a gradient of zeros.
    """
    shares_TE = scores_TE / (scores_TE.sum(1, keepdim=True) + SUM_FLOOR) if normalise else scores_TE
    if mask_T is None:
        mean_E = shares_TE.sum(0) / max(shares_TE.shape[0], 1)
    else:
        kept_T1 = mask_T.to(shares_TE.dtype).unsqueeze(1)
        mean_E = (shares_TE * kept_T1).sum(0) / kept_T1.sum().clamp_min(1)
    # Whole numbers up to 2^53 and one division: ranks agree in every bit.
    load_E = counts_E.double() * top_k / counts_E.sum().clamp_min(1).double()
    return scores_TE.shape[1] * (load_E.to(mean_E.dtype) * mean_E).sum()
