"""Exchanges and memory of the plan against real ranks: what their ledgers, engines and windows show."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from episodes import make_model
from plan_cases import settings_of, unique_bytes
from rank_pool import RankPools

from meshspark.comm.volumes import exchange_window, gather_window, window_bytes
from meshspark.launch.engine import Engine
from meshspark.launch.plan_data import make_plan, windows
from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.share import shard_weights
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.dspark.drafter import make_drafter
from meshspark.models.dspark.mtp import MtpProposer, make_mtp, mtp_shape
from meshspark.models.dspark.proposer import DSparkProposer
from meshspark.models.dspark.shape import DraftShape
from meshspark.models.dspark.traffic import DraftLoad, draft_exchanges
from meshspark.models.numerics import numerics
from meshspark.models.request import SamplingParams
from meshspark.models.v4.config import PRESETS, tiny_mtp
from meshspark.models.v4.model import Model
from meshspark.models.v4.pools import engine_shape
from meshspark.models.v4.traffic import Load, StepPlan, step_exchanges
from meshspark.parallel.groups import Groups
from meshspark.parallel.ledger import Ledger
from meshspark.parallel.topology import Topology

FIELDS = ("group", "op", "stage", "dtype", "rows", "columns", "bytes")
SIZES = (4, 2, 4)
SHAPES = {"tiny-dspark": DraftShape(5, 5, 2), "tiny-mtp": mtp_shape(tiny_mtp(), slab_blocks=2)}


def _use(groups: Groups, ledger: Ledger) -> None:
    groups.ledger = ledger
    for group in (groups.world, groups.tp, groups.ep, groups.control, groups.front):
        group.ledger = ledger


def _load_of(plan_) -> Load:
    """What a real plan says of its group's rows."""
    bands = [plan_.rows.valid_G[plan_.rows.band(rank)].sum().item() for rank in range(plan_.rows.tp)]
    return Load(plan_.local_t, tuple(bands), plan_.asked.counts, (0,) * plan_.rows.tp)


def drive_steps(groups: Groups, preset: str, mode: str, gather_weights: bool) -> list:
    """Steps of every kind by kind and want: this rank's records, its group's load, and the routes that it received."""
    before, ledger = groups.ledger, Ledger(10_000)
    model = make_model(groups, preset, mode)
    place, tp = groups.topology.coordinates(groups.rank), groups.topology.tp
    shape = engine_shape(model.config, model.numerics, requests=4, max_context=256, prefill_rows=64, verify_rows=4)
    found = []
    try:
        for kind, want in product(("decode", "prefill", "mixed", "idle"), ("ids", "logits")):
            caches = model.make_caches(shape)
            rows = []
            # The last group has no rows at all, the first ones have different numbers of them.
            busy = kind != "idle" and place.dp_rank < max(1, groups.topology.dp - (kind == "decode"))
            if busy and kind in ("decode", "mixed"):
                for slot, count in ((0, 1), (1, 3), (3, 2 + place.dp_rank)):
                    caches.admit(slot, 200)
                    rows.append(RequestRows(slot, 0, [7] * count, slot // 2 % tp, "verify", range(count)))
            if busy and kind in ("prefill", "mixed"):
                caches.admit(2, 200)
                count = 37 + 4 * place.dp_rank
                rows.append(RequestRows(2, 0, list(range(count)), 1 % tp, "prefill", (count - 1,)))
            planned = model.plan(rows, caches)
            ledger.clear()
            _use(groups, ledger)
            with torch.no_grad():
                model.forward(planned, caches, want=want, gather_weights=gather_weights)
            _use(groups, before)
            load = _load_of(planned)
            records = [[getattr(r, field) for field in FIELDS] for r in ledger]
            found.append([kind, want, records, [load.local_t, load.valid, load.asked, load.requests]])
    finally:
        _use(groups, before)
    return found


def _planned(sizes, config, mode, rank, loads, want, received, gather_weights=False) -> list:
    topology = Topology(*sizes)
    place = topology.coordinates(rank)
    most = max(max(loads[topology.coordinates(r).dp_rank].valid) for r in topology.ep_ranks(rank))
    step = StepPlan(
        config, topology, numerics(mode), loads[place.dp_rank], place.tp_rank, most, want=want,
        received=received, gather_weights=gather_weights,
    )  # fmt: skip
    return [[getattr(e, field) for field in FIELDS] for e in step_exchanges(step)]


def check_exchanges(ranks: RankPools, preset: str, sizes: tuple[int, int, int], mode: str, weights: bool) -> None:
    config, topology = PRESETS[preset](), Topology(*sizes)
    results = ranks.run(topology, "test_traffic:drive_steps", preset=preset, mode=mode, gather_weights=weights)
    sent, back = FIELDS.index("bytes"), FIELDS.index("rows")
    for number, (kind, want, *_) in enumerate(results[0]):
        steps = [result[number] for result in results]
        loads = {}
        for rank, (_, _, _, load) in enumerate(steps):
            loads[topology.coordinates(rank).dp_rank] = Load(load[0], tuple(load[1]), tuple(load[2]), tuple(load[3]))
        returned = Counter()
        for rank, (_, _, records, _) in enumerate(steps):
            planned = _planned(sizes, config, mode, rank, loads, want, None, weights)
            assert len(planned) == len(records), (kind, want, rank)
            for got, expected in zip(records, planned, strict=True):
                # Who receives how much is the router's; together it is what was sent.
                if got[2] == "combine":
                    block = topology.coordinates(rank).ep_block
                    returned[block] += got[back] - expected[back]
                    got, expected = ([*r[:back], *r[back + 1 : sent]] for r in (got, expected))
                assert got == expected, (kind, want, rank)
        assert set(returned.values()) <= {0}, (kind, want)


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "w8a8"])
def test_exchanges_are_those_of_the_ledger(ranks: RankPools, mode: str) -> None:
    check_exchanges(ranks, "tiny", SIZES, mode, weights=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "sizes", "mode"),
    [("tiny", (2, 2, 2), "float64"), ("tiny", (4, 4, 4), "float32"), ("tiny", (4, 2, 2), "float32"),
     ("tiny", (4, 1, 4), "bfloat16"), ("tiny-thirds", (3, 3, 3), "float32"), ("tiny", (8, 4, 8), "bfloat16")],
)  # fmt: skip
def test_exchanges_at_other_topologies(ranks: RankPools, preset: str, sizes: tuple[int, int, int], mode: str) -> None:
    """Also where partial sums are no branch of the tree (thirds), and with two EP blocks."""
    check_exchanges(ranks, preset, sizes, mode, weights=False)


@pytest.mark.parametrize("mode", ["float32", "w8a8"])
def test_exchanges_where_weights_travel(ranks: RankPools, mode: str) -> None:
    """The order differs, for each layer's weights start before the one before has ended; calls and bytes do not."""
    results = ranks.run(Topology(*SIZES), "test_traffic:drive_steps", preset="tiny", mode=mode, gather_weights=True)
    for rank, result in enumerate(results):
        for kind, want, records, load in result:
            loads = dict.fromkeys(range(2), Load(load[0], tuple(load[1]), tuple(load[2]), tuple(load[3])))
            planned = _planned(SIZES, PRESETS["tiny"](), mode, rank, loads, want, None, True)
            travel = [Counter(map(tuple, (r for r in side if r[2] == "weight_gather"))) for side in (records, planned)]
            assert travel[0] == travel[1] and travel[0], (kind, want, rank)


def test_large_rows_travel_apart() -> None:
    """Beyond the limit rows and their small parts are two exchanges; both sides of it, and INT8 with its scale."""
    config, topology = PRESETS["tiny"](), Topology(4, 2, 4)

    def stages(rows: int, mode: str) -> dict[str, tuple[str, int]]:
        load = Load(rows, (rows, rows), (0, 0), (0, 0))
        plan_ = StepPlan(config, topology, numerics(mode), load)
        return {e.stage: (e.dtype, e.columns) for e in step_exchanges(plan_) if e.group == "ep"}

    assert stages(100, "float32")["dispatch"] == ("uint8", 64 * 4 + 4 + 8)
    assert stages(1000, "float32")["dispatch.x"] == ("float32", 64)
    assert stages(1000, "float32")["dispatch.aux"] == ("uint8", 12)
    assert stages(100, "w8a8")["dispatch"] == ("uint8", 64 + 4 + 4 + 8)


def drive_engine(groups: Groups, count: int) -> dict:
    """An engine of real ranks: bytes of its weights and pools, its windows, and the agreements of its steps."""
    before, ledger = groups.ledger, Ledger(100_000)
    model = make_model(groups, "tiny", "float32")
    engine = Engine(model, requests=5, max_context=512, prefill_rows=32)
    _use(groups, ledger)
    try:
        if groups.rank == 0:
            for number in range(count):
                engine.add_request([3 + number] * (1 + 9 * number), SamplingParams(4))
            while engine.active:
                engine.step()
            engine.close()
        else:
            engine.serve()
    finally:
        _use(groups, before)
    agreements = {r.bytes for r in ledger if r.stage == "agreement"}
    seen: set[int] = set()
    held = [t for b in (*model.blocks, model) for t in _tensors(b, seen)]
    return {
        "weights": unique_bytes(held),
        "pools": {name: pool.nbytes for name, pool in engine.caches.pools.items()},
        "agreements": sorted(agreements),
    }


def _tensors(owner, seen: set[int]) -> list[torch.Tensor]:
    """Weights below a model or one of its parts, found through their fields; each part once."""
    if isinstance(owner, torch.Tensor):
        return [owner]
    if not hasattr(owner, "__dict__") or isinstance(owner, Groups) or id(owner) in seen:
        return []
    seen.add(id(owner))
    skipped = ("config", "groups", "numerics", "clock", "_frequencies", "_payloads", "blocks", "geometry", "_prefetch")
    return [t for name, value in vars(owner).items() if name not in skipped for t in _tensors(value, seen)]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 4)])
def test_a_running_engine_takes_what_the_plan_says(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    settings = settings_of("tiny", sizes)
    planned = make_plan(settings)
    agreement = next(iter(step_exchanges(settings.step_plan("decode"))))
    assert agreement.stage == "agreement"
    for found in ranks.run(Topology(*sizes), "test_traffic:drive_engine", timeout=120, count=5):
        assert found["weights"] == planned["per_rank"]["weights"]
        assert found["pools"] == {k: v for k, v in planned["per_rank"]["pools"].items() if v}
        assert found["agreements"] == [agreement.bytes]
    calls = planned["steps"]["decode"]["ids"]["exchanges"]
    assert [each["bytes"] for each in calls if each["stage"] == "agreement"] == [agreement.bytes]


@dataclass
class Recorded:
    """A proposer that keeps, of each step, the ledger's records of its calls and what they were for."""

    inner: Any
    ledger: Ledger
    steps: list = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def keep(self, rows, taps, caches) -> None:
        """One step begins; its room is not known before it drafts."""
        begin = len(self.ledger)
        self.inner.keep(rows, taps, caches)
        self.steps.append([len(rows.slot_T), None, 0, _records(self.ledger, begin)])

    def propose(self, anchors, caches, **options) -> Any:
        begin = len(self.ledger)
        drafts = self.inner.propose(anchors, caches, **options)
        room = anchors.room
        self.steps[-1][1:3] = [[list(room.blocks), room.most], len(anchors.blocks)]
        self.steps[-1][3] += _records(self.ledger, begin)
        return drafts


def _records(ledger: Ledger, begin: int) -> list:
    return [[getattr(r, field) for field in FIELDS] for r in list(ledger)[begin:]]


def drive_drafts(groups: Groups, preset: str, mode: str) -> list:
    """An engine that drafts, with slabs of 2 blocks and more requests in one group than in the other."""
    before, ledger = groups.ledger, Ledger(100_000)
    config = PRESETS[preset]()
    full = random_weights(config, 7, numerics(mode), draft=True)
    share = shard_weights(full, groups.topology, groups.rank, config, draft=True)
    model = Model(config, share, groups, numerics(mode))
    ends = (config, share, model.embed, model.head, groups, model.numerics)
    if config.drafter == "mtp":
        proposer = MtpProposer(make_mtp(*ends, shape=SHAPES[preset]))
    else:
        proposer = DSparkProposer(make_drafter(*ends, shape=SHAPES[preset]))
    recorded = Recorded(proposer, ledger)
    engine = Engine(model, requests=5, max_context=64, prefill_rows=16, proposer=recorded)
    _use(groups, ledger)
    try:
        if groups.rank == 0:
            for number in range(9):
                engine.add_request([3 + number] * (1 + 3 * number), SamplingParams(3 + number % 4, draft=number != 1))
            while engine.active:
                engine.step()
            engine.close()
        else:
            engine.serve()
    finally:
        _use(groups, before)
    return recorded.steps


@pytest.mark.parametrize(
    ("preset", "sizes", "mode"),
    [("tiny-dspark", (4, 2, 4), "float32"),
     pytest.param("tiny-dspark", (2, 2, 2), "w8a8", marks=pytest.mark.slow),
     pytest.param("tiny-dspark", (2, 1, 2), "bfloat16", marks=pytest.mark.slow),
     pytest.param("tiny-mtp", (4, 2, 2), "bfloat16", marks=pytest.mark.slow)],
)  # fmt: skip
def test_drafts_are_those_of_the_ledger(ranks: RankPools, preset: str, sizes: tuple[int, int, int], mode: str) -> None:
    """Every drafting step of an engine: one gather whatever is drafted, then slabs, empty ones too."""
    config, topology, shape = PRESETS[preset](), Topology(*sizes), SHAPES[preset]
    results = ranks.run(topology, "test_traffic:drive_drafts", timeout=150, preset=preset, mode=mode)
    sent, back = FIELDS.index("bytes"), FIELDS.index("rows")
    seen = Counter()
    for steps in zip(*results, strict=True):
        returned = 0
        for rank, (local_t, room, _, records) in enumerate(steps):
            place = topology.coordinates(rank)
            bounds, most = ((0,) * topology.tp, 0) if room is None else (tuple(room[0]), room[1])
            blocks = tuple(steps[r][2] for r in topology.tp_groups()[place.dp_rank])
            busiest = max(steps[r][2] for r in topology.ep_ranks(rank))
            target = StepPlan(config, topology, numerics(mode), Load(local_t, (), (), ()), place.tp_rank)
            found = draft_exchanges(target, DraftLoad(bounds, most, blocks, busiest), shape)
            planned = [[getattr(e, field) for field in FIELDS] for e in found]
            assert len(planned) == len(records), (rank, room)
            for got, expected in zip(records, planned, strict=True):
                if got[2] == "combine":
                    returned += got[back] - expected[back]
                    got, expected = ([*r[:back], *r[back + 1 : sent]] for r in (got, expected))
                assert got == expected, (rank, room)
            seen["slabs"] = max(seen["slabs"], -(-most // shape.slab_blocks))
            seen["idle"] += most > 0 and blocks[place.tp_rank] == 0
            seen["unequal"] += len(set(bounds)) > 1
        assert returned == 0
    assert seen["slabs"] == 3 if topology.tp == 1 else seen["slabs"] == 2
    assert seen["idle"] and (topology.tp == 1 or seen["unequal"])


def drive_window(groups: Groups, rows: int) -> list[int]:
    """A step of many rows through the shared windows -> their capacities, of tp and ep."""
    model = make_model(groups, "tiny", "float32")
    for group in (groups.tp, groups.ep):
        group.control.window = None
    caches = model.make_caches(
        engine_shape(model.config, model.numerics, requests=2, max_context=512, prefill_rows=rows)
    )
    caches.admit(0, 512)
    planned = model.plan([RequestRows(0, 0, list(range(rows)), 0, "prefill", (rows - 1,))], caches)
    with torch.no_grad():
        model.forward(planned, caches, want="logits")
    return [2 * group.control.capacity for group in (groups.tp, groups.ep)]


def test_windows_hold_what_a_step_wants(ranks: RankPools) -> None:
    settings = settings_of("tiny", SIZES, batch=2, prefill_rows=200)
    planned = windows(settings)
    for tp, ep in ranks.run(Topology(*SIZES), "test_traffic:drive_window", rows=200):
        assert tp == planned["tp"]["per_group"]
        assert 0 < ep <= planned["ep"]["per_group"]
    assert planned["tp"]["per_rank"] * 2 == planned["tp"]["per_group"]
    assert planned["tp"]["total"] == 2 * planned["tp"]["per_group"]
    assert not any(each["total"] for each in windows(replace(settings, local=False)).values())
    assert windows(replace(settings, reads=False))["ep"]["per_group"] > planned["ep"]["per_group"]


def test_window_sizes() -> None:
    assert gather_window(8192, 4) == 0 and gather_window(8193, 4) == 4 * 8193
    assert exchange_window(8192, 4, reads=True) == 0
    assert exchange_window(1 << 30, 4, reads=True) == 4 * (256 << 10)
    assert exchange_window(1 << 30, 4, reads=False) == 4 << 30
    assert window_bytes(0) == 0 and window_bytes(1) == 2 << 20 and window_bytes((1 << 20) + 1) == 4 << 20
