"""The bandwidth benchmark: formulas, sizes, clocks with known answers, data that is really checked, files and flags."""

import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from meshspark.benchmarks import collectives, driver, exchanges, presets, routed, routes
from meshspark.benchmarks.driver import COPY, Call, Exchange, Loop, Origin
from meshspark.launch.engine import HEADER
from meshspark.launch.telling import told_length
from meshspark.models.dspark.context import draft_payload
from meshspark.models.dspark.shape import DraftShape
from meshspark.models.numerics import numerics
from meshspark.models.v4.config import flash, flash_dspark
from meshspark.parallel.errors import TransportError
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

MIB = 1 << 20


class FakeClock:
    """Time that moves only when a call says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def call(self, seconds):
        """A call that takes these seconds, the last one for ever."""
        left = list(seconds)

        def run(x):
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return x

        return Call(run)


def _stub(call, kind="gather", ranks=4, size=64 * MIB):
    return Exchange("stub", kind, size, size, "uint8", ranks, lambda epoch: epoch, {"fake": call}, lambda got, e: 0)


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        ("gather", (0, 1 / 2, 3 / 4)),
        ("exchange", (0, 1 / 2, 3 / 4)),
        ("reduce-scatter", (0, 1 / 2, 3 / 4)),
        ("all-reduce", (0, 1, 3 / 2)),
        ("broadcast", (0, 1, 1)),
    ],
)
def test_formulas_for_64_mib_in_1_ms(kind, factors, monkeypatch):
    monkeypatch.setattr(driver, "_copy_call", lambda size, device: Call(lambda x: None))
    for ranks, factor in zip((1, 2, 4), factors, strict=True):
        clock = FakeClock()
        exchange = _stub(clock.call([1e-3]), kind, ranks)
        row = driver.measure(exchange, Groups.single(), Loop(5, 1, 0), clock).rows[0]
        assert row.algbw_gbs == pytest.approx(67.108864)
        assert row.busbw_gbs == pytest.approx(67.108864 * factor)
        assert (row.p50_us, row.p99_us, row.min_us) == pytest.approx((1000, 1000, 1000))


def test_formulas_refuse_and_do_not_divide_by_zero():
    with pytest.raises(ValueError, match="kind is 'scan', allowed: gather"):
        driver.bus_factor("scan", 2)
    clock = FakeClock()
    row = driver.measure(_stub(clock.call([0.0]), size=0), Groups.single(), Loop(3, 0, 0), clock).rows[0]
    assert (row.algbw_gbs, row.busbw_gbs, row.limit) == (0, 0, None)


def test_code_and_docs_use_the_same_words():
    document = Path(__file__).parent.parent.joinpath("docs", "collectives.md").read_text(encoding="utf-8")
    points = re.findall(r"^\* .*\n(?:  .*\n)*", driver.__doc__, re.MULTILINE)
    assert len(points) == 5
    for point in points:
        assert point in document


def test_a_slow_first_call_moves_no_median(monkeypatch):
    monkeypatch.setattr(driver, "_copy_call", lambda size, device: Call(lambda x: None))
    for warm_up in (0, 3):
        clock = FakeClock()
        measured = driver.measure(_stub(clock.call([1.0, 2e-3])), Groups.single(), Loop(5, warm_up, 0), clock)
        row = measured.rows[0]
        assert row.p50_us == pytest.approx(2000) and row.min_us == pytest.approx(2000)
        assert row.p99_us == pytest.approx(2000 if warm_up else 1e6)
        assert measured.samples["fake"].shape == measured.samples[COPY].shape == (1, 5)


def slowest_rank(groups):
    clock = FakeClock()
    exchange = _stub(clock.call([1e-3 * (1 + 2 * groups.rank)]), ranks=groups.topology.world, size=8)
    one = driver.measure(exchange, groups, Loop(4, 1, 1), clock)
    return [asdict(one.rows[0]), one.samples["fake"].tolist()]


def test_time_is_that_of_the_slowest_rank(ranks):
    for row, samples in ranks.run(Topology(2, 1, 2), "test_bench:slowest_rank"):
        assert row["p50_us"] == pytest.approx(3000) and row["min_us"] == pytest.approx(3000)
        assert np.array(samples) == pytest.approx(np.array([[1e-3] * 4, [3e-3] * 4]))


def test_limit_is_the_copy_of_the_same_iteration(monkeypatch):
    clock = FakeClock()
    copies = clock.call([1.0, 4.0, 9.0])
    monkeypatch.setattr(driver, "_copy_call", lambda size, device: copies)
    row = driver.measure(_stub(clock.call([2.0, 2.0, 2.0])), Groups.single(), Loop(3, 0, 0), clock).rows[0]
    assert row.limit == pytest.approx(2.0)


def everything(groups, skew):
    setting = exchanges.Setting(groups.world, groups.control, 7, skew)
    loop, rows = Loop(1, 0, 2), []
    ops = collectives.OPS if skew == "uniform" else ("all-to-all", "dispatch", "combine")
    for op in ops:
        for size in (0, 1, 5001, 70_000):
            exchange = collectives.of_size(setting, groups, op, size, torch.bfloat16)
            assert op == "control" or exchange.bytes <= size, (op, size, exchange.bytes)
            rows += driver.measure(exchange, groups, loop).rows
    return [asdict(row) for row in rows]


@pytest.mark.parametrize("skew", routes.SKEWS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_op_is_right_at_every_size(ranks, world, skew):
    for answers in ranks.run(Topology(world, 1, world), "test_bench:everything", skew=skew):
        assert {row["transport"] for row in answers} >= ({"c10d"} if world > 1 else set())
        for row in answers:
            assert row["wrong"] == 0, row
            assert row["ranks"] == world
            assert (row["limit"] is None) == (world == 1 or row["bytes"] == 0), row
            if skew == "empty":
                assert row["bytes"] == 0


def _shifted(x):
    if isinstance(x, bytes):
        return x[1:] + x[:1]
    if isinstance(x, dict):
        return {name: part.roll(1) for name, part in x.items()}
    if isinstance(x, list):
        return [[row[-1], *row[:-1]] for row in x]
    if isinstance(x, torch.Tensor):
        return x.reshape(-1).roll(1).view(x.shape)
    return replace(x, **{name: part.roll(1) for name, part in vars(x).items() if isinstance(part, torch.Tensor)})


def planted(groups):
    """Elements found wrong by op and fault, over all ranks."""
    setting, seen = exchanges.Setting(groups.world, groups.control, 3, peers=True), {}
    for op in collectives.OPS:
        exchange = collectives.of_size(setting, groups, op, 200_000, torch.bfloat16)
        for name, call in exchange.calls.items():
            for fault in ("none", "shifted", "stale"):
                inputs = [exchange.fill(epoch) for epoch in (0, 1)]
                call.ready(inputs[1 - (fault == "stale")])
                got = call.run(inputs[1 - (fault == "stale")])
                got = _shifted(got) if fault == "shifted" else got
                seen[f"{op} {name} {fault}"] = exchange.wrong(got, 1)
    return seen


def test_planted_faults_are_counted(ranks):
    for answer in ranks.run(Topology(2, 1, 2), "test_bench:planted"):
        assert len(answer) >= 3 * len(collectives.OPS)
        for name, wrong in answer.items():
            assert (wrong == 0) == name.endswith("none"), (name, wrong)


def swapped(groups):
    """Sources in the other order, one element changed: each is counted."""
    setting = exchanges.Setting(groups.world, groups.control, 3)
    exchange = exchanges.gather(setting, "all-gather", 10, 4, torch.float32)
    good = next(iter(exchange.calls.values())).run(exchange.fill(1))
    other = good.clone()
    other[3, 2] = 0
    return [exchange.wrong(good, 1), exchange.wrong(torch.cat(good.split(10)[::-1]), 1), exchange.wrong(other, 1)]


def test_swapped_sources_are_counted(ranks):
    assert ranks.run(Topology(2, 1, 2), "test_bench:swapped") == [[0, 80, 1]] * 2


def faulty_run(groups):
    """`run` where the gather gives wrong rows on rank 1 alone."""
    real = exchanges.all_gather_rows

    def broken(x, group, *, stage, out):
        out = real(x, group, stage=stage, out=out)
        return torch.zeros_like(out) if groups.rank == 1 else out

    flags = SimpleNamespace(json=None, seed=0)
    plan = collectives.Plan(("all-gather",), (4096,), "float32", None, "uniform", Loop(1, 0, 1), False, None, None)
    exchanges.all_gather_rows = broken
    try:
        collectives.run(plan, flags, groups)
    except TransportError as problem:
        return str(problem)
    finally:
        exchanges.all_gather_rows = real


def test_wrong_elements_are_an_error_on_every_rank(ranks):
    for text in ranks.run(Topology(2, 1, 2), "test_bench:faulty_run"):
        assert re.search(r"wrong elements: \d+ of all-gather at 4096 bytes over (local|torch)", text)


def test_origins_differ_in_everything_that_they_name():
    origin = Origin(1, "world")
    base = origin.bits(0, 0, 0, 4096, torch.float32)
    others = [
        Origin(2, "world").bits(0, 0, 0, 4096, torch.float32),
        Origin(1, "tp").bits(0, 0, 0, 4096, torch.float32),
        origin.bits(1, 0, 0, 4096, torch.float32),
        origin.bits(0, 1, 0, 4096, torch.float32),
        origin.bits(0, 0, 1, 4097, torch.float32),
    ]
    for other in others:
        assert driver.differing(other, base) > 4090
    for dtype in (torch.uint8, torch.bfloat16, torch.float64):
        whole = origin.bits(0, 0, 0, 100, dtype)
        assert driver.differing(origin.bits(0, 0, 13, 77, dtype), whole[13:77]) == 0
    sums = sum(origin.small(0, source, 0, 1000, torch.int8, 16).int() for source in range(16))
    assert 0 < int(sums.max()) <= 127


def test_differing_counts_bits_and_shapes():
    nan = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert driver.differing(nan, nan) == 0
    assert driver.differing(nan, nan.flip(0)) == 2
    assert driver.differing(torch.tensor([0.0]), torch.tensor([-0.0])) == 1
    assert driver.differing(nan[:1], nan) == 2 and driver.differing(torch.zeros(3), torch.zeros(0)) == 1


def test_patterns_and_routes():
    assert routes.pattern("uniform", 2, 3) == [[3, 3], [3, 3]]
    assert routes.pattern("hot", 3, 2) == [[2, 0, 0]] * 3
    assert routes.pattern("one", 2, 2) == [[2, 2], [0, 0]]
    assert routes.pattern("empty", 2, 2) == [[0, 0], [0, 0]]
    assert [routes.busiest(routes.pattern(skew, 4, 5)) for skew in routes.SKEWS] == [20, 20, 20, 0]
    with pytest.raises(ValueError, match="skew is 'steep', allowed: uniform"):
        routes.pattern("steep", 2, 1)
    made = routes.Routes.make("uniform", 4, 16, 256, 6)
    assert made.counts() == [[24] * 4] * 4
    assert all(len(set(chosen)) == 6 for chosen in made.indices[2].tolist())
    assert routes.Routes.make("hot", 4, 16, 256, 6).counts() == [[96, 0, 0, 0]] * 4


# Hand-computed for the deployment point: tp 4, ep 16, dp 4; 64 requests of 8 rows a group, so 128 rows a rank.
DECODE = {
    "gather kv": (2, 128 * 1024, 128 << 10),
    "gather hca": (20, 128 * 5 * 1024, 640 << 10),
    "gather csa-aux": (21, 128 * 3 * 1024, 384 << 10),
    "gather csa-main": (21, 128 * 8 * 1024, 1 << 20),
    # 128 rows of 8 groups x 4096 in BF16: a quarter to each of 4 ranks.
    "publish heads": (43, 128 * 2 * 4096 * 2, 2 << 20),
    # FP32 partials, twice the 4 MiB that the BF16 form has in all.
    "reduce partials": (43, 128 * 4096 * 4, 2 << 20),
    "dispatch": (43, 128 * 4096, 512 << 10),
    "combine": (43, 128 * 8192, 1 << 20),
    "gather asked": (1, 128 * 8192, 1 << 20),
    # 512 rows x 32,320 x 4 bytes = 63.1 MiB in all, a quarter to each.
    "logits": (1, 128 * 32320 * 4, 16_547_840),
}


def test_decode_preset_at_the_deployment_point():
    found = {p.name: p for p in presets.exchanges("decode", flash(), Topology(16, 4, 16))}
    agreement = found.pop("agreement")
    assert (agreement.rows, agreement.columns, agreement.calls) == (1, len(HEADER) + 16 * told_length(7), 1)
    assert list(found) == list(DECODE)
    for name, (calls, size, again) in DECODE.items():
        assert (found[name].calls, found[name].rows * found[name].row_bytes) == (calls, size) == (calls, again), name
    lanes = {name: p.columns for name, p in found.items() if name.startswith("gather ") and p.op != "all-gather"}
    assert lanes == {"gather kv": 512, "gather hca": 2560, "gather csa-aux": 1536, "gather csa-main": 4096}
    received = sum(3 * p.calls * p.rows * p.row_bytes for p in found.values() if p.op in collectives.PAYLOAD_OPS)
    assert received / MIB == 3 / 4 * (2 * 0.5 + 20 * 2.5 + 21 * 5.5)
    routed_bytes = routes.busiest(routes.Routes.make("uniform", 16, 128, 256, 6).counts()) * (4096 + routed.AUX_BYTES)
    assert routed_bytes == 768 * 4112


def test_prefill_preset_gathers_weights():
    found = {p.name: p for p in presets.exchanges("prefill", flash(), Topology(16, 4, 16))}
    assert "publish heads" not in found
    # wo_a: [8192, 4096] BF16, 64 MiB; wo_b: [4096, 8192] INT8, 32 MiB; a shard is a quarter, 24 MiB together.
    shards = [found[name].rows * found[name].row_bytes for name in ("weights wo_a", "weights wo_b")]
    assert shards == [16 * MIB, 8 * MIB] and found["weights wo_a"].calls == 43
    assert found["gather csa-main"].rows == found["dispatch"].rows == 2048
    assert (found["gather asked"].rows, found["logits"].columns) == (16, 32320)


def test_draft_preset_follows_the_stages():
    found = {p.name: p for p in presets.exchanges("draft", flash_dspark(), Topology(16, 4, 16))}
    context = found.pop("gather context rows")
    assert {p.calls for name, p in found.items() if name not in ("gather asked", "logits")} == {3}
    width = draft_payload(flash_dspark(), numerics("w8a8")).width
    assert (context.rows, context.columns, context.calls) == (128, width, 1)
    assert found["publish heads"].rows == 16 * DraftShape(7, 7, 16).padded_rows
    assert found["dispatch"].rows == found["logits"].rows == 112


def test_presets_at_other_topologies():
    assert presets.exchanges("decode", flash(), Topology(1, 1, 1)) == ()
    alone = [p.name for p in presets.exchanges("decode", flash(), Topology(4, 1, 4))]
    assert alone == ["agreement", "dispatch", "combine"]
    # 6 output groups over 3 ranks: [0, 2) is no branch of the tree, so both partials travel.
    config = replace(flash(), o_groups=6, num_attention_heads=48, n_routed_experts=255, vocab_size=129000)
    found = {p.name: p for p in presets.exchanges("decode", config, Topology(3, 3, 3))}
    assert found["reduce partials"].columns == 2 * 4096
    with pytest.raises(ValueError, match="preset is 'verify', allowed: decode"):
        presets.exchanges("verify", flash(), Topology())
    with pytest.raises(ValueError, match="o_groups % tp must be 0"):
        presets.exchanges("decode", flash(), Topology(3, 3, 3))


def small_preset(groups):
    """A preset's exchanges as they are measured, of a small model."""
    from meshspark.models.v4.config import tiny

    setting = exchanges.Setting(groups.tp, groups.control, config=tiny())
    plans = presets.exchanges("decode", tiny(), groups.topology)
    rows = []
    for plan in plans:
        plan = replace(plan, rows=min(plan.rows, 8))
        at = replace(setting, group=getattr(groups, plan.group))
        rows += driver.measure(collectives.planned(at, groups, plan), groups, Loop(1, 0, 1)).rows
    return [asdict(row) for row in rows]


def test_planned_exchanges_are_right(ranks):
    for rows in ranks.run(Topology(2, 2, 2), "test_bench:small_preset"):
        names = [p.name for p in presets.exchanges("decode", flash(), Topology(2, 2, 2))]
        assert list(dict.fromkeys(row["op"] for row in rows)) == names
        assert all(row["wrong"] == 0 and row["calls_per_step"] for row in rows)
