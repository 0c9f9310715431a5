"""Doorbell: a full mesh of local sockets among the ranks of one host; short messages, and word of who is gone.

Messages keep their borders and their order. A closed connection is seen at once by every rank that waits, whatever
it waits for, so the death of any rank ends all waits.
"""

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

RING, NOTICE, BYE, MEMORY = b"R", b"N", b"B", b"M"
"""First byte of a message: part of a call; a failure, in msgpack; an orderly end; shared memory, or word of none."""

MESSAGE_LIMIT = 64 << 10
BUFFER_BYTES = 1 << 20
YIELDS = 4
"""Times that a rank offers its core to others before it sleeps: among ranks that share cores, the others ring then,
and a sleep with its waking costs more."""


class PeersLate(Exception):
    """The time is up and these world ranks have not rung."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(ranks)


class PeerGone(Exception):
    """A world rank closed its connection. `notice`: why, if it said so; `orderly`: it ended on purpose."""

    def __init__(self, rank: int, notice: bytes | None = None, *, orderly: bool = False) -> None:
        self.rank, self.notice, self.orderly = rank, notice, orderly


@dataclass(eq=False)
class _Peer:
    rank: int
    link: socket.socket
    waiting: deque[bytes] = field(default_factory=deque)
    descriptors: deque[int] = field(default_factory=deque)
    left: bool = False


class Doorbell:
    """One rank's connections. `ranks`: the world ranks it reaches, itself left out."""

    def __init__(self, links: Mapping[int, socket.socket]) -> None:
        self._peers = {rank: _Peer(rank, link) for rank, link in sorted(links.items())}
        self._by_descriptor = {peer.link.fileno(): peer for peer in self._peers.values()}
        self._polls: dict[tuple[int, ...], select.poll] = {}
        for link in links.values():
            link.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                link.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._peers)

    def ring(self, rank: int, parts: Sequence[bytes], deadline: float) -> None:
        """Send one message. A peer that is gone is found by `hear`, with what it said before."""
        link = self._peers[rank].link
        while True:
            try:
                link.sendmsg(parts)
            except BlockingIOError:
                self._wait_to_send(rank, deadline)
            except (BrokenPipeError, ConnectionResetError):
                return
            except OSError as problem:
                if problem.errno != errno.ENOBUFS:
                    raise
                self._wait_to_send(rank, deadline)
            else:
                return

    def hear(self, ranks: tuple[int, ...], deadline: float) -> dict[int, bytes]:
        """The next message of each rank. PeersLate at the deadline (of time.monotonic); PeerGone at once."""
        heard: dict[int, bytes] = {}
        missing = list(ranks)
        yields = YIELDS
        while True:
            silent = []
            for rank in missing:
                message = self._next(self._peers[rank])
                if message is None:
                    silent.append(rank)
                else:
                    heard[rank] = message
            if not silent:
                # All had rung before: this rank may be so late that they gave up since.
                if len(missing) == len(ranks):
                    self._see_who_hung_up(ranks)
                return heard
            missing = silent
            if yields:
                yields -= 1
                os.sched_yield()
            else:
                self._wait(ranks, missing, deadline)

    def tell_all(self, message: bytes) -> None:
        """Send to everybody who still takes it, without waiting."""
        for peer in self._peers.values():
            with suppress(OSError):
                peer.link.sendmsg([message])

    def close(self) -> None:
        """Close every connection; without effect when called again."""
        for peer in self._peers.values():
            peer.link.close()
            while peer.descriptors:
                os.close(peer.descriptors.popleft())

    def send_memory(self, rank: int, descriptor: int | None, deadline: float) -> None:
        """Hand a file descriptor over, or say that there is none."""
        if descriptor is None:
            self.ring(rank, (MEMORY,), deadline)
            return
        with suppress(BrokenPipeError, ConnectionResetError):
            link = self._peers[rank].link
            link.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                socket.send_fds(link, [MEMORY], [descriptor])
            finally:
                link.setblocking(False)

    def receive_memory(self, rank: int, deadline: float) -> int | None:
        """What `send_memory` of this rank hands over. PeersLate and PeerGone as `hear`."""
        peer = self._peers[rank]
        while (message := self._next_ahead(peer)) is None:
            self._wait((rank,), [rank], deadline)
        if message[:1] not in (RING, MEMORY):
            raise _end_of(rank, message)
        return peer.descriptors.popleft() if peer.descriptors else None

    def _next(self, peer: _Peer) -> bytes | None:
        """The peer's next ring, None if it has not rung. Raises PeerGone for its end."""
        if peer.waiting:
            message: bytes | None = peer.waiting.popleft()
        else:
            message = BYE if peer.left else self._receive(peer)
        if message is None or message[:1] == RING:
            return message
        raise _end_of(peer.rank, message)

    def _receive(self, peer: _Peer) -> bytes | None:
        """A message, b"" for the end of the connection, None if there is none yet."""
        return _patiently(lambda: peer.link.recv(MESSAGE_LIMIT))

    def _receive_ahead(self, peer: _Peer) -> bytes | None:
        """As `_receive`, where a message may bring a descriptor along."""

        def receive() -> bytes:
            message, descriptors, _, _ = socket.recv_fds(peer.link, MESSAGE_LIMIT, 1)
            peer.descriptors.extend(descriptors)
            return message

        return _patiently(receive)

    def _next_ahead(self, peer: _Peer) -> bytes | None:
        if peer.waiting:
            return peer.waiting.popleft()
        return BYE if peer.left else self._receive_ahead(peer)

    def _wait(self, ranks: tuple[int, ...], missing: Sequence[int], deadline: float) -> None:
        """Wait until a peer may have rung or somebody has gone."""
        left = deadline - time.monotonic()
        # A poll takes a whole number of milliseconds that fits 32 bits; a longer wait simply polls again.
        ready = self._poll_of(ranks).poll(min(max(0.0, left) * 1000 + 1, 1e9)) if left > 0 else []
        if not ready and left < 1e6:
            raise PeersLate(missing)
        for descriptor, _ in ready:
            peer = self._by_descriptor[descriptor]
            if peer.rank not in missing:
                self._look_at(peer)

    def _see_who_hung_up(self, ranks: tuple[int, ...]) -> None:
        for descriptor, event in self._poll_of(ranks).poll(0):
            if event & (select.POLLHUP | select.POLLERR):
                self._look_at(self._by_descriptor[descriptor])

    def _look_at(self, peer: _Peer) -> None:
        """A rank that this call does not wait for has spoken or hung up: fine if it rang ahead or said goodbye."""
        while message := self._receive_ahead(peer):
            peer.waiting.append(message)
        last = peer.waiting[-1] if peer.waiting else b""
        if last[:1] == NOTICE or (message == b"" and last[:1] != BYE):
            raise _end_of(peer.rank, last if last[:1] == NOTICE else b"")
        if message == b"":
            peer.left = True
            for poll in self._polls.values():
                with suppress(KeyError):
                    poll.unregister(peer.link.fileno())

    def _poll_of(self, ranks: tuple[int, ...]) -> select.poll:
        """Waits for messages of these ranks and for the end of any."""
        if ranks not in self._polls:
            poll = select.poll()
            for peer in self._peers.values():
                if not peer.left:
                    poll.register(peer.link.fileno(), select.POLLIN if peer.rank in ranks else 0)
            self._polls[ranks] = poll
        return self._polls[ranks]

    def _wait_to_send(self, rank: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._peers[rank].link.fileno(), select.POLLOUT)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise PeersLate([rank])


def _end_of(rank: int, message: bytes) -> PeerGone:
    if message[:1] == NOTICE:
        return PeerGone(rank, message[1:])
    return PeerGone(rank, orderly=message[:1] == BYE)


def _patiently(receive: Callable[[], bytes]) -> bytes | None:
    """What `receive` gives, None where it would block.

    A peer that closed before it had read everything makes the next call fail once; what it sent comes after that.
    """
    for _ in range(2):
        try:
            return receive()
        except BlockingIOError:
            return None
        except ConnectionResetError:
            continue
    return b""
