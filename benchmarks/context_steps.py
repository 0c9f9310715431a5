"""Decode steps of one request at long contexts, over caches that were filled through their page tables."""

import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..layouts.rows import RequestRows
from ..models.checkpoint.synthetic import random_weights
from ..models.numerics import Numerics
from ..models.v4.attention import attention_workspace
from ..models.v4.caches import Caches, poison
from ..models.v4.config import V4Config, flash, tiny
from ..models.v4.model import Model
from ..models.v4.pools import CacheShape, pool_shapes
from ..parallel.groups import Groups
from .context_probe import SLOT, Found, Probe, fill_resident, rows_of
from .context_rows import is_written, wipe

MARGIN_BYTES = 1 << 30
MEASURE_BYTES = 64 << 20
"""What a process may take or give back besides, while its pools are made."""

SELECTION, REST = "index selection", "attention"
"""The two parts of the stage attend; the first is estimated from the layers that were tried."""


def small_flash() -> V4Config:
    """Flash's layers, heads, window and caches, with small other widths, 8 learned experts and 512 tokens."""
    return replace(
        flash(),
        hidden_size=64,
        vocab_size=512,
        q_lora_rank=32,
        o_lora_rank=32,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        num_hash_layers=0,
        draft_ratios=(),
    )


def shared_weights(config: V4Config, seed: int, mode: Numerics) -> dict[str, torch.Tensor]:
    """Random weights in which all layers with one compression ratio are the same: one draw for each kind."""
    ratios = tuple(sorted(set(config.compress_ratios)))
    few = replace(config, compress_ratios=ratios, num_hidden_layers=len(ratios))
    weights = random_weights(few, seed, mode)
    shared = {name: tensor for name, tensor in weights.items() if not name.startswith("layers.")}
    for layer, ratio in enumerate(config.compress_ratios):
        prefix = f"layers.{ratios.index(ratio)}."
        own = {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
        shared |= {f"layers.{layer}.{name.removeprefix(prefix)}": tensor for name, tensor in own.items()}
    return shared


def small_tiny() -> V4Config:
    """The tiny shape, all of its experts learned."""
    return replace(tiny(), num_hash_layers=0)


PRESETS: dict[str, Callable[[], V4Config]] = {"flash": small_flash, "tiny": small_tiny}


@dataclass(frozen=True)
class Plan:
    """What the flags ask for: positions of the longest first row + 1, steps that end each context."""

    preset: str
    config: V4Config
    mode: Numerics
    contexts: tuple[int, ...]
    steps: int
    plot: str | None

    @property
    def shape(self) -> CacheShape:
        return CacheShape(1, max(self.contexts), 1)


@dataclass(frozen=True)
class Context:
    """What was found at one context: milliseconds of a step (medians) by stage, the layers tried, what failed."""

    context: int
    fill_s: float
    step_ms: float
    stages_ms: dict[str, float]
    probes: list[Found]
    faults: list[str]


def pool_bytes(plan: Plan) -> dict[str, int]:
    """Bytes of each pool by family."""
    return {name: pool.nbytes for name, pool in pool_shapes(plan.config, plan.shape, plan.mode).items()}


def needed_bytes(plan: Plan) -> int:
    """Memory that a run takes: pools, attention of one row, FP64 copies of one layer's index keys, and a margin."""
    copies = 3 * 8 * (max(plan.contexts) // 4) * plan.config.index_head_dim
    work = attention_workspace(plan.config, plan.mode, 1, max(plan.contexts))
    return sum(pool_bytes(plan).values()) + work + copies + MARGIN_BYTES


def free_bytes() -> int | None:
    """Memory that this machine can still give, None where it does not say."""
    return _kilobytes(Path("/proc/meminfo"), "MemAvailable")


def resident_bytes() -> int | None:
    """Memory that no file stands behind and this process holds, None where the system does not say."""
    return _kilobytes(Path("/proc/self/status"), "RssAnon")


def _kilobytes(path: Path, name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+([0-9]+) kB", path.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) << 10 if found else None


def run(plan: Plan, seed: int) -> Iterator[Context]:
    """Fill, try and time each context in turn."""
    model = Model(plan.config, shared_weights(plan.config, seed, plan.mode), Groups.single(), plan.mode)
    before = resident_bytes()
    caches = model.make_caches(plan.shape)
    poison(caches)
    after, planned = resident_bytes(), sum(pool_bytes(plan).values())
    model.clock.enabled = True
    for number, context in enumerate(plan.contexts):
        row = at_context(model, caches, plan, context, seed + number)
        taken = planned if before is None or after is None else after - before
        held = sum(pool.nbytes for pool in caches.pools.values())
        if held != planned or abs(taken - planned) > planned / 100 + MEASURE_BYTES:
            row.faults.append(f"the pools have {held:,} bytes and took {taken:,}, planned were {planned:,}")
        yield row


@torch.no_grad()
def at_context(model: Model, caches: Caches, plan: Plan, context: int, seed: int) -> Context:
    """The last steps of one context: each is tried in single layers, then run through all of them.

    The caches hold NaN everywhere, before and after.
    """
    begin, first = time.perf_counter(), context - plan.steps
    caches.admit(SLOT, context)
    fill_resident(caches, SLOT, first, seed)
    filled = time.perf_counter() - begin
    steps: list[dict[str, float]] = []
    probes: list[Found] = []
    faults: list[str] = []
    for position in range(first, context):
        rows = [RequestRows(SLOT, position, [position % plan.config.vocab_size], kind="decode", asked=(0,))]
        if position in (first, context - 1):
            probes += tried(Probe(model, caches, model.plan(rows, caches), position, position))
        steps.append(one_step(model, caches, rows, faults))
    faults += [f"{found}" for found in probes if not found.holds]
    faults += refusals(model, caches, context)
    caches.release(SLOT)
    caches.check_integrity()
    poison(caches)
    stages = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in steps[0]}
    total = stages.pop("step")
    selecting = [found.select_s for found in probes if found.ratio == 4]
    attend = stages.pop("attend")
    estimate = 1000 * statistics.median(selecting) * len(plan.config.layers_of(4)) if selecting else 0.0
    stages[SELECTION] = min(estimate, attend)
    stages[REST] = attend - stages[SELECTION]
    return Context(context, filled, total, stages, probes, faults)


def tried(probe: Probe) -> list[Found]:
    """The first, middle and last layer of both kinds."""
    found = []
    for ratio in (4, 128):
        layers = len(probe.config.layers_of(ratio))
        found += [probe.run(ratio, place) for place in sorted({0, layers // 2, layers - 1})] if layers else []
    return found


def one_step(model: Model, caches: Caches, rows: list[RequestRows], faults: list[str]) -> dict[str, float]:
    """Milliseconds of a decode step by stage, and of the whole; says what was not written where it belongs.

    Where the row is to be written there is NaN before: nothing may read that either.
    """
    position, before = rows[0].start, dict(model.clock.seconds)
    begin = time.perf_counter()
    plan = model.plan(rows, caches)
    planned = time.perf_counter()
    targets = _targets(caches, position)
    for name, slot in targets.items():
        wipe(caches.pools[name][:, slot])
    middle = time.perf_counter()
    logits = model.forward(plan, caches).logits
    end = time.perf_counter()
    if logits is None or not bool(logits.isfinite().all()):
        faults.append(f"position {position:,}: a logit is not finite")
    for name, slot in targets.items():
        if not is_written(caches.pools[name][:, slot]):
            faults.append(f"position {position:,}: {name} was not written where its row belongs")
    stages = {name: 1000 * (s - before.get(name, 0.0)) for name, s in model.clock.seconds.items()}
    return {"plan": 1000 * (planned - begin), **stages, "step": 1000 * (planned - begin + end - middle)}


def _targets(caches: Caches, position: int) -> dict[str, int]:
    """The pool slot of each family that a row at this position writes."""
    targets = {}
    for family in caches.families:
        index = family.rows(position)
        if not family.per_entry or family.rows(position + 1) > index:
            targets[family.name] = int(rows_of(caches, family, SLOT, [index])[0])
    return targets


def refusals(model: Model, caches: Caches, context: int) -> list[str]:
    """What should have been refused one position behind the end, and was not."""
    faults = []
    beyond = [RequestRows(SLOT, context, [1], kind="decode", asked=(0,))]
    longer = caches.shape.max_context + 1
    tries: dict[str, Callable[[], object]] = {
        f"a row at position {context:,}": lambda: model.plan(beyond, caches),
        f"a request of {longer:,} positions": lambda: caches.admit(SLOT, longer),
    }
    for what, act in tries.items():
        try:
            act()
        except ValueError:
            continue
        faults.append(f"{what} was not refused")
    return faults
