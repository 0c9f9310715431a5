"""The plan against the truth: bytes of real weights and pools, to the byte; buffers as a bound; the verb."""

import json
from dataclasses import replace

import pytest
import torch
from episodes import full_weights, single_model
from plan_cases import DEVICE, settings_of, unique_bytes
from torch.profiler import ProfilerActivity, profile

from meshspark.launch import cli, plan
from meshspark.launch.engine import Engine
from meshspark.launch.plan_data import GIB, make_plan, rank_memory
from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.forms import scale_key
from meshspark.models.checkpoint.share import shard_weights
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.numerics import MODES, W8A8, numerics
from meshspark.models.v4.buffers import step_buffers
from meshspark.models.v4.caches import Caches
from meshspark.models.v4.config import PRESETS, flash, flash_dspark
from meshspark.models.v4.estimate import Device, step_times, step_work, whole
from meshspark.models.v4.pools import engine_shape
from meshspark.models.v4.sizing import (
    POOLS,
    CacheWish,
    fitting_requests,
    held_weights,
    plan_pools,
    weight_parts,
    worst_routes,
)
from meshspark.models.v4.traffic import even_load
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

# weights


@pytest.mark.parametrize(("preset", "sizes"), [("tiny", (1, 1, 1)), ("tiny", (4, 2, 4)), ("tiny", (8, 2, 4)),
                                               ("tiny-thirds", (6, 3, 6)), ("tiny-thirds", (3, 1, 3))])  # fmt: skip
def test_weights_are_those_that_a_rank_holds(preset: str, sizes: tuple[int, int, int]) -> None:
    config, topology = PRESETS[preset](), Topology(*sizes)
    for mode in MODES:
        for rank in range(topology.world):
            share = shard_weights(full_weights(preset, mode), topology, rank, config)
            parts = weight_parts(config, topology, numerics(mode), rank=rank)
            assert sum(parts.values()) == unique_bytes(share.values()), (mode, rank)
            for name, held in held_weights(config, topology, numerics(mode), rank=rank).items():
                scale = share.get(scale_key(name))
                assert held.num_bytes == share[name].nbytes + (0 if scale is None else scale.nbytes), name


def test_drafter_is_counted_where_it_is_planned() -> None:
    config = replace(PRESETS["tiny"](), draft_ratios=(0, 0))
    whole_model = random_weights(config, 1, numerics("float32"), draft=True)
    parts = weight_parts(config, Topology(), numerics("float32"), draft=True)
    assert sum(parts.values()) == sum(t.nbytes for t in whole_model.values())
    assert parts["draft"] == sum(t.nbytes for name, t in whole_model.items() if name.startswith("mtp."))
    assert "draft" not in weight_parts(config, Topology(), numerics("float32"))


def test_flash_in_int8() -> None:
    """INT8 codes are half of BF16, a scale per output channel comes on top; what stays wide is as it was."""
    topology = Topology(16, 4, 16)
    bf16, int8 = (held_weights(flash(), topology, MODES[mode]) for mode in ("bfloat16", "w8a8"))
    experts = "layers.5.ffn.experts.w2.weight"
    assert int8[experts].num_bytes == 16 * (4096 * 2048 + 4 * 4096)
    assert bf16[experts].num_bytes == 16 * 4096 * 2048 * 2
    wo_b = "layers.0.attn.wo_b.weight"
    assert int8[wo_b].num_bytes == 4096 * 2048 + 4 * 4096
    for same in ("layers.0.attn.wo_a.weight", "layers.3.attn.wkv.weight", "layers.4.ffn.gate.weight", "embed.weight"):
        assert int8[same].num_bytes == bf16[same].num_bytes, same
    assert int8["head.weight"].num_bytes == 129280 // 4 * 4096 * 2


# pools


@pytest.mark.parametrize("mode", sorted(MODES))
def test_pools_are_those_that_an_engine_allocates(mode: str) -> None:
    for batch, context, rows, points, block in [(1, 1, 1, 0, 32), (5, 300, 24, None, 32), (3, 512, 200, 2, 64)]:
        settings = settings_of(
            "tiny", (1, 1, 1), mode, batch=batch, context=context, prefill_rows=rows, prefix_points=points,
            block_size=block,
        )  # fmt: skip
        engine = Engine(
            single_model("tiny", mode), requests=batch, max_context=context, prefill_rows=rows, prefix_points=points,
            block_size=block,
        )  # fmt: skip
        planned = rank_memory(settings)["pools"]
        assert tuple(planned) == POOLS
        assert {k: v for k, v in planned.items() if v} == {k: p.nbytes for k, p in engine.caches.pools.items()}


def test_pools_of_a_budget_are_the_engines() -> None:
    for budget in (2 << 20, 3 << 20, 50 << 20):
        engine = Engine(
            single_model("tiny", "float32"), requests=5, max_context=512, prefill_rows=32, cache_bytes=budget
        )
        settings = settings_of("tiny", (1, 1, 1), cache_bytes=budget)
        pools = rank_memory(settings)["pools"]
        assert {k: v for k, v in pools.items() if v} == {k: p.nbytes for k, p in engine.caches.pools.items()}
        assert sum(pools.values()) <= budget
    with pytest.raises(ValueError, match="the cache budget is 1,000 bytes, allowed"):
        rank_memory(settings_of("tiny", (1, 1, 1), cache_bytes=1000))


def test_one_request_at_the_ceiling() -> None:
    """deployment.md 4: 6,229 bytes of full history per token in INT8 rows, 6.08 GiB at 1,048,576 positions."""
    wish = CacheWish(requests=1, max_context=1 << 20, prefill_rows=512, verify_rows=8)
    full = ("csa_kv", "csa_index", "hca_kv")
    for mode, per_token in (("w8a8", 21 * (1024 + 132) / 4 + 20 * 8), ("bfloat16", 21 * (1024 + 256) / 4 + 20 * 8)):
        pools = plan_pools(flash(), MODES[mode], wish)
        assert sum(pools[name].num_bytes for name in full) == per_token * (1 << 20)
        assert pools["draft_kv"].num_bytes == 0
        assert sum(pool.num_bytes for pool in pools.values()) < 1.04 * per_token * (1 << 20)


def test_keys_of_the_drafter() -> None:
    wish = CacheWish(requests=64, max_context=1 << 20, prefill_rows=512, verify_rows=8, gamma=7)
    pools = plan_pools(flash_dspark(), W8A8, wish)
    draft, window = pools["draft_kv"], pools["window_kv"]
    assert (draft.page_bytes, window.page_bytes) == (3 * 32 * 1024, 43 * 32 * 1024)
    assert window.pages == draft.pages, "127 rows and 128 rows span as many pages; block rows take none"
    least = replace(wish, cache_bytes=sum(p.num_bytes for p in plan_pools(flash_dspark(), W8A8, wish).values()))
    assert plan_pools(flash_dspark(), W8A8, least)["draft_kv"] == draft


@pytest.mark.parametrize("preset", ["tiny-dspark", "tiny-mtp"])
@pytest.mark.parametrize("mode", ["float32", "w8a8"])
@pytest.mark.parametrize("block_size", [4, 32])
def test_caches_with_a_drafter_are_planned_byte_for_byte(preset: str, mode: str, block_size: int) -> None:
    config = PRESETS[preset]()
    sizes = {"requests": 3, "max_context": 640, "prefill_rows": 70, "verify_rows": 6, "prefix_points": 2}
    wish = CacheWish(**sizes, block_size=block_size, gamma=5)
    free = sum(pool.num_bytes for pool in plan_pools(config, MODES[mode], wish).values())
    for budget in (None, free, free - 1):
        pools = plan_pools(config, MODES[mode], replace(wish, cache_bytes=budget))
        shape = engine_shape(
            config, MODES[mode], **sizes, block_size=block_size, cache_bytes=budget,
            draft_stages=len(config.draft_ratios),
        )  # fmt: skip
        made = Caches(config, shape, MODES[mode], Topology())
        assert {name: pool.num_bytes for name, pool in pools.items()} == {
            name: pool.nbytes for name, pool in made.pools.items()
        }
        assert budget is None or sum(pool.num_bytes for pool in pools.values()) <= budget
        least = len(config.draft_ratios) * config.head_dim * MODES[mode].kv.itemsize * config.sliding_window
        assert pools["draft_kv"].num_bytes >= 3 * least


def test_fitting_requests_are_the_most() -> None:
    config, mode = PRESETS["tiny"](), numerics("float32")
    wish = CacheWish(requests=1, max_context=512, prefill_rows=32)
    for room in (0, 10**6, 5 * 10**6, 10**8):
        most = fitting_requests(config, mode, wish, room)

        def size(requests: int) -> int:
            shape = engine_shape(config, mode, requests=requests, max_context=512, prefill_rows=32)
            pools = plan_pools(config, mode, replace(wish, requests=requests))
            assert {n: p.pages for n, p in pools.items() if p.pages} == dict(shape.pages or {})
            return sum(pool.num_bytes for pool in pools.values())

        assert most == 0 or size(most) <= room
        assert size(most + 1) > room


# working memory


def measured_peak(model, rows: list[RequestRows], shape) -> int:
    """Most bytes that a step had allocated at once."""
    caches = model.make_caches(shape)
    for row in rows:
        caches.admit(row.slot, shape.max_context)
    planned = model.plan(rows, caches)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        model.forward(planned, caches)
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("wide", "mode"),
    [
        ("attention", "bfloat16"),
        ("experts", "float32"),
        ("experts", "bfloat16"),
        ("streams", "bfloat16"),
        ("vocabulary", "float32"),
        ("attention", "w8a8"),
        ("packed", "w8a8"),
        ("index", "w8a8"),
    ],
)
def test_buffers_bound_what_a_step_holds(wide: str, mode: str) -> None:
    changes = {
        "attention": {},
        "experts": {"moe_intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 16},
        "streams": {"hidden_size": 1024, "head_dim": 16, "num_experts_per_tok": 1},
        "vocabulary": {"vocab_size": 8192},
        # Matrices that are large enough for packed INT8 products.
        "packed": {"hidden_size": 768, "moe_intermediate_size": 768, "n_routed_experts": 6, "head_dim": 16},
        "index": {"index_n_heads": 64, "index_head_dim": 128},
    }[wide]
    config = replace(PRESETS["tiny"](), **changes)
    model = type(single_model("tiny", mode))(
        config, random_weights(config, 1, numerics(mode)), Groups.single(topology=Topology()), numerics(mode)
    )
    shape = engine_shape(config, numerics(mode), requests=9, max_context=256, prefill_rows=96, verify_rows=4)
    verifying = [RequestRows(slot, 0, [5] * 4, 0, "verify", range(4)) for slot in range(8)]
    prompt = RequestRows(8, 0, list(range(96)), 0, "prefill", (95,))
    for rows, load in (
        (verifying, even_load(1, requests=8, rows_each=4, prefill_rows=0)),
        ([*verifying, prompt], even_load(1, requests=8, rows_each=4, prefill_rows=96, prompts_ending=1)),
    ):
        got = measured_peak(model, rows, shape)
        bound = step_buffers(config, Topology(), numerics(mode), load, context=256).peak
        assert got > 0 and got <= bound <= 12 * got, (got, bound)


def test_worst_case_counts_every_row_of_the_block() -> None:
    """64 x 8 + 512 rows in each of 4 groups, six routes each; never more routes of a row than a rank has experts."""
    assert worst_routes(flash(), Topology(16, 4, 16), 1024) == 4 * 1024 * 6
    assert worst_routes(flash(), Topology(64, 4, 16), 1024) == 4 * 1024 * 6
    assert worst_routes(flash(), Topology(128, 1, 128), 1024) == 128 * 1024 * 2
    memory = make_plan(settings_of("tiny", (4, 2, 4)))["worst_case"]
    assert memory["rows"] == 2 * (5 + 32) and memory["routes"] == memory["rows"] * 3
    assert memory["dispatch_bytes"] == memory["routes"] * (64 * 4 + 12)
    assert memory["combine_bytes"] == memory["routes"] * 64 * 4


# rows and time


def test_rows_of_even_loads() -> None:
    point = even_load(4, requests=64, rows_each=8, prefill_rows=512, prompts_ending=1)
    assert (point.local_t, point.rows, point.valid) == (256, 1024, (256,) * 4)
    assert sum(point.asked) == 513
    odd = even_load(4, requests=5, rows_each=3, prefill_rows=2, prompts_ending=1)
    assert (odd.local_t, odd.valid, odd.asked) == (6, (6, 5, 3, 3), (6, 4, 3, 3))
    assert even_load(2, requests=0, rows_each=1, prefill_rows=0).local_t == 0


def test_time_follows_the_rates() -> None:
    """Each term is inverse to its rate, and what is slowest bounds the step."""
    settings = settings_of("tiny", (4, 2, 4))
    load = settings.load("mixed")

    def times(device: Device):
        held = held_weights(settings.config, settings.topology, settings.numerics)
        work = step_work(
            settings.config, settings.topology, settings.numerics, held, load, context=512,
            exchanges=settings.exchanges("mixed"),
        )  # fmt: skip
        return step_times(work, device)

    fast = replace(DEVICE, call_us=0)
    for field, term in (("memory_gbs", "memory"), ("link_gbs", "link"), ("tflops", "arithmetic")):
        slow = replace(fast, **{field: getattr(fast, field) / 1e6})
        for kind, each in times(slow).items():
            base = times(fast)[kind]
            assert getattr(each, term) == pytest.approx(1e6 * getattr(base, term))
        seconds, bound = whole(times(slow))
        assert bound == term and seconds > whole(times(fast))[0]


def test_products_of_a_layer_are_counted_once() -> None:
    """Flash, one rank, one row: 2 operations per weight that a token passes, about 13 billion of them."""
    config = flash()
    held = held_weights(config, Topology(), MODES["bfloat16"])
    load = even_load(1, requests=1, rows_each=1, prefill_rows=0)
    work = step_work(config, Topology(), MODES["bfloat16"], held, load, context=1, exchanges=())
    assert 2 * 12e9 < sum(each.flops for each in work.values()) < 2 * 14e9
    int8 = held_weights(config, Topology(), W8A8)
    work = step_work(config, Topology(), W8A8, int8, load, context=1, exchanges=())
    assert sum(each.int8_ops for each in work.values()) > sum(each.flops for each in work.values())


# the verb


def run_json(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    assert cli.main(["plan", *flags, "--json"]) == 0
    shown = capsys.readouterr()
    assert "memory" in shown.err
    return json.loads(shown.out)


def test_json_of_the_point(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--preset flash-dspark --tp 4 --ep 16 --ranks 16 --context 1048576 --batch 64 --numerics bfloat16"
    data = run_json(capsys, *flags.split(), "--verify-rows", "8", "--prefix-points", "0")
    mine = data["per_rank"]
    assert data["schema"] == 1 and tuple(mine["pools"]) == POOLS
    assert mine["peak"] == mine["weights"] + sum(mine["pools"].values()) + mine["buffers"] + mine["windows"]
    assert sum(mine["weights_by_part"].values()) == mine["weights"]
    assert mine["pools"]["csa_kv"] == 64 * (1 << 18) * 1024 * 21
    assert mine["pools"]["draft_kv"] > 0
    assert data["total"]["weights"] == 16 * mine["weights"]
    rows = {name: step["rows"] for name, step in data["steps"].items()}
    assert [(rows[n]["group"], rows[n]["band"]) for n in ("decode", "prefill", "mixed")] == [
        (512, 128),
        (512, 128),
        (1024, 256),
    ]
    assert data["worst_case"]["routes"] == 4 * 1024 * 6
    gathers = [e for e in data["steps"]["decode"]["ids"]["exchanges"] if (e["kind"], e["stage"]) == ("csa", "gather")]
    assert [(e["calls"], e["bytes"]) for e in gathers] == [(42, 21 * 3 * 128 * (3072 + 8192))]
    # 24 MiB of BF16 heads and partials in 256 rows, 96 MiB of weights, and two more calls of 64 KiB.
    assert data["projection"]["break_even"] == 1026
    for step in data["steps"].values():
        assert step["estimate"]["seconds"] > 0 and step["estimate"]["bound"] in ("memory", "arithmetic", "link")
    assert [row["context"] for row in data["fits"]][-1] == 1 << 20
    counts = [row["requests_per_group"] for row in data["fits"]]
    assert counts == sorted(counts, reverse=True) and 0 < counts[-1] < counts[0]
    assert {(4, 16), (8, 256), (1, 1)} <= {(row["tp"], row["ep"]) for row in data["topologies"]}
    assert data["worlds"][-1]["ranks"] == 4096 and all(row["ranks"] % 16 == 0 for row in data["worlds"])


def test_several_ep_blocks_share_nothing_but_the_agreement(capsys: pytest.CaptureFixture[str]) -> None:
    one, many = (run_json(capsys, "--preset", "tiny", "--tp", "2", "--ep", "4", "--ranks", n) for n in ("4", "32"))
    assert many["topology"]["dp"] == 16
    for part in ("weights", "pools", "buffers"):
        assert one["per_rank"][part] == many["per_rank"][part]
    differing = [
        (a["stage"], b["bytes"] / a["bytes"])
        for a, b in zip(
            one["steps"]["mixed"]["ids"]["exchanges"], many["steps"]["mixed"]["ids"]["exchanges"], strict=True
        )
        if a != b
    ]
    assert differing == [("agreement", 31 / 3)]


def test_no_flags_plan_the_sample(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys)
    assert data["model"] == "the bundled sample" and data["numerics"] == "float32"
    assert data["steps"]["mixed"]["ids"]["calls"] == 0 and data["per_rank"]["windows"] == 0
    assert data["per_rank"]["pools"]["draft_kv"] > 0, "it has a drafter"
    assert run_json(capsys, "--speculative", "none")["per_rank"]["pools"]["draft_kv"] == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--preset flash --context 1048577", "--context is 1048577, allowed: 1 to 1048576"),
        ("--preset flash --tp 3 --ep 16 --ranks 16", "world % tp must be 0"),
        ("--preset flash --tp 16 --ep 16", "o_groups % tp must be 0"),
        ("--preset tiny --batch 0", "--batch is 0, allowed: 1 to"),
        ("--preset tiny --speculative dspark", "--speculative is dspark, which this shape has no drafter for"),
        ("--preset flash-dspark --speculative mtp", "allowed: none, dspark"),
        ("--preset flash-dspark --verify-rows 1", "--verify-rows is 1, allowed: 2"),
        ("--preset flash --link-gbs 0", "--link-gbs is 0.0, allowed"),
        ("--preset flash --device-gib nan", "--device-gib is nan, allowed"),
        ("--preset flash --block-size 48", "--block-size"),
        ("--preset flash --numerics int4", "--numerics"),
        ("--preset tiny --cache-gib 0.0001", "the cache budget is 107,374 bytes, allowed"),
        ("--checkpoint /nowhere", "/nowhere"),
    ],
)
def test_wrong_flags_are_named(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *flags.split()]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out


def test_a_device_too_small_says_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *"--preset tiny --tp 2 --ep 4 --device-gib 0.001".split()]) == 0  # noqa: SIM905
    assert "more than the 0.001 GiB of a device: nothing is left for the pools" in capsys.readouterr().out


def test_defaults_are_the_engines() -> None:
    args = plan.parser().parse_args([])
    settings, _, _ = plan.resolve_plan(args)
    engine = Engine(single_model("tiny", "float32"))
    shape = engine.caches.shape
    wish = settings.wish
    assert (wish.requests, wish.max_context, wish.prefill_rows, wish.block_size, wish.prefix_points) == (
        shape.request_slots,
        shape.max_context,
        engine.prefill_rows,
        shape.block_size,
        shape.prefix_points,
    )
    assert settings.device_gib * GIB == 64 * GIB
