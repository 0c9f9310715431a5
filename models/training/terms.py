"""The objective's terms of rows of logits, over a whole vocabulary or over a shard of it on each rank of a group.

A group holds contiguous shards of the vocabulary in the order of its ranks, the same rows on all of them. Of a row
only scalars cross: two maxima, then two sums of exponentials and the label's logit, then the sums of the distance.
Sums are added in the order of the ranks, so results are the same on all of them and in every run.

Letters: R rows (any leading shape), V vocabulary, or a rank's shard of it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...comm.collectives import all_gather_rows, all_reduce_rows
from ...parallel.group import Group


@dataclass(frozen=True)
class VocabularyShard:
    """Which ids this rank's logits are of, from `start` on; group: the ranks that hold the others."""

    start: int = 0
    group: Group | None = None

    @property
    def size(self) -> int:
        """Ranks among which the vocabulary is divided."""
        return 1 if self.group is None else self.group.size


@dataclass(frozen=True)
class VocabularyTerms:
    """Of each row, in FP32 or wider: cross entropy and L1 distance, which carry gradients; greedy id and its
    probability of draft and teacher. Of equal logits the lowest id counts. No teacher: None."""

    ce_R: Tensor
    draft_id_R: Tensor
    draft_top1_R: Tensor
    l1_R: Tensor | None = None
    teacher_id_R: Tensor | None = None
    teacher_top1_R: Tensor | None = None


def vocabulary_terms(
    logits_RV: Tensor, label_R: Tensor, teacher_RV: Tensor | None = None, shard: VocabularyShard | None = None
) -> VocabularyTerms:
    """ce = -log softmax(logits)[label] and l1 = ||softmax(logits) - softmax(teacher)||_1, training.md 7.4.

    label_R int64 are ids of the whole vocabulary. Only the logits get a gradient, exactly that of this rank's shard;
    no collective runs in the backward pass. All ranks of the group call it with the same rows. ValueError for shapes
    that do not fit.
    """
    shard = VocabularyShard() if shard is None else shard
    rows = logits_RV.shape[:-1]
    if label_R.shape != rows or (teacher_RV is not None and teacher_RV.shape != logits_RV.shape):
        taught = None if teacher_RV is None else list(teacher_RV.shape)
        raise ValueError(f"labels are {list(label_R.shape)} and teacher {taught} for logits {list(logits_RV.shape)}")
    flat_RV = logits_RV.flatten(0, -2)
    taught_RV = None if teacher_RV is None else teacher_RV.detach().flatten(0, -2)
    ce, l1, tops, ids = _Terms.apply(flat_RV, taught_RV, label_R.flatten(), shard)
    if teacher_RV is None:
        return VocabularyTerms(ce.view(rows), ids[0].view(rows), tops[0].view(rows))
    return VocabularyTerms(
        ce.view(rows), ids[0].view(rows), tops[0].view(rows), l1.view(rows), ids[1].view(rows), tops[1].view(rows)
    )


class _Terms(torch.autograd.Function):
    """Saves the logits as they are given and a few numbers a row; the softmaxes are made again in backward."""

    @staticmethod
    def forward(
        ctx: Any, logits_RV: Tensor, teacher_RV: Tensor | None, label_R: Tensor, shard: VocabularyShard
    ) -> tuple[Tensor, ...]:
        given = [logits_RV] if teacher_RV is None else [logits_RV, teacher_RV]
        tables = [_wide(table) for table in given]
        tops_KR, ids_KR = _maxima(tables, shard)
        exps = [(table - top_R[:, None]).exp_() for table, top_R in zip(tables, tops_KR, strict=True)]
        local_R, inside_R = _local(label_R, logits_RV.shape[-1], shard)
        at_label_R = tables[0].gather(1, local_R[:, None])[:, 0].where(inside_R, 0.0)
        sums = _summed(torch.stack([exp.sum(-1) for exp in exps] + [at_label_R]), shard)
        ce_R = tops_KR[0] + sums[0].log() - sums[-1]
        l1_R = pull_R = torch.zeros_like(ce_R)
        if teacher_RV is not None:
            p_RV, q_RV = (exp.div_(total_R[:, None]) for exp, total_R in zip(exps, sums, strict=False))
            apart_RV = p_RV - q_RV
            l1_R, pull_R = _summed(torch.stack([apart_RV.abs().sum(-1), (apart_RV.sign() * p_RV).sum(-1)]), shard)
        ctx.save_for_backward(logits_RV, teacher_RV, local_R, inside_R, tops_KR, sums, pull_R)
        top1_KR = sums[: len(given)].reciprocal()
        ctx.mark_non_differentiable(top1_KR, ids_KR, *([l1_R] if teacher_RV is None else []))
        return ce_R, l1_R, top1_KR, ids_KR

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, ce_R: Tensor, l1_R: Tensor, *_: Tensor) -> tuple[Tensor, None, None, None]:
        """d ce = p - onehot(label); d l1 = p (sign(p - q) - sum p sign(p - q)), the sum being what forward summed."""
        logits_RV, teacher_RV, local_R, inside_R, tops_KR, sums, pull_R = ctx.saved_tensors
        p_RV = (_wide(logits_RV) - tops_KR[0][:, None]).exp_().div_(sums[0][:, None])
        slope_RV = ce_R[:, None].expand_as(p_RV)
        if teacher_RV is not None:
            q_RV = (_wide(teacher_RV) - tops_KR[1][:, None]).exp_().div_(sums[1][:, None])
            sign_RV = torch.sub(p_RV, q_RV, out=q_RV).sign_()
            slope_RV = sign_RV.sub_(pull_R[:, None]).mul_(l1_R[:, None]).add_(ce_R[:, None])
        gradient_RV = p_RV.mul_(slope_RV)
        gradient_RV.scatter_add_(1, local_R[:, None], -(ce_R * inside_R)[:, None])
        return gradient_RV.to(logits_RV.dtype), None, None, None


def copy_to_shards(x: Tensor, shard: VocabularyShard) -> Tensor:
    """x, which all ranks of the group hold alike and multiply with their own shards; its gradient is their sum."""
    if shard.size == 1:
        return x
    copied: Tensor = _CopyToShards.apply(x, shard.group)
    return copied


def shard_rows(weight_VX: Tensor, size: int, shard: VocabularyShard) -> Tensor:
    """This rank's `size` rows of a parameter that all ranks of the group hold whole.

    Its gradient is zero in the others' rows and weighs as many times as there are ranks, so that the mean over the
    ranks, which makes one of all other gradients too, is that of the whole parameter.
    """
    if shard.size == 1 and size == weight_VX.shape[0]:
        return weight_VX
    if not 0 <= shard.start <= weight_VX.shape[0] - size:
        raise ValueError(f"ids {shard.start} to {shard.start + size - 1} of a vocabulary of {weight_VX.shape[0]}")
    rows = weight_VX[shard.start : shard.start + size]
    taken: Tensor = _Weighted.apply(rows, shard.size)
    return taken


class _CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce_rows(gradient.contiguous(), ctx.group, stage="vocabulary_gradient"), None


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: int) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.weight, None


def _wide(table_RV: Tensor) -> Tensor:
    return table_RV.to(torch.promote_types(table_RV.dtype, torch.float32))


def _maxima(tables: list[Tensor], shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Largest logit of each table and row, and its lowest id: both [tables, R]."""
    ids = torch.stack([table.argmax(-1) for table in tables])
    tops = torch.stack([t.gather(1, i[:, None])[:, 0] for t, i in zip(tables, ids, strict=True)])
    if shard.size == 1:
        return tops, ids + shard.start
    assert shard.group is not None
    # An id is exact in FP32 up to 2^24. Of equal tops argmax takes the first rank, which has the lower ids.
    told = torch.stack([tops, (ids + shard.start).to(tops.dtype)])
    all_told = all_gather_rows(told[None], shard.group, stage="vocabulary_max")
    rank = all_told[:, 0].argmax(0, keepdim=True)
    return all_told[:, 0].gather(0, rank)[0], all_told[:, 1].gather(0, rank)[0].long()


def _summed(sums: Tensor, shard: VocabularyShard) -> Tensor:
    return (
        sums if shard.size == 1 or shard.group is None else all_reduce_rows(sums, shard.group, stage="vocabulary_sum")
    )


def _local(label_R: Tensor, size: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    local_R = label_R - shard.start
    inside_R = (local_R >= 0) & (local_R < size)
    return local_R.where(inside_R, 0), inside_R
