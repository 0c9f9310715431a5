"""Rows of a step: which request's token stands where in the rank-major order of a group.

Legend: G group rows (tp x local_t), N fresh rows of all requests, R requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
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


@dataclass(frozen=True)
class RequestFields:
    """Slot, start and number of tokens of each request, int64 [R] on the host."""

    slot_R: np.ndarray
    start_R: np.ndarray
    length_R: np.ndarray


def request_fields(requests: Sequence[RequestRows]) -> RequestFields:
    return RequestFields(
        slot_R=np.array([request.slot for request in requests], dtype=np.int64),
        start_R=np.array([request.start for request in requests], dtype=np.int64),
        length_R=np.array([len(request.tokens) for request in requests], dtype=np.int64),
    )


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
    local_t, fields = band_length(requests, tp), request_fields(requests)
    offset_R = fields.length_R.cumsum() - fields.length_R
    owner_R = np.array([request.owner for request in requests], dtype=np.int64)
    kind_R = np.array([ROW_KINDS.index(request.kind) for request in requests], dtype=np.int64)
    request_N = np.repeat(np.arange(len(requests)), fields.length_R)
    place_N = _places(owner_R[request_N], kind_R[request_N] != ROW_KINDS.index("prefill"), tp, local_t)
    within_N = np.arange(len(request_N)) - offset_R[request_N]
    tokens = chain.from_iterable(request.tokens for request in requests)

    def spread(values: np.ndarray, empty: int) -> torch.Tensor:
        rows_G = np.full(tp * local_t, empty, dtype=np.int64)
        rows_G[place_N] = values
        return torch.from_numpy(rows_G)

    return GroupRows(
        tp=tp,
        local_t=local_t,
        token_G=spread(np.fromiter(tokens, dtype=np.int64, count=len(request_N)), 0),
        slot_G=spread(fields.slot_R[request_N], -1),
        position_G=spread(fields.start_R[request_N] + within_N, 0),
        request_G=spread(request_N, -1),
        kind_G=spread(kind_R[request_N], -1),
        fresh_rows_N=torch.from_numpy(place_N),
        fresh_offset_R=torch.from_numpy(offset_R),
    )


def _places(owner_N: np.ndarray, pinned_N: np.ndarray, tp: int, local_t: int) -> np.ndarray:
    """Group row of each fresh row: the pinned from the top of their owner's band, the others in what is left."""
    place_N = np.empty_like(owner_N)
    free_G = np.ones(tp * local_t, dtype=bool)
    for tp_rank in range(tp):
        mine = np.flatnonzero(pinned_N & (owner_N == tp_rank))
        first = tp_rank * local_t
        place_N[mine] = np.arange(first, first + len(mine))
        free_G[first : first + len(mine)] = False
    rest = np.flatnonzero(~pinned_N)
    place_N[rest] = np.flatnonzero(free_G)[: len(rest)]
    return place_N
