"""A pool of ranks for tests: processes that stay alive and run test functions over gloo on loopback.

A test names a function "test_module:function"; every rank imports the module and calls
function(groups, **kwargs) with the Groups of the topology asked for. Arguments and results travel as msgpack.
"""

import importlib
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import torch

from meshspark.parallel.topology import Topology

START_SECONDS = 90.0
# After one rank failed, how long the others get to say what they saw.
GRACE_SECONDS = 5.0


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time."""


def to_bytes(tensor: torch.Tensor) -> dict[str, Any]:
    """A tensor as plain data, bit for bit."""
    data = tensor.detach().cpu().contiguous()
    name = str(data.dtype).removeprefix("torch.")
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return {"dtype": name, "shape": list(data.shape), "data": raw}


def from_bytes(packed: dict[str, Any]) -> torch.Tensor:
    """Inverse of `to_bytes`."""
    dtype = getattr(torch, packed["dtype"])
    if not packed["data"]:
        return torch.empty(packed["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(packed["data"]), dtype=dtype).reshape(packed["shape"])


def _send(pipe: BinaryIO, message: Any) -> None:
    data = msgpack.packb(message)
    pipe.write(struct.pack("<Q", len(data)) + data)
    pipe.flush()


def _receive(pipe: BinaryIO) -> Any:
    head = pipe.read(8)
    if len(head) < 8:
        raise EOFError
    data = pipe.read(struct.unpack("<Q", head)[0])
    return msgpack.unpackb(data, strict_map_key=False)


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, rank: int, world: int, group_timeout: float) -> None:
        down_read, self._down = os.pipe()
        self._up, up_write = os.pipe()
        self.rank = rank
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        arguments = ["worker", str(rank), str(world), str(group_timeout), str(down_read), str(up_write)]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *arguments],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.errors,
            stderr=self.errors,
            pass_fds=(down_read, up_write),
            start_new_session=True,
        )
        os.close(down_read)
        os.close(up_write)
        self.sink = os.fdopen(self._down, "wb")
        self.source = os.fdopen(self._up, "rb", buffering=0)
        self._buffer = bytearray()

    def read_some(self) -> Any | None:
        """The next whole message if it has arrived, None before that. EOFError when the rank is gone."""
        piece = os.read(self._up, 1 << 20)
        if not piece:
            raise EOFError
        self._buffer += piece
        if len(self._buffer) < 8:
            return None
        size = struct.unpack("<Q", self._buffer[:8])[0]
        if len(self._buffer) < 8 + size:
            return None
        message = msgpack.unpackb(bytes(self._buffer[8 : 8 + size]), strict_map_key=False)
        del self._buffer[: 8 + size]
        return message

    def output(self) -> str:
        """The end of what the rank printed."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-3000:]

    def end(self) -> None:
        """Kill the rank and give its pipes back."""
        self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):
            self.sink.close()
        self.source.close()
        self.errors.close()


def _environment() -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    names = [name for _, name in socket.if_nameindex()]
    loopback = [name for name in ("lo", "lo0") if name in names]
    if loopback:
        environment["GLOO_SOCKET_IFNAME"] = loopback[0]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    return environment


class RankPool:
    """`size` ranks, started when first used and again after a failure."""

    def __init__(self, size: int, group_timeout: float = 30.0) -> None:
        self.size = size
        self.group_timeout = group_timeout
        self._ranks: list[_Rank] = []

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, for tests that kill."""
        self._start()
        return [rank.process.pid for rank in self._ranks]

    def run(
        self, topology: Topology, target: str, timeout: float = 60.0, *, transport: str = "local", **kwargs: Any
    ) -> list[Any]:
        """Results of target(groups, **kwargs) by rank. RankFailure, with what each rank said, otherwise.

        transport: how the groups of several ranks move rows, "local" or "torch".
        """
        answers = self._ask(topology, target, timeout, (), kwargs, transport)
        failures = [f"rank {rank}:\n{answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        if failures:
            said = [f"rank {rank.rank} printed:\n{rank.output()}" for rank in self._ranks if rank.output().strip()]
            self.kill()
            raise RankFailure(f"{target} on {topology}:\n" + "\n".join(failures + said))
        return [answer["result"] for answer in answers]

    def run_surviving(
        self,
        topology: Topology,
        target: str,
        dead: tuple[int, ...],
        timeout: float = 60.0,
        *,
        transport: str = "local",
        **kwargs: Any,
    ) -> list[Any]:
        """As `run` where the ranks in `dead` end without an answer: None for them. The pool starts anew after it."""
        answers = self._ask(topology, target, timeout, dead, kwargs, transport)
        wrong = {rank: a["error"] for rank, a in enumerate(answers) if "error" in a and rank not in dead}
        alive = [rank for rank in dead if "result" in answers[rank]]
        self.kill()
        if wrong or alive:
            raise RankFailure(f"{target} on {topology}: ranks {alive} lived on; errors {wrong}")
        return [answer.get("result") for answer in answers]

    def _ask(
        self,
        topology: Topology,
        target: str,
        timeout: float,
        dead: tuple[int, ...],
        kwargs: dict[str, Any],
        transport: str,
    ) -> list[dict[str, Any]]:
        if topology.world != self.size:
            raise ValueError(f"topology has world {topology.world}, this pool has {self.size} ranks")
        self._start()
        module, function = target.split(":")
        sizes = [topology.world, topology.tp, topology.ep]
        request = {"topology": sizes, "module": module, "function": function, "kwargs": kwargs}
        request["transport"] = transport
        try:
            for rank in self._ranks:
                _send(rank.sink, request)
            return self._collect(timeout, dead)
        except BaseException:
            self.kill()
            raise

    def _collect(self, timeout: float, dead: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """One answer per rank; a rank that died or is late answers with an error."""
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.source, selectors.EVENT_READ, rank)
            while len(answers) < len(self._ranks) and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    rank = key.data
                    try:
                        message = rank.read_some()
                    except EOFError:
                        message = {"error": f"died with status {rank.process.wait()}"}
                    if message is None:
                        continue
                    answers[rank.rank] = message
                    selector.unregister(rank.source)
                    if "error" in message and rank.rank not in dead:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        late = {"error": "no answer in time"}
        return [answers.get(rank.rank, late) for rank in self._ranks]

    def _start(self) -> None:
        if self._ranks:
            return
        self._ranks = [_Rank(rank, self.size, self.group_timeout) for rank in range(self.size)]
        try:
            # Rank 0 listens on a port that the system chose, so two pools never fight for one.
            port = 0
            if self.size > 1:
                port = _receive(self._ranks[0].source)["port"]
                for rank in self._ranks[1:]:
                    _send(rank.sink, {"port": port})
            failures = [answer["error"] for answer in self._collect(START_SECONDS) if "error" in answer]
        except EOFError:
            failures = ["rank 0 died"]
        if failures:
            said = "\n".join(rank.output() for rank in self._ranks)
            self.kill()
            raise RankFailure(f"{self.size} ranks did not start: {failures}\n{said}")

    def kill(self) -> None:
        """End every rank."""
        for rank in self._ranks:
            rank.end()
        self._ranks = []


class RankPools:
    """One pool per size, made when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def pool(self, size: int) -> RankPool:
        """The pool of this many ranks."""
        if size not in self._pools:
            self._pools[size] = RankPool(size)
        return self._pools[size]

    def run(self, topology: Topology, target: str, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """`RankPool.run` on the pool of the topology's size."""
        return self.pool(topology.world).run(topology, target, timeout, **kwargs)

    def run_both(self, topology: Topology, target: str, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """`run` over both transports, whose results must be the same."""
        local = self.run(topology, target, timeout, **kwargs)
        if topology.world > 1:
            torch_results = self.run(topology, target, timeout, transport="torch", **kwargs)
            assert local == torch_results, f"{target}: local {local}, torch {torch_results}"
        return local

    def kill(self) -> None:
        """End every rank of every pool."""
        for pool in self._pools.values():
            pool.kill()


def _watch_parent(parent: int) -> None:
    """End with the parent, however it ended, also while a collective waits."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _base_groups(rank: int, world: int, timeout: float, source: BinaryIO, sink: BinaryIO) -> Any:
    from datetime import timedelta

    import torch.distributed as dist

    from meshspark.comm.connect import Connections, Wish
    from meshspark.parallel.groups import Groups

    if world == 1:
        return Groups.single()
    ends = timedelta(seconds=START_SECONDS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, True, timeout=ends, wait_for_workers=False)
        _send(sink, {"port": store.port})
    else:
        store = dist.TCPStore("127.0.0.1", _receive(source)["port"], world, False, timeout=ends)
    topology = Topology(world, 1, world)
    return Groups.start(
        topology,
        rank=rank,
        backend="gloo",
        device="cpu",
        timeout=timeout,
        store=store,
        connections=Connections(Wish("local")),
    )


def _answer(request: dict[str, Any], base: Any, cache: dict[Topology, Any]) -> dict[str, Any]:
    try:
        topology = Topology(*request["topology"])
        if topology not in cache:
            cache[topology] = base.derive(topology)
        groups = cache[topology]
        for group in (groups.world, groups.tp, groups.ep, groups.control, groups.front):
            group.transport = request["transport"] if group.size > 1 else "torch"
        function = getattr(importlib.import_module(request["module"]), request["function"])
        result = function(groups, **request["kwargs"])
        msgpack.packb(result)
    except Exception:
        return {"error": traceback.format_exc()}
    return {"result": result}


def _worker(rank: int, world: int, timeout: float, down: int, up: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _watch_parent(os.getppid())
    torch.set_num_threads(1)
    source, sink = os.fdopen(down, "rb"), os.fdopen(up, "wb")
    try:
        base = _base_groups(rank, world, timeout, source, sink)
    except Exception:
        _send(sink, {"error": traceback.format_exc()})
        return
    _send(sink, {"result": "ready"})
    cache = {base.topology: base}
    while True:
        try:
            request = _receive(source)
        except EOFError:
            os._exit(0)
        _send(sink, _answer(request, base, cache))


if __name__ == "__main__":
    _worker(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
