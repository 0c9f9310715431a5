"""The exchanges on which all others stand.

Letters: T rows of a rank, R rows received. Any layout of the caller's tensor is accepted; a group of one gets
its own tensor back. Backend failures become typed errors and end the use of the groups.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..parallel.group import cpu_tensor
from ..parallel.groups import Group
from ..parallel.signature import Signature
from . import backend, local, pending


def all_gather_rows(x: torch.Tensor, group: Group, *, stage: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """All ranks' rows, [T, ...] -> [size * T, ...]: by source rank, then by row.

    T and the other sizes are equal on all ranks. Gradients do not cross: ValueError if x needs one. The result is
    `out` where one is given; memory that is used again saves its first touch, most of the time of a large gather.
    """
    if group.size == 1:
        return x if out is None else out.copy_(x)
    _check_rows(x, "x")
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"x of stage {stage} needs a gradient, which all_gather_rows does not carry; detach it")
    rows = x.detach().contiguous()
    out = _room(out, (group.size * rows.shape[0], *rows.shape[1:]), rows)
    with group.call(_signature("all_gather_rows", stage, rows, group.size - 1)) as call:
        backend.all_gather(call, out, rows)
    return out


def exchange_rows(
    x: torch.Tensor,
    group: Group,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    *,
    stage: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows to their destinations, [T, ...] -> [R, ...]: by source rank, then by row.

    x holds send_counts[d] rows for each rank d in order; recv_counts[s] come from rank s. Counts may be zero.
    Differentiable: the gradient takes the reverse way, and every rank of the group has to run backward. The result
    is `out` where one is given, which must not share memory with x; no gradient crosses then.
    """
    _check_rows(x, "x")
    _check_counts(send_counts, group, "send_counts")
    _check_counts(recv_counts, group, "recv_counts")
    if sum(send_counts) != x.shape[0]:
        raise ValueError(f"send_counts {list(send_counts)} make {sum(send_counts)} rows, but x has {x.shape[0]}")
    if group.size == 1:
        if list(send_counts) != list(recv_counts):
            raise ValueError(f"recv_counts is {list(recv_counts)}, but the only rank sends {list(send_counts)}")
        return x if out is None else out.copy_(x)
    if x.requires_grad and torch.is_grad_enabled():
        if out is not None:
            raise ValueError(f"x of stage {stage} needs a gradient, which does not cross into out; detach it")
        moved: torch.Tensor = _ExchangeRows.apply(x, group, tuple(send_counts), tuple(recv_counts), stage)
        return moved
    return _exchange(x.detach(), group, send_counts, recv_counts, stage, out)


class PendingRows:
    """A gather under way. It holds the rows given until `wait`: they may be freed before, but not overwritten."""

    def __init__(self, group: Group, stage: str, out: torch.Tensor, rows: torch.Tensor, work: pending.Work | None):
        self._group, self._stage, self._out = group, stage, out
        self._rows, self._work = rows, work

    def wait(self) -> torch.Tensor:
        """The result, [size * T, ...] by source rank, then by row; the rows given are the caller's again.

        A call of the group like any other: every rank waits at the same place in the order of calls. Errors as those
        of the start. Without effect when called again.
        """
        work, self._work = self._work, None
        if work is None:
            return self._out
        signature = _signature("finish_gather_rows", self._stage, self._rows[:0], 0)
        try:
            with self._group.call(signature) as call:
                work.finish(call)
        finally:
            work.drop()
        return self._out

    def drop(self) -> None:
        """Give the gather up after a failure of the groups, whose connections it may keep open."""
        work, self._work = self._work, None
        if work is not None:
            work.drop()


def start_gather_rows(x: torch.Tensor, group: Group, *, stage: str, out: torch.Tensor | None = None) -> PendingRows:
    """As `all_gather_rows`, which goes on while this rank computes, until `PendingRows.wait`.

    The call is compared with all ranks before data moves. Other calls of the group may follow before the wait. `out`
    must neither be read nor written until then. Where nothing can go on in the background (`pending.is_ahead`) the
    gather is over when this returns.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"x of stage {stage} needs a gradient, which start_gather_rows does not carry; detach it")
    rows = x.detach()
    if group.size == 1 or not pending.is_ahead(group, rows):
        return PendingRows(group, stage, all_gather_rows(rows, group, stage=stage, out=out), rows, None)
    _check_rows(rows, "x")
    rows = rows.contiguous()
    out = _room(out, (group.size * rows.shape[0], *rows.shape[1:]), rows)
    with group.call(_signature("start_gather_rows", stage, rows, group.size - 1)) as call:
        work = pending.start(call, out, rows)
    return PendingRows(group, stage, out, rows, work)


def view_gathered_rows(x: torch.Tensor, group: Group, *, stage: str) -> torch.Tensor:
    """As `all_gather_rows`, for readers: where ranks share memory the result is that memory, not a copy of it.

    It must not be written, and holds only until the group's next exchange.
    """
    if group.size == 1 or group.transport != "local" or not x.numel():
        return all_gather_rows(x, group, stage=stage)
    _check_rows(x, "x")
    rows = x.detach().contiguous()
    with group.call(_signature("all_gather_rows", stage, rows, group.size - 1)) as call:
        return local.gather_view(call, rows)


def reduce_scatter_rows(x: torch.Tensor, group: Group, *, stage: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over ranks of the rows for each rank, [size * T, ...] -> [T, ...]: rows by destination rank.

    Added one rank after the other from rank 0 on, in FP32 or a wider dtype of x, and rounded once to x's dtype. x is
    floating point and has the same shape on all ranks. No gradient crosses. The result is `out` where one is given,
    which must not share memory with x.
    """
    _check_rows(x, "x")
    if x.shape[0] % group.size or not x.dtype.is_floating_point:
        raise ValueError(
            f"x is {x.dtype} with {x.shape[0]} rows, allowed: floating point, rows divisible by {group.size} ranks"
        )
    if group.size == 1:
        return x if out is None else out.copy_(x)
    rows = x.detach().contiguous()
    count = rows.shape[0] // group.size
    wide = torch.promote_types(x.dtype, torch.float32)
    signature = _signature("reduce_scatter_rows", stage, rows, 1)
    out = _room(out, (count, *rows.shape[1:]), rows)
    total = out if wide == x.dtype else rows.new_empty(out.shape, dtype=wide)
    if local.can_reduce(group, rows):
        with group.call(signature) as call:
            local.reduce(call, total, rows)
        return total if total is out else out.copy_(total)
    parts = exchange_rows(rows, group, [count] * group.size, [count] * group.size, stage=stage)
    pieces = parts.view(group.size, *total.shape)
    total.copy_(pieces[0])
    for piece in pieces[1:]:
        total += piece
    return total if total is out else out.copy_(total)


def all_reduce_rows(x: torch.Tensor, group: Group, *, stage: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over ranks of x, of any shape with rows, on every rank: order and dtype as `reduce_scatter_rows`.

    The result is `out` where one is given, which must not share memory with x.
    """
    if group.size == 1:
        return x if out is None else out.copy_(x)
    result = _room(out, tuple(x.shape), x)
    share = -(-x.numel() // group.size)
    given, whole = x.detach().reshape(-1, 1), result.view(-1, 1)
    if share * group.size > x.numel():
        given = torch.cat([given, given.new_zeros(share * group.size - x.numel(), 1)])
        whole = torch.empty_like(given)
    # The sum of this rank's share lands where the gather wants it; not every backend takes such an overlap.
    place = whole.view(group.size, share, 1)[group.rank] if group.transport == "local" else None
    summed = reduce_scatter_rows(given, group, stage=stage, out=place)
    all_gather_rows(summed, group, stage=stage, out=whole)
    if whole.numel() > x.numel():
        result.view(-1, 1).copy_(whole[: x.numel()])
    return result


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
    data = cpu_tensor(payload) if mine and payload is not None else torch.zeros(length, dtype=torch.uint8)
    sent = length * (group.size - 1) if mine else 0
    with group.call(Signature("broadcast_bytes", stage, "uint8", source, length, moved=sent)) as call:
        return backend.broadcast(call, data, source)


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
    x: torch.Tensor,
    group: Group,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    stage: str,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    rows = x.contiguous()
    out = _room(out, (sum(recv_counts), *rows.shape[1:]), rows)
    signature = _signature("exchange_rows", stage, rows, 1)
    signature = signature._replace(send=tuple(send_counts), received=tuple(recv_counts))
    with group.call(signature) as call:
        backend.all_to_all(call, out, rows, recv_counts, send_counts)
    return out


def _room(out: torch.Tensor | None, shape: tuple[int, ...], rows: torch.Tensor) -> torch.Tensor:
    """Where the result goes: the caller's memory if it fits. ValueError otherwise."""
    if out is None:
        return rows.new_empty(shape)
    if out.shape != shape or out.dtype != rows.dtype or out.device != rows.device or not out.is_contiguous():
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device} with strides {list(out.stride())}, "
            f"allowed: {rows.dtype} {list(shape)} on {rows.device}, contiguous"
        )
    return out


def _check_rows(x: torch.Tensor, what: str) -> None:
    if x.ndim < 1:
        raise ValueError(f"{what} has no rows: its shape is {list(x.shape)}, allowed: at least one dim")
    backend.check_wire(x.dtype, what)


def _check_counts(counts: Sequence[int], group: Group, what: str) -> None:
    if len(counts) != group.size or any(count < 0 for count in counts):
        raise ValueError(f"{what} is {list(counts)}, allowed: {group.size} numbers from 0")


def _signature(op: str, stage: str, rows: torch.Tensor, copies: int) -> Signature:
    dtype = str(rows.dtype).removeprefix("torch.")
    return Signature(op, stage, dtype, rows.shape[0], prod(rows.shape[1:]), moved=rows.nbytes * copies)
