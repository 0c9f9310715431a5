"""Group: the one handle that a collective takes, and what happens around each call."""

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .errors import CollectiveMismatch, CommError, TransportError, error_kind, first_line
from .ledger import Ledger, Record
from .topology import Topology


@dataclass(eq=False)
class Health:
    """The first failure among the groups that share it, and those groups."""

    failure: CommError | None = None
    groups: list["Group"] = field(default_factory=list)

    def fail(self, failure: CommError) -> None:
        """Keep the first failure and hang up.

        A survivor that kept its connections open would let its peers wait for it until their time is up. After
        a mismatch all ranks know, and nobody waits.
        """
        if self.failure is not None:
            return
        self.failure = failure
        if not isinstance(failure, CollectiveMismatch):
            self.hang_up()

    def hang_up(self) -> None:
        """Close the connections of all CPU groups: without reference to them, gloo closes its sockets."""
        for group in self.groups:
            if group.device == "cpu":
                _drop(group)


def _drop(group: "Group") -> None:
    process_group, group.process_group = group.process_group, None
    if process_group is None or not dist.is_initialized():
        return
    # Several groups may stand on one process group, and the end of the world's ends all: then it is gone already.
    with suppress(ValueError):
        dist.destroy_process_group(process_group)


@dataclass(eq=False)
class Group:
    """The only handle that a collective takes.

    `ranks` are world ranks, `rank` is the place among them, `timeout` is in seconds. A group of one has no
    process group. `sequence` counts the calls; after a failure every further call of any group of the same
    `Groups` raises that failure again.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup | None
    timeout: float = 60.0
    transport: str = "torch"
    control: None = None
    check: str = "off"
    ledger: Ledger = field(default_factory=Ledger)
    topology: Topology = field(default_factory=Topology)
    device: str = "cpu"
    health: Health = field(default_factory=Health)
    sequence: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def error(self, kind: type[CommError], message: str, op: str, stage: str) -> CommError:
        """An error that carries this group, its sequence and its ranks."""
        return kind(message, group=self.name, sequence=self.sequence, op=op, stage=stage, ranks=self.ranks)

    def poison(self, failure: CommError) -> None:
        """Make every further use fail at once: a half-finished exchange leaves ranks at different calls."""
        self.health.fail(failure)

    @contextmanager
    def call(
        self,
        op: str,
        stage: str,
        *,
        dtype: str = "",
        rows: int = 0,
        columns: int = 0,
        sent_bytes: int = 0,
        splits: Sequence[int] = (),
    ) -> Iterator[None]:
        """Around one exchange: counts it, records it, turns the backend's exception into a typed error.

        Raises the first failure again if there was one. The body must not keep the process group in a variable
        of its own, or the connections outlive the failure.
        """
        if self.health.failure is not None:
            raise self.health.failure
        assert self.process_group is not None, "a group of one has nothing to exchange"
        self.sequence += 1
        start = time.perf_counter()
        try:
            yield
        except CommError as failure:
            self.poison(failure)
            raise
        except Exception as problem:
            typed = self.error(error_kind(str(problem)), first_line(problem), op, stage)
            traceback.clear_frames(problem.__traceback__)
            self.poison(typed)
            raise typed from problem
        except BaseException as problem:
            self.poison(self.error(TransportError, f"interrupted by {type(problem).__name__}", op, stage))
            raise
        if self.ledger.enabled:
            figures = (dtype, rows, columns, sent_bytes, tuple(splits))
            self.ledger.add(Record(self.sequence, self.name, op, *figures, stage, start, time.perf_counter()))


def cpu_tensor(data: bytes) -> torch.Tensor:
    """Bytes as a uint8 tensor of its own memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
