"""Connections among the ranks of one host: who is here, their folder, the doorbell, and what each group gets."""

import os
import secrets
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..parallel.errors import CommError, TransportError, first_line
from ..parallel.group import Group
from ..parallel.groups import Groups
from .control_page import ENDED, GONE, SUFFIX, ControlPage, page_path, process_state, standings
from .direct import Nonce, can_read, find_read
from .doorbell import BYE, Doorbell
from .link import Host, Link
from .sampled import SideChannel
from .window import LEAST_BYTES, NoRoom, make_memory

FOLDER_PREFIX = "meshspark-control-"
TOKEN_BYTES = 32
CREDENTIALS = struct.Struct("iii")


def host_identity() -> str:
    """What is equal for two ranks exactly if they can meet in local sockets and memory of one user.

    Boot and network namespace together: two namespaces share a boot, two machines may share a namespace's number.
    Without either (not Linux), a value that no other process has.
    """
    network = network_identity()
    return f"{network} {os.getuid()}" if network else f"alone {os.getpid()} {secrets.token_hex(8)}"


def network_identity() -> str:
    """What is equal for two ranks exactly if a loopback address leads from one to the other; empty if not Linux."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""


def loopback_of(interface: str | None) -> str:
    """Why gloo would listen on loopback alone, empty if it would not: its interface, or this host's own address."""
    if interface is not None:
        return f"GLOO_SOCKET_IFNAME is {interface!r}" if interface in ("lo", "lo0") else ""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return f"{name} has no address"
    return f"{name} is {address}" if address.startswith("127.") else ""


@dataclass(frozen=True)
class Wish:
    """What the user asked for: transport auto, torch or local; check auto, signature, sampled or off; pages' folder."""

    transport: str = "auto"
    check: str = "auto"
    folder: Path | None = None

    @property
    def wants_host(self) -> bool:
        return self.transport != "torch" or self.check in ("auto", "signature")


class Connections:
    """One rank's connections on its host, for all `Groups` of its process; the wiring of their health.

    interface: what GLOO_SOCKET_IFNAME says. note: why there are no connections, where there are none.
    """

    def __init__(self, wish: Wish, interface: str | None = None) -> None:
        self.wish, self.host, self.note = wish, None, ""
        self._interface = interface
        self.locals: tuple[int, ...] = ()
        self.names: tuple[str, ...] = ()
        self._nonce = Nonce()
        self._own_folder: Path | None = None

    host: Host | None

    @property
    def decision(self) -> str:
        """How CPU rows move between the ranks of this host, and how calls are compared."""
        if self.host is None:
            return f"transport torch ({self.note})"
        if self.wish.transport == "torch":
            return "transport torch, as asked for; the doorbell compares calls"
        copies = "direct reads" if self.host.read is not None else "no direct reads"
        return f"transport local: doorbell, shared window, {copies}"

    def told(self) -> dict[str, str | int | float | None]:
        """What this rank tells all others before they meet."""
        return {
            "host": host_identity(),
            "name": socket.gethostname(),
            "pid": os.getpid(),
            "network": network_identity(),
            "loopback": loopback_of(self._interface),
            "nonce": self._nonce.text,
            "address": self._nonce.address,
        }

    def check(self, told: Sequence[Mapping[str, Any]]) -> None:
        """TransportError on all ranks if gloo would listen where ranks of another host cannot reach it."""
        alone = [rank for rank, fact in enumerate(told) if fact["loopback"]]
        networks = {fact["network"] for fact in told} - {""}
        if not alone or len(networks) < 2:
            return
        found = "; ".join(f"rank {rank} on host {told[rank]['name']}: {told[rank]['loopback']}" for rank in alone)
        text = f"gloo would listen on loopback, which no other host reaches ({found}); set GLOO_SOCKET_IFNAME to the "
        text += "interface of the network that joins the hosts"
        raise TransportError(text, group="world", sequence=0, op="connect", stage="start", ranks=alone)

    def connect(self, groups: Groups) -> None:
        """Give every group of `groups` its control and transport; the first call connects the ranks of this host.

        Collective over the world. TransportError on all ranks where --transport local was asked for and is not to
        be had; else the groups stay on torch, and `note` says why.
        """
        if self.host is None and not self.note:
            self._meet(groups)
        for group in (groups.world, groups.tp, groups.ep, groups.control, groups.front):
            if group.size > 1:
                self._equip(group)

    def _equip(self, group: Group) -> None:
        reached = self.host is not None and set(group.ranks) <= set(self.locals)
        if reached and group.device == "cpu":
            assert self.host is not None
            group.control = Link(group, self.host)
            group.check = "signature" if self.wish.check == "auto" else self.wish.check
            group.transport = "torch" if self.wish.transport == "torch" else "local"
            return
        # An idle rank waits in the front group for days: nobody would answer its question.
        group.check = "off" if group.name == "front" else self.wish.check.replace("auto", "sampled")
        near = None if self.host is None else Link(group, self.host)
        group.control = SideChannel(group.side, near, {r: self.names[r] for r in group.ranks if r not in self.locals})

    def tell(self, failure: CommError) -> None:
        """Tell the ranks of this host why this one gives up, and hang up."""
        if self.host is not None:
            self.host.tell(failure)
        self._end(self.host)

    def close(self) -> None:
        """Say goodbye and hang up."""
        if self.host is not None:
            self.host.doorbell.tell_all(BYE)
        self._end(self.host)

    def standing(self) -> str:
        """Where this rank stands, from its own page; empty without one. Any thread may ask."""
        return "" if self.host is None else self.host.page.standing().told()

    def abandon(self) -> None:
        """Remove the private folder of a process that is about to end, whatever its other threads do."""
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def _end(self, host: Host | None) -> None:
        """Hang up, and remove the private folder, which may be there before a host is."""
        if host is not None:
            host.doorbell.close()
            host.page.leave()
        self.abandon()

    def _meet(self, groups: Groups) -> None:
        facts = groups.told
        mine = facts[groups.rank]["host"]
        self.names = tuple(str(fact["name"]) for fact in facts)
        self.locals = tuple(rank for rank, fact in enumerate(facts) if fact["host"] == mine)
        if not self.wish.wants_host:
            self.note = "the torch transport was asked for, without checks"
            return
        assert groups.store is not None
        store = dist.PrefixStore(f"host {min(self.locals)}", groups.store)
        meeting = _Meeting(store, groups.rank, self.locals, groups.world.timeout)
        alone = "" if len(self.locals) > 1 else "no other rank is on this host"
        # Where there is no room for any window, that is better known before anybody waits for anybody.
        host, why = None, alone or meeting.verdict(_memory_trouble(), "memory")
        if not why:
            try:
                host = self._build(meeting, facts)
            except (OSError, RuntimeError, ValueError) as problem:
                why = f"{type(problem).__name__}: {first_line(problem)}"
        trouble = meeting.verdict(why)
        if self.wish.transport == "local" and len(self.locals) < len(facts):
            trouble = trouble or f"ranks {sorted(set(range(len(facts))) - set(self.locals))} are on other hosts"
        if not trouble:
            self.host = host
            return
        self.note = trouble
        self._end(host)
        if self.wish.transport == "local":
            text = f"--transport local is not to be had here: {trouble}"
            raise TransportError(text, group="world", op="connect", stage="start", ranks=self.locals)

    def _build(self, meeting: "_Meeting", facts: Sequence[Mapping[str, Any]]) -> Host:
        folder = meeting.folder(self.wish.folder)
        self._own_folder = folder if self.wish.folder is None else None
        page = ControlPage(page_path(folder, meeting.rank), meeting.rank)
        doorbell = Doorbell(meeting.links(folder))
        others = [rank for rank in self.locals if rank != meeting.rank]
        readable = all(can_read(int(facts[r]["pid"]), int(facts[r]["address"]), str(facts[r]["nonce"])) for r in others)
        read = find_read() if not meeting.verdict("" if readable else "memory is private", "read") else None
        return Host(doorbell, page, folder, {rank: int(facts[rank]["pid"]) for rank in self.locals}, read)


def _memory_trouble() -> str:
    """Why not even the smallest window can be made, empty if it can."""
    try:
        os.close(make_memory(LEAST_BYTES))
    except NoRoom as problem:
        return f"{problem}"
    return ""


class _Meeting:
    """How the ranks of one host find each other through the store."""

    def __init__(self, store: dist.Store, rank: int, ranks: tuple[int, ...], timeout: float) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self.deadline = time.monotonic() + timeout

    def get(self, key: str) -> str:
        self.store.wait([key], timedelta(seconds=max(0.01, self.deadline - time.monotonic())))
        return str(self.store.get(key).decode())

    def verdict(self, why: str, name: str = "verdict") -> str:
        """The first trouble that any rank of this host had, empty if none; the same on all."""
        self.store.set(f"{name}/{self.rank}", why)
        found = [(rank, self.get(f"{name}/{rank}")) for rank in self.ranks]
        return next((f"rank {rank}: {text}" for rank, text in found if text), "")

    def folder(self, wish: Path | None) -> Path:
        """The folder of the control pages: the user's, or a private one that the first rank makes."""
        if self.rank == self.ranks[0]:
            try:
                if wish is None:
                    sweep(Path(tempfile.gettempdir()))
                    path = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
                else:
                    wish.mkdir(mode=0o700, parents=True, exist_ok=True)
                    path = wish.resolve()
                    for old in path.glob(f"*{SUFFIX}"):
                        old.unlink()
            except OSError as problem:
                self.store.set("folder", "")
                raise ValueError(f"--control {wish}: {problem.strerror}") from problem
            self.store.set("token", secrets.token_hex(TOKEN_BYTES))
            self.store.set("folder", str(path))
        path_text = self.get("folder")
        if not path_text:
            raise ValueError("the first rank of this host could not make the folder of the control pages")
        return Path(path_text)

    def links(self, folder: Path) -> dict[int, socket.socket]:
        """A connection to every other rank. The sockets' names are gone when all are connected."""
        token = bytes.fromhex(self.get("token"))
        links: dict[int, socket.socket] = {}
        # A path of any length fits a socket's name through the descriptor of its folder.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        here = f"/proc/self/fd/{descriptor}"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(f"{here}/{self.rank}.socket")
                listener.listen(len(self.ranks))
                self.store.set(f"listens/{self.rank}", "1")
                for rank in self.ranks[: self.ranks.index(self.rank)]:
                    self.get(f"listens/{rank}")
                    links[rank] = self._call(f"{here}/{rank}.socket", token)
                while len(links) < len(self.ranks) - 1:
                    rank, link = self._answer(listener, token)
                    links[rank] = link
        except BaseException:
            for link in links.values():
                link.close()
            raise
        finally:
            with suppress(OSError):
                (folder / f"{self.rank}.socket").unlink()
            os.close(descriptor)
        return links

    def _call(self, path: str, token: bytes) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.settimeout(max(0.01, self.deadline - time.monotonic()))
            link.connect(path)
            link.send(token + str(self.rank).encode())
        except BaseException:
            link.close()
            raise
        return link

    def _answer(self, listener: socket.socket, token: bytes) -> tuple[int, socket.socket]:
        """The next caller of this user who knows the token, with its rank."""
        while True:
            listener.settimeout(max(0.01, self.deadline - time.monotonic()))
            link, _ = listener.accept()
            link.settimeout(max(0.01, self.deadline - time.monotonic()))
            _, user, _ = CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
            said = link.recv(TOKEN_BYTES + 16)
            name = said[TOKEN_BYTES:].decode(errors="replace")
            if user == os.getuid() and secrets.compare_digest(said[:TOKEN_BYTES], token) and name.isdecimal():
                return int(name), link
            link.close()


def sweep(folder: Path) -> None:
    """Remove the private folders that killed jobs of this user left: those of which no process lives."""
    for path in folder.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            if path.stat().st_uid != os.getuid() or path.is_symlink() or time.time() - path.stat().st_mtime < 60:
                continue
            ranks = [int(p.name.removesuffix(SUFFIX).removeprefix("rank-")) for p in path.glob(f"rank-*{SUFFIX}")]
            if all(process_state(standing.pid) in (GONE, ENDED) for standing in standings(path, ranks).values()):
                shutil.rmtree(path, ignore_errors=True)
