"""Gathers under way: what stands behind a handle between the start of a gather and its wait.

No thread takes part in a call of a group: a second thread would enter calls in an order of its own. The start is a
call of the group, compared before data moves, and so is the wait; both are counted in the group's one order, and other
calls may come between. What happens in between needs nobody's answer:

* on one host each rank reads the others' memory from a thread that only copies, and the wait is the call after which
  all have read;
* on torch's CPU backend sends and receives are posted under a tag of their own, and the backend moves them;
* on a device the gather is one asynchronous call of the group: later calls of the same group queue behind it, in the
  same order on all ranks, while computing goes on.
"""

import ctypes
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from ..parallel.errors import CollectiveTimeout
from ..parallel.group import Call, Group
from . import backend
from .link import Link
from .local import ADDRESS, DIRECT_BYTES

DROP_SECONDS = 1.0
"""How long a rank whose groups have failed lets others have what is under way."""


class Work(Protocol):
    """The moving part of a gather under way."""

    def finish(self, call: Call) -> None:
        """Return when this rank has everything and nobody reads its rows any more, within the group's time."""

    def drop(self) -> None:
        """Give up what keeps connections alive; `finish` is not called any more."""


def is_ahead(group: Group, rows: torch.Tensor) -> bool:
    """Whether a gather of these rows can go on in the background; alike on all ranks of the group.

    Small rows ride on the call itself, and where no rank may read another's memory the shared window is copied at once.
    """
    if not rows.numel():
        return False
    return group.transport != "local" or (group.control.reads and rows.nbytes >= DIRECT_BYTES)


def start(call: Call, out: torch.Tensor, rows: torch.Tensor) -> Work:
    """Begin to bring every rank's contiguous `rows` into `out`, by rank; both stay as they are until `finish`."""
    if call.group.transport == "local":
        return Pull(call, out, rows)
    return Posted(out, backend.start_gather(call, out, rows))


class Posted:
    """Works of torch.distributed."""

    def __init__(self, out: torch.Tensor, works: list[dist.Work | None]) -> None:
        self._out, self._works = out, works

    def finish(self, call: Call) -> None:
        backend.finish_gather(call, self._out, self._works)

    def drop(self) -> None:
        # A work holds its connection, and peers see the end of this rank only when that closes. Closed in the middle
        # of a message, gloo would leave a peer that receives it to its time-out.
        ends = time.monotonic() + DROP_SECONDS
        while self._works:
            work = self._works.pop(0)
            if work is not None and self._out.device.type == "cpu":
                with suppress(RuntimeError):
                    work.wait(timedelta(seconds=max(0.001, ends - time.monotonic())))


class Pull:
    """A thread that reads the other ranks' rows from their memory. It ends by itself: a dead rank's memory is gone."""

    def __init__(self, call: Call, out: torch.Tensor, rows: torch.Tensor) -> None:
        link, me, size = call.group.control, call.group.rank, rows.nbytes
        assert isinstance(link, Link), "a local group has a link"
        heard = link.meet(call, ADDRESS.pack(rows.data_ptr()))
        self._link, self._problem = link, ""
        self._parts = [
            (source, ADDRESS.unpack(payload)[0], out.data_ptr() + source * size, size)
            for source, payload in enumerate(heard.payloads)
            if source != me
        ]
        # The thread holds both tensors: after a failure nobody else may.
        self._kept = out, rows
        ctypes.memmove(out.data_ptr() + me * size, rows.data_ptr(), size)
        self._thread = threading.Thread(target=self._read, name=f"meshspark {call.signature.stage}")
        self._thread.start()

    def _read(self) -> None:
        try:
            for source, address, place, size in self._parts:
                self._link.read(source, address, place, size)
        except OSError as problem:
            self._problem = str(problem)

    def finish(self, call: Call) -> None:
        self._thread.join(call.group.timeout)
        if self._thread.is_alive():
            raise call.error(CollectiveTimeout, f"rows are not read within {call.group.timeout:g} s")
        if self._problem:
            raise OSError(self._problem)
        self._link.meet(call)

    def drop(self) -> None:
        pass
