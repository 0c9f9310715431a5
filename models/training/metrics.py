"""Metrics as numerators and denominators, which are summed over micro-batches and ranks and divided once.

Letters: B samples or packed documents, N blocks, b offsets of a block.
"""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...comm.collectives import all_reduce_rows
from ...parallel.group import Group
from .terms import VocabularyTerms

Pairs = Mapping[str, tuple[Tensor, Tensor]]


def add_pairs(many: Sequence[Pairs]) -> dict[str, tuple[Tensor, Tensor]]:
    """The sums of equally named pairs, as FP64 on the host, by name. ValueError where names or shapes differ."""
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for pairs in many:
        if sums and sorted(sums) != sorted(pairs):
            raise ValueError(f"metrics {sorted(pairs)} beside {sorted(sums)}: each micro-batch needs the same")
        for name in sorted(pairs):
            parts = torch.broadcast_tensors(*(part.detach().to("cpu", torch.float64) for part in pairs[name]))
            if name in sums and sums[name][0].shape != parts[0].shape:
                shapes = [list(sums[name][0].shape), list(parts[0].shape)]
                raise ValueError(f"metric {name} has shapes {shapes}, needed: one shape in all micro-batches")
            before = sums.get(name, (torch.zeros_like(parts[0]), torch.zeros_like(parts[0])))
            sums[name] = (before[0] + parts[0], before[1] + parts[1])
    return sums


def pool_pairs(pairs: Pairs, group: Group) -> dict[str, tuple[Tensor, Tensor]]:
    """The sums over the ranks of a CPU group of what `add_pairs` gave, in one all-reduce; exact while sums are.

    ValueError on all ranks alike where names differ, CollectiveMismatch where their sizes do.
    """
    if group.size == 1:
        return dict(pairs)
    names = sorted(pairs)
    told = [(name, list(pairs[name][0].shape)) for name in names]
    mark = zlib.crc32(repr(told).encode()) % (1 << 20)
    marks = torch.tensor([mark, mark * mark], dtype=torch.float64)
    flat = torch.cat([marks] + [part.double().reshape(-1) for name in names for part in pairs[name]])
    flat = all_reduce_rows(flat, group, stage="training_metrics")
    # The sum of squares is the square of the sum over the ranks only if all marks are one: each rank sees the same.
    if int(flat[0]) ** 2 != group.size * int(flat[1]):
        raise ValueError(f"ranks report different metrics or numbers of micro-batches; this rank: {names}")
    pooled, place = {}, 2
    for name, shape in told:
        size = pairs[name][0].numel()
        parts = flat[place : place + 2 * size].view(2, *shape)
        pooled[name] = (parts[0], parts[1])
        place += 2 * size
    return pooled


def divided(pairs: Pairs) -> dict[str, float]:
    """The ratios by name; entry j of a vector is name_j. NaN where nothing was counted."""
    ratios: dict[str, float] = {}
    for name, (numerator, denominator) in pairs.items():
        ratio = (numerator / denominator).where(denominator != 0, torch.nan)
        if ratio.ndim == 0:
            ratios[name] = float(ratio)
        else:
            ratios |= {f"{name}_{j}": value for j, value in enumerate(ratio.flatten().tolist())}
    return ratios


@torch.no_grad()
def term_metrics(
    terms: VocabularyTerms,
    labels: Tensor,
    eval_mask: Tensor,
    weights: Tensor,
    confidence_logits: Tensor | None,
    confidence_loss: Tensor | None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs of training.md 7.4 of terms [B, N, b], where eval_mask says that something is learned.

    Losses are weighted as in the objective, all others count every learned offset once. tau_greedy and
    tau_probabilistic are lengths with the bonus: 1 + the offsets before the first miss, and 1 + the sum of products of
    acceptances, means over blocks that learn anything.
    """
    seen = eval_mask.to(weights.dtype)
    count, weight = seen.sum(), weights.sum()
    correct = (terms.draft_id_R == labels) & eval_mask
    blocks = eval_mask[..., 0].to(weights.dtype).sum()
    ce = terms.ce_R.where(eval_mask, 0.0)
    pairs = {
        "ce_loss": ((ce * weights).sum(), weight),
        "acc": (correct.to(weights.dtype).sum(), count),
        "ce_position": (ce.sum((0, 1)), seen.sum((0, 1))),
        "accuracy_position": (correct.to(weights.dtype).sum((0, 1)), seen.sum((0, 1))),
        "draft_top1_prob": (terms.draft_top1_R.where(eval_mask, 0.0).sum(), count),
        "tau_greedy": ((seen[..., 0] + correct.cumprod(-1).sum(-1)).sum(), blocks),
        "full_blocks": (eval_mask[..., -1].to(weights.dtype).sum(), blocks),
    }
    if terms.l1_R is None or terms.teacher_id_R is None or terms.teacher_top1_R is None:
        return pairs
    accepted = acceptance(terms.l1_R).where(eval_mask, 0.0)
    agreed = (terms.draft_id_R == terms.teacher_id_R) & eval_mask
    pairs["l1_loss"] = ((terms.l1_R.where(eval_mask, 0.0) * weights).sum(), weight)
    pairs["accept_rate"] = (accepted.sum((0, 1)), seen.sum((0, 1)))
    pairs["teacher_agreement"] = (agreed.to(weights.dtype).sum(), count)
    pairs["teacher_top1_prob"] = (terms.teacher_top1_R.where(eval_mask, 0.0).sum(), count)
    pairs["tau_probabilistic"] = ((seen[..., 0] + accepted.cumprod(-1).sum(-1)).sum(), blocks)
    if confidence_logits is None or confidence_loss is None:
        return pairs
    sure = confidence_logits.sigmoid().where(eval_mask, 0.0)
    pairs["confidence_loss"] = ((confidence_loss.where(eval_mask, 0.0) * weights).sum(), weight)
    pairs["confidence_abs_error"] = ((sure - accepted).abs().sum(), count)
    pairs["confidence_bias"] = ((sure - accepted).sum(), count)
    pairs["confidence_cumprod_bias"] = ((sure.cumprod(-1) - accepted.cumprod(-1)).sum(), count)
    return pairs


def acceptance(l1: Tensor) -> Tensor:
    """How probable it is that sampling accepts the draft: 1 - l1 / 2 (training.md 7.4)."""
    return (1 - l1 / 2).clamp(0, 1)
