"""The exchanges that are measured: how each is filled, made by us and by others, and checked.

Data are origin hashes, so a wrong element is one that does not belong where it is.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..comm.agreement import agree
from ..comm.collectives import (
    all_gather_rows,
    all_reduce_rows,
    broadcast_bytes,
    exchange_rows,
    reduce_scatter_rows,
    view_gathered_rows,
)
from ..comm.context_gather import gather_context
from ..layouts.bits import raw_view
from ..layouts.payloads import KINDS, Payload, payload
from ..models.v4.config import V4Config, flash
from ..parallel.group import cpu_tensor
from ..parallel.groups import Group, Groups
from .driver import Call, Exchange, Origin, differing
from .routes import busiest, pattern

STAGE = "bench"
PAYLOAD_OPS = {kind.replace("_", "-"): kind for kind in KINDS}
RECORD_NUMBERS = 35
"""Numbers of the agreement's record: 3 and a pair for each of 16 slots."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32)
}


@dataclass(frozen=True)
class Setting:
    """Where and how exchanges are made. peers: whether plain calls of other libraries join the same loop."""

    group: Group
    control: Group
    seed: int = 0
    skew: str = "uniform"
    peers: bool = True
    config: V4Config = field(default_factory=flash)

    def origin(self, op: str) -> Origin:
        return Origin(self.seed, f"{self.group.name}/{op}")

    def calls(self, own: Call, c10d: Call | None = None, mpi: Callable[[Any], Call] | None = None) -> dict[str, Call]:
        """By transport: ours, and the peers that are there."""
        calls = {self.group.transport: own}
        if self.peers and self.group.size > 1 and c10d is not None:
            calls["c10d"] = c10d
            world = mpi_world(self.group)
            if world is not None and mpi is not None:
                calls["mpi"] = mpi(world)
        return calls


def mpi_world(group: Group) -> Any | None:
    """mpi4py's communicator of all ranks where it is installed and mpiexec started these very ranks, else None."""
    if group.device != "cpu" or importlib.util.find_spec("mpi4py") is None:
        return None
    try:
        world = importlib.import_module("mpi4py.MPI").COMM_WORLD
    except (ImportError, RuntimeError):
        # Installed without an MPI library that it could load.
        return None
    return world if (world.size, world.rank) == (group.size, group.rank) else None


def gather(s: Setting, op: str, rows: int, columns: int, dtype: torch.dtype) -> Exchange:
    """all_gather_rows of [rows, columns] from each rank."""
    n, share, origin = s.group.size, rows * columns, s.origin(op)
    out = torch.empty(n * rows, columns, dtype=dtype, device=s.group.device)
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def fill(epoch: int) -> torch.Tensor:
        return origin.bits(epoch, s.group.rank, 0, share, dtype).view(rows, columns).to(s.group.device)

    def plain(x: torch.Tensor) -> torch.Tensor:
        single(out, x, group=s.group.process_group)
        return out

    def wrong(result: torch.Tensor, epoch: int) -> int:
        parts = result.reshape(-1).split(share) if share else ()
        return sum(differing(part, origin.bits(epoch, peer, 0, share, dtype)) for peer, part in enumerate(parts))

    def mpi(world: Any) -> Call:
        return Call(lambda x: _mpi(world.Allgather, x, out))

    own = Call(lambda x: all_gather_rows(x, s.group, stage=STAGE, out=out))
    calls = s.calls(own, Call(plain), mpi)
    if s.group.transport == "local" and s.group.size > 1 and share:
        calls["local view"] = Call(lambda x: view_gathered_rows(x, s.group, stage=STAGE))
    return made(op, "gather", n * share, dtype, s, fill, calls, wrong)


def all_to_all(s: Setting, op: str, rows: int, columns: int, dtype: torch.dtype) -> Exchange:
    """exchange_rows of `rows` rows to each destination, or as the skew says."""
    me, origin, counts = s.group.rank, s.origin(op), pattern(s.skew, s.group.size, rows)
    sent, received = list(counts[me]), [row[me] for row in counts]
    out = torch.empty(sum(received), columns, dtype=dtype, device=s.group.device)

    def fill(epoch: int) -> torch.Tensor:
        return origin.bits(epoch, me, 0, sum(sent) * columns, dtype).view(-1, columns).to(s.group.device)

    def plain(x: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(out, x, received, sent, group=s.group.process_group)
        return out

    def wrong(result: torch.Tensor, epoch: int) -> int:
        total = 0
        for source, part in enumerate(result.split(received)):
            first = sum(counts[source][:me]) * columns
            total += differing(part, origin.bits(epoch, source, first, first + received[source] * columns, dtype))
        return total

    def mpi(world: Any) -> Call:
        scale = columns * dtype.itemsize
        splits = [[c * scale for c in sent]], [[c * scale for c in received]]
        return Call(lambda x: _mpi(world.Alltoallv, x, out, *splits))

    own = Call(lambda x: exchange_rows(x, s.group, sent, received, stage=STAGE, out=out))
    count = busiest(counts) * columns
    return made(op, "exchange", count, dtype, s, fill, s.calls(own, Call(plain), mpi), wrong, skewed=True)


def reduction(s: Setting, op: str, count: int, dtype: torch.dtype) -> Exchange:
    """reduce_scatter_rows or all_reduce_rows of `count` elements on each rank."""
    n, me, origin, scatter = s.group.size, s.group.rank, s.origin(op), op == "reduce-scatter"
    first, last = (me * count // n, (me + 1) * count // n) if scatter else (0, count)
    out = torch.empty(last - first, dtype=dtype, device=s.group.device)
    single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def fill(epoch: int) -> torch.Tensor:
        return origin.small(epoch, me, 0, count, dtype, n).to(s.group.device)

    def run(x: torch.Tensor) -> torch.Tensor:
        return (reduce_scatter_rows if scatter else all_reduce_rows)(x, s.group, stage=STAGE, out=out)

    def plain(x: torch.Tensor) -> torch.Tensor:
        if scatter:
            single(out, x, group=s.group.process_group)
        else:
            dist.all_reduce(out, group=s.group.process_group)
        return out

    def wrong(result: torch.Tensor, epoch: int) -> int:
        wanted = torch.zeros(last - first, dtype=dtype)
        for source in range(n):
            wanted += origin.small(epoch, source, first, last, dtype, n)
        return differing(result, wanted)

    def mpi(world: Any) -> Call:
        verb = world.Reduce_scatter_block if scatter else world.Allreduce
        return Call(lambda x: _mpi(verb, x, out, raw=False))

    def copy_in(x: torch.Tensor) -> None:
        """The plain all-reduce works in place."""
        out.copy_(x)

    c10d = Call(plain) if scatter else Call(plain, ready=copy_in)
    with_mpi = None if dtype in (torch.bfloat16, torch.float16) else mpi
    return made(op, op, count, dtype, s, fill, s.calls(Call(run), c10d, with_mpi), wrong)


def broadcast(s: Setting, length: int) -> Exchange:
    """broadcast_bytes from rank 0 over the control group."""
    origin, mine = s.origin("broadcast"), s.control.rank == 0
    out = torch.zeros(length, dtype=torch.uint8)

    def fill(epoch: int) -> bytes:
        return origin.bits(epoch, 0, 0, length, torch.uint8).numpy().tobytes() if mine else b""

    def ready(payload: bytes) -> None:
        out.copy_(cpu_tensor(payload)) if mine else out.zero_()

    def plain(_: bytes) -> torch.Tensor:
        dist.broadcast(out, group=s.control.process_group, group_src=0)
        return out

    def wrong(result: bytes | torch.Tensor, epoch: int) -> int:
        got = cpu_tensor(result) if isinstance(result, bytes) else result
        return differing(got, origin.bits(epoch, 0, 0, length, torch.uint8))

    def mpi(world: Any) -> Call:
        return Call(lambda _: (world.Bcast(out.numpy(), 0), out)[1], ready)

    own = Call(lambda x: broadcast_bytes(x if mine else None, s.control, 0, length=length, stage=STAGE))
    calls = s.calls(own, Call(plain, ready), mpi)
    return made("broadcast", "broadcast", length, torch.uint8, s, fill, calls, wrong)


def control(s: Setting, groups: Groups, op: str = "control", numbers: int = RECORD_NUMBERS) -> Exchange:
    """The agreement: a record of int64 numbers from every rank to every rank."""
    origin, n = s.origin(op), s.control.size

    def record(epoch: int, source: int) -> list[int]:
        return origin.bits(epoch, source, 0, numbers, torch.int64).tolist()

    def wrong(result: list[list[int]], epoch: int) -> int:
        wanted = [record(epoch, source) for source in range(n)]
        return int((np.array(result) != np.array(wanted)).sum())

    calls = s.calls(Call(lambda x: agree(x, groups, stage=STAGE)))
    return made(op, "gather", n * numbers, torch.int64, s, lambda e: record(e, s.control.rank), calls, wrong)


def context(s: Setting, op: str, kind: str, rows: int, name: str | None = None) -> Exchange:
    """gather_context of one payload kind, packing included; widths of the config in BF16 lanes."""
    row = flash_payload(kind, s.config)
    base = gather(s, name or op, rows, row.width, row.wire)

    def fill(epoch: int) -> dict[str, torch.Tensor]:
        return row.unpack(base.fill(epoch))

    def wrong(result: dict[str, torch.Tensor], epoch: int) -> int:
        return base.wrong(row.pack(result), epoch)

    own = Call(lambda x: gather_context(x, row, s.group, stage=STAGE))
    return replace(base, fill=fill, calls=s.calls(own), wrong=wrong)


def flash_payload(kind: str, config: V4Config) -> Payload:
    """The payload of a kind as the deployment point has it: keys in BF16, compressor state in FP32."""
    sizes = {"head_dim": config.head_dim, "index_head_dim": config.index_head_dim}
    return payload(kind, **sizes, kv_dtype=torch.bfloat16, state_dtype=torch.float32, wire=torch.bfloat16)


def made(
    op: str,
    kind: str,
    count: int,
    dtype: torch.dtype,
    s: Setting,
    fill: Callable[[int], Any],
    calls: Mapping[str, Call],
    wrong: Callable[[Any, int], int],
    skewed: bool = False,
) -> Exchange:
    """An exchange of `count` elements in a setting; its bytes are theirs."""
    name = str(dtype).removeprefix("torch.")
    ranks, skew = s.group.size, s.skew if skewed else None
    return Exchange(op, kind, count * dtype.itemsize, count, name, ranks, fill, calls, wrong, skew)


def _mpi(verb: Callable[..., Any], x: torch.Tensor, out: torch.Tensor, *splits: Any, raw: bool = True) -> torch.Tensor:
    """One call of mpi4py between the memory of two tensors, as bytes or as numbers."""
    given, taken = (raw_view(t).view(torch.uint8).numpy() if raw else t.numpy() for t in (x, out))
    if splits:
        verb([given, *splits[0]], [taken, *splits[1]])
    else:
        verb(given, taken)
    return out
