"""How one rank joins the others: the store where they meet, its connections, its groups. Imports torch when called."""

import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .flags import RunFlags

if TYPE_CHECKING:
    from .worker import Place

HCCL_MARGIN = 10
"""Seconds that HCCL waits longer than we do: its own error names no rank, and a stuck device must not hold the job."""


def join(
    place: "Place",
    flags: RunFlags,
    facts: Mapping[str, str | int | float],
    environ: MutableMapping[str, str],
    made: Callable[[Any], None] = lambda connections: None,
) -> Any:
    """This rank's Groups, connected to the other ranks of its host. facts: what must be equal on all ranks.

    made: is given the connections before anybody waits for anybody. Sets HCCL_EXEC_TIMEOUT in `environ` where the user
    has not. Rank 0 tells how the ranks are connected.
    """
    from ..comm.connect import Connections, Wish
    from ..comm.trace import CAPACITY
    from ..parallel.groups import Groups
    from ..parallel.ledger import Ledger

    device = flags.device.of(place.local_rank)
    folder = job_folder(place)
    wish = Wish(flags.transport, flags.check, flags.control or (folder / "control" if folder is not None else None))
    connections = Connections(wish, environ.get("GLOO_SOCKET_IFNAME"))
    made(connections)
    if flags.device.kind != "cpu":
        import torch

        getattr(torch, flags.device.kind).set_device(device)
    if flags.backend == "hccl":
        environ.setdefault("HCCL_EXEC_TIMEOUT", str(math.ceil(flags.timeout) + HCCL_MARGIN))
    recorded = flags.record is not None or flags.trace is not None
    groups = Groups.start(
        flags.topology,
        rank=place.rank,
        backend=flags.backend,
        device=device,
        timeout=flags.timeout,
        facts=facts,
        store=_store(place, folder, flags.timeout, environ),
        connections=connections,
        ledger=Ledger(CAPACITY if recorded else 0),
    )
    if place.rank == 0 and place.world > 1:
        _tell(connections, flags)
    return groups


def _tell(connections: Any, flags: RunFlags) -> None:
    """What a user may want to know of how the ranks are connected, on standard error."""
    if connections.host is not None:
        print(f"note: control pages are in {connections.host.folder}", file=sys.stderr)
    else:
        print(f"note: rows move with {flags.backend}: {connections.note}", file=sys.stderr)
    if flags.check == "off":
        print(f"note: with --check off a mismatch may abort {flags.backend} or give wrong sums", file=sys.stderr)


def job_folder(place: "Place") -> Path | None:
    """The folder of our own launcher, private to the user, which removes it at the end; else None."""
    return Path(place.error_file).parents[3] if place.spoken_for and place.error_file else None


def _store(place: "Place", folder: Path | None, seconds: float, environ: Mapping[str, str]) -> Any:
    """Where ranks meet: a file in our launcher's folder, or an own store of ranks started by hand, which waits for
    nobody. None where another launcher has a store.
    """
    import torch.distributed as dist

    if folder is not None:
        return dist.FileStore(str(folder / "ranks"), place.world)
    if place.managed or place.world == 1:
        return None
    from ..parallel.errors import error_kind, first_line

    address, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not (port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"MASTER_PORT is {port!r}, allowed: a port number")
    ends = timedelta(seconds=seconds)
    try:
        return dist.TCPStore(address, int(port), place.world, place.rank == 0, timeout=ends, wait_for_workers=False)
    except RuntimeError as problem:
        text = f"no store at {address}:{port}: {first_line(problem)}"
        kind = error_kind(str(problem))
        raise kind(text, group="world", sequence=0, op="start", stage="start", ranks=range(place.world)) from problem


def let_go_on(groups: Any, problem: Exception) -> None:
    """Wake the stopped ranks of this host that the failure names: asleep they could not hear that the job ends."""
    from ..comm.control_page import process_state

    host = groups.connections.host if groups.connections is not None else None
    for rank in getattr(problem, "ranks", ()):
        pid = host.pids.get(rank) if host is not None else None
        if pid is not None and process_state(pid) == "stopped":
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
