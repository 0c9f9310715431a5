"""Rows of a step: which request's token stands where in the rank-major order of a group.

Legend: G group rows (tp x local_t), N fresh rows of all requests, R requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROW_KINDS = ("prefill", "decode", "verify")


@dataclass(frozen=True)
class RequestRows:
    """The rows that one request brings to a step: tokens at positions start, start + 1, ...

    slot: its place in the page tables. owner: the tp_rank that it is pinned to. Rows of kind decode and verify
    stand in the owner's band; prefill rows fill the bands. asked: offsets of the rows whose logits (or ids)
    the owner wants.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    owner: int = 0
    kind: str = "prefill"
    asked: Sequence[int] = ()

    def __post_init__(self) -> None:
        if self.kind not in ROW_KINDS:
            raise ValueError(f"kind is {self.kind!r}, allowed: {ROW_KINDS}")
        if self.start < 0 or not self.tokens:
            raise ValueError(f"start is {self.start} with {len(self.tokens)} tokens, allowed: 0 or more with 1 or more")
        if any(not 0 <= offset < len(self.tokens) for offset in self.asked):
            raise ValueError(f"asked is {list(self.asked)}, allowed: 0 to {len(self.tokens) - 1}")


@dataclass(frozen=True)
class GroupRows:
    """All rows of a group, rank-major; row g is row g % local_t of band g // local_t. Padding has request -1."""

    tp: int
    local_t: int
    token_G: torch.Tensor
    slot_G: torch.Tensor
    position_G: torch.Tensor
    request_G: torch.Tensor
    kind_G: torch.Tensor
    fresh_rows_N: torch.Tensor
    """Group rows by request, then by position: rank-major order is not position order."""
    fresh_offset_R: torch.Tensor
    """Where each request starts in fresh_rows_N."""

    def band(self, tp_rank: int) -> slice:
        return slice(tp_rank * self.local_t, (tp_rank + 1) * self.local_t)

    @property
    def valid_G(self) -> torch.Tensor:
        return self.request_G >= 0


def band_length(requests: Sequence[RequestRows], tp: int) -> int:
    """The least length that holds the largest pinned band and ceil(all rows / tp)."""
    pinned = [0] * tp
    for request in requests:
        if not 0 <= request.owner < tp:
            raise ValueError(f"owner is tp_rank {request.owner}, allowed: 0 to {tp - 1}")
        if request.kind != "prefill":
            pinned[request.owner] += len(request.tokens)
    total = sum(len(request.tokens) for request in requests)
    return max(max(pinned), -(-total // tp))


def place_rows(requests: Sequence[RequestRows], tp: int) -> GroupRows:
    """Lay the requests' rows into bands: pinned rows first, in the owner's band, then prefill rows fill up."""
    local_t = band_length(requests, tp)
    lengths = torch.tensor([len(request.tokens) for request in requests], dtype=torch.int64)
    offset_R = lengths.cumsum(0) - lengths
    owner_R = torch.tensor([request.owner for request in requests], dtype=torch.int64)
    pinned_R = torch.tensor([request.kind != "prefill" for request in requests], dtype=torch.bool)
    request_N = torch.repeat_interleave(torch.arange(len(requests)), lengths)
    fresh_rows_N = _places(owner_R[request_N], pinned_R[request_N], tp, local_t)

    def spread(values: torch.Tensor, empty: int) -> torch.Tensor:
        rows_G = torch.full((tp * local_t,), empty, dtype=torch.int64)
        rows_G[fresh_rows_N] = values
        return rows_G

    within_N = torch.arange(len(request_N)) - offset_R[request_N]
    start_R = torch.tensor([request.start for request in requests], dtype=torch.int64)
    slot_R = torch.tensor([request.slot for request in requests], dtype=torch.int64)
    kind_R = torch.tensor([ROW_KINDS.index(request.kind) for request in requests], dtype=torch.int64)
    token_N = torch.tensor([t for request in requests for t in request.tokens], dtype=torch.int64)
    return GroupRows(
        tp=tp,
        local_t=local_t,
        token_G=spread(token_N, 0),
        slot_G=spread(slot_R[request_N], -1),
        position_G=spread(start_R[request_N] + within_N, 0),
        request_G=spread(request_N, -1),
        kind_G=spread(kind_R[request_N], -1),
        fresh_rows_N=fresh_rows_N,
        fresh_offset_R=offset_R,
    )


def _places(owner_N: torch.Tensor, pinned_N: torch.Tensor, tp: int, local_t: int) -> torch.Tensor:
    """Group row of each fresh row: the pinned from the top of their owner's band, the others in what is left."""
    place_N = torch.empty_like(owner_N)
    taken_G = torch.zeros(tp * local_t, dtype=torch.bool)
    for tp_rank in range(tp):
        mine = (pinned_N & (owner_N == tp_rank)).nonzero().flatten()
        rows = tp_rank * local_t + torch.arange(len(mine))
        place_N[mine] = rows
        taken_G[rows] = True
    rest = (~pinned_N).nonzero().flatten()
    place_N[rest] = (~taken_G).nonzero().flatten()[: len(rest)]
    return place_N
