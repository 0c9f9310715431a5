"""The grouped output projection over a tensor group: heads to the owners of their output group, sums back.

Letters: T rows of a rank, R rows of all ranks, G output groups, P output groups of a rank, Q partials sent for a
row, K inputs of an output group, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..parallel.groups import Group
from .collectives import PendingRows, all_gather_rows, exchange_rows, start_gather_rows

Bounds = tuple[int, int]


def publish_heads(heads_TGK: torch.Tensor, group: Group, *, stage: str) -> torch.Tensor:
    """Heads to the owners of their output group, [T, G, K] -> [size * T, G / size, K]: by source rank, then by row.

    T is equal on all ranks; rank r owns output groups [r * G / size, (r + 1) * G / size).
    """
    T, G, K = heads_TGK.shape
    if G % group.size:
        raise ValueError(f"{G} output groups cannot be split equally over {group.size} ranks of {group.name}")
    if group.size == 1:
        return heads_TGK
    P = G // group.size
    by_owner = heads_TGK.reshape(T, group.size, P, K).transpose(0, 1).reshape(group.size * T, P, K)
    counts = [T] * group.size
    return exchange_rows(by_owner, group, counts, counts, stage=stage)


def reduce_partials(partials_RPH: torch.Tensor, group: Group, num_groups: int, *, stage: str) -> torch.Tensor:
    """Sums over all output groups for this rank's own rows, [size * T, P, H] -> [T, H]: by row.

    Partial p of rank r belongs to output group r * P + p. All num_groups partials of a row are added in one fixed
    binary tree over the group index, in the dtype they have, so that the bits do not depend on the group's size.
    """
    R, P, H = partials_RPH.shape
    if num_groups != P * group.size or R % group.size:
        raise ValueError(
            f"partials have {R} rows and {P} groups, allowed: a multiple of {group.size} rows, "
            f"and {num_groups} groups over {group.size} ranks of {group.name}"
        )
    if group.size == 1:
        return tree_sum(partials_RPH.unbind(1))
    T = R // group.size
    bounds = [(rank * P, (rank + 1) * P) for rank in range(group.size)]
    if sends_sums(num_groups, group.size):
        # A rank whose groups are a whole branch of the tree sends the branch's sum.
        sent_RQH = tree_sum(partials_RPH.unbind(1)).unsqueeze(1)
    else:
        sent_RQH = partials_RPH
        bounds = [(index, index + 1) for index in range(num_groups)]
    Q = sent_RQH.shape[1]
    counts = [T] * group.size
    received = exchange_rows(sent_RQH, group, counts, counts, stage=stage)
    by_branch = received.view(group.size, T, Q, H).transpose(1, 2).reshape(group.size * Q, T, H)
    return _branch_sum(dict(zip(bounds, by_branch.unbind(0), strict=True)), 0, num_groups)


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of n tensors in the fixed tree [lo, mid) + [mid, hi), mid = (lo + hi) // 2."""
    if not parts:
        raise ValueError("there is nothing to add")
    return _branch_sum({(index, index + 1): part for index, part in enumerate(parts)}, 0, len(parts))


def sends_sums(num_groups: int, size: int) -> bool:
    """Whether the output groups of each of `size` ranks are a whole branch of the tree: it sends the branch's sum of a
    row then, else one partial for each of its groups."""
    own = num_groups // size
    return {(rank * own, (rank + 1) * own) for rank in range(size)} <= tree_nodes(num_groups)


def tree_nodes(count: int) -> set[Bounds]:
    """The index ranges that `tree_sum` of `count` tensors forms on its way."""

    def below(lo: int, hi: int) -> set[Bounds]:
        if hi - lo == 1:
            return {(lo, hi)}
        mid = (lo + hi) // 2
        return {(lo, hi)} | below(lo, mid) | below(mid, hi)

    return below(0, count) if count else set()


def _branch_sum(branches: Mapping[Bounds, torch.Tensor], lo: int, hi: int) -> torch.Tensor:
    if (lo, hi) in branches:
        return branches[lo, hi]
    mid = (lo + hi) // 2
    return _branch_sum(branches, lo, mid) + _branch_sum(branches, mid, hi)


def gather_weight_shards(
    wo_a: torch.Tensor, wo_b: torch.Tensor, group: Group, *, stage: str = "gather_weights"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole output projection from its shards: the form for steps whose rows outweigh the weights.

    wo_a [P * Ro, K] -> [G * Ro, K], wo_b [H, P * Ro] -> [H, G * Ro], both by owner, then as stored; contiguous.
    """
    if group.size == 1:
        return wo_a, wo_b
    H, columns = wo_b.shape
    full_a = all_gather_rows(wo_a, group, stage=stage)
    by_rank = all_gather_rows(wo_b, group, stage=stage).view(group.size, H, columns)
    return full_a, by_rank.transpose(0, 1).reshape(H, group.size * columns)


Shards = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""(wo_a [P * Ro, K], wo_b [H, P * Ro]) of every rank of the group, by owner."""


@dataclass(frozen=True)
class PendingShards:
    """All ranks' weight shards under way."""

    size: int
    pending: tuple[PendingRows, PendingRows]

    def wait(self) -> Shards:
        """Every rank's shards, by owner, as stored. The memory is the buffers' where some were given."""
        try:
            a, b = (rows.wait().chunk(self.size) for rows in self.pending)
        except BaseException:
            self.drop()
            raise
        return tuple(zip(a, b, strict=True))

    def drop(self) -> None:
        """Give them up after a failure of the groups."""
        for rows in self.pending:
            rows.drop()


def start_gather_weight_shards(
    wo_a: torch.Tensor,
    wo_b: torch.Tensor,
    group: Group,
    *,
    buffers: tuple[torch.Tensor, torch.Tensor] | None = None,
    stage: str = "gather_weights",
) -> PendingShards:
    """Begin to bring every rank's wo_a [P * Ro, K] and wo_b [H, P * Ro] here, while this rank computes.

    buffers: [size * P * Ro, K] and [size * H, P * Ro] to receive in, not to be touched until the wait. The shards are
    held until then and must not be overwritten. Unlike `gather_weight_shards` each shard stays as stored: wo_b's
    columns are not brought together. `start_gather_rows` says what may come between.
    """
    out_a, out_b = (None, None) if buffers is None else buffers
    first = start_gather_rows(wo_a, group, stage=stage, out=out_a)
    try:
        second = start_gather_rows(wo_b, group, stage=stage, out=out_b)
    except BaseException:
        first.drop()
        raise
    return PendingShards(group.size, (first, second))


def gather_projected(rows_TH: torch.Tensor, group: Group, *, stage: str) -> torch.Tensor:
    """All rows of the group where a caller wants more than its own, [T, H] -> [size * T, H]: by source, then row."""
    return all_gather_rows(rows_TH, group, stage=stage)
