"""Which drafts of a verification are accepted, and the token after them. dspark.md 5.

Letters: R requests, Y drafts of a request (gamma), S = Y + 1 rows at most, N rows of all requests, V vocabulary.
Rows stand by request, then by position; row j of a request decides about its draft j, its last row about none.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..sampling import draw
from ..uniforms import uniforms

LEAST_RESIDUAL = 1e-8
"""A rejected draft's distribution is the target's but for rounding where no more than this is left of it."""


@dataclass(frozen=True)
class Accepted:
    """count_R int64: accepted drafts, 0 to width - 1; token_R int64: what comes after them, -1 where the row that
    decides it is not finite."""

    count_R: torch.Tensor
    token_R: torch.Tensor


def accept_greedy(best_N: torch.Tensor, width_R: torch.Tensor, draft_RY: torch.Tensor) -> Accepted:
    """The longest prefix of drafts that are the target's own highest ids.

    best_N int64: those ids, -1 where a row is not finite. width_R int64: rows of each request, 1 to S; fewer than S
    verify fewer drafts. draft_RY int64: -1 is no draft, and is never accepted.
    """
    rows = _Rows(width_R, draft_RY)
    right_N = (best_N == rows.draft_N) & (rows.draft_N >= 0)
    count_R = rows.prefix(right_N)
    return Accepted(count_R, best_N[rows.first_R + count_R])


def accept_sampled(
    target_NV: torch.Tensor,
    width_R: torch.Tensor,
    draft_RY: torch.Tensor,
    drawn_RYV: torch.Tensor | None,
    test_RY: torch.Tensor,
    final_RS: torch.Tensor,
) -> Accepted:
    """Drafts accepted so that what is emitted has the target's distribution, whatever the drafts' is.

    target_NV: FP64 weights of the target's tokens, as `kept_probability` gives them. drawn_RYV: those that the drafts
    were drawn from, the very same; None where each draft was certain (a point mass), as all of temperature 0 are.
    test_RY, final_RS: numbers in [0, 1) that judge draft j, and draw the token of row j (`step_uniforms`). A draft x is
    accepted with probability min(1, P(x) / Q(x)); the token after the first that is not comes from what P has more
    than Q, that after the last accepted one from P. A row of temperature 0, and so of a single weight, is greedy.
    """
    rows = _Rows(width_R, draft_RY)
    mass_N = target_NV.sum(1)
    chance_N = target_NV.gather(1, rows.draft_N.clamp(min=0)[:, None]).squeeze(1) / mass_N
    proposed_N = torch.ones_like(chance_N)
    if drawn_RYV is not None and drawn_RYV.shape[1]:
        drawn_RY = drawn_RYV.gather(2, draft_RY.clamp(min=0)[:, :, None]).squeeze(2) / drawn_RYV.sum(2)
        proposed_N = rows.spread(drawn_RY)
    # Comparisons with NaN are false: such drafts are rejected.
    count_R = rows.prefix((rows.draft_N >= 0) & (rows.spread(test_RY) * proposed_N < chance_N))
    at_R = rows.first_R + count_R
    weight_RV = _residual(target_NV[at_R], mass_N[at_R], count_R, count_R < width_R - 1, draft_RY, drawn_RYV)
    return Accepted(count_R, draw(weight_RV, final_RS.gather(1, count_R[:, None]).squeeze(1)))


def _residual(
    target_RV: torch.Tensor,
    mass_R: torch.Tensor,
    count_R: torch.Tensor,
    rejected_R: torch.Tensor,
    draft_RY: torch.Tensor,
    drawn_RYV: torch.Tensor | None,
) -> torch.Tensor:
    """Weights of the token after the accepted drafts: of a rejected one what the target has more than its proposal."""
    if not draft_RY.shape[1]:
        return target_RV
    at_R1 = count_R.clamp(max=draft_RY.shape[1] - 1)[:, None]
    refused_R = draft_RY.gather(1, at_R1).squeeze(1)
    if drawn_RYV is None:
        proposed_RV = torch.zeros_like(target_RV).scatter_(1, refused_R.clamp(min=0)[:, None], 1.0)
    else:
        proposed_RV = drawn_RYV.gather(1, at_R1[:, :, None].expand(-1, 1, drawn_RYV.shape[2])).squeeze(1)
        proposed_RV = proposed_RV / proposed_RV.sum(1, keepdim=True)
    left_RV = (target_RV / mass_R[:, None] - proposed_RV).clamp(min=0)
    use_R = rejected_R & (refused_R >= 0) & (left_RV.sum(1) > LEAST_RESIDUAL)
    return torch.where(use_R[:, None], left_RV, target_RV)


def step_uniforms(seed_R: np.ndarray, anchor_R: np.ndarray, columns: int, stream: int) -> torch.Tensor:
    """FP64 [R, columns]: the stream's numbers for the tokens at positions anchor + 1 and after."""
    return torch.from_numpy(uniforms(seed_R[:, None], anchor_R[:, None] + 1 + np.arange(columns), stream))


class _Rows:
    """Where each row stands: request and offset, and the draft that it decides about, -1 for none."""

    def __init__(self, width_R: torch.Tensor, draft_RY: torch.Tensor) -> None:
        self.shape, self.width_R = draft_RY.shape, width_R
        self.first_R = width_R.cumsum(0) - width_R
        device = width_R.device
        self.request_N = torch.repeat_interleave(torch.arange(len(width_R), device=device), width_R)
        self.offset_N = torch.arange(len(self.request_N), device=device) - self.first_R[self.request_N]
        self.judges_N = self.offset_N < width_R[self.request_N] - 1
        self.draft_N = self.spread(draft_RY, -1)

    def spread(self, values_RY: torch.Tensor, empty: float = 0) -> torch.Tensor:
        """By row what is by request and draft."""
        values_N = values_RY.new_full(self.judges_N.shape, empty)
        values_N[self.judges_N] = values_RY[self.request_N[self.judges_N], self.offset_N[self.judges_N]]
        return values_N

    def prefix(self, right_N: torch.Tensor) -> torch.Tensor:
        """How many drafts of each request are right before the first that is not."""
        right_RY = torch.zeros(self.shape, dtype=torch.int64, device=right_N.device)
        judges_N = self.judges_N
        right_RY[self.request_N[judges_N], self.offset_N[judges_N]] = right_N[judges_N].long()
        return right_RY.cumprod(1).sum(1)
