"""The engine under load: requests that come and go over time, budgets of every size, prefixes that are shared.

The oracle is each request run alone, on one rank, from cold caches, in one call for its prompt.
"""

import random
import re
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from episodes import make_model, permute_pages, single_model
from rank_pool import RankPools

from meshspark.launch.engine import Engine
from meshspark.launch.schedule import fair_shares
from meshspark.layouts.rows import RequestRows
from meshspark.models.dspark.step import Told
from meshspark.models.request import SamplingParams
from meshspark.models.v4.caches import Caches, poison
from meshspark.models.v4.pools import CacheShape
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

MODE, CONTEXT, REQUESTS = "float32", 720, 24


@dataclass(frozen=True)
class Arrival:
    """A request of the traffic: when it comes, and after how many tokens it is cancelled (0: never)."""

    step: int
    prompt: list[int]
    params: SamplingParams
    cancel_after: int = 0


@cache
def traffic() -> tuple[Arrival, ...]:
    """Lengths 1 to 700, some with a common beginning, greedy and sampled, some cancelled, arriving over time."""
    draw = random.Random(11)
    stem = [draw.randrange(2, 264) for _ in range(300)]
    lengths = [1, 700, 2, 3, 4, 5, 31, 32, 33, 127, 128, 129, 257, 300, 16, 64, 90, 140, 200, 7, 45, 260, 130, 20]
    arrivals = []
    for number, length in enumerate(lengths):
        own = [draw.randrange(2, 264) for _ in range(length)]
        prompt = (stem[: length - 1] + own)[:length] if number % 2 else own
        params = SamplingParams(
            3 + number % 7,
            temperature=0.0 if number % 3 else 0.8,
            top_p=0.9,
            seed=100 + number,
            top_k=(0, 5)[number % 2],
            min_p=(0.0, 0.02)[number % 4 == 0],
        )
        # Those with the common beginning come when the first of them has published it, whatever the budget.
        later = 60 if number % 2 and number > 8 else 0
        step = draw.randrange(40) + later
        arrivals.append(Arrival(step, prompt, params, cancel_after=2 if number in (5, 12) else 0))
    return tuple(arrivals)


def serve_traffic(engine: Engine, arrivals: tuple[Arrival, ...]) -> list[list]:
    """All requests to their ends on world rank 0 -> [ids, finish reason] in order."""
    results: list[list] = [[[], None] for _ in arrivals]
    numbers: dict[int, int] = {}
    step = 0
    while step <= max(a.step for a in arrivals) or engine.active:
        for place, arrival in enumerate(arrivals):
            if arrival.step == step:
                numbers[engine.add_request(arrival.prompt, arrival.params)] = place
        step += 1
        if not engine.active:
            continue
        for event in engine.step():
            place = numbers[event.request_id]
            results[place][0] += event.token_ids
            results[place][1] = event.finish_reason or results[place][1]
            wanted = arrivals[place].cancel_after
            if wanted and len(results[place][0]) >= wanted and event.finish_reason is None:
                engine.cancel(event.request_id)
        engine.caches.check_integrity()
    return results


@cache
def alone() -> tuple[list, ...]:
    """Each request by itself."""
    model, results = single_model("tiny", MODE), []
    for arrival in traffic():
        engine = Engine(model, requests=1, max_context=CONTEXT, prefill_rows=CONTEXT, prefix_points=0)
        results.append(serve_traffic(engine, (Arrival(0, arrival.prompt, arrival.params),))[0])
    return tuple(results)


def drive(groups: Groups, budget: int, requests: int, points: int) -> dict | None:
    """The traffic on a mesh; pages are permuted and poisoned first, differently on every rank."""
    engine = Engine(
        make_model(groups, "tiny", MODE),
        requests=requests,
        max_context=CONTEXT,
        prefill_rows=budget,
        prefix_points=points,
    )
    permute_pages(engine.caches, groups.rank)
    poison(engine.caches)
    if not engine.is_front:
        engine.serve()
        engine.caches.check_integrity()
        return None
    results = serve_traffic(engine, traffic())
    metrics = engine.metrics()
    engine.close()
    return {"results": results, "metrics": metrics}


def check(got: dict, points: int) -> None:
    for arrival, (ids, reason), (want, want_reason) in zip(traffic(), got["results"], alone(), strict=True):
        if arrival.cancel_after:
            assert reason == "cancelled" and ids == want[: len(ids)] and len(ids) >= arrival.cancel_after
        else:
            assert (ids, reason) == (want, want_reason)
    assert got["metrics"]["prefix"]["hits"] > 0 if points else got["metrics"]["prefix"]["hits"] == 0
    assert got["metrics"]["time_to_first_token"]["count"] == REQUESTS


SIZES = [(1, 1, 1), (2, 2, 2), (4, 2, 4), (4, 1, 4)]
BUDGETS = [16, 32, 512]
PAIRS = {((1, 1, 1), 16), ((2, 2, 2), 32), ((4, 2, 4), 512), ((4, 1, 4), 16), ((1, 1, 1), 512), ((4, 2, 4), 32)}


@pytest.mark.parametrize(
    "sizes,budget",
    [
        pytest.param(s, b, marks=() if (s, b) in PAIRS else pytest.mark.slow, id=f"{s[0]}{s[1]}{s[2]}-{b}")
        for s in SIZES
        for b in BUDGETS
    ],
)
def test_company_arrival_and_topology_change_no_token(
    ranks: RankPools, sizes: tuple[int, int, int], budget: int
) -> None:
    topology, points = Topology(*sizes), 0 if budget == 32 else 12
    got = ranks.run(topology, "test_serving:drive", timeout=280, budget=budget, requests=6, points=points)[0]
    check(got, points)


def count_calls(groups: Groups, steps: int) -> list[list[int]] | None:
    """A seeded mix of work, idle groups and idle times; after every step, the calls of each group so far."""
    engine = Engine(make_model(groups, "tiny", MODE), requests=2, max_context=128, prefill_rows=8)
    counted, named = [], (groups.control, groups.tp, groups.ep)
    if not engine.is_front:
        while not engine.closed:
            engine.step()
            counted.append([group.sequence for group in named])
        return counted
    draw = random.Random(5)
    for _ in range(steps):
        if draw.random() < 0.12:
            engine.add_request([2 + draw.randrange(200) for _ in range(draw.randint(1, 20))], SamplingParams(4))
        engine.step()
        counted.append([group.sequence for group in named])
    engine.close()
    counted.append([group.sequence for group in named])
    return counted


@pytest.mark.parametrize("sizes", [(4, 2, 4), (4, 1, 2)])
def test_idle_groups_make_every_call(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    topology = Topology(*sizes)
    counted = ranks.run(topology, "test_serving:count_calls", timeout=200, steps=200)
    assert [len(one) for one in counted] == [201] * topology.world
    # Every group of the world counts the same calls: also those of different tp groups and expert blocks.
    assert all(one == counted[0] for one in counted)
    assert counted[0][-1][2] > counted[0][0][2]


@pytest.mark.parametrize("shared", [128, 256, 384])
def test_a_hit_is_a_cold_run(shared: int) -> None:
    """Logits and everything a later step can read, bit for bit; the page's other users come and go meanwhile."""
    model, draw = single_model("tiny", MODE), random.Random(shared)
    first = [draw.randrange(2, 264) for _ in range(400)]
    second = first[:shared] + [draw.randrange(2, 264) for _ in range(37)]
    cold, warm = (model.make_caches(CacheShape(3, 500, 512, prefix_points=points)) for points in (0, 8))
    for caches in (cold, warm):
        permute_pages(caches, shared)
        poison(caches)
    want = _run_tokens(cold, 0, second, 0)
    assert warm.admit(0, 500, first) == 0
    _run_tokens(warm, 0, first, 0, admitted=True)
    assert warm.admit(1, 500, second) == shared
    assert warm.admit(2, 500, second) == shared
    warm.release(0)
    warm.release(2)
    for name, pages in warm.pages.items():
        warm.pools[name].unflatten(1, (-1, warm.tables[name].page))[:, pages.free] = float("nan")
    got = _run_tokens(warm, 1, second, shared, admitted=True)
    assert torch.equal(got, want[-len(got) :]) and len(got) == 37
    for family, rows in cold.dump(0, len(second)).items():
        assert torch.equal(rows, warm.dump(1, len(second))[family]), family
    warm.check_integrity()


def _run_tokens(caches: Caches, slot: int, tokens: list[int], start: int, admitted: bool = False) -> torch.Tensor:
    model = single_model("tiny", MODE)
    if not admitted:
        caches.admit(slot, 500)
    rows = RequestRows(slot, start, tokens[start:], asked=range(len(tokens) - start))
    with torch.no_grad():
        logits = model.forward(model.plan([rows], caches), caches).logits
    caches.commit(slot, tokens, len(tokens))
    assert logits is not None
    return logits


def test_an_engine_hits_what_it_wrote_itself() -> None:
    """Prompt and output of one request are the beginning of the next: a conversation."""
    model, draw = single_model("tiny", MODE), random.Random(2)
    engine = Engine(model, requests=2, max_context=CONTEXT, prefill_rows=64)
    prompt = [draw.randrange(2, 264) for _ in range(120)]
    answer = serve_traffic(engine, (Arrival(0, prompt, SamplingParams(20)),))[0][0]
    again = Arrival(0, prompt + answer + [5, 6], SamplingParams(6))
    warm = serve_traffic(engine, (again,))
    cold = serve_traffic(Engine(model, requests=1, max_context=CONTEXT, prefix_points=0), (again,))
    assert warm == cold
    metrics = engine.metrics()
    assert metrics["prefix"] == {"hits": 1, "tokens": 128}
    assert all(pool["used"] <= pool["peak"] <= pool["pages"] for pool in metrics["pools"].values())


def test_what_does_not_fit_waits_and_what_never_fits_is_refused() -> None:
    model = single_model("tiny", MODE)
    with pytest.raises(ValueError, match="cache budget is 1 bytes, allowed: ") as refused:
        Engine(model, requests=4, max_context=512, prefill_rows=64, cache_bytes=1, prefix_points=0)
    least = int(re.findall(r"\d[\d,]*", str(refused.value))[1].replace(",", ""))
    engine = Engine(model, requests=4, max_context=512, prefill_rows=64, cache_bytes=least, prefix_points=0)
    with pytest.raises(ValueError, match="513 positions, allowed: max_context 512"):
        engine.add_request([5] * 500, SamplingParams(13))
    arrivals = tuple(Arrival(0, [3 + i] * 300, SamplingParams(3)) for i in range(4))
    most_running, numbers = 0, [engine.add_request(a.prompt, a.params) for a in arrivals]
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.active:
        for event in engine.step():
            ids[event.request_id] += event.token_ids
        most_running = max(most_running, len(engine.requests))
        engine.caches.check_integrity()
    assert most_running == 1, "the pools hold one context of 512 positions, and 303 take three of its four blocks"
    for arrival, number in zip(arrivals, numbers, strict=True):
        single = Engine(model, requests=1, max_context=512, prefix_points=0)
        assert serve_traffic(single, (arrival,))[0][0] == ids[number]


def test_a_long_prompt_does_not_keep_others_waiting() -> None:
    engine = Engine(single_model("tiny", MODE), requests=4, max_context=CONTEXT, prefill_rows=32)
    long = engine.add_request([7] * 600, SamplingParams(2))
    engine.step()
    short = [engine.add_request([9] * 12, SamplingParams(8)) for _ in range(2)]
    ends = []
    while engine.active:
        ends += [event.request_id for event in engine.step() if event.finish_reason]
    assert ends == [*short, long]


def test_shares_are_fair_and_nothing_is_lost() -> None:
    draw = random.Random(1)
    for _ in range(300):
        wanted = [draw.randint(1, 60) for _ in range(draw.randint(1, 7))]
        budget = draw.randint(1, 90)
        shares = fair_shares(wanted, budget)
        assert sum(shares) == min(budget, sum(wanted))
        assert all(0 <= share <= most for share, most in zip(shares, wanted, strict=True))
        cut = [share for share, most in zip(shares, wanted, strict=True) if share < most]
        assert not cut or max(shares) - min(cut) <= 1
    assert fair_shares([500, 20], 64) == [44, 20]
    assert fair_shares([5, 5, 5], 2) == [1, 1, 0]


def test_news_of_an_earlier_lease_of_a_seat_are_not_taken() -> None:
    engine = Engine(single_model("tiny", MODE), requests=1, max_context=64)
    for prompt in ([5, 6], [7, 8]):
        number = engine.add_request(prompt, SamplingParams(3))
        engine.step()
        request = engine.requests[number]
        late = Told(request.slot, request.generation - 1, 1, (9,))
        assert engine._apply((request.dp_rank, request.slot), late) == []
        assert engine.requests[number].tokens == prompt
        while engine.active:
            engine.step()
    assert request.generation == 2
