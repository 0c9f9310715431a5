"""Link: what a group of ranks on one host shares: doorbell, control pages, a window, and the check of every call."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgpack

from ..parallel.errors import CollectiveMismatch, CollectiveTimeout, CommError, RankDied, TransportError
from ..parallel.group import Call, Group
from .control_page import ControlPage, standings
from .doorbell import NOTICE, Doorbell, PeerGone, PeersLate
from .signatures import Ring, disagreement, ring_head
from .window import EPOCHS, NoRoom, Window, capacity_for, make_memory

ALIGNED = 64
EXPLAIN_SECONDS = 0.5

KINDS: dict[str, type[CommError]] = {
    kind.__name__: kind for kind in (RankDied, CollectiveTimeout, CollectiveMismatch, TransportError)
}


@dataclass(eq=False)
class Host:
    """The ranks of one host as one of them sees it: connections, its own page, the folder of all pages.

    pids: process ids by world rank; read: copies from the memory of another process, None where not all may.
    """

    doorbell: Doorbell
    page: ControlPage
    folder: Path
    pids: dict[int, int]
    read: Callable[[int, int, int, int], None] | None = None

    def tell(self, failure: CommError) -> None:
        """Tell everybody here that this rank gives up, and why."""
        parts = [type(failure).__name__, failure.message, list(failure.ranks)]
        self.doorbell.tell_all(NOTICE + bytes(msgpack.packb(parts)))


@dataclass(frozen=True)
class Heard:
    """What the ranks of a call rang, by group rank: payloads, window bytes wanted, and rows [source, destination]."""

    payloads: list[bytes]
    wanted: list[int]
    rows_SD: list[list[int]]


class Link:
    """The calls of one group, checked and, where they are small, carried by the doorbell."""

    def __init__(self, group: Group, host: Host) -> None:
        self.host, self.ranks, self.me = host, group.ranks, group.rank
        # Of a group that spans several hosts, those that are here.
        self.peers = tuple(r for r in group.ranks if r in host.pids and r != group.ranks[group.rank])
        self.window: Window | None = None

    @property
    def reads(self) -> bool:
        """Whether ranks may read each other's memory."""
        return self.host.read is not None

    def read(self, source: int, address: int, destination: int, size: int) -> None:
        """Copy from the memory of group rank `source`."""
        assert self.host.read is not None
        self.host.read(self.host.pids[self.ranks[source]], address, destination, size)

    @property
    def slot(self) -> int:
        """Bytes of the window's epoch for each rank."""
        return self.capacity // len(self.ranks) // ALIGNED * ALIGNED

    @property
    def capacity(self) -> int:
        """Bytes of the window's epoch, 0 before it is first wanted."""
        return 0 if self.window is None else self.window.capacity

    @staticmethod
    def slot_for(size: int) -> int:
        """The slot that takes `size` bytes."""
        return -(-size // ALIGNED) * ALIGNED

    def enter(self, group: Group, told: str) -> None:
        """Note the call on this rank's page."""
        self.host.page.enter(told)

    def leave(self) -> None:
        """Note its end."""
        self.host.page.leave()

    def check(self, call: Call) -> None:
        """Compare the call with all ranks of the group; CollectiveMismatch on every one before data moves."""
        self.meet(call)

    def meet(
        self, call: Call, payloads: Sequence[bytes] | bytes = b"", *, wanted: int = 0, round_number: int = 0
    ) -> Heard:
        """Ring all others and hear them. payloads: one for all, or one for each group rank; up to a few KiB each.

        Returns after every rank of the group has entered the call and none disagrees. Typed errors otherwise.
        """
        head = ring_head(call, round_number, wanted)
        deadline = time.monotonic() + call.group.timeout
        each = [payloads] * len(self.ranks) if isinstance(payloads, bytes) else payloads
        try:
            for rank, payload in zip(self.ranks, each, strict=True):
                if rank != self.ranks[self.me]:
                    self.host.doorbell.ring(rank, (head, payload) if payload else (head,), deadline)
            rung = self.host.doorbell.hear(self.peers, deadline)
        except (PeersLate, PeerGone) as problem:
            raise self._typed(call, problem) from None
        rung[self.ranks[self.me]] = head + each[self.me]
        return self._verify(call, [rung[rank] for rank in self.ranks], head, wanted)

    def meet_in_window(
        self, call: Call, payloads: Sequence[bytes] | bytes, wanted: int, write: Callable[[int], None]
    ) -> tuple[int, Heard]:
        """Meet, after write(address of the epoch) where this rank wants `wanted` bytes of it -> (address, heard).

        Where somebody wants more than there is, all take a larger window and meet again.
        """
        if self.window is not None and 0 < wanted <= self.capacity:
            write(self.window.next_epoch())
        heard = self.meet(call, payloads, wanted=wanted)
        most = max(heard.wanted)
        if not most:
            return 0, heard
        if self.window is None or most > self.capacity:
            self.window = self._larger(call, most)
            if wanted:
                write(self.window.next_epoch())
            self.meet(call, round_number=1)
        epoch = self.window.next_epoch()
        self.window.uses += 1
        return epoch, heard

    def _larger(self, call: Call, wanted: int) -> Window:
        """A window for `wanted` bytes, made by the first rank. TransportError on all if there is no room."""
        capacity = capacity_for(wanted)
        doorbell, leader = self.host.doorbell, self.ranks[0]
        deadline = time.monotonic() + call.group.timeout
        descriptor: int | None = None
        try:
            if self.me:
                descriptor = doorbell.receive_memory(leader, deadline)
            else:
                with suppress(NoRoom):
                    descriptor = make_memory(capacity)
                for rank in self.peers:
                    doorbell.send_memory(rank, descriptor, deadline)
        except (PeersLate, PeerGone) as problem:
            raise self._typed(call, problem) from None
        if descriptor is None:
            text = f"rank {leader} could not make a window of {EPOCHS} x {capacity} bytes of shared memory"
            raise self._error(call, TransportError, text, [leader])
        return Window(descriptor, capacity)

    def _verify(self, call: Call, messages: list[bytes], head: bytes, wanted: int) -> Heard:
        if not call.signature.send and all(message.startswith(head) for message in messages):
            # The usual case: every rank says the same, byte for byte.
            return Heard([message[len(head) :] for message in messages], [wanted] * len(messages), [])
        rings = [Ring.parse(message) for message in messages]
        trouble = disagreement(rings, self.ranks)
        if trouble:
            raise self._error(call, CollectiveMismatch, trouble, self.ranks)
        rows_SD = [list(ring.send) for ring in rings]
        return Heard([ring.payload for ring in rings], [ring.wanted for ring in rings], rows_SD)

    def _typed(self, call: Call, problem: PeersLate | PeerGone) -> CommError:
        if isinstance(problem, PeersLate):
            text = (
                f"ranks {list(problem.ranks)} have not come within {call.group.timeout:g} s{self._where(problem.ranks)}"
            )
            return self._error(call, CollectiveTimeout, text, problem.ranks)
        if problem.notice is not None:
            return self._passed_on(call, problem)
        how = "has closed its groups" if problem.orderly else "died"
        return self._error(call, RankDied, f"rank {problem.rank} {how}{self._where([problem.rank])}", [problem.rank])

    def _passed_on(self, call: Call, problem: PeerGone) -> CommError:
        """The failure that another rank met, as it told it."""
        try:
            name, text, ranks = msgpack.unpackb(problem.notice)
            kind = KINDS[name]
            said, concerned = str(text), [int(rank) for rank in ranks]
        except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException):
            kind, said, concerned = TransportError, "(unreadable)", [problem.rank]
        return self._error(call, kind, f"rank {problem.rank} gave up: {said}", concerned)

    def _where(self, ranks: Sequence[int]) -> str:
        found = standings(self.host.folder, ranks, latest=1).values()
        return "".join(f"; {standing.told()}" for standing in found)

    def _error(self, call: Call, kind: type[CommError], text: str, ranks: Sequence[int]) -> CommError:
        error = call.error(kind, text, ranks)
        found = standings(self.host.folder, self.ranks)
        error.signatures = {rank: standing.notes for rank, standing in found.items()}
        return error

    def explain(self, call: Call, problem: Exception) -> CommError | None:
        """Whose end broke a call of the backend, if somebody's did."""
        try:
            self.host.doorbell.hear(self.peers, time.monotonic() + EXPLAIN_SECONDS)
        except (PeersLate, PeerGone) as end:
            return self._typed(call, end) if isinstance(end, PeerGone) else None
        return None
