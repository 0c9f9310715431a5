"""What each exchange means, written over the list of all ranks' arguments in one process.

Every function has the name of the exchange that it defines, takes one item per rank of the group and gives back
one result per rank. Plain loops on purpose.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


def all_gather_rows(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """By source rank, then by row; every rank gets its own copy."""
    return [torch.cat(list(xs)) for _ in xs]


def exchange_rows(xs: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """counts[s][d] rows go from rank s to rank d: by source rank, then by row."""
    parts = [x.split(list(row)) for x, row in zip(xs, counts, strict=True)]
    return [torch.cat([parts[source][rank] for source in range(len(xs))]) for rank in range(len(xs))]


def exchange_counts(counts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Row s of rank d's result is row d of rank s's argument."""
    return [torch.stack([announced[rank] for announced in counts]) for rank in range(len(counts))]


def broadcast_bytes(payloads: Sequence[bytes | None], source: int) -> list[bytes]:
    """The source's bytes for everybody."""
    payload = payloads[source]
    assert payload is not None
    return [payload for _ in payloads]


def gather_context(tensors: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Span by span: by source rank, then by row."""
    return [{name: torch.cat([spans[name] for spans in tensors]) for name in tensors[0]} for _ in tensors]


def publish_heads(heads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Rank r gets its output groups of all rows: by source rank, then by row."""
    share = heads[0].shape[1] // len(heads)
    return [torch.cat([h[:, rank * share : (rank + 1) * share] for h in heads]) for rank in range(len(heads))]


def reduce_partials(partials: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sums over all output groups, halves of the group index first: by row."""
    all_groups = torch.cat(list(partials), dim=1)
    rows = all_groups.shape[0] // len(partials)

    def branch(lo: int, hi: int) -> torch.Tensor:
        if hi - lo == 1:
            return all_groups[:, lo]
        mid = (lo + hi) // 2
        return branch(lo, mid) + branch(mid, hi)

    return (
        list(branch(0, all_groups.shape[1]).split(rows)) if rows else [branch(0, all_groups.shape[1])] * len(partials)
    )


def gather_weight_shards(
    shards: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """wo_a by rows and wo_b by columns: by owner, then as stored."""
    whole = torch.cat([a for a, _ in shards]), torch.cat([b for _, b in shards], dim=1)
    return [whole for _ in shards]


def gather_projected(rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """By source rank, then by row."""
    return all_gather_rows(rows)


def gather_asked(hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """By source rank, then by row."""
    return all_gather_rows(hidden)


def return_logits(logits: Sequence[torch.Tensor], destination: Sequence[int]) -> list[torch.Tensor]:
    """Rows in their order among all asked rows, columns by vocabulary owner."""
    whole = torch.cat(list(logits), dim=1)
    return [whole[[i for i, wanted in enumerate(destination) if wanted == rank]] for rank in range(len(logits))]


def return_best(logits: Sequence[torch.Tensor], destination: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The lowest id among the largest values of the whole row; -1 and NaN for a row that is not finite."""
    results = []
    for rows in return_logits(logits, destination):
        ids, values = [], []
        for row in rows:
            usable = bool(row.isfinite().all())
            best = row.max() if usable else row.new_tensor(torch.nan)
            values.append(best)
            ids.append(int((row == best).nonzero()[0]) if usable else -1)
        ids_M = torch.tensor(ids, dtype=torch.int64)
        results.append((ids_M, torch.stack(values) if values else rows.new_empty(0)))
    return results


@dataclass(frozen=True)
class Route:
    """One row at one expert: where it came from and which slot chose it."""

    expert: int
    source: int
    row: int
    slot: int


def dispatch(
    indices: Sequence[torch.Tensor], valid: Sequence[torch.Tensor | None], num_experts: int
) -> list[list[Route]]:
    """The routes that each rank receives: by local expert, then by source rank, source row and k."""
    ranks = len(indices)
    share = num_experts // ranks
    received: list[list[Route]] = [[] for _ in range(ranks)]
    for source, (chosen, flags) in enumerate(zip(indices, valid, strict=True)):
        for row, experts in enumerate(chosen.tolist()):
            for slot, expert in enumerate(experts):
                if expert >= 0 and (flags is None or bool(flags[row])):
                    received[expert // share].append(Route(expert, source, row, slot))
    return [sorted(routes, key=lambda r: (r.expert, r.source, r.row, r.slot)) for routes in received]


def combine(
    results: Sequence[torch.Tensor], routes: Sequence[Sequence[Route]], rows: Sequence[int], routes_per_row: int
) -> list[torch.Tensor]:
    """Results at (source row, k); zero where nothing was sent."""
    columns = results[0].shape[1]
    out = [results[0].new_zeros((count, routes_per_row, columns)) for count in rows]
    for result, received in zip(results, routes, strict=True):
        for place, route in enumerate(received):
            out[route.source][route.row, route.slot] = result[place]
    return out


def spread_tokens(
    indices: Sequence[torch.Tensor], num_experts: int, strategy: str
) -> list[list[tuple[int, int, list[int]]]]:
    """The rows that each rank receives, as (source rank, row, its own experts by route): by source rank, then by row.

    A route of another rank or of none is -1. Row -1 is padding.
    """
    ranks = len(indices)
    share, most = num_experts // ranks, max(len(chosen) for chosen in indices)
    received: list[list[tuple[int, int, list[int]]]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        for source, chosen in enumerate(indices):
            for row, experts in enumerate(chosen.tolist()):
                own = [e - rank * share if e >= 0 and e // share == rank else -1 for e in experts]
                if strategy == "all_gather" or max(own) >= 0:
                    received[rank].append((source, row, own))
            if strategy == "all_gather":
                received[rank] += [(source, -1, [-1] * chosen.shape[1])] * (most - len(chosen))
    return received


def collect_sums(
    sums: Sequence[torch.Tensor], received: Sequence[Sequence[tuple[int, int, list[int]]]], rows: Sequence[int]
) -> list[torch.Tensor]:
    """For each row the sum of what the ranks made of it, from rank 0 on."""
    out = [sums[0].new_zeros((count, sums[0].shape[1])) for count in rows]
    for partial, places in zip(sums, received, strict=True):
        for value, (source, row, _) in zip(partial, places, strict=True):
            if row >= 0:
                out[source][row] += value
    return out
