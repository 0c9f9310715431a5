"""Scores, choice and weights of experts: pure rules, the same for the target and for drafters that train.

Legend: T tokens, E experts, K experts of a token, G groups of experts.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..functions import silu, softplus

SUM_FLOOR = 1e-20
"""Keeps the weights finite where every chosen score underflows."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, weights and sums over values of dtype: FP32, or FP64 for FP64."""
    return torch.promote_types(dtype, torch.float32)


class _SqrtSoftplus(torch.autograd.Function):
    """sqrt(softplus(x)) whose gradient stays finite where softplus underflows to 0. training.md 1.2.

    The forward is not clamped: it gives the bits that inference gives. Only the quotient of the gradient has a floor.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        scores = softplus(logits).sqrt_()
        ctx.save_for_backward(logits, scores)
        return scores

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        logits, scores = ctx.saved_tensors
        floor = torch.finfo(scores.dtype).tiny ** 0.5
        return grads[0] * (torch.sigmoid(logits) / (2 * scores.clamp_min(floor)))


class _SiLU(torch.autograd.Function):
    """functions.silu, whose own graph has 0 * inf in it where exp(-x) overflows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return silu(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        part = torch.sigmoid(x)
        return grads[0] * (part * (1 + x * (1 - part)))


def _differentiates(x: torch.Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + exp(logits))), in the logits' dtype; the gradient is finite at any finite logit."""
    return _SqrtSoftplus.apply(logits) if _differentiates(logits) else softplus(logits).sqrt_()


def softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, dim=-1)


SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": softmax,
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": sqrt_softplus,
}
"""Score functions by their name in a config: logits [T, E] in a wide dtype -> scores [T, E]. training.md 1.2."""


def score_function(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The score function of that name; ValueError names the known ones."""
    if name not in SCORES:
        raise ValueError(f"scoring_func is {name!r}, allowed: {', '.join(map(repr, SCORES))}")
    return SCORES[name]


def best_experts(choice_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """The top_k experts of each row [T, K] int64, the highest first; ties go to the lowest expert on every device."""
    return torch.sort(choice_TE, dim=1, descending=True, stable=True).indices.narrow(1, 0, top_k)


def limit_groups(choice_TE: torch.Tensor, groups: int, kept: int) -> torch.Tensor:
    """choice with -inf outside the `kept` groups whose two best experts sum highest. training.md 1.3."""
    choice_TGX = choice_TE.unflatten(1, (groups, -1))
    group_TG = choice_TGX.topk(2, dim=2).values.sum(2)
    open_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(1, best_experts(group_TG, kept), True)
    return choice_TGX.masked_fill(~open_TG.unsqueeze(2), -torch.inf).flatten(1)


def weigh(scores_TE: torch.Tensor, indices_TK: torch.Tensor, scale: float, normalize: bool = True) -> torch.Tensor:
    """Weights [T, K] of the chosen experts: their scores without any bias, made to sum to 1, times scale."""
    chosen_TK = scores_TE.gather(1, indices_TK)
    if normalize:
        chosen_TK = chosen_TK / chosen_TK.sum(1, keepdim=True).add_(SUM_FLOOR)
    return chosen_TK.mul_(scale)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): the gate is clamped from above only. training.md 2.2.

    None, or a limit that is not positive, clamps nothing. The gradient is finite at any finite gate.
    """
    limit = limit if limit is not None and limit > 0 else None
    # One after the other: two clamped copies at once would be more than a step's memory is planned for.
    gate = gate if limit is None else gate.clamp(max=limit)
    gate = _SiLU.apply(gate) if _differentiates(gate) else silu(gate)
    return gate.mul_(up if limit is None else up.clamp(-limit, limit))
