"""One shim over torch.distributed: names, dtypes and environment of gloo, NCCL and HCCL."""

import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ..parallel.group import Call
from ..parallel.groups import Group
from . import local

# What all backends carry. Raw 16-bit data travels as bfloat16 or bytes, never as int16, which gloo and NCCL lack.
WIRE_DTYPES = (
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

# gloo's all-gather is a ring: slow, and a rank far from a dead one waits for its time-out. Pairs see it at once.
# From about this many result bytes on, sends and receives beat the all-to-all.
DIRECT_GATHER_BYTES = 2 << 20

# Sends and receives of a gather under way find each other by this tag, whatever else moves meanwhile.
AHEAD_TAG = 1

# An exchange of gloo, which compares calls where no doorbell does, costs as much as a small call.
SAMPLE_EVERY = 64

# Variables that each backend reads, in the order in which they are shown.
ENVIRONMENT = {
    "gloo": ("GLOO_SOCKET_IFNAME",),
    "nccl": ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_BUFFSIZE", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"),
    "hccl": (
        "GLOO_SOCKET_IFNAME",
        "HCCL_SOCKET_IFNAME",
        "HCCL_BUFFSIZE",
        "HCCL_EXEC_TIMEOUT",
        "HCCL_CONNECT_TIMEOUT",
        "ASCEND_RT_VISIBLE_DEVICES",
    ),
}
_POSITIVE = ("NCCL_BUFFSIZE", "HCCL_BUFFSIZE", "HCCL_CONNECT_TIMEOUT")
_NOT_NEGATIVE = ("HCCL_EXEC_TIMEOUT",)


def check_wire(dtype: torch.dtype, what: str) -> None:
    """ValueError before anything is sent if a dtype does not travel on every backend."""
    if dtype not in WIRE_DTYPES:
        allowed = [str(d).removeprefix("torch.") for d in WIRE_DTYPES]
        raise ValueError(f"{what} is {dtype}, which does not travel; allowed: {allowed}, or a bit view of it")


def check_environment(
    backend: str, environ: Mapping[str, str], interfaces: Sequence[str] | None = None
) -> dict[str, str]:
    """The variables that the backend reads and that are set. ValueError names a variable with a useless value."""
    if backend not in ENVIRONMENT:
        raise ValueError(f"backend is {backend!r}, allowed: {sorted(ENVIRONMENT)}")
    present = {name: environ[name] for name in ENVIRONMENT[backend] if name in environ}
    names = [name for _, name in socket.if_nameindex()] if interfaces is None else list(interfaces)
    chosen = present.get("GLOO_SOCKET_IFNAME")
    if chosen is not None and chosen not in names:
        raise ValueError(f"GLOO_SOCKET_IFNAME is {chosen!r}, allowed: the name of one interface, present are {names}")
    for name, value in present.items():
        least = 1 if name in _POSITIVE else 0 if name in _NOT_NEGATIVE else None
        if least is not None and not (value.isascii() and value.isdecimal() and int(value) >= least):
            raise ValueError(f"{name} is {value!r}, allowed: a whole number from {least}")
    return present


def all_gather(call: Call, output: torch.Tensor, rows: torch.Tensor) -> None:
    """Every rank's contiguous `rows` into `output`, by rank."""
    group = call.group
    if group.transport == "local":
        local.gather(call, output, rows)
        return
    compare(call)
    if output.device.type != "cpu":
        _device_gather()(output, rows, group=group.process_group)
    elif output.numel() * output.element_size() >= DIRECT_GATHER_BYTES:
        wait_all(_post_pairs(output, rows, group), group)
    else:
        dist.all_to_all_single(output, torch.cat([rows] * group.size), group=group.process_group)


def start_gather(call: Call, output: torch.Tensor, rows: torch.Tensor) -> list[dist.Work | None]:
    """Post what `all_gather` moves -> works for `finish_gather`; both tensors are the backend's until then."""
    compare(call)
    group = call.group
    if output.device.type == "cpu":
        return _post_pairs(output, rows, group, AHEAD_TAG)
    return [_device_gather()(output, rows, group=group.process_group, async_op=True)]


def finish_gather(call: Call, output: torch.Tensor, works: list[dist.Work | None]) -> None:
    """Wait for a started gather and empty `works`: gloo waits for a second message where a work is waited for twice.

    On a device what is computed next waits, not the program; the backend's own watchdog keeps the time there.
    """
    compare(call)
    while works:
        one = [works.pop(0)]
        if output.device.type == "cpu":
            wait_all(one, call.group)
        elif one[0] is not None:
            one[0].wait()


def _device_gather() -> Callable[..., dist.Work | None]:
    gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather


def _post_pairs(output: torch.Tensor, rows: torch.Tensor, group: Group, tag: int = 0) -> list[dist.Work | None]:
    parts = output.chunk(group.size)
    peers = [peer for peer in range(group.size) if peer != group.rank]
    works = [dist.irecv(parts[peer], group=group.process_group, group_src=peer, tag=tag) for peer in peers]
    works += [dist.isend(rows, group=group.process_group, group_dst=peer, tag=tag) for peer in peers]
    parts[group.rank].copy_(rows)
    return works


def all_to_all(
    call: Call, output: torch.Tensor, rows: torch.Tensor, received: Sequence[int], sent: Sequence[int]
) -> None:
    """Contiguous `rows`, cut into `sent` rows by destination, into `output`, `received` rows by source."""
    if call.group.transport == "local":
        local.exchange(call, output, rows, sent)
        return
    compare(call)
    dist.all_to_all_single(output, rows, list(received), list(sent), group=call.group.process_group)


def broadcast(call: Call, data: torch.Tensor, source: int) -> bytes:
    """The bytes of the uint8 tensor of group rank `source` of a CPU group, whose length is that of all others'."""
    group = call.group
    if group.transport == "local":
        return local.broadcast(call, data.numpy().tobytes(), source, len(data))
    compare(call)
    if group.rank == source:
        peers = [peer for peer in range(group.size) if peer != group.rank]
        wait_all([dist.isend(data, group=group.process_group, group_dst=peer) for peer in peers], group)
    else:
        wait_all([dist.irecv(data, group=group.process_group, group_src=source)], group)
    return data.numpy().tobytes()


def compare(call: Call) -> None:
    """Have the group's control compare the call with all ranks before the backend moves data; nothing without one.

    Where the check is sampled, one call in SAMPLE_EVERY is compared.
    """
    group = call.group
    if group.control is None or group.check == "off":
        return
    if group.check == "signature" or call.sequence % SAMPLE_EVERY == 1:
        group.control.check(call)


def wait_all(works: Sequence[dist.Work | None], group: Group) -> None:
    """Wait for point-to-point works for at most the group's time."""
    ends = timedelta(seconds=group.timeout)
    for work in works:
        assert work is not None, "this rank is a member of the group"
        work.wait(ends)
