"""Group: the one handle that a collective takes, and what happens around each call."""

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .errors import CollectiveMismatch, CommError, TransportError, error_kind, first_line
from .ledger import Ledger, Record
from .signature import Signature
from .topology import Topology


class Control(Protocol):
    """What stands beside a group: knows its ranks from outside of the backend."""

    def enter(self, group: "Group", told: str) -> None:
        """A call begins; `told` is one line of it."""

    def leave(self) -> None:
        """It is over."""

    def check(self, call: "Call") -> None:
        """Compare the call with all ranks of the group; CollectiveMismatch on every one before data moves."""

    def explain(self, call: "Call", problem: Exception) -> CommError | None:
        """Whose end or failure broke the backend's call, if that is known."""


class Wiring(Protocol):
    """Connections beside the process groups, made by a floor above and ended with them."""

    def tell(self, failure: CommError) -> None:
        """Tell the other ranks why this one gives up, and hang up."""

    def close(self) -> None:
        """End in good order."""


@dataclass(eq=False)
class Health:
    """The first failure among the groups that share it, and those groups. made: groups so far, alike on all ranks."""

    failure: CommError | None = None
    groups: list["Group"] = field(default_factory=list)
    wiring: Wiring | None = None
    made: int = 0

    def fail(self, failure: CommError) -> None:
        """Keep the first failure and hang up.

        A survivor that kept its connections open would let its peers wait for it until their time is up. After
        a mismatch all ranks of that group know, and gloo's connections may stay.
        """
        if self.failure is not None:
            return
        self.failure = failure
        if self.wiring is not None:
            self.wiring.tell(failure)
        if not isinstance(failure, CollectiveMismatch):
            self.hang_up()

    def hang_up(self) -> None:
        """Close the connections of all CPU groups: without reference to them, gloo closes its sockets."""
        for group in self.groups:
            if group.device == "cpu":
                _drop(group)
            side, group.side = group.side, None
            _destroy(side)


def _drop(group: "Group") -> None:
    process_group, group.process_group = group.process_group, None
    _destroy(process_group)


def _destroy(process_group: dist.ProcessGroup | None) -> None:
    if process_group is None or not dist.is_initialized():
        return
    # Several groups may stand on one process group, and the end of the world's ends all: then it is gone already.
    with suppress(ValueError):
        dist.destroy_process_group(process_group)


@dataclass(frozen=True)
class Call:
    """One exchange under way: its group, what it moves, its number in the group."""

    group: "Group"
    signature: Signature
    sequence: int

    def error(self, kind: type[CommError], text: str, ranks: Sequence[int] | None = None) -> CommError:
        """An error that carries this call and the ranks that it concerns, all of the group if not given."""
        op, stage = self.signature.op, self.signature.stage
        concerned = self.group.ranks if ranks is None else ranks
        return kind(text, group=self.group.name, sequence=self.sequence, op=op, stage=stage, ranks=concerned)


@dataclass(eq=False)
class Group:
    """The only handle that a collective takes.

    `ranks` are world ranks, `rank` is the place among them, `timeout` is in seconds. A group of one has no
    process group. `sequence` counts the calls; after a failure every further call of any group of the same
    `Groups` raises that failure again. `number` is the place in the one order in which all ranks make their groups.
    transport: "torch" or "local"; check: "signature" (every call), "sampled" or "off"; control: what checks;
    side: a gloo group of the same ranks where the group is on a device.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None
    timeout: float = 60.0
    transport: str = "torch"
    control: Any = None
    check: str = "off"
    ledger: Ledger = field(default_factory=Ledger)
    topology: Topology = field(default_factory=Topology)
    device: str = "cpu"
    health: Health = field(default_factory=Health)
    sequence: int = 0
    number: int = 0
    side: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def error(self, kind: type[CommError], message: str, op: str, stage: str) -> CommError:
        """An error that carries this group, its sequence and its ranks."""
        return Call(self, Signature(op, stage), self.sequence).error(kind, message)

    def poison(self, failure: CommError) -> None:
        """Make every further use fail at once: a half-finished exchange leaves ranks at different calls."""
        self.health.fail(failure)

    @contextmanager
    def call(self, signature: Signature) -> Iterator[Call]:
        """Around one exchange: counts it, notes and records it, turns the backend's exception into a typed error.

        Raises the first failure again if there was one. The body must not keep the process group in a variable
        of its own, or the connections outlive the failure.
        """
        if self.health.failure is not None:
            raise self.health.failure
        assert self.process_group is not None, "a group of one has nothing to exchange"
        self.sequence += 1
        call = Call(self, signature, self.sequence)
        if self.control is not None:
            self.control.enter(self, signature.told(self.name, self.sequence))
        start = time.perf_counter()
        try:
            yield call
        except CommError as failure:
            self.poison(failure)
            raise
        except Exception as problem:
            typed = self._typed(call, problem)
            traceback.clear_frames(problem.__traceback__)
            self.poison(typed)
            raise typed from problem
        except BaseException as problem:
            self.poison(call.error(TransportError, f"interrupted by {type(problem).__name__}"))
            raise
        if self.control is not None:
            self.control.leave()
        if self.ledger.enabled:
            self._record(signature, start)

    def _typed(self, call: Call, problem: Exception) -> CommError:
        known = self.control.explain(call, problem) if self.control is not None else None
        return known or call.error(error_kind(str(problem)), first_line(problem))

    def _record(self, signature: Signature, start: float) -> None:
        s = signature
        figures = (s.dtype, s.rows, s.columns, s.moved, s.send)
        self.ledger.add(Record(self.sequence, self.name, s.op, *figures, s.stage, start, time.perf_counter()))


def cpu_tensor(data: bytes) -> torch.Tensor:
    """Bytes as a uint8 tensor of its own memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
