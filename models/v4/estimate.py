"""How long a step may take: bytes read, operations and bytes sent of each layer kind over a device's rates.

A model of limits, not a measurement. docs/deployment.md states the formulas.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ...layouts.tiles import TILE
from ...parallel.topology import Topology
from ..checkpoint.forms import SCALE_BYTES, is_int8
from ..numerics import Numerics
from .config import V4Config
from .sizing import Held
from .traffic import DRAFT, HEAD, STEP, Exchange, Load

LOOKED_UP = ("embed.weight", ".tid2eid", ".markov_w1.")
"""Weights of which a step reads single rows."""


@dataclass(frozen=True)
class Device:
    """Rates of one rank's device: memory and link in GB/s, products in TFLOPS and INT8 TOPS, a call in microseconds."""

    memory_gbs: float
    link_gbs: float
    tflops: float
    int8_tops: float
    call_us: float


@dataclass
class Work:
    """What one rank does in a step for one kind of layer. flops count a multiplication and an addition as two."""

    memory: float = 0.0
    flops: float = 0.0
    int8_ops: float = 0.0
    leaves: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class Times:
    """Seconds for one kind of layer; bound names the largest of the three."""

    memory: float
    arithmetic: float
    link: float

    @property
    def total(self) -> float:
        return max(self.memory, self.arithmetic) + self.link

    @property
    def bound(self) -> str:
        terms = {"memory": self.memory, "arithmetic": self.arithmetic, "link": self.link}
        return max(terms, key=lambda name: terms[name])


def step_work(
    config: V4Config,
    topology: Topology,
    numerics: Numerics,
    held: dict[str, Held],
    load: Load,
    *,
    context: int,
    exchanges: Iterable[Exchange],
    draft_rows: int = 0,
) -> dict[str, Work]:
    """Work of the busiest rank by layer kind, then the head, then the step's own exchanges and the drafter's.

    draft_rows: query rows of this rank that the drafter runs after the step; `held` holds its weights too, then.
    """
    work: dict[str, Work] = {kind: Work() for kind in dict.fromkeys(config.kinds)}
    work |= {HEAD: Work()} | ({DRAFT: Work()} if draft_rows else {})
    for name, each in held.items():
        if any(mark in name for mark in LOOKED_UP) or (each.spec.is_draft and not draft_rows):
            continue
        rows, block_rows = max(load.valid), topology.ep // topology.tp * load.rows
        kind = config.kinds[int(name.split(".")[1])] if name.startswith("layers.") else HEAD
        if each.spec.is_draft:
            rows, block_rows, kind = draft_rows, topology.ep * draft_rows, DRAFT
        elif name == "head.weight":
            rows = sum(load.asked) // topology.tp
            if draft_rows:
                _add_weight(work[DRAFT], each, draft_rows, 0, config, numerics)
        _add_weight(work[kind], each, rows, block_rows, config, numerics)
    for ratio, kind in ((0, "swa"), (4, "csa"), (128, "hca")):
        if kind in work:
            _add_attention(work[kind], config, numerics, load, ratio, context, config.kinds.count(kind))
    for exchange in exchanges:
        mine = work.setdefault(exchange.kind, Work())
        mine.leaves += exchange.leaves
        mine.calls += 1
    return work


def step_times(work: dict[str, Work], device: Device) -> dict[str, Times]:
    """Seconds of each kind: bytes read over the memory's rate, operations over theirs, bytes and calls of the link."""
    times = {}
    for kind, each in work.items():
        arithmetic = each.flops / (device.tflops * 1e12) + each.int8_ops / (device.int8_tops * 1e12)
        link = each.leaves / (device.link_gbs * 1e9) + each.calls * device.call_us * 1e-6
        times[kind] = Times(each.memory / (device.memory_gbs * 1e9), arithmetic, link)
    return times


def whole(times: dict[str, Times]) -> tuple[float, str]:
    """(seconds, what bounds it) of a step: kinds one after the other; the largest share of its time is the bound."""
    shares = {"memory": 0.0, "arithmetic": 0.0, "link": 0.0}
    for each in times.values():
        shares["memory" if each.memory >= each.arithmetic else "arithmetic"] += max(each.memory, each.arithmetic)
        shares["link"] += each.link
    return sum(each.total for each in times.values()), max(shares, key=lambda name: shares[name])


def _touched(config: V4Config, rows: int) -> float:
    """Share of the experts that some of the rows chooses, where all experts are chosen alike."""
    return 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows


def _add_weight(work: Work, held: Held, rows: float, block_rows: int, config: V4Config, numerics: Numerics) -> None:
    """Reading it, and its products with `rows` rows. block_rows: those whose routes may touch an expert.

    Every row meets the whole weight once somewhere in its group: a rank's share is that of its own rows.
    """
    spec, experts = held.spec, held.spec.shard == "experts"
    work.memory += held.num_bytes * (_touched(config, block_rows) if experts else 1.0)
    if len(spec.shape) != 2 or spec.name.endswith(".ape"):
        return
    operations = 2.0 * rows * (config.num_experts_per_tok if experts else 1) * spec.shape[0] * spec.shape[1]
    if is_int8(spec, numerics):
        work.int8_ops += operations
    else:
        work.flops += operations


def _add_attention(
    work: Work, config: V4Config, numerics: Numerics, load: Load, ratio: int, context: int, layers: int
) -> None:
    """Cache rows read and written, scores and sums of the busiest rank."""
    rows = max(load.valid)
    tiles = max(max(load.requests, default=0), -(-rows // TILE)) if rows else 0
    entries = context // ratio if ratio else 0
    selected = min(entries, config.index_topk) if ratio == 4 else entries
    kv, wide = numerics.kv.itemsize, numerics.accumulation.itemsize
    index_row = config.index_head_dim + SCALE_BYTES if numerics.quantisation else config.index_head_dim * kv
    read = tiles * min(context, config.sliding_window + TILE) * config.head_dim * kv
    if ratio == 4:
        sparse = selected < entries
        read += tiles * entries * index_row + (rows if sparse else tiles) * selected * config.head_dim * kv
        scored = layers * 2.0 * rows * config.index_n_heads * config.index_head_dim * entries
        work.int8_ops += scored if numerics.quantisation else 0.0
        work.flops += 0.0 if numerics.quantisation else scored
    elif ratio:
        read += tiles * entries * config.head_dim * kv
    state = {0: 0, 4: 4 * (config.head_dim + config.index_head_dim), 128: 2 * config.head_dim}[ratio]
    written = load.rows * (config.head_dim * kv + state * wide)
    work.memory += layers * (read + written)
    lanes = min(context, config.sliding_window) + selected
    work.flops += layers * 4.0 * rows * config.num_attention_heads * config.head_dim * lanes


__all__ = ["DRAFT", "HEAD", "STEP", "Device", "Times", "Work", "step_times", "step_work", "whole"]
