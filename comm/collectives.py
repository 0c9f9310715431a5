"""The four exchanges on which all others stand.

Letters: T rows of a rank, R rows received. Any layout of the caller's tensor is accepted; a group of one gets
its own tensor back. Backend failures become typed errors and end the use of the groups.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..parallel.groups import Group
from . import backend


def all_gather_rows(x: torch.Tensor, group: Group, *, stage: str) -> torch.Tensor:
    """All ranks' rows, [T, ...] -> [size * T, ...]: by source rank, then by row.

    T and the other sizes are equal on all ranks. Gradients do not cross: ValueError if x needs one.
    """
    if group.size == 1:
        return x
    _check_rows(x, "x")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"x of stage {stage} needs a gradient, which all_gather_rows does not carry; detach it")
    rows = x.detach().contiguous()
    out = rows.new_empty((group.size * rows.shape[0], *rows.shape[1:]))
    with group.call("all_gather_rows", stage, **_figures(rows, group.size - 1)):
        backend.all_gather(out, rows, group)
    return out


def exchange_rows(
    x: torch.Tensor, group: Group, send_counts: Sequence[int], recv_counts: Sequence[int], *, stage: str
) -> torch.Tensor:
    """Rows to their destinations, [T, ...] -> [R, ...]: by source rank, then by row.

    x holds send_counts[d] rows for each rank d in order; recv_counts[s] come from rank s. Counts may be zero.
    Differentiable: the gradient takes the reverse way, and every rank of the group has to run backward.
    """
    _check_rows(x, "x")
    _check_counts(send_counts, group, "send_counts")
    _check_counts(recv_counts, group, "recv_counts")
    if sum(send_counts) != x.shape[0]:
        raise ValueError(f"send_counts {list(send_counts)} make {sum(send_counts)} rows, but x has {x.shape[0]}")
    if group.size == 1:
        if list(send_counts) != list(recv_counts):
            raise ValueError(f"recv_counts is {list(recv_counts)}, but the only rank sends {list(send_counts)}")
        return x
    if x.requires_grad and torch.is_grad_enabled():
        moved: torch.Tensor = _ExchangeRows.apply(x, group, tuple(send_counts), tuple(recv_counts), stage)
        return moved
    return _exchange(x.detach(), group, send_counts, recv_counts, stage)


def exchange_counts(counts: torch.Tensor, group: Group, *, stage: str) -> torch.Tensor:
    """What every rank announces to this one, int64 [size, ...] -> int64 [size, ...]: by source rank.

    Row d of the argument goes to rank d.
    """
    if counts.dtype != torch.int64 or counts.ndim < 1 or counts.shape[0] != group.size:
        raise ValueError(f"counts are {counts.dtype} {list(counts.shape)}, allowed: int64 with {group.size} rows")
    ones = [1] * group.size
    return exchange_rows(counts, group, ones, ones, stage=stage)


def broadcast_bytes(payload: bytes | None, group: Group, source: int, *, length: int, stage: str) -> bytes:
    """The `length` bytes of rank `source` of a CPU group (control, front, or any group on gloo).

    `payload` is only read on the source. Every rank waits on the source itself, so its death ends the wait.
    """
    if not 0 <= source < group.size:
        raise ValueError(f"source is {source}, allowed: 0 to {group.size - 1}, a rank inside group {group.name}")
    mine = group.rank == source
    if mine and (payload is None or len(payload) != length):
        raise ValueError(f"payload has {None if payload is None else len(payload)} bytes, announced are {length}")
    if group.size == 1 or length == 0:
        return payload if payload is not None else b""
    data = torch.zeros(length, dtype=torch.uint8)
    if mine and payload is not None:
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    sent = length * (group.size - 1) if mine else 0
    with group.call("broadcast_bytes", stage, dtype="uint8", rows=1, columns=length, sent_bytes=sent):
        if mine:
            backend.send_bytes(data, group)
        else:
            backend.receive_bytes(data, source, group)
    return data.numpy().tobytes()


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        group: Group,
        send_counts: tuple[int, ...],
        recv_counts: tuple[int, ...],
        stage: str,
    ) -> torch.Tensor:
        ctx.way = group, send_counts, recv_counts, stage
        return _exchange(x, group, send_counts, recv_counts, stage)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, send_counts, recv_counts, stage = ctx.way
        return _exchange(gradients[0], group, recv_counts, send_counts, f"{stage}.backward"), None, None, None, None


def _exchange(
    x: torch.Tensor, group: Group, send_counts: Sequence[int], recv_counts: Sequence[int], stage: str
) -> torch.Tensor:
    rows = x.contiguous()
    out = rows.new_empty((sum(recv_counts), *rows.shape[1:]))
    figures = _figures(rows, 1)
    figures["splits"] = tuple(send_counts)
    with group.call("exchange_rows", stage, **figures):
        backend.all_to_all(out, rows, recv_counts, send_counts, group)
    return out


def _check_rows(x: torch.Tensor, what: str) -> None:
    if x.ndim < 1:
        raise ValueError(f"{what} has no rows: its shape is {list(x.shape)}, allowed: at least one dim")
    backend.check_wire(x.dtype, what)


def _check_counts(counts: Sequence[int], group: Group, what: str) -> None:
    if len(counts) != group.size or any(count < 0 for count in counts):
        raise ValueError(f"{what} is {list(counts)}, allowed: {group.size} numbers from 0")


def _figures(rows: torch.Tensor, copies: int) -> dict[str, Any]:
    columns = prod(rows.shape[1:])
    size = rows.numel() * rows.element_size() * copies
    dtype = str(rows.dtype).removeprefix("torch.")
    return {"dtype": dtype, "rows": rows.shape[0], "columns": columns, "sent_bytes": size}
