"""Dispatch and combine as they are measured: rows of the model's width to experts and back."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..comm.experts import Dispatched, DispatchHandle, combine, dispatch
from ..parallel.group import Group
from .driver import Call, Exchange, differing
from .exchanges import STAGE, Setting, made
from .routes import Routes, busiest

AUX_BYTES = 4 + 8 + 4
"""Beside a dispatched row: its FP32 weight, its route number and its FP32 scale."""


def experts_dispatch(s: Setting, op: str, rows: int) -> Exchange:
    """dispatch of INT8 rows of the model's width with scale, weight and route number."""
    me, D, device = s.group.rank, s.config.hidden_size, s.group.device
    routes, origin, other = _routes(s, rows), s.origin(op), s.origin(f"{op} scales")
    k = routes.k

    def values(epoch: int, peer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        here = len(routes.indices[peer])
        x_TD = origin.bits(epoch, peer, 0, here * D, torch.int8).view(here, D)
        scale_T = other.small(epoch, peer, 0, here, torch.float32, 1) + 1
        return x_TD, scale_T, other.small(epoch, peer, here, here * (1 + k), torch.float32, 1).view(here, k)

    def fill(epoch: int) -> list[torch.Tensor]:
        return [part.to(device) for part in (*values(epoch, me), routes.indices[me])]

    def run(x: list[torch.Tensor]) -> Dispatched:
        return dispatch(x[0], x[3], x[2], None, s.group, routes.experts, x[1], stage=STAGE)

    def wrong(result: Any, epoch: int) -> int:
        given = [values(epoch, peer) for peer in range(s.group.size)]
        total = differing(result.x_RD, routes.rows_of(me, lambda peer, route: given[peer][0][route // k]))
        total += differing(result.scale_R, routes.rows_of(me, lambda peer, route: given[peer][1][route // k]))
        if isinstance(result, Dispatched):
            weights = routes.rows_of(me, lambda peer, route: given[peer][2].flatten()[route])
            total += differing(result.weights_R, weights)
            total += differing(result.routes_R, routes.received(me)[1])
        return total

    naive = Call(lambda x: _four_calls(x, s.group, routes.experts))
    calls = s.calls(Call(run), naive)
    routed = busiest(routes.counts())
    exchange = made(op, "exchange", routed * D, torch.int8, s, fill, calls, wrong, skewed=True)
    return replace(exchange, bytes=routed * (D + AUX_BYTES))


def experts_combine(s: Setting, op: str, rows: int) -> Exchange:
    """combine of BF16 rows of the model's width, all routes of a row back to it."""
    me, D, k = s.group.rank, s.config.hidden_size, s.config.num_experts_per_tok
    routes, origin = _routes(s, rows), s.origin(op)
    own = routes.indices[me]

    def values(epoch: int, peer: int) -> torch.Tensor:
        """What comes back for each route of a rank: numbered by its source, wherever it is computed."""
        return origin.bits(epoch, peer, 0, routes.indices[peer].numel() * D, torch.bfloat16).view(-1, D)

    def fill(epoch: int) -> tuple[torch.Tensor, DispatchHandle]:
        x_TD, weight_Tk = torch.zeros(len(own), 1), torch.zeros(own.shape)
        x_TD, chosen_Tk, weight_Tk = (part.to(s.group.device) for part in (x_TD, own, weight_Tk))
        sent = dispatch(x_TD, chosen_Tk, weight_Tk, None, s.group, routes.experts, stage=f"{STAGE}.setup")
        y_RD = routes.rows_of(me, lambda peer, route: values(epoch, peer)[route])
        return y_RD.to(s.group.device), sent.handle

    def wrong(result: torch.Tensor, epoch: int) -> int:
        return differing(result, values(epoch, me)) if result.shape == (len(own), k, D) else max(1, own.numel() * D)

    calls = s.calls(Call(lambda x: combine(*x, stage=STAGE)))
    count = busiest(routes.counts()) * D
    return made(op, "exchange", count, torch.bfloat16, s, fill, calls, wrong, skewed=True)


@dataclass(frozen=True)
class PlainRows:
    """Rows at their experts as four plain calls bring them."""

    x_RD: torch.Tensor
    scale_R: torch.Tensor


def _four_calls(x: Sequence[torch.Tensor], group: Group, experts: int) -> PlainRows:
    """Dispatch as four plain all-to-alls one after the other: counts, rows, scales, experts."""
    x_TD, scale_T, _, indices_Tk = x
    flat = indices_Tk.flatten()
    order_S = flat.argsort(stable=True)
    sent = torch.bincount(flat // (experts // group.size), minlength=group.size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.process_group)
    row_S = order_S // indices_Tk.shape[1]
    got = []
    for part in (x_TD[row_S], scale_T[row_S], flat[order_S]):
        out = part.new_empty((int(received.sum()), *part.shape[1:]))
        dist.all_to_all_single(out, part, received.tolist(), sent.tolist(), group=group.process_group)
        got.append(out)
    order_R = got[2].argsort(stable=True)
    return PlainRows(got[0][order_R], got[1][order_R])


def _routes(s: Setting, rows: int) -> Routes:
    return Routes.make(s.skew, s.group.size, rows, s.config.n_routed_experts, s.config.num_experts_per_tok)
