"""Rounds in which everybody takes a turn, and what is told of them.

A machine that changes speed changes all who run in a round; ratios are taken within rounds, and their median counts.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import torch
from rich.table import Table

from ..launch.output import show, write_json
from ..launch.worker import FAILED, OK
from ..models.numerics import Numerics
from .contest_plot import plot
from .limits import Limit, Meter, Rates, Work, limit

PEER = "transformers"
DIFFERENT = 1e-3
"""In FP32 both sides' logits differ by less, relatively, where they do the same work."""


@dataclass(frozen=True)
class Side:
    """Who takes a turn: a numerics' name, `peer` before that of the peer's dtype, at a context of so many positions."""

    numerics: str
    context: int
    peer: bool = False


@dataclass(frozen=True)
class Rounds:
    """Seconds of a step, by side, and the machine's rates, for each counted round; what each side gave in the one that
    was not counted."""

    seconds: Mapping[Side, list[float]]
    rates: list[Rates]
    first: Mapping[Side, Any]

    def error(self, ours: Side, peer: Side) -> float:
        """How far our logits are from the peer's."""
        return relative_error(self.first[ours], self.first[peer])


def take_turns(sides: Mapping[Side, tuple[Callable[[], object], int]], meter: Meter, rounds: int) -> Rounds:
    """One round that is not counted, then `rounds`; each side is (what it runs, the steps that these are)."""
    first = {side: run() for side, (run, _) in sides.items()}
    meter.measure()
    seconds: dict[Side, list[float]] = {side: [] for side in sides}
    rates = []
    for _ in range(rounds):
        rates.append(meter.measure())
        for side, (run, steps) in sides.items():
            begin = time.perf_counter()
            run()
            seconds[side].append((time.perf_counter() - begin) / steps)
    return Rounds(seconds, rates, first)


@dataclass(frozen=True)
class Row:
    """One line: seconds of a step (medians, and the least), ratios by round (medians).

    batch: requests; rows: those of a step; context: positions before the step. peer_ratio: the peer's time over ours;
    limit_ratio: the least time over ours, 1 at the limit. error: relative difference of both sides' logits; same_ids:
    whether both wrote the same text; None where it was not looked at. stages_ms: of one more run, by stage.
    """

    case: str
    numerics: str
    peer_numerics: str
    batch: int
    rows: int
    context: int
    ours_s: float
    ours_min_s: float
    peer_s: float
    peer_min_s: float
    peer_ratio: float
    peer_ratio_min: float
    peer_ratio_max: float
    limit_s: float
    limit_ratio: float
    bound: str
    error: float | None = None
    same_ids: bool | None = None
    stages_ms: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Load:
    """What a row is about: case, requests, rows of a step."""

    case: str
    batch: int
    rows: int


def make_row(load: Load, ours: Side, peer: Side, rounds: Rounds, numerics: Numerics, work: Work, **more: Any) -> Row:
    """The row of one side against one peer. more: the fields that nobody timed."""
    mine, theirs = rounds.seconds[ours], rounds.seconds[peer]
    ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
    limits: list[Limit] = [limit(work, rates, numerics) for rates in rounds.rates]
    return Row(
        case=load.case,
        numerics=ours.numerics,
        peer_numerics=peer.numerics,
        batch=load.batch,
        rows=load.rows,
        context=ours.context,
        ours_s=statistics.median(mine),
        ours_min_s=min(mine),
        peer_s=statistics.median(theirs),
        peer_min_s=min(theirs),
        peer_ratio=statistics.median(ratios),
        peer_ratio_min=min(ratios),
        peer_ratio_max=max(ratios),
        limit_s=statistics.median(each.seconds for each in limits),
        limit_ratio=statistics.median(each.seconds / taken for each, taken in zip(limits, mine, strict=True)),
        bound=statistics.mode(each.bound for each in limits),
        **more,
    )


def growth(rounds: Rounds) -> dict[str, float]:
    """By numerics, the median over the rounds of our step at the longest context over that at the shortest."""
    ours = [side for side in rounds.seconds if not side.peer]
    found = {}
    for name in dict.fromkeys(side.numerics for side in ours):
        sides = sorted((side for side in ours if side.numerics == name), key=lambda side: side.context)
        if len(sides) > 1:
            pairs = zip(rounds.seconds[sides[0]], rounds.seconds[sides[-1]], strict=True)
            found[name] = statistics.median(long / short for short, long in pairs)
    return found


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over the norm of theirs."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def faults(rows: Sequence[Row]) -> list[str]:
    """Rows of float32 whose logits are not the peer's: the times are then of different work."""
    return [
        f"{row.case}, {row.rows} rows, context {row.context:,}: logits differ from {PEER}' by {row.error:.1e}"
        for row in rows
        if row.numerics == "float32" and row.error is not None and not row.error < DIFFERENT
    ]


def step_table(rows: Sequence[Row]) -> Table:
    """The rows for people, times in milliseconds."""
    table = Table()
    for name in ("case", "numerics"):
        table.add_column(name)
    heads = ("batch", "rows", "context", "ours, ms", "least", f"{PEER}, ms", "least", "ratio", "limit, ms", "of limit")
    for name in heads:
        table.add_column(name, justify="right")
    for name in ("bound", "same"):
        table.add_column(name)
    for row in rows:
        times = [1000 * t for t in (row.ours_s, row.ours_min_s, row.peer_s, row.peer_min_s)]
        same = "-" if row.error is None else f"{row.error:.1e}"
        table.add_row(
            row.case,
            row.numerics,
            str(row.batch),
            str(row.rows),
            f"{row.context:,}",
            *(f"{time:,.1f}" for time in times),
            f"{row.peer_ratio:.2f}",
            f"{1000 * row.limit_s:,.1f}",
            f"{row.limit_ratio:.2f}",
            row.bound,
            same if row.same_ids is None else f"ids {'yes' if row.same_ids else 'no'}",
        )
    return table


def stage_table(rows: Sequence[Row]) -> Table | None:
    """Milliseconds by stage and row, of those that have them."""
    shown = [row for row in rows if row.stages_ms]
    if not shown:
        return None
    table = Table("stage, ms a step", *(f"{row.numerics} {row.context:,}" for row in shown))
    for column in table.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys(name for row in shown for name in row.stages_ms or ()):
        table.add_row(name, *(f"{(row.stages_ms or {}).get(name, 0.0):,.2f}" for row in shown))
    return table


def _rates(rates: Sequence[Rates]) -> dict[str, float]:
    """Medians over the rounds: bytes/s of reading, operations/s by dtype."""
    names = {name for each in rates for name in each.peak}
    peaks = {name: statistics.median(r.peak[name] for r in rates if name in r.peak) for name in sorted(names)}
    return {"read": statistics.median(each.read for each in rates), **peaks}


class Report:
    """Tells the rows as they come, and at the end what belongs to all of them."""

    def __init__(self, benchmark: str, stream: TextIO) -> None:
        self.benchmark, self.stream = benchmark, stream
        self.rows: list[Row] = []
        self.growth: list[dict[str, Any]] = []
        self.rates: list[Rates] = []

    def add(self, rows: Sequence[Row], found: Rounds) -> None:
        """Rows of one load, of which `found` are the rounds."""
        self.rows += rows
        self.rates += found.rates
        show(self.stream, step_table(rows))
        if (table := stage_table(rows)) is not None:
            show(self.stream, table)
        for name, ratio in growth(found).items():
            contexts = sorted({row.context for row in rows})
            self.growth.append({**asdict(Load(rows[0].case, rows[0].batch, rows[0].rows)), "numerics": name,
                                "contexts": [contexts[0], contexts[-1]], "ratio": ratio})  # fmt: skip
            print(f"{name}: a step at {contexts[-1]:,} takes {ratio:.2f} of one at {contexts[0]:,}", file=self.stream)

    def end(self, json_target: str | None, picture: str | None = None, **more: Any) -> int:
        """The rates, the JSON and the picture; OK, or FAILED where both sides did not do the same work."""
        rates = _rates(self.rates)
        products = ", ".join(f"{name} {value / 1e9:,.0f}" for name, value in rates.items() if name != "read")
        print(f"beside: read {rates['read'] / 1e9:.1f} GB/s; products {products} G operations/s", file=self.stream)
        wrong = faults(self.rows)
        for fault in wrong:
            print(f"WRONG: {fault}", file=self.stream)
        rows = [asdict(row) for row in self.rows]
        write_json(json_target, {
            "benchmark": self.benchmark,
            "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
            "threads": torch.get_num_threads(),
            **more,
            "rates": rates,
            "growth": self.growth,
            "rows": rows,
        })  # fmt: skip
        if picture:
            plot(rows, picture)
        return FAILED if wrong else OK
