"""Times an exchange against a memory copy in one loop, and checks afterwards what it moved.

* bytes: those of the busiest rank, its own part included: the larger of what it gives and what it gets. For an even
  exchange that is S: the gathered result, all rows that a rank sends, the rows to be reduced, the message.
* The time of an iteration is the longest of any rank, from a barrier on.
* algbw = bytes / median time; busbw = algbw * factor (`bus_factor`), what a rank's link carries.
* limit: time of a memory copy of the same bytes on every rank at once, divided by the exchange's; the median over
  the iterations, each of which holds one copy and one exchange.
* A gigabyte is 1e9 bytes.
"""

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from ..comm.collectives import all_gather_rows
from ..layouts.bits import raw_view
from ..parallel.groups import Groups

GIGABYTE = 1e9
BLOCK_WORDS = 1 << 20
"""Origin data is made in blocks, so that its temporaries stay small."""

COPY = "copy"


@dataclass(frozen=True)
class Call:
    """One way of making an exchange. `ready` runs before the barrier, outside of the time."""

    run: Callable[[Any], Any]
    ready: Callable[[Any], None] = lambda _: None


@dataclass(frozen=True)
class Exchange:
    """What is measured.

    kind: the way its bytes move, a key of KINDS. count: elements behind `bytes`. fill(epoch): this rank's input, other
    data for each epoch. calls: by transport, each run(input) -> result. wrong(result, epoch): elements of this rank's
    result that are not what the origins say.
    """

    op: str
    kind: str
    bytes: int
    count: int
    dtype: str
    ranks: int
    fill: Callable[[int], Any]
    calls: Mapping[str, Call]
    wrong: Callable[[Any, int], int]
    skew: str | None = None
    calls_per_step: int | None = None


@dataclass(frozen=True)
class Loop:
    """How often: counted iterations, uncounted ones before them, checked epochs after them."""

    iterations: int = 20
    warm_up: int = 3
    checks: int = 2


@dataclass(frozen=True)
class Row:
    """One line of the table: an exchange on one transport. limit: None where nothing moves between ranks."""

    op: str
    bytes: int
    count: int
    dtype: str
    ranks: int
    transport: str
    p50_us: float
    p99_us: float
    min_us: float
    algbw_gbs: float
    busbw_gbs: float
    wrong: int
    limit: float | None
    skew: str | None = None
    calls_per_step: int | None = None


@dataclass(frozen=True)
class Measured:
    """Rows by transport, and seconds by transport (COPY is one), [ranks, iterations]."""

    rows: list[Row]
    samples: dict[str, np.ndarray]


KINDS = ("gather", "exchange", "reduce-scatter", "all-reduce", "broadcast")


def bus_factor(kind: str, ranks: int) -> Fraction:
    """busbw / algbw for n ranks: the part of `bytes` that crosses a rank's link; 0 for a rank alone.

    gather, exchange, reduce-scatter: (n - 1) / n, for a rank's own share stays. all-reduce: 2 (n - 1) / n, for it is
    a reduce-scatter and a gather. broadcast: 1, for every byte reaches every other rank. An uneven exchange counts its
    busiest rank, and in each pattern measured here the n-th part of that rank's bytes is its own.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}, allowed: {', '.join(KINDS)}")
    if ranks == 1:
        return Fraction(0)
    if kind == "broadcast":
        return Fraction(1)
    return Fraction((2 if kind == "all-reduce" else 1) * (ranks - 1), ranks)


def bandwidth(size: int, seconds: float) -> float:
    """GB/s; 0 for no bytes."""
    return size / seconds / GIGABYTE if size and seconds > 0 else 0.0


def measure(exchange: Exchange, groups: Groups, loop: Loop, clock: Callable[[], float] = time.perf_counter) -> Measured:
    """Time every call of an exchange, alternating with a memory copy, then check their results. All ranks call it."""
    x = exchange.fill(0)
    calls = {COPY: _copy_call(exchange.bytes, groups.device), **exchange.calls}
    spent = np.zeros((len(calls), loop.iterations))
    for iteration in range(-loop.warm_up, loop.iterations):
        for place, call in enumerate(calls.values()):
            seconds = _timed(call, x, groups, clock)
            if iteration >= 0:
                spent[place, iteration] = seconds
    wrong = dict.fromkeys(exchange.calls, 0)
    for epoch in range(1, loop.checks + 1):
        x = exchange.fill(epoch)
        for name, call in exchange.calls.items():
            call.ready(x)
            wrong[name] += exchange.wrong(call.run(x), epoch)
    everywhere = _of_all_ranks(spent, groups)
    totals = _of_all_ranks(np.array([list(wrong.values())], dtype=np.float64), groups).sum((0, 1))
    samples = {name: everywhere[:, place] for place, name in enumerate(calls)}
    rows = [_row(exchange, name, samples, int(totals[place])) for place, name in enumerate(exchange.calls)]
    return Measured(rows, samples)


def barrier(groups: Groups) -> None:
    """Returns on no rank before all have come."""
    all_gather_rows(torch.zeros(1, dtype=torch.uint8), groups.control, stage="bench.barrier")


def _timed(call: Call, x: Any, groups: Groups, clock: Callable[[], float]) -> float:
    call.ready(x)
    _settle(groups.device)
    barrier(groups)
    begin = clock()
    result = call.run(x)
    _settle(groups.device)
    seconds = clock() - begin
    # Freed here, outside of the time.
    del result
    return seconds


def _settle(device: str) -> None:
    """Wait for what a device still does: its exchanges run behind the program."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


def _copy_call(size: int, device: str) -> Call:
    # Ones: every page of both is there before the first copy.
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    return Call(lambda _: target.copy_(source))


def _of_all_ranks(values: np.ndarray, groups: Groups) -> np.ndarray:
    """[...] of each rank -> [ranks, ...]."""
    rows = torch.from_numpy(values.copy()).unsqueeze(0)
    return all_gather_rows(rows, groups.control, stage="bench.samples").numpy()


def _row(exchange: Exchange, transport: str, samples: Mapping[str, np.ndarray], wrong: int) -> Row:
    slowest, copied = samples[transport].max(0), samples[COPY].max(0)
    p50, p99 = np.percentile(slowest, [50, 99], method="higher")
    alone = exchange.ranks == 1 or exchange.bytes == 0 or not slowest.all()
    algbw = bandwidth(exchange.bytes, float(p50))
    return Row(
        op=exchange.op,
        bytes=exchange.bytes,
        count=exchange.count,
        dtype=exchange.dtype,
        ranks=exchange.ranks,
        transport=transport,
        p50_us=float(p50) * 1e6,
        p99_us=float(p99) * 1e6,
        min_us=float(slowest.min()) * 1e6,
        algbw_gbs=algbw,
        busbw_gbs=algbw * float(bus_factor(exchange.kind, exchange.ranks)),
        wrong=wrong,
        limit=None if alone else float(np.median(copied / slowest)),
        skew=exchange.skew,
        calls_per_step=exchange.calls_per_step,
    )


@dataclass(frozen=True)
class Origin:
    """Data that knows where it came from: a hash of seed, group, epoch, source rank and element.

    Stale, swapped and shifted elements differ from those that belong there. As `bits` any bit pattern occurs, for what
    is only moved; as `small` there are whole numbers whose sum over all ranks is exact in every dtype and order.
    """

    seed: int
    group: str

    def bits(self, epoch: int, source: int, first: int, last: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements [first, last) of a source's stream."""
        return self._bytes(epoch, source, first * dtype.itemsize, last * dtype.itemsize).view(dtype)

    def small(self, epoch: int, source: int, first: int, last: int, dtype: torch.dtype, ranks: int) -> torch.Tensor:
        """Elements [first, last) of a source's stream, whole numbers from 0."""
        # int8 is the narrowest: the largest sum fits it, and then every other dtype.
        return (self._bytes(epoch, source, first, last) % max(2, min(16, 127 // ranks))).to(dtype)

    def _bytes(self, epoch: int, source: int, first: int, last: int) -> torch.Tensor:
        start, words = first // 8, -(-last // 8) - first // 8
        out = torch.empty(words, dtype=torch.int64)
        name = f"{self.seed}/{self.group}/{epoch}/{source}".encode()
        key = (zlib.crc32(name) << 32 | zlib.crc32(name, 1)) - (1 << 63)
        for block in range(0, words, BLOCK_WORDS):
            part = out[block : block + BLOCK_WORDS]
            torch.arange(start + block, start + block + len(part), out=part)
            _mix(part, key)
        return out.view(torch.uint8)[first - 8 * start : last - 8 * start]


def _mix(words: torch.Tensor, key: int) -> None:
    """A finaliser of the multiply and shift kind, in place; products wrap around."""
    words.mul_(-7046029254386353131).add_(key)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        words.bitwise_xor_((words >> shift) & ((1 << (64 - shift)) - 1)).mul_(factor)


def differing(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Elements whose bits differ; all of them if the sizes or dtypes do."""
    got = got.detach().cpu().reshape(-1)
    wanted = wanted.reshape(-1)
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return max(1, len(wanted))
    return int((raw_view(got) != raw_view(wanted)).sum())
