"""Rows to their experts and back, over an expert group.

Letters: T rows of a rank, k routes of a row, S routes sent, R routes received, E experts of a rank, D columns.
Rows travel sorted by expert, then by source row and k; the receiver regroups them by local expert, then by source
rank, source row and k. Sizes are exact: nothing is padded and nothing is ever dropped.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..layouts.bits import as_lanes, from_lanes
from ..parallel.errors import CollectiveMismatch
from ..parallel.groups import Group
from .backend import check_wire
from .collectives import exchange_counts, exchange_rows

# Up to this many bytes from the busiest rank everything rides in one byte row; above, copies cost more than calls.
PACK_LIMIT_BYTES = 256 * 1024


@dataclass(frozen=True, eq=False)
class DispatchHandle:
    """How rows went out, so that `combine` can bring results back.

    order_S: source route (row * k + slot) of each sent row. sent_E: rows sent to each expert of the group, int64.
    regroup_R: for each row in expert order, its place in arrival order. send_counts and recv_counts: rows by rank.
    expert_counts: rows by local expert.
    """

    group: Group
    num_experts: int
    rows: int
    routes_per_row: int
    order_S: torch.Tensor
    sent_E: torch.Tensor
    regroup_R: torch.Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    expert_counts: tuple[int, ...]

    def require_group(self, group: Group) -> None:
        """ValueError, naming both, if `group` is not the one that dispatched."""
        group.topology.require_same(self.group.topology, "the dispatch handle")
        if group is not self.group:
            raise ValueError(
                f"the dispatch handle was made on group {self.group.name} of ranks {list(self.group.ranks)}, "
                f"but is used with group {group.name} of ranks {list(group.ranks)}"
            )


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Rows at their experts, by local expert, then by source rank, source row and k.

    x_RD and scale_R as sent, weights_R the routing weight, routes_R int64 the route (row * k + slot) at its source;
    expert_counts says how many rows each local expert got.
    """

    handle: DispatchHandle
    x_RD: torch.Tensor
    weights_R: torch.Tensor
    scale_R: torch.Tensor | None
    expert_counts: tuple[int, ...]
    routes_R: torch.Tensor


def dispatch(
    x_TD: torch.Tensor,
    indices_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    valid_T: torch.Tensor | None,
    group: Group,
    num_experts: int,
    scale_T: torch.Tensor | None = None,
    *,
    stage: str,
) -> Dispatched:
    """Send each row to the owners of its experts: by local expert, then by source rank, source row and k.

    indices_Tk: int64 experts, below 0 for no route; valid_T: bool, False sends nothing. x may have any dtype that
    travels, int8 with FP32 scale_T included. T may differ between ranks and be 0. Differentiable in x and weights:
    then every rank of the group needs the gradient (CollectiveMismatch on all if only some do).
    """
    _check(x_TD, indices_Tk, weights_Tk, valid_T, scale_T, group, num_experts)
    order_S, sent_E, counts = _sorted_routes(indices_Tk, valid_T, num_experts)
    needs_gradient = torch.is_grad_enabled() and (x_TD.requires_grad or weights_Tk.requires_grad)
    recv, most_rows = _announce(sent_E, counts, needs_gradient, group, stage)
    local = num_experts // group.size
    handle = DispatchHandle(
        group,
        num_experts,
        indices_Tk.shape[0],
        indices_Tk.shape[1],
        order_S,
        sent_E,
        _regroup(recv, x_TD.device),
        tuple(sum(counts[first : first + local]) for first in range(0, num_experts, local)),
        tuple(map(sum, recv)),
        tuple(map(sum, zip(*recv, strict=True))),
    )
    return _move(x_TD, weights_Tk, scale_T, handle, needs_gradient, most_rows, stage)


def combine(y_RD: torch.Tensor, handle: DispatchHandle, group: Group | None = None, *, stage: str) -> torch.Tensor:
    """Results back to the rows they came from, [R, D] -> [T, k, D]: by source row, then by k.

    y_RD has the order that `dispatch` gave. Routes that were not sent are zero. Differentiable. ValueError if
    `group` is given and is not the handle's.
    """
    if group is not None:
        handle.require_group(group)
    if y_RD.ndim != 2 or y_RD.shape[0] != sum(handle.recv_counts):
        raise ValueError(f"y has shape {list(y_RD.shape)}, allowed: [{sum(handle.recv_counts)}, columns]")
    y_SD = y_RD
    if handle.group.size > 1:
        arrival = torch.empty_like(handle.regroup_R)
        arrival[handle.regroup_R] = torch.arange(len(arrival), device=arrival.device)
        sent_RD = y_RD.index_select(0, arrival)
        y_SD = exchange_rows(sent_RD, handle.group, handle.recv_counts, handle.send_counts, stage=stage)
    routes = handle.rows * handle.routes_per_row
    out = y_SD.new_zeros((routes, y_SD.shape[1])).index_copy_(0, handle.order_S, y_SD)
    return out.view(handle.rows, handle.routes_per_row, y_SD.shape[1])


def index_tensor(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """int64 numbers of the host on `device`; they share memory where that is the host."""
    tensor = torch.from_numpy(numbers)
    return tensor if device.type == "cpu" else tensor.to(device)


def _on_host(x: torch.Tensor) -> np.ndarray:
    numbers: np.ndarray = (x if x.device.type == "cpu" else x.cpu()).numpy()
    return numbers


def _sorted_routes(
    indices_Tk: torch.Tensor, valid_T: torch.Tensor | None, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Routes that are sent, sorted by expert and then by route, and their number by expert, as tensor and list.

    On the host: the counts are needed there, and a few routes are sorted faster than a device is asked.
    """
    experts = _on_host(indices_Tk)
    if valid_T is not None:
        experts = np.where(_on_host(valid_T)[:, None], experts, -1)
    experts = experts.ravel()
    sent = (experts >= 0).nonzero()[0]
    chosen = experts[sent]
    counts = np.bincount(chosen, minlength=num_experts)
    if len(counts) > num_experts:
        raise ValueError(f"indices reach {len(counts) - 1}, allowed: below the {num_experts} experts")
    order_S, sent_E = (index_tensor(part, indices_Tk.device) for part in (sent[chosen.argsort(kind="stable")], counts))
    return order_S, sent_E, counts.tolist()


def _regroup(recv: list[list[int]], device: torch.device) -> torch.Tensor:
    """For each row in expert order its place in arrival order; recv [size][E] rows by rank and local expert."""
    if len(recv) == 1:
        return torch.arange(sum(recv[0]), device=device)
    recv_SE = torch.tensor(recv, device=device)
    expert_R = torch.arange(recv_SE.shape[1], device=device).repeat(len(recv)).repeat_interleave(recv_SE.flatten())
    return expert_R.argsort(stable=True)


def _announce(
    sent_E: torch.Tensor, counts: list[int], needs_gradient: bool, group: Group, stage: str
) -> tuple[list[list[int]], int]:
    """Rows that come from each rank for each local expert [size][E], and the rows of the busiest sender."""
    rows = sum(counts)
    if group.size == 1:
        return [counts], rows
    by_owner = sent_E.view(group.size, -1)
    extra = by_owner.new_tensor([rows, int(needs_gradient)]).expand(group.size, 2)
    received = exchange_counts(torch.cat([by_owner, extra], dim=1), group, stage=f"{stage}.counts").cpu()
    flags = received[:, -1].tolist()
    if len(set(flags)) > 1:
        raise group.error(
            CollectiveMismatch, f"ranks differ in whether a gradient is needed: {flags} by rank", "dispatch", stage
        )
    table: list[list[int]] = received.tolist()
    return [row[:-2] for row in table], max(row[-2] for row in table)


def _move(
    x_TD: torch.Tensor,
    weights_Tk: torch.Tensor,
    scale_T: torch.Tensor | None,
    handle: DispatchHandle,
    needs_gradient: bool,
    most_rows: int,
    stage: str,
) -> Dispatched:
    """The rows themselves, by the way that fits their size; all ranks choose the same."""
    row_S = handle.order_S // handle.routes_per_row
    x_SD, weight_S = x_TD.index_select(0, row_S), weights_Tk.reshape(-1).index_select(0, handle.order_S)
    scale_S = None if scale_T is None else scale_T.index_select(0, row_S)
    if handle.group.size == 1:
        # One rank's routes are sorted by expert already.
        return Dispatched(handle, x_SD, weight_S, scale_S, handle.expert_counts, handle.order_S)
    sent = {"x": x_SD, "weight": weight_S.unsqueeze(1), "route": handle.order_S.unsqueeze(1)}
    if scale_S is not None:
        sent["scale"] = scale_S.unsqueeze(1)
    if needs_gradient:
        got = _separate(sent, handle, stage)
    elif most_rows * sum(part.shape[1] * part.itemsize for part in sent.values()) <= PACK_LIMIT_BYTES:
        got = _packed(sent, handle, stage)
    else:
        small = {name: sent[name] for name in sent if name != "x"}
        got = {**_separate({"x": sent["x"]}, handle, stage), **_packed(small, handle, f"{stage}.aux")}
    scale_R = got["scale"].squeeze(1) if scale_T is not None else None
    weights_R, routes_R = got["weight"].squeeze(1), got["route"].squeeze(1)
    return Dispatched(handle, got["x"], weights_R, scale_R, handle.expert_counts, routes_R)


def _separate(sent: dict[str, torch.Tensor], handle: DispatchHandle, stage: str) -> dict[str, torch.Tensor]:
    """Each part with its own dtype, differentiable."""
    got = {}
    for name, part in sent.items():
        moved = exchange_rows(part, handle.group, handle.send_counts, handle.recv_counts, stage=f"{stage}.{name}")
        got[name] = moved.index_select(0, handle.regroup_R)
    return got


def _packed(sent: dict[str, torch.Tensor], handle: DispatchHandle, stage: str) -> dict[str, torch.Tensor]:
    """All parts in one byte row, the widest alignment first, so that most can be read back as views."""
    names = sorted(sent, key=lambda name: -sent[name].itemsize)
    lanes = {name: as_lanes(sent[name].detach(), torch.uint8) for name in names}
    rows = torch.cat([lanes[name] for name in names], dim=1)
    moved = exchange_rows(rows, handle.group, handle.send_counts, handle.recv_counts, stage=stage)[handle.regroup_R]
    got, first = {}, 0
    for name in names:
        columns = moved[:, first : first + lanes[name].shape[1]]
        got[name] = from_lanes(columns, sent[name].dtype)
        first += lanes[name].shape[1]
    return got


def _check(
    x_TD: torch.Tensor,
    indices_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    valid_T: torch.Tensor | None,
    scale_T: torch.Tensor | None,
    group: Group,
    num_experts: int,
) -> None:
    T = x_TD.shape[0]
    check_wire(x_TD.dtype, "x")
    check_wire(weights_Tk.dtype, "weights")
    if x_TD.ndim != 2 or indices_Tk.ndim != 2 or indices_Tk.shape[0] != T or indices_Tk.dtype != torch.int64:
        raise ValueError(
            f"x is {list(x_TD.shape)} and indices are {indices_Tk.dtype} {list(indices_Tk.shape)}, "
            f"allowed: [T, D] and int64 [T, k]"
        )
    if weights_Tk.shape != indices_Tk.shape:
        raise ValueError(f"weights are {list(weights_Tk.shape)}, allowed: {list(indices_Tk.shape)} as the indices")
    if valid_T is not None and (valid_T.shape != (T,) or valid_T.dtype != torch.bool):
        raise ValueError(f"valid is {valid_T.dtype} {list(valid_T.shape)}, allowed: bool [{T}]")
    if scale_T is not None and (scale_T.shape != (T,) or scale_T.dtype != torch.float32):
        raise ValueError(f"scale is {scale_T.dtype} {list(scale_T.shape)}, allowed: float32 [{T}]")
    if num_experts % group.size:
        raise ValueError(f"{num_experts} experts cannot be split equally over {group.size} ranks of {group.name}")
