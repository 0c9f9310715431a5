"""Logits over a vocabulary that is split in a tensor group.

Letters: A asked rows of a rank, N asked rows of the group, H hidden, V vocabulary, M rows that a rank gets back.
`counts` (asked rows by rank) and `destination` (the rank that wants each of the N rows) are known to all ranks.
"""

from collections.abc import Sequence

import torch

from ..layouts.bits import as_lanes, from_lanes
from ..parallel.groups import Group
from .collectives import all_gather_rows, exchange_rows


def gather_asked(hidden_AH: torch.Tensor, counts: Sequence[int], group: Group, *, stage: str) -> torch.Tensor:
    """The asked rows of all ranks, [A, H] -> [N, H]: by source rank, then by row."""
    if len(counts) != group.size or hidden_AH.shape[0] != counts[group.rank]:
        raise ValueError(
            f"counts is {list(counts)}, allowed: {group.size} numbers, of which number {group.rank} "
            f"is the {hidden_AH.shape[0]} rows given"
        )
    most = max(counts)
    if group.size == 1:
        return hidden_AH
    padded = hidden_AH
    if hidden_AH.shape[0] < most:
        padded = hidden_AH.new_zeros((most, hidden_AH.shape[1]))
        padded[: hidden_AH.shape[0]] = hidden_AH
    gathered = all_gather_rows(padded, group, stage=stage)
    if min(counts) == most:
        return gathered
    pieces = zip(gathered.split(most), counts, strict=True)
    return torch.cat([piece[:count] for piece, count in pieces])


def return_logits(logits_NV: torch.Tensor, destination: Sequence[int], group: Group, *, stage: str) -> torch.Tensor:
    """Whole rows to those that asked, [N, V / size] -> [M, V]: rows in their order among the N, columns by owner."""
    _check_destination(logits_NV, destination, group)
    if group.size == 1:
        return logits_NV
    received = _to_destination(logits_NV, destination, group, stage)
    return received.transpose(0, 1).reshape(received.shape[1], group.size * logits_NV.shape[1])


def return_best(
    logits_NV: torch.Tensor, vocab_offset: int, destination: Sequence[int], group: Group, *, stage: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best token of each row to those that asked, [N, V / size] -> ids int64 [M] and values [M].

    Rows in their order among the N. Equal values go to the lowest id, across shards too; a row that holds a NaN or an
    infinity on any rank gets id -1 and value NaN. Column j of this rank is token vocab_offset + j. A few bytes a row
    travel.
    """
    _check_destination(logits_NV, destination, group)
    values_N, columns_N = logits_NV.max(dim=-1)
    # As a NaN a shard's infinity of either sign wins over whatever the other shards have.
    finite_N = values_N.isfinite() & logits_NV.amin(dim=-1).isfinite()
    values_N = torch.where(finite_N, values_N, torch.nan)
    ids_N = torch.where(finite_N, columns_N + vocab_offset, -1)
    if group.size == 1:
        return ids_N, values_N
    value_bytes = as_lanes(values_N.detach().unsqueeze(1), torch.uint8)
    packed = torch.cat([as_lanes(ids_N.unsqueeze(1), torch.uint8), value_bytes], dim=1)
    received = _to_destination(packed, destination, group, stage)
    ids_SM = from_lanes(received[..., :8], torch.int64)[..., 0]
    values_SM = from_lanes(received[..., 8:], logits_NV.dtype)[..., 0]
    return _best_of_shards(ids_SM, values_SM)


def _best_of_shards(ids_SM: torch.Tensor, values_SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best_M = values_SM.amax(dim=0)
    last = torch.iinfo(torch.int64).max
    ids_M = torch.where(values_SM == best_M, ids_SM, last).amin(dim=0)
    return torch.where(best_M.isnan(), -1, ids_M), best_M


def _to_destination(rows: torch.Tensor, destination: Sequence[int], group: Group, stage: str) -> torch.Tensor:
    """[N, C] -> [size, M, C]: by source rank, then by row."""
    order = sorted(range(len(destination)), key=destination.__getitem__)
    counts = [0] * group.size
    for rank in destination:
        counts[rank] += 1
    mine = counts[group.rank]
    if order != list(range(len(order))):
        rows = rows[torch.tensor(order, device=rows.device)]
    received = exchange_rows(rows, group, counts, [mine] * group.size, stage=stage)
    return received.reshape(group.size, mine, rows.shape[1])


def _check_destination(rows: torch.Tensor, destination: Sequence[int], group: Group) -> None:
    if len(destination) != rows.shape[0]:
        raise ValueError(f"destination names {len(destination)} rows, but there are {rows.shape[0]}")
    wrong = [rank for rank in destination if not 0 <= rank < group.size]
    if wrong:
        raise ValueError(f"destination has {wrong[:3]}, allowed: 0 to {group.size - 1} in group {group.name}")
