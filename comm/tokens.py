"""Token rows to the ranks of their experts and sums back, with gradients both ways: the exchange of training.

Legend: T rows of a rank, R rows at a rank, S rows sent, N ranks of the group, K routes of a row, H hidden.

Two strategies move the same thing. "all_gather": every rank gets every row, padded to one length, and the sums are
reduce-scattered: fixed sizes, no word of the host where `most_rows` is given. "all_to_all": a row goes once to each
rank that has one of its experts, after an exchange of counts. `dispatch` (comm/experts.py), which serves, sends one
row per route instead and keeps routes apart.

Spreading rows and collecting sums are adjoint, so the backward of one is the other, and each is one node of the graph:
the exchanges of a backward run in the same order on all ranks.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from ..parallel.errors import CollectiveMismatch
from ..parallel.groups import Group
from ..parallel.ownership import expert_slice
from .backend import check_wire
from .collectives import all_gather_rows, exchange_counts, exchange_rows, reduce_scatter_rows

STRATEGIES = ("all_gather", "all_to_all")


class Way(Protocol):
    """How rows of this rank reach the ranks of their experts. `collect` is the adjoint of `spread`."""

    def spread(self, rows_T: torch.Tensor, stage: str) -> torch.Tensor:
        """Rows [T, ...] to where they are needed -> [R, ...]: by source rank, then by row."""

    def collect(self, rows_R: torch.Tensor, stage: str) -> torch.Tensor:
        """The sum over ranks of what came back for each row -> [T, ...], from rank 0 on, at least in FP32."""


@dataclass(frozen=True)
class Stay:
    """A group of one: nothing moves."""

    def spread(self, rows_T: torch.Tensor, stage: str) -> torch.Tensor:
        return rows_T

    def collect(self, rows_R: torch.Tensor, stage: str) -> torch.Tensor:
        return rows_R


@dataclass(frozen=True, eq=False)
class ToAll:
    """Every row to every rank; each rank's `rows` are padded with zeros to `most_rows`."""

    group: Group
    rows: int
    most_rows: int

    def spread(self, rows_T: torch.Tensor, stage: str) -> torch.Tensor:
        beyond = rows_T.new_zeros((self.most_rows - self.rows, *rows_T.shape[1:]))
        return all_gather_rows(torch.cat([rows_T, beyond]), self.group, stage=stage)

    def collect(self, rows_R: torch.Tensor, stage: str) -> torch.Tensor:
        return reduce_scatter_rows(rows_R, self.group, stage=stage)[: self.rows]


@dataclass(frozen=True, eq=False)
class ToOwners:
    """Row row_S[s] to the ranks that need it, send_counts[d] of them to rank d, each row at most once to a rank."""

    group: Group
    rows: int
    row_S: torch.Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]

    def spread(self, rows_T: torch.Tensor, stage: str) -> torch.Tensor:
        sent = rows_T.index_select(0, self.row_S)
        return exchange_rows(sent, self.group, self.send_counts, self.recv_counts, stage=stage)

    def collect(self, rows_R: torch.Tensor, stage: str) -> torch.Tensor:
        back_S = exchange_rows(rows_R, self.group, self.recv_counts, self.send_counts, stage=stage)
        wide = torch.promote_types(rows_R.dtype, torch.float32)
        total = back_S.new_zeros((self.rows, *rows_R.shape[1:]), dtype=wide)
        # No row occurs twice in the part of one rank, so the order of the sum is that of the ranks on any device.
        for part, row_P in zip(back_S.split(self.send_counts), self.row_S.split(self.send_counts), strict=True):
            total.index_add_(0, row_P, part.to(wide))
        return total.to(rows_R.dtype)


@dataclass(frozen=True, eq=False)
class SpreadTokens:
    """Rows at a rank of their experts: by source rank, then by row, and the way back.

    indices_RK int64 counts this rank's experts from 0 and is -1 where a route has none here; weights_RK is 0 there.
    """

    way: Way
    x_RH: torch.Tensor
    indices_RK: torch.Tensor
    weights_RK: torch.Tensor


def spread_tokens(
    x_TH: torch.Tensor,
    indices_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    group: Group,
    num_experts: int,
    *,
    strategy: str,
    stage: str,
    most_rows: int | None = None,
) -> SpreadTokens:
    """Every row to the ranks that hold its experts: by source rank, then by row.

    x_TH and weights_TK are floating point; indices_TK are int64 below num_experts, below 0 for no route. T may differ
    between ranks and be 0; every rank of the group calls, and runs backward if one does. most_rows: at least the T of
    every rank and the same on all, spares "all_gather" the exchange of counts; "all_to_all" has no use for it.
    Differentiable once in x and weights, on all ranks alike (CollectiveMismatch if counts tell otherwise). ValueError
    for shapes, dtypes, an unknown strategy, and experts that do not split equally.
    """
    _check(x_TH, indices_TK, weights_TK, num_experts, strategy, most_rows)
    own = expert_slice(group.rank, group.size, num_experts)
    needs = torch.is_grad_enabled() * (int(x_TH.requires_grad) + 2 * int(weights_TK.requires_grad))
    way = _way(indices_TK, group, own.stop - own.start, needs, strategy, most_rows, stage)
    x_RH, all_RK = _Spread.apply(way, stage, x_TH, weights_TK) if group.size > 1 else (x_TH, weights_TK)
    # Counted from 1 on the way: the padding is 0, which is no expert.
    expert_RK = way.spread((indices_TK + 1).clamp(min=0), f"{stage}.indices") - 1
    here_RK = (expert_RK >= own.start) & (expert_RK < own.stop)
    local_RK = torch.where(here_RK, expert_RK - own.start, -1)
    return SpreadTokens(way, x_RH, local_RK, torch.where(here_RK, all_RK, 0))


def collect_sums(y_RH: torch.Tensor, tokens: SpreadTokens, *, stage: str) -> torch.Tensor:
    """The sum over ranks of every row's partial sums, [R, H] -> [T, H] in y's dtype, at the row's own rank.

    y_RH has the order of `tokens`; it travels and is added at least in FP32. Differentiable once. The gradient of the
    tokens is exchanged even where y does not depend on them, so that no rank waits for another.
    """
    if y_RH.shape[:1] != tokens.x_RH.shape[:1]:
        raise ValueError(f"y has {list(y_RH.shape)[:1]} rows, allowed: [{tokens.x_RH.shape[0]}], those of the tokens")
    if isinstance(tokens.way, Stay):
        return y_RH
    wide = y_RH.to(torch.promote_types(y_RH.dtype, torch.float32))
    total: torch.Tensor = _Collect.apply(tokens.way, stage, wide, tokens.x_RH, tokens.weights_RK)
    return total.to(y_RH.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, way: Way, stage: str, x_TH: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.way, ctx.stage = way, stage
        return way.spread(x_TH, f"{stage}.x"), way.spread(weights_TK, f"{stage}.weights")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        stages = f"{ctx.stage}.x.backward", f"{ctx.stage}.weights.backward"
        own = [
            ctx.way.collect(gradient, stage) if needed else None
            for gradient, stage, needed in zip(gradients, stages, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, None, *own


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, way: Way, stage: str, y_RH: torch.Tensor, x_RH: torch.Tensor, weights_RK: torch.Tensor
    ) -> torch.Tensor:
        # x and weights are inputs only to tie the two nodes: the backward of `_Spread` follows on every rank, after
        # this one, with zeros where y does not depend on them.
        ctx.way, ctx.stage = way, stage
        return way.collect(y_RH, stage)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, ctx.way.spread(gradients[0], f"{ctx.stage}.backward"), None, None


def _way(
    indices_TK: torch.Tensor, group: Group, share: int, needs: int, strategy: str, most_rows: int | None, stage: str
) -> Way:
    rows, size = indices_TK.shape[0], group.size
    if size == 1:
        return Stay()
    if strategy == "all_gather":
        if most_rows is None:
            counts = indices_TK.new_full((size,), rows)
            most_rows = max(_announce(counts, needs, group, stage)[1])
        return ToAll(group, rows, most_rows)
    owner_TK = indices_TK.div(share, rounding_mode="floor")
    ranks_N = torch.arange(size, device=indices_TK.device)
    sent_NT = (owner_TK == ranks_N.view(-1, 1, 1)).any(2)
    send, recv = _announce(sent_NT.sum(1), needs, group, stage)
    # Sorted, the places of what is sent come first, by rank and then by row, without asking the device how many.
    places = sent_NT.flatten().to(torch.uint8).argsort(descending=True, stable=True)[: sum(send)]
    return ToOwners(group, rows, places % max(rows, 1), tuple(send), tuple(recv))


def _announce(counts_N: torch.Tensor, needs: int, group: Group, stage: str) -> tuple[list[int], list[int]]:
    """Rows for and from each rank, on the host."""
    told = torch.stack([counts_N, torch.full_like(counts_N, needs)], dim=1)
    heard = exchange_counts(told, group, stage=f"{stage}.counts")
    send, recv, flags = torch.cat([counts_N.view(1, -1), heard.T]).tolist()
    if len(set(flags)) > 1:
        text = f"ranks differ in what needs a gradient (1 rows, 2 weights, 3 both): {flags} by rank"
        raise group.error(CollectiveMismatch, text, "spread_tokens", stage)
    return send, recv


def _check(
    x_TH: torch.Tensor,
    indices_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    num_experts: int,
    strategy: str,
    most_rows: int | None,
) -> None:
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}, allowed: {list(STRATEGIES)}")
    check_wire(x_TH.dtype, "x")
    check_wire(weights_TK.dtype, "weights")
    if not (x_TH.dtype.is_floating_point and weights_TK.dtype.is_floating_point):
        raise ValueError(f"x is {x_TH.dtype} and weights are {weights_TK.dtype}, allowed: floating point")
    T = x_TH.shape[0] if x_TH.ndim == 2 else -1
    if indices_TK.ndim != 2 or indices_TK.shape[0] != T or indices_TK.dtype != torch.int64:
        raise ValueError(
            f"x is {list(x_TH.shape)} and indices are {indices_TK.dtype} {list(indices_TK.shape)}, "
            f"allowed: [T, H] and int64 [T, K]"
        )
    if weights_TK.shape != indices_TK.shape:
        raise ValueError(f"weights are {list(weights_TK.shape)}, allowed: {list(indices_TK.shape)} as the indices")
    if most_rows is not None and most_rows < T:
        raise ValueError(f"most_rows is {most_rows}, allowed: from {T}, the rows of this rank")
    # On a device the question would stop the host; a router gives no such index.
    if indices_TK.device.type == "cpu" and indices_TK.numel() and int(indices_TK.max()) >= num_experts:
        raise ValueError(f"indices reach {int(indices_TK.max())}, allowed: below the {num_experts} experts")
