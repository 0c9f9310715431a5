"""Who sends how much to whom in an uneven exchange, known on every rank without asking."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Counts = Sequence[Sequence[int]]
"""Rows by source and destination."""

SKEWS = ("uniform", "hot", "one", "empty")
"""What an uneven exchange looks like: all ranks alike; everything to rank 0; only rank 0 sends; nobody sends."""


def pattern(skew: str, n: int, rows: int) -> Counts:
    """Rows by source and destination; the busiest rank gives or gets n * rows, or none where nobody sends."""
    if skew not in SKEWS:
        raise ValueError(f"skew is {skew!r}, allowed: {', '.join(SKEWS)}")
    there = {"uniform": lambda s, d: True, "hot": lambda s, d: d == 0, "one": lambda s, d: s == 0}
    chosen = there.get(skew, lambda s, d: False)
    return [[rows if chosen(source, peer) else 0 for peer in range(n)] for source in range(n)]


def busiest(counts: Counts) -> int:
    """Most rows that any rank gives or gets, its own part included."""
    return max([sum(row) for row in counts] + [sum(column) for column in zip(*counts, strict=True)])


@dataclass(frozen=True)
class Routes:
    """Which expert each route of each rank goes to, known everywhere without asking.

    indices: by source rank, [rows of that rank, k]. Uniform routes change the owner with every route.
    """

    indices: list[torch.Tensor]
    experts: int
    k: int

    @classmethod
    def make(cls, skew: str, ranks: int, rows: int, experts: int, k: int) -> "Routes":
        """The same number of rows on each rank that sends. Each rank gets a whole share of the experts."""
        n, local = ranks, max(1, experts // ranks)
        indices = []
        for source in range(n):
            here = 0 if skew == "empty" or (skew == "one" and source) else rows
            route = torch.arange(here * k).view(here, k) + source
            hot = route % local
            indices.append(hot if skew == "hot" else route % n * local + route // n % local)
        return cls(indices, n * local, k)

    def counts(self) -> Counts:
        """Routes by source and destination."""
        n = len(self.indices)
        owners = [(chosen // (self.experts // n)).flatten() for chosen in self.indices]
        return [torch.bincount(owner, minlength=n).tolist() for owner in owners]

    def received(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(source rank, route number) of each row that a rank gets: by local expert, source rank, source route."""
        local = self.experts // len(self.indices)
        source = torch.cat([torch.full((chosen.numel(),), rank) for rank, chosen in enumerate(self.indices)])
        route = torch.cat([torch.arange(chosen.numel()) for chosen in self.indices])
        expert = torch.cat([chosen.flatten() for chosen in self.indices])
        mine = (expert // local == rank).nonzero().squeeze(1)
        order = mine[expert[mine].argsort(stable=True)]
        return source[order], route[order]

    def rows_of(self, rank: int, read: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """read(source, routes) for everything that a rank gets, in its order."""
        source, route = self.received(rank)
        parts = [read(peer, route[source == peer]) for peer in range(len(self.indices))]
        order = torch.cat([(source == peer).nonzero().squeeze(1) for peer in range(len(self.indices))])
        joined = torch.cat(parts)
        return joined.new_empty(joined.shape).index_copy_(0, order, joined)
