"""The plan of a deployment as plain data: memory, exchanges, time, what fits, and other topologies."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..comm.volumes import broadcast_window, exchange_window, gather_window, window_bytes
from ..models.dspark.shape import SLAB_BLOCKS, DraftShape
from ..models.dspark.traffic import DraftLoad, draft_exchanges, even_drafts
from ..models.numerics import Numerics
from ..models.v4.buffers import Buffers, step_buffers
from ..models.v4.config import V4Config
from ..models.v4.estimate import Device, Times, step_times, step_work, whole
from ..models.v4.projection_choice import ProjectionCosts, cost_rows, prefetch_bytes, projection_costs
from ..models.v4.sizing import CacheWish, fitting_requests, held_weights, plan_pools, weight_parts, worst_routes
from ..models.v4.traffic import Exchange, Load, StepPlan, even_load, step_exchanges, totals
from ..parallel.topology import Topology, divisors
from .engine import HEADER
from .telling import told_length

GIB = 1 << 30
TOKEN_BYTES = 5
"""Of one id in a control message, at most."""
CONTEXTS = (1 << 10, 1 << 12, 1 << 13, 1 << 15, 1 << 17, 1 << 18, 1 << 19, 1 << 20)
MOST_RANKS = 4096
STEPS = ("decode", "prefill", "mixed")


@dataclass(frozen=True)
class Settings:
    """What a plan is for. batch, prefill_rows and verify_rows (of each request) are per tensor group.

    gamma: drafts of a request, 0 for no drafter. local: CPU ranks of one host with shared memory, which read each
    other's memory if reads.
    """

    config: V4Config
    topology: Topology
    numerics: Numerics
    context: int
    batch: int
    prefill_rows: int
    verify_rows: int
    block_size: int
    device: Device
    device_gib: float
    gamma: int = 0
    cache_bytes: int | None = None
    prefix_points: int | None = None
    projection: str = "auto"
    local: bool = True
    reads: bool = True

    @property
    def slots_per_rank(self) -> int:
        return -(-self.batch // self.topology.tp)

    @property
    def wish(self) -> CacheWish:
        """The caches that an engine of these settings makes."""
        return CacheWish(
            requests=self.slots_per_rank * self.topology.tp,
            max_context=self.context,
            prefill_rows=self.prefill_rows,
            verify_rows=self.verify_rows,
            block_size=self.block_size,
            cache_bytes=self.cache_bytes,
            prefix_points=self.batch if self.prefix_points is None else self.prefix_points,
            gamma=self.gamma,
        )

    @property
    def costs(self) -> ProjectionCosts:
        return projection_costs(self.config, self.numerics, self.topology.tp, self.projection)

    def load(self, step: str) -> Load:
        """The rows of a step of this kind: all requests decode, or one prompt's rows run to its end, or both."""
        return even_load(
            self.topology.tp,
            requests=self.batch if step != "prefill" else 0,
            rows_each=self.verify_rows,
            prefill_rows=self.prefill_rows if step != "decode" else 0,
            prompts_ending=int(step != "decode"),
        )

    def gathers_weights(self, load: Load) -> bool:
        return self.topology.tp > 1 and self.costs.choose(load.local_t) == "weights"

    def step_plan(self, step: str, want: str = "ids") -> StepPlan:
        """The busiest rank's exchanges in such a step, experts chosen evenly."""
        load = self.load(step)
        record = len(HEADER) + told_length(self.gamma) * self.slots_per_rank
        busiest = load.valid.index(max(load.valid))
        return StepPlan(
            self.config, self.topology, self.numerics, load, busiest, max(load.valid), None, record, want,
            self.gathers_weights(load),
        )  # fmt: skip

    def draft_shape(self) -> DraftShape:
        """The drafter's blocks: as wide as it was trained for, or as there are drafts."""
        block = self.gamma if self.config.dspark is None else self.config.dspark.block_size
        return DraftShape(self.gamma, max(self.gamma, block), SLAB_BLOCKS)

    def draft_load(self, step: str) -> DraftLoad:
        """A block of each request that decodes, or of the one whose prompt ends where none does."""
        if step == "prefill":
            return even_drafts(self.load(step).asked)
        tp = self.topology.tp
        return even_drafts(tuple(self.batch // tp + (rank < self.batch % tp) for rank in range(tp)))

    def exchanges(self, step: str, want: str = "ids") -> Iterator[Exchange]:
        """Those of the step, then the drafter's."""
        plan = self.step_plan(step, want)
        yield from step_exchanges(plan)
        if self.gamma:
            yield from draft_exchanges(plan, self.draft_load(step), self.draft_shape())

    def buffers(self) -> Buffers:
        """Working memory of the largest step."""
        load = self.load("mixed")
        return step_buffers(
            self.config, self.topology, self.numerics, load, context=self.context,
            gather_weights=self.gathers_weights(load),
        )  # fmt: skip


def make_plan(settings: Settings) -> dict[str, Any]:
    """Everything about a deployment, ready for JSON."""
    memory = rank_memory(settings)
    return {
        "topology": {**asdict(settings.topology), "dp": settings.topology.dp},
        "numerics": settings.numerics.name,
        "per_rank": memory,
        "total": _total(memory, settings),
        "windows": windows(settings),
        "worst_case": _worst_case(settings),
        "steps": {step: _step(settings, step) for step in STEPS},
        "projection": _projection(settings),
        "device": {**asdict(settings.device), "gib": settings.device_gib},
        "room_for_caches": room_for_caches(settings, memory),
        "fits": _fits(settings, memory),
        "topologies": [_at(settings, topology) for topology in _others(settings)],
        "worlds": [_world(settings, world) for world in _worlds(settings.topology)],
    }


def rank_memory(settings: Settings) -> dict[str, Any]:
    """Bytes of one rank: weights, pools, working memory, its part of the shared windows, and their sum."""
    config, topology, numerics = settings.config, settings.topology, settings.numerics
    parts = weight_parts(config, topology, numerics, draft=settings.gamma > 0)
    pools = {name: pool.num_bytes for name, pool in plan_pools(config, numerics, settings.wish).items()}
    buffers = settings.buffers()
    ahead = prefetch_bytes(config, numerics, topology.tp) if settings.gathers_weights(settings.load("mixed")) else 0
    shared = sum(each["per_rank"] for each in windows(settings).values())
    weights, cached, working = sum(parts.values()), sum(pools.values()), buffers.peak + ahead
    return {
        "weights": weights,
        "weights_by_part": parts,
        "pools": pools,
        "buffers": working,
        "buffers_by_stage": {"streams": buffers.streams, **buffers.stages, "weights ahead": ahead},
        "windows": shared,
        "peak": weights + cached + working + shared,
    }


def windows(settings: Settings) -> dict[str, dict[str, int]]:
    """Shared memory by group, at the largest of its exchanges: of one group, of all, and a rank's part of it."""
    wanted = {"tp": 0, "ep": 0, "control": 0}
    if settings.local:
        plan = settings.step_plan("mixed", "logits")
        plan = replace(plan, received=worst_routes(settings.config, settings.topology, plan.load.rows))
        drafts = draft_exchanges(plan, settings.draft_load("mixed"), settings.draft_shape()) if settings.gamma else ()
        for each in (*step_exchanges(plan), *drafts):
            wanted[each.group] = max(wanted[each.group], _wanted(each, plan.size(each.group), settings.reads))
        if settings.topology.world > 1:
            message = broadcast_window(settings.context * TOKEN_BYTES)
            wanted["control"] = max(wanted["control"], message)
    sizes = {"tp": settings.topology.tp, "ep": settings.topology.ep, "control": settings.topology.world}
    found = {}
    for group, most in wanted.items():
        one = window_bytes(most)
        found[group] = {
            "per_group": one,
            "total": one * (settings.topology.world // sizes[group]),
            "per_rank": one // sizes[group],
        }
    return found


def _wanted(exchange: Exchange, size: int, reads: bool) -> int:
    if exchange.op == "exchange_rows":
        return exchange_window(exchange.bytes, size, reads=reads)
    ahead = exchange.op in ("start_gather_rows", "finish_gather_rows") and reads
    return 0 if ahead else gather_window(exchange.bytes // (size - 1), size)


def _total(memory: dict[str, Any], settings: Settings) -> dict[str, Any]:
    world = settings.topology.world
    total: dict[str, Any] = {name: memory[name] * world for name in ("weights", "buffers")}
    total["pools"] = {name: size * world for name, size in memory["pools"].items()}
    total["windows"] = sum(each["total"] for each in windows(settings).values())
    total["peak"] = total["weights"] + total["buffers"] + total["windows"] + sum(total["pools"].values())
    return total


def _worst_case(settings: Settings) -> dict[str, int]:
    """Every row of the EP block with all its routes on one rank's experts: what arrives there, and goes back."""
    config, numerics, topology = settings.config, settings.numerics, settings.topology
    load = settings.load("mixed")
    routes = worst_routes(config, topology, load.rows)
    plan = settings.step_plan("mixed")
    sent = [each for each in step_exchanges(plan) if each.stage in ("dispatch", "dispatch.x", "dispatch.aux")]
    layers = config.num_hidden_layers
    per_route = sum(each.bytes for each in sent) // (layers * plan.routes) if sent else 0
    return {
        "rows": topology.ep // topology.tp * load.rows,
        "routes": routes,
        "dispatch_bytes": routes * per_route,
        "combine_bytes": routes * config.hidden_size * numerics.activation.itemsize * (topology.ep > 1),
        "buffer_bytes": settings.buffers().stages["experts"],
    }


def _step(settings: Settings, step: str) -> dict[str, Any]:
    """Rows, exchanges for greedy and for sampled requests, and the time with what bounds it."""
    load = settings.load(step)
    times = step_estimate(settings, step, settings.context)
    seconds, bound = whole(times)
    exchanged = {}
    for want in ("ids", "logits"):
        found = totals(settings.exchanges(step, want))
        exchanged[want] = {
            "calls": sum(each.calls for each in found),
            "bytes": sum(each.bytes for each in found),
            "leaves": round(sum(each.leaves for each in found)),
            "exchanges": [{**asdict(each), "leaves": round(each.leaves)} for each in found],
        }
    kinds = {kind: {**asdict(each), "total": each.total, "bound": each.bound} for kind, each in times.items()}
    return {
        "rows": {"group": load.rows, "band": load.local_t, "most_of_a_rank": max(load.valid), "asked": sum(load.asked)},
        "projection": "weights" if settings.gathers_weights(load) else "activations",
        **exchanged,
        "estimate": {"context": settings.context, "seconds": seconds, "bound": bound, "kinds": kinds},
    }


def step_estimate(settings: Settings, step: str, context: int) -> dict[str, Times]:
    """Seconds by layer kind of such a step where every request has `context` positions."""
    config, topology, numerics = settings.config, settings.topology, settings.numerics
    drafts = max(settings.draft_load(step).blocks) * settings.draft_shape().rows if settings.gamma else 0
    held = held_weights(config, topology, numerics, draft=drafts > 0)
    exchanges = settings.exchanges(step)
    work = step_work(
        config, topology, numerics, held, settings.load(step), context=context, exchanges=exchanges, draft_rows=drafts
    )
    return step_times(work, settings.device)


def _projection(settings: Settings) -> dict[str, Any]:
    costs = settings.costs
    return {
        "mode": costs.mode,
        "break_even": costs.break_even,
        "rows": [asdict(row) for row in cost_rows(costs)] if settings.topology.tp > 1 else [],
    }


def room_for_caches(settings: Settings, memory: dict[str, Any]) -> int:
    """What the device has left beside weights, working memory and windows."""
    return int(settings.device_gib * GIB) - memory["weights"] - memory["buffers"] - memory["windows"]


def _fits(settings: Settings, memory: dict[str, Any]) -> list[dict[str, Any]]:
    """By context: requests of a tensor group whose caches fit beside the rest, and a decode step's time."""
    ceiling = settings.config.max_position_embeddings
    room = room_for_caches(settings, memory)
    rows = []
    for context in sorted({c for c in CONTEXTS if c <= ceiling} | {settings.context}):
        wish = replace(settings.wish, max_context=context, prefix_points=settings.prefix_points or 0)
        requests = fitting_requests(settings.config, settings.numerics, wish, room)
        seconds, bound = whole(step_estimate(settings, "decode", context))
        rows.append(
            {
                "context": context,
                "requests_per_group": requests,
                "requests": requests * settings.topology.dp,
                "decode_seconds": seconds,
                "bound": bound,
            }
        )
    return rows


def _others(settings: Settings) -> list[Topology]:
    """One EP block of each tp and ep that divide the model; powers of two, and the plan's own."""
    config, own = settings.config, settings.topology
    tps = [n for n in divisors(config.o_groups) if config.vocab_size % n == 0]
    eps = divisors(config.n_routed_experts)
    found = {Topology(ep, tp, ep) for tp in tps for ep in eps if ep % tp == 0 and ep.bit_count() == 1}
    found |= {Topology(own.ep, own.tp, own.ep)}
    return sorted(found, key=lambda t: (t.tp, t.ep))


def _at(settings: Settings, topology: Topology) -> dict[str, Any]:
    """The same requests per group at another topology of one EP block."""
    other = replace(settings, topology=topology)
    memory = rank_memory(other)
    room = room_for_caches(other, memory)
    wish = replace(other.wish, prefix_points=settings.prefix_points or 0)
    seconds, bound = whole(step_estimate(other, "decode", other.context))
    return {
        "tp": topology.tp,
        "ep": topology.ep,
        "groups": topology.dp,
        "weights": memory["weights"],
        "pools": sum(memory["pools"].values()),
        "buffers": memory["buffers"],
        "peak": memory["peak"],
        "fitting_requests_per_group": fitting_requests(other.config, other.numerics, wish, room),
        "decode_leaves": round(sum(each.leaves for each in other.exchanges("decode"))),
        "decode_seconds": seconds,
        "bound": bound,
        "rows_per_second_per_rank": other.load("decode").rows * topology.dp / topology.world / seconds,
    }


def _worlds(topology: Topology) -> list[int]:
    """Legal numbers of ranks: whole EP blocks, doubled up to thousands of ranks, and the plan's own."""
    found = {topology.world}
    world = topology.ep
    while world <= MOST_RANKS:
        found.add(world)
        world *= 2
    return sorted(found)


def _world(settings: Settings, world: int) -> dict[str, Any]:
    """What grows with the number of EP blocks: requests, and the agreement, the one exchange over all ranks."""
    own = settings.topology
    other = replace(settings, topology=Topology(world, own.tp, own.ep))
    plan = replace(other.step_plan("decode"))
    agreement = next(iter(step_exchanges(plan))) if world > 1 else None
    leaves = 0.0 if agreement is None else agreement.leaves
    return {
        "ranks": world,
        "ep_blocks": world // own.ep,
        "groups": world // own.tp,
        "requests": settings.batch * (world // own.tp),
        "agreement_bytes": round(leaves),
        "agreement_seconds": leaves / (settings.device.link_gbs * 1e9) + settings.device.call_us * 1e-6 * (world > 1),
    }
