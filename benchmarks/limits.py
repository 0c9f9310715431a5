"""How fast a step could be: what it must read and compute, over rates that were measured in the same run.

limit = max(bytes / read bandwidth, operations / peak), all of a step's bytes and operations summed up.

* bytes: every weight once in its held dtype, of the routed experts those that a row of the step chose; cache rows that
  attention and indexer look at; rows written (models/v4/estimate.py).
* operations: two for each multiplication and addition of products, INT8 ones over the INT8 peak, all others over the
  peak of the numerics' own dtype.
* read bandwidth: summing up FP32 numbers of READ_BYTES, too many for any cache.
* peaks: a product of large matrices in FP32, in BF16 where the CPU multiplies so, and in the INT8 form that the project
  picks for this device. Narrower numbers can be multiplied as FP32 ones too, without loss, so no peak is less than
  that of FP32.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..models.int8.linear import int8_linear, int8_weight
from ..models.int8.quantise import quantise_rows
from ..models.numerics import MODES, Numerics
from ..models.v4.config import V4Config
from ..models.v4.estimate import step_work
from ..models.v4.sizing import Held, held_weights
from ..models.v4.traffic import Load
from ..parallel.topology import Topology

READ_BYTES = 256 << 20
SQUARE = 2048
"""Rows, inputs and outputs of the products that find the peaks."""

READS = 3
"""A pass over the memory is short: the best of so many counts."""


@dataclass(frozen=True)
class Rates:
    """bytes/s that can be read, and operations/s in products of float32, bfloat16 and int8."""

    read: float
    peak: Mapping[str, float]


@dataclass(frozen=True)
class Work:
    """What a step must do at least: bytes, and operations in the numerics' own dtype and in INT8."""

    bytes: float
    flops: float
    int8_ops: float


@dataclass(frozen=True)
class Limit:
    """Seconds that a step takes at least, and whether memory or arithmetic says so."""

    seconds: float
    bound: str


class Meter:
    """Measures this machine's rates; what it needs for that is made once."""

    def __init__(self, quantised: bool, read_bytes: int = READ_BYTES, square: int = SQUARE) -> None:
        generator = torch.Generator().manual_seed(0)
        self._memory = torch.ones(read_bytes // 4)
        self._wide = torch.randn(square, square, generator=generator)
        # A CPU without BF16 products falls into a form that takes minutes for this one.
        native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self._narrow = self._wide.to(torch.bfloat16) if native else None
        self._weight = self._rows = None
        if quantised:
            codes = torch.randint(-127, 128, (square, square), generator=generator, dtype=torch.int8)
            self._weight, self._rows = int8_weight(codes, torch.ones(square)), quantise_rows(self._wide)

    @torch.no_grad()
    def measure(self) -> Rates:
        """The rates at this moment."""
        read = self._memory.nbytes / min(_seconds(self._memory.sum) for _ in range(READS))
        operations = 2 * len(self._wide) ** 3
        wide = operations / _seconds(lambda: torch.mm(self._wide, self._wide))
        peak = {"float32": wide, "bfloat16": wide}
        narrow, weight, rows = self._narrow, self._weight, self._rows
        if narrow is not None:
            peak["bfloat16"] = max(wide, operations / _seconds(lambda: torch.mm(narrow, narrow)))
        if weight is not None and rows is not None:
            peak["int8"] = max(wide, operations / _seconds(lambda: int8_linear(rows, weight)))
        return Rates(read, peak)


def make_meter(case: str, names: Sequence[str]) -> Meter:
    """A meter for ours of these numerics; a small one for the case tiny, which is there to be quick."""
    quantised = any(MODES[name].quantisation is not None for name in names)
    return Meter(quantised, 1 << 20, 128) if case == "tiny" else Meter(quantised)


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def least_work(
    config: V4Config, numerics: Numerics, load: Load, context: int, hit: Mapping[int, float] | None = None
) -> Work:
    """Work of a step of one rank whose requests have `context` positions.

    hit: by layer, the routed experts that a row chose; None where nobody counted: then the mean of even routing.
    """
    held = held_weights(config, Topology(), numerics)
    routed = {} if hit is None else {name: each for name, each in held.items() if each.spec.shard == "experts"}
    rest = {name: each for name, each in held.items() if name not in routed}
    kinds = step_work(config, Topology(), numerics, rest, load, context=context, exchanges=()).values()
    total = Work(sum(k.memory for k in kinds), sum(k.flops for k in kinds), sum(k.int8_ops for k in kinds))
    if hit is None:
        return total
    read = sum(hit[int(name.split(".")[1])] * each.num_bytes / each.count for name, each in routed.items())
    operations = sum(_routed_operations(each, config, load) for each in routed.values())
    quantised = numerics.quantisation is not None
    return Work(
        total.bytes + read,
        total.flops + (0 if quantised else operations),
        total.int8_ops + (operations if quantised else 0),
    )


def _routed_operations(held: Held, config: V4Config, load: Load) -> float:
    outputs, inputs = held.spec.shape
    return 2.0 * load.rows * config.num_experts_per_tok * outputs * inputs


def limit(work: Work, rates: Rates, numerics: Numerics) -> Limit:
    """The least seconds of this work at these rates."""
    own = "float32" if numerics.activation == torch.float32 else "bfloat16"
    memory = work.bytes / rates.read
    arithmetic = work.flops / rates.peak[own]
    if work.int8_ops:
        arithmetic += work.int8_ops / rates.peak["int8"]
    return Limit(max(memory, arithmetic), "memory" if memory >= arithmetic else "arithmetic")
