"""NCCL and HCCL played on the CPU: tensors that claim a device, and a torch.distributed that refuses what those do.

Inside `stand_in` a process group that is asked for on "nccl" or "hccl" is one of gloo, whose calls are checked by the
device backend's rules before they go there. What only gloo allows is an error here, not a hang on a device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

# Both backends know more: NCCL 8-bit floats, HCCL int16, each only itself.
_BOTH = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)


class Refused(RuntimeError):
    """The device backend would refuse the call, wait for ever or give wrong data."""


class _DeviceTensor(torch.Tensor):
    """CPU memory that claims to be on `claimed`; what is computed from it claims the same."""

    claimed = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self.claimed

    @property
    def is_cpu(self) -> bool:
        return False


class CudaTensor(_DeviceTensor):
    claimed = torch.device("cuda:0")


class NpuTensor(_DeviceTensor):
    # The place that torch keeps for backends outside of it: torch-npu renames it.
    claimed = torch.device("privateuseone:0")


@dataclass(frozen=True)
class Flavour:
    """A backend: its name, the tensors that it moves, and torch's name of its all-gather.

    HCCL plays a torch that has the all-gather under its old name alone, so that both ways are tried.
    """

    name: str
    tensors: type[_DeviceTensor]
    gather: str
    dtypes: tuple[torch.dtype, ...] = _BOTH

    @property
    def device(self) -> str:
        return str(self.tensors.claimed)


FLAVOURS = {
    "nccl": Flavour("nccl", CudaTensor, "all_gather_single"),
    "hccl": Flavour("hccl", NpuTensor, "all_gather_into_tensor"),
}

OPS = ("all_gather", "all_to_all")
GATHERS = ("all_gather_single", "all_gather_into_tensor")
CALLS = (
    "_all_gather_base",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
)
"""Calls that the library never makes on a device: the stand-in has no rules for them and refuses them there."""


@dataclass(eq=False)
class Stand:
    """The stand-in while it is up. groups: the process groups that play the device's; calls: how many of each name."""

    flavour: Flavour
    groups: list[Any] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)

    def plays(self, group: Any) -> bool:
        """Whether a process group is the device's; None is the world."""
        group = dist.group.WORLD if group is None else group
        return any(group is mine for mine in self.groups)

    def all_gather(
        self, real: Callable, output: torch.Tensor, rows: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """all_gather_single under the device's rules."""
        if not self.plays(group):
            return real(output, rows, group=group, async_op=async_op)
        self._check("all_gather", output, rows, self.flavour.gather)
        size = dist.get_world_size(group)
        if output.numel() != size * rows.numel():
            raise Refused(f"all-gather of {rows.numel()} elements into {output.numel()} over {size} ranks")
        self._agree("all_gather", rows, [rows.numel()] * size, [rows.numel()] * size, group)
        return real(_plain(output), _plain(rows), group=group, async_op=async_op)

    def all_to_all(
        self,
        real: Callable,
        output: torch.Tensor,
        rows: torch.Tensor,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
        group: Any = None,
    ) -> None:
        """all_to_all_single under the device's rules."""
        if not self.plays(group):
            real(output, rows, received, sent, group=group)
            return
        self._check("all_to_all", output, rows, "all_to_all_single")
        size = dist.get_world_size(group)
        counts = [_splits(splits, tensor, size) for splits, tensor in ((sent, rows), (received, output))]
        self._agree("all_to_all", rows, *counts, group)
        real(_plain(output), _plain(rows), received, sent, group=group)

    def other(self, name: str, real: Callable, *args: Any, **kwargs: Any) -> Any:
        """Every other call: the CPU groups' business alone."""
        group = kwargs.get("group", next((a for a in args if isinstance(a, dist.ProcessGroup)), None))
        if self.plays(group):
            raise Refused(f"{name} is called on a group of {self.flavour.name}, where it was never looked at")
        _only_cpu(name, args, kwargs)
        return real(*args, **kwargs)

    def start(self, real: Callable, backend: str | None = None, **kwargs: Any) -> None:
        """init_process_group: the flavour's world is one of gloo."""
        real("gloo" if backend == self.flavour.name else backend, **kwargs)
        if backend == self.flavour.name:
            self.groups.append(dist.group.WORLD)

    def new_group(self, real: Callable, ranks: Sequence[int], *, backend: str, **kwargs: Any) -> Any:
        """new_group: so are its other groups."""
        group = real(ranks, backend="gloo" if backend == self.flavour.name else backend, **kwargs)
        if backend == self.flavour.name:
            self.groups.append(group)
        return group

    def _check(self, op: str, output: torch.Tensor, rows: torch.Tensor, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        for what, tensor in (("output", output), ("input", rows)):
            where = f"{what} of {op} on {self.flavour.name}"
            if not isinstance(tensor, self.flavour.tensors):
                raise Refused(f"{where} is on {tensor.device}, not on {self.flavour.device}")
            if tensor.dtype not in self.flavour.dtypes:
                raise Refused(f"{where} is {tensor.dtype}, which does not travel")
            if not tensor.is_contiguous():
                raise Refused(f"{where} is not contiguous: its strides are {tensor.stride()}")
        if output.dtype != rows.dtype:
            raise Refused(f"{op} of {rows.dtype} into {output.dtype}")
        if _overlap(output, rows):
            raise Refused(f"{op}: input and output share memory")

    def _agree(self, op: str, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: Any) -> None:
        """What the backend leaves to its callers: all ranks make the same call with counts that fit."""
        own = [OPS.index(op), self.flavour.dtypes.index(rows.dtype)]
        own_row = torch.tensor([*own, rows.shape[1:].numel(), *sent, *received])
        table = [torch.empty_like(own_row) for _ in sent]
        dist.distributed_c10d.all_gather(table, own_row, group=group)
        calls = {tuple(row[:3].tolist()) for row in table}
        sent_SD = torch.stack([row[3 : 3 + len(sent)] for row in table])
        received_DS = torch.stack([row[3 + len(sent) :] for row in table])
        if len(calls) > 1 or not torch.equal(sent_SD, received_DS.t()):
            told = f"(op, dtype, columns) {sorted(calls)}, sent {sent_SD.tolist()}, awaited {received_DS.tolist()}"
            raise Refused(f"ranks differ in {op}: {told}")


@contextmanager
def stand_in(flavour: Flavour) -> Iterator[Stand]:
    """Play the flavour's backend, and its device, while the body runs."""
    stand = Stand(flavour)
    with ExitStack() as stack:
        replaced = {
            "init_process_group": _bound(stand.start, dist.init_process_group),
            "new_group": _bound(stand.new_group, dist.new_group),
            "all_to_all_single": _bound(stand.all_to_all, dist.all_to_all_single),
            flavour.gather: _bound(stand.all_gather, dist.all_gather_single),
        }
        for name in (*CALLS, *(g for g in GATHERS if g != flavour.gather)):
            replaced[name] = _bound(stand.other, name, getattr(dist, name))
        if flavour.gather != "all_gather_single":
            replaced["all_gather_single"] = None
        for name, function in replaced.items():
            stack.enter_context(patch.object(dist, name, function))
        stack.enter_context(DeviceMode(flavour.tensors))
        yield stand


class DeviceMode(TorchFunctionMode):
    """torch as it is on a device: what is made there claims it, and CPU tensors do not mix with its own."""

    # These take index tensors from the CPU, or copy from it.
    MIXING = (torch.Tensor.copy_, torch.Tensor.__getitem__, torch.Tensor.to)

    def __init__(self, tensors: type[_DeviceTensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cpu:
            return _plain(args[0]).clone()
        if func is torch.Tensor.numpy and isinstance(args[0], self.tensors):
            raise TypeError(f"a tensor on {self.tensors.claimed} has no numpy array: copy it to the CPU first")
        if func is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if func not in self.MIXING:
            self._same_device(func, args, kwargs)
        device = kwargs.pop("device", None)
        result = func(*args, **kwargs)
        if device is None or not isinstance(result, torch.Tensor):
            return result
        return self._place(result, torch.device(device))

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Tensor.to with its device taken out and played."""
        places = [*args, kwargs.pop("device", None)]
        device = next((torch.device(p) for p in places if isinstance(p, str | torch.device)), None)
        device = next((p.device for p in args if isinstance(p, torch.Tensor)), device)
        rest = [p for p in args if not isinstance(p, str | torch.device | torch.Tensor)]
        rest += [p.dtype for p in args if isinstance(p, torch.Tensor)]
        result = torch.Tensor.to(tensor, *rest, **kwargs) if rest or kwargs else tensor
        return result if device is None else self._place(result, device)

    def _place(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on a device: itself if it is there, else a copy."""
        if device.type == "cpu":
            return _plain(tensor).clone() if isinstance(tensor, _DeviceTensor) else tensor
        if device != self.tensors.claimed:
            raise Refused(f"a tensor is put on {device}, but this rank's device is {self.tensors.claimed}")
        return tensor if isinstance(tensor, self.tensors) else tensor.clone().as_subclass(self.tensors)

    def _same_device(self, func: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        found = list(_tensors([*args, *kwargs.values()]))
        there = [tensor for tensor in found if isinstance(tensor, _DeviceTensor)]
        # A scalar of the CPU may stand beside any tensor.
        here = [tensor for tensor in found if not isinstance(tensor, _DeviceTensor) and tensor.ndim]
        if there and here:
            name = getattr(func, "__name__", func)
            raise Refused(f"{name} mixes tensors on the CPU ({list(here[0].shape)}) and on {self.tensors.claimed}")


def on_device(function: Callable, tensors: type[_DeviceTensor]) -> Callable:
    """The function as a program on the device calls it: tensors go there, in their layout, and results come back."""

    def called(*args: Any, **kwargs: Any) -> Any:
        moved = [_map(lambda t: t.detach().as_subclass(tensors), arg) for arg in args]
        moved_too = {name: _map(lambda t: t.detach().as_subclass(tensors), arg) for name, arg in kwargs.items()}
        return _map(_plain, function(*moved, **moved_too))

    return called


def _map(change: Callable, value: Any) -> Any:
    """The value with its tensors changed; those inside of other objects but a result's own fields stay."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _map(change, part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_map(change, part) for part in value)
    return value


def _bound(function: Callable, *first: Any) -> Callable:
    return lambda *args, **kwargs: function(*first, *args, **kwargs)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, claiming nothing."""
    return tensor.as_subclass(torch.Tensor)


def _splits(splits: Sequence[int] | None, tensor: torch.Tensor, size: int) -> list[int]:
    counts = [tensor.shape[0] // size] * size if splits is None else list(splits)
    if len(counts) != size or sum(counts) != tensor.shape[0]:
        raise Refused(f"splits {counts} of {tensor.shape[0]} rows over {size} ranks")
    return counts


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    starts = first.data_ptr(), second.data_ptr()
    ends = starts[0] + first.nbytes, starts[1] + second.nbytes
    return bool(first.nbytes and second.nbytes) and starts[0] < ends[1] and starts[1] < ends[0]


def _only_cpu(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if any(isinstance(tensor, _DeviceTensor) for tensor in _tensors([*args, *kwargs.values()])):
        raise Refused(f"{name} on a group of the CPU is given a tensor of a device")


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
