"""How long a step of so many rows takes: measured at the start, whole numbers from then on. dspark.md 6.3."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

BILLION = 1_000_000_000
MOST_NANOSECONDS = 1 << 62
MOST_ENTRIES = 1 << 16


@dataclass(frozen=True)
class CostTable:
    """Nanoseconds of a step by its number of rows.

    rows: strictly increasing from 1; nanoseconds: positive, non-decreasing, one for each. ValueError otherwise: see
    `measured` for times as a clock gives them.
    """

    rows: tuple[int, ...]
    nanoseconds: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("rows", "nanoseconds"):
            object.__setattr__(self, name, _counts(name, getattr(self, name)))
        if len(self.rows) != len(self.nanoseconds):
            raise ValueError(f"{len(self.rows)} rows with {len(self.nanoseconds)} nanoseconds, allowed: as many")
        if self.rows[0] != 1 or any(after <= before for before, after in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"rows are {_few(self.rows)}, allowed: strictly increasing from 1")
        if any(after < before for before, after in zip(self.nanoseconds, self.nanoseconds[1:], strict=False)):
            raise ValueError(f"nanoseconds are {_few(self.nanoseconds)}, allowed: non-decreasing")

    @classmethod
    def measured(cls, rows: Sequence[int], nanoseconds: Sequence[int]) -> "CostTable":
        """The table nearest to measured times in least squares: neighbours in the wrong order share their mean.

        So one slow outlier of a small step does not lift all larger ones, as a running maximum would.
        """
        blocks: list[tuple[int, int]] = []
        for time in _counts("nanoseconds", nanoseconds):
            total, count = time, 1
            while blocks and blocks[-1][0] * count > total * blocks[-1][1]:
                total, count = total + blocks[-1][0], count + blocks[-1][1]
                blocks.pop()
            blocks.append((total, count))
        return cls(tuple(rows), tuple(total // count for total, count in blocks for _ in range(count)))

    def cost(self, rows: int) -> int:
        """Nanoseconds of a step of that many rows; non-decreasing in them.

        Between two entries on the line through them, rounded down. Beyond the last one on the steeper of two lines:
        that through the last two, and that through the last and the nearest of at most half as many rows. For the last
        two may be equal by noise, and no number of rows is free. ValueError below 1.
        """
        if rows < 1:
            raise ValueError(f"rows is {rows}, allowed: 1 or more")
        last = len(self.rows) - 1
        place = bisect_right(self.rows, rows) - 1
        if place < last:
            return self._line(place, place + 1, rows)
        if not last or rows == self.rows[last]:
            return self.nanoseconds[last]
        half = bisect_right(self.rows, self.rows[last] // 2) - 1
        return max(self._line(last - 1, last, rows), self._line(half, last, rows))

    def _line(self, a: int, b: int, rows: int) -> int:
        rise, run = self.nanoseconds[b] - self.nanoseconds[a], self.rows[b] - self.rows[a]
        return self.nanoseconds[a] + rise * (rows - self.rows[a]) // run

    def convex(self, start: int = 1) -> "CostTable":
        """From `start` rows on, the entries that no line between two others passes below; on these a further row never
        costs less than the one before, but for rounding. Equal to this table at `start`, and never above it there.

        A search that stops at the first row that does not pay is never caught before a jump of such a table. ValueError
        below 1.
        """
        ahead = zip(self.rows, self.nanoseconds, strict=True)
        kept = [(start, self.cost(start))]
        for point in (entry for entry in ahead if entry[0] > start):
            while len(kept) > 1 and _turns_down(kept[-2], kept[-1], point):
                kept.pop()
            kept.append(point)
        before = [(1, self.nanoseconds[0])] if start > 1 else []
        rows, times = zip(*before, *kept, strict=True)
        return CostTable(rows, times)

    def encode(self) -> list[int]:
        """As it travels: the number of entries, their rows, their nanoseconds."""
        return [len(self.rows), *self.rows, *self.nanoseconds]

    @classmethod
    def decode(cls, numbers: Sequence[int]) -> "CostTable":
        """What `encode` made. ValueError for anything else."""
        count = numbers[0] if numbers and type(numbers[0]) is int else 0
        if not 0 < count <= MOST_ENTRIES or len(numbers) != 1 + 2 * count:
            raise ValueError(f"a cost table of {len(numbers)} numbers, allowed: an odd number that the first tells")
        return cls(tuple(numbers[1 : 1 + count]), tuple(numbers[1 + count :]))


def cost_sizes(most: int) -> tuple[int, ...]:
    """Row counts to measure for steps of up to `most` rows: each up to 8, then four to an octave, and `most`."""
    if most < 1:
        raise ValueError(f"most is {most}, allowed: 1 or more")
    sizes = list(range(1, min(most, 8) + 1))
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + (1 << (sizes[-1].bit_length() - 3))))
    return tuple(sizes)


def measure_costs(
    run: Callable[[int], float], sizes: Sequence[int], repeats: int = 5, *, warm_up: int = 1
) -> CostTable:
    """The cost table of what `run` does.

    run(rows) runs one step of that many rows of a group on all ranks and returns its seconds: the whole of what a
    step's widths change, so the target's forward with its exchanges, and what waits for the slowest rank. What does
    not depend on widths (the drafter) may be in it or not; then it is to be told to `widths` as other_nanoseconds.

    The sizes, strictly increasing from 1, are run in turn, `warm_up` rounds uncounted, then `repeats` rounds; so a
    drift of the machine meets all sizes alike. Each size's time is the median of its rounds. Where run is collective,
    all ranks call this with equal arguments; world rank 0's table is to hold on all. ValueError for seconds that are no
    positive number.
    """
    if repeats < 1 or warm_up < 0:
        raise ValueError(f"repeats is {repeats} and warm_up {warm_up}, allowed: 1 or more and 0 or more")
    CostTable(tuple(sizes), (1,) * len(sizes))
    rounds = [[run(rows) for rows in sizes] for _ in range(warm_up + repeats)]
    times = [median(seconds) for seconds in zip(*rounds[warm_up:], strict=True)]
    for rows, seconds in zip(sizes, times, strict=True):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"a step of {rows} rows took {seconds} seconds, allowed: a finite number above 0")
    return CostTable.measured(sizes, [max(1, round(seconds * BILLION)) for seconds in times])


def _turns_down(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether b is on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _counts(name: str, values: Sequence[int]) -> tuple[int, ...]:
    numbers = tuple(values)
    if not 0 < len(numbers) <= MOST_ENTRIES:
        raise ValueError(f"{name} has {len(numbers)} entries, allowed: 1 to {MOST_ENTRIES}")
    wrong = [value for value in numbers if type(value) is not int or not 0 < value <= MOST_NANOSECONDS]
    if wrong:
        raise ValueError(f"{name} has {wrong[0]!r}, allowed: whole numbers from 1 to 2^62")
    return numbers


def _few(values: Sequence[int]) -> str:
    return f"{list(values[:8])}{' ...' if len(values) > 8 else ''}"
