"""Ledger: one record per exchange, kept in a bounded ring. Off unless given a capacity."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple


class Record(NamedTuple):
    """What one exchange moved on this rank. Times are seconds of time.perf_counter; `bytes` are those sent."""

    sequence: int
    group: str
    op: str
    dtype: str
    rows: int
    columns: int
    bytes: int
    splits: tuple[int, ...]
    stage: str
    start: float
    end: float


class StageSpan(NamedTuple):
    """A stage of a step on this rank. Times are seconds of time.perf_counter."""

    name: str
    start: float
    end: float


class Ledger:
    """The latest `capacity` records, and as many `stages`; a capacity of 0 keeps nothing."""

    def __init__(self, capacity: int = 0) -> None:
        if capacity < 0:
            raise ValueError(f"capacity is {capacity}, allowed: from 0")
        self.capacity = capacity
        self._records: deque[Record] = deque(maxlen=capacity)
        self.stages: deque[StageSpan] = deque(maxlen=capacity)

    @property
    def enabled(self) -> bool:
        """Whether records are kept."""
        return self.capacity > 0

    def add(self, record: Record) -> None:
        """Append; the oldest record falls out when the ring is full."""
        self._records.append(record)

    def clear(self) -> None:
        """Forget all records."""
        self._records.clear()
        self.stages.clear()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)
