"""What a step exchanges: every call of one rank in its order, as its ledger would record it. Pure arithmetic.

Letters: T local rows, G group rows, A asked rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ...comm.experts import PACK_LIMIT_BYTES
from ...comm.local import DIRECT_BYTES
from ...comm.projection import sends_sums
from ...parallel.ownership import even_band
from ...parallel.topology import Topology
from ..numerics import Numerics
from .config import V4Config
from .payloads import GATHERED, model_payload

PAYLOADS = {"swa": GATHERED[0], "csa": GATHERED[4], "hca": GATHERED[128]}
"""Kind of attention layer -> what it gathers over the context group, in order."""

ROUTE_BYTES = torch.int64.itemsize
SCALE_BYTES = torch.float32.itemsize
HEAD, STEP, DRAFT = "head", "step", "draft"
"""Kinds of exchange beside those of the attention layers: of the head, of the step as a whole, of the drafter."""


@dataclass(frozen=True)
class Load:
    """The rows of one tensor group in a step.

    local_t: length of its bands. valid, asked: rows of each band that are no padding, and whose ids or logits are
    wanted. requests: those with rows in the step, by the band that owns most of their rows.
    """

    local_t: int
    valid: tuple[int, ...]
    asked: tuple[int, ...]
    requests: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.valid)


def even_load(tp: int, *, requests: int, rows_each: int, prefill_rows: int, prompts_ending: int = 0) -> Load:
    """`requests` decoding or verifying ones of rows_each rows, pinned in turn, and one prompt's rows that fill up.

    prompts_ending: prompts whose last row is in the step, at the end of the filled bands.
    """
    each = [requests // tp + (rank < requests % tp) for rank in range(tp)]
    pinned = [count * rows_each for count in each]
    local_t = max(max(pinned), even_band(sum(pinned) + prefill_rows, tp))
    valid, left, last = [], prefill_rows, 0
    for rank, own in enumerate(pinned):
        filling = min(left, local_t - own)
        left -= filling
        last = rank if filling else last
        valid.append(own + filling)
    asked = [own + prompts_ending * (rank == last) for rank, own in enumerate(pinned)]
    running = [count + (rank <= last and prefill_rows > 0) for rank, count in enumerate(each)]
    return Load(local_t, tuple(valid), tuple(asked), tuple(running))


@dataclass(frozen=True)
class Exchange:
    """One call of one rank. `bytes` as a ledger counts them: sent, an all-to-all's own rows among them.

    leaves: bytes that really leave the rank. kind: that of the attention layer, head, step or draft.
    """

    kind: str
    group: str
    op: str
    stage: str
    dtype: str
    rows: int
    columns: int
    bytes: int
    leaves: float


@dataclass(frozen=True)
class StepPlan:
    """What fixes the exchanges of a rank in a step.

    most_routed: valid rows of the busiest rank of the EP block. received: routes that arrive at this rank's
    experts, None for as many as it sends. record: numbers of its agreement record, 0 for no agreement. want and
    gather_weights as Model.forward takes them.
    """

    config: V4Config
    topology: Topology
    numerics: Numerics
    load: Load
    tp_rank: int = 0
    most_routed: int | None = None
    received: int | None = None
    record: int = 0
    want: str = "ids"
    gather_weights: bool = False

    @property
    def routes(self) -> int:
        return self.load.valid[self.tp_rank] * self.config.num_experts_per_tok

    def size(self, group: str) -> int:
        return {"tp": self.topology.tp, "ep": self.topology.ep, "control": self.topology.world}[group]

    def gather(self, kind: str, group: str, stage: str, dtype: torch.dtype, rows: int, columns: int) -> Exchange:
        sent = rows * columns * dtype.itemsize * (self.size(group) - 1)
        return Exchange(kind, group, "all_gather_rows", stage, _name(dtype), rows, columns, sent, sent)

    def gather_ahead(self, kind: str, dtype: torch.dtype, rows: int, columns: int) -> Iterator[Exchange]:
        """A weight that is on its way while an earlier layer computes, as two calls; a small one travels at once."""
        whole = self.gather(kind, "tp", "weight_gather", dtype, rows, columns)
        if rows * columns * dtype.itemsize < DIRECT_BYTES:
            yield whole
        else:
            yield replace(whole, op="start_gather_rows")
            yield replace(whole, op="finish_gather_rows", rows=0, bytes=0, leaves=0)

    def exchange(self, kind: str, group: str, stage: str, dtype: torch.dtype, rows: int, columns: int) -> Exchange:
        sent, size = rows * columns * dtype.itemsize, self.size(group)
        return Exchange(
            kind, group, "exchange_rows", stage, _name(dtype), rows, columns, sent, sent * (size - 1) / size
        )


def step_exchanges(plan: StepPlan) -> Iterator[Exchange]:
    """Every call of the rank in one step, in order; none over a group of one."""
    if plan.record and plan.topology.world > 1:
        yield plan.gather(STEP, "control", "agreement", torch.int64, 1, plan.record)
    for kind in plan.config.kinds:
        if plan.topology.tp > 1:
            yield from _gathers(plan, kind)
            yield from publish_exchanges(plan, kind)
        if plan.topology.ep > 1:
            yield from expert_exchanges(plan, kind)
    if plan.topology.tp > 1:
        yield from head_exchanges(plan, HEAD)


def payload_columns(config: V4Config, numerics: Numerics, kind: str) -> int:
    """Lanes of the wire dtype in one row of this payload."""
    return model_payload(kind, config, numerics).width


def _gathers(plan: StepPlan, kind: str) -> Iterator[Exchange]:
    for name in PAYLOADS[kind]:
        columns = payload_columns(plan.config, plan.numerics, name)
        yield plan.gather(kind, "tp", "gather", plan.numerics.wire, plan.load.local_t, columns)


def publish_exchanges(plan: StepPlan, kind: str) -> Iterator[Exchange]:
    """Heads to the owners of their output groups and partial sums back, or the shards of both weights."""
    config, numerics, tp = plan.config, plan.numerics, plan.topology.tp
    groups = config.o_groups // tp
    if plan.gather_weights:
        rank_columns, act = groups * config.o_lora_rank, numerics.activation
        wo_b = torch.int8 if numerics.quantisation == "w8a8" else act
        yield from plan.gather_ahead(kind, act, rank_columns, config.group_columns)
        yield from plan.gather_ahead(kind, wo_b, config.hidden_size, rank_columns)
        return
    rows = tp * plan.load.local_t
    yield plan.exchange(kind, "tp", "publish", numerics.activation, rows, groups * config.group_columns)
    partials = (1 if sends_sums(config.o_groups, tp) else groups) * config.hidden_size
    yield plan.exchange(kind, "tp", "publish", numerics.accumulation, rows, partials)


def expert_exchanges(plan: StepPlan, kind: str) -> Iterator[Exchange]:
    """Counts, rows with their weights and route numbers in the form that fits the busiest rank, and results back."""
    config, numerics, ep = plan.config, plan.numerics, plan.topology.ep
    yield plan.exchange(kind, "ep", "dispatch.counts", torch.int64, ep, config.n_routed_experts // ep + 2)
    quantised = numerics.quantisation == "w8a8"
    dtype = torch.int8 if quantised else numerics.activation
    small = numerics.accumulation.itemsize + ROUTE_BYTES + SCALE_BYTES * quantised
    row_bytes = config.hidden_size * dtype.itemsize + small
    valid = plan.load.valid[plan.tp_rank] if plan.most_routed is None else plan.most_routed
    if valid * config.num_experts_per_tok * row_bytes <= PACK_LIMIT_BYTES:
        yield plan.exchange(kind, "ep", "dispatch", torch.uint8, plan.routes, row_bytes)
    else:
        yield plan.exchange(kind, "ep", "dispatch.x", dtype, plan.routes, config.hidden_size)
        yield plan.exchange(kind, "ep", "dispatch.aux", torch.uint8, plan.routes, small)
    received = plan.routes if plan.received is None else plan.received
    yield plan.exchange(kind, "ep", "combine", numerics.activation, received, config.hidden_size)


def head_exchanges(
    plan: StepPlan, kind: str, stages: tuple[str, str] = ("lm_head", "exchange_logits")
) -> Iterator[Exchange]:
    """Asked rows to all shards of the vocabulary, padded to the largest band's; logits or best ids to the owners."""
    config, numerics, load = plan.config, plan.numerics, plan.load
    yield plan.gather(kind, "tp", stages[0], numerics.activation, max(load.asked), config.hidden_size)
    asked, wide = sum(load.asked), numerics.accumulation
    if plan.want == "logits":
        columns = config.vocab_size // plan.topology.tp
        yield plan.exchange(kind, "tp", stages[1], wide, asked, columns)
    else:
        columns = torch.int64.itemsize + wide.itemsize
        yield plan.exchange(kind, "tp", stages[1], torch.uint8, asked, columns)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Total:
    """Calls of one sort in a step: how many, and their bytes together, as `Exchange` counts both."""

    kind: str
    group: str
    stage: str
    op: str
    calls: int
    bytes: int
    leaves: float


def totals(exchanges: Iterator[Exchange]) -> tuple[Total, ...]:
    """Calls added up by layer kind, group, stage and op, in the order of their first call."""
    found: dict[tuple[str, str, str, str], Total] = {}
    for each in exchanges:
        key = (each.kind, each.group, each.stage, each.op)
        old = found.get(key, Total(*key, 0, 0, 0.0))
        found[key] = Total(*key, old.calls + 1, old.bytes + each.bytes, old.leaves + each.leaves)
    return tuple(found.values())
