"""The engine: requests of any length beside each other, on any topology, give the ids of each one alone."""

import random

import pytest
import torch
from episodes import full_weights, make_model, single_model
from rank_pool import RankPools

from meshspark.comm.logits import return_best
from meshspark.launch.engine import Engine
from meshspark.layouts.rows import RequestRows
from meshspark.models.checkpoint.share import shard_weights
from meshspark.models.numerics import numerics
from meshspark.models.request import SamplingParams
from meshspark.models.sampling import greedy, sample
from meshspark.models.v4.caches import Caches
from meshspark.models.v4.config import PRESETS
from meshspark.models.v4.model import Model, Tap
from meshspark.models.v4.pools import CacheShape
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

MODE = "float32"


def traffic(count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of many lengths, greedy and sampled."""
    draw = random.Random(3)
    requests = []
    for number in range(count):
        prompt = [draw.randrange(2, 264) for _ in range(draw.choice((1, 2, 5, 17, 40, 90)))]
        temperature = 0.0 if number % 3 else 0.9
        requests.append((prompt, SamplingParams(3 + number % 6, temperature, 0.95, seed=number, eos_id=1)))
    return requests


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[list]:
    """All requests to their end -> [ids, finish reason] in order."""
    numbers = [engine.add_request(prompt, params) for prompt, params in requests]
    results: dict[int, list] = {number: [[], None] for number in numbers}
    while engine.active:
        for event in engine.step():
            results[event.request_id][0] += event.token_ids
            results[event.request_id][1] = event.finish_reason or results[event.request_id][1]
    engine.caches.check_integrity()
    return [results[number] for number in numbers]


def alone(requests: list[tuple[list[int], SamplingParams]]) -> list[list]:
    model = single_model("tiny", MODE)
    return [run(Engine(model, requests=1, max_context=128), [request])[0] for request in requests]


def drive(groups: Groups, count: int, gap: bool) -> dict | None:
    """Rank 0 is the front, the others serve; with a gap the ranks go idle and are woken again."""
    engine = Engine(make_model(groups, "tiny", MODE), requests=2 * groups.topology.tp, max_context=128, prefill_rows=24)
    if groups.rank != 0:
        engine.serve()
        return None
    requests = traffic(count)
    first = run(engine, requests[: count // 2] if gap else requests)
    second = run(engine, requests[count // 2 :]) if gap else []
    engine.close()
    return {"results": first + second, "metrics": engine.metrics()}


@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 2, 4), (4, 4, 4)])
def test_ids_do_not_depend_on_company_or_topology(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    got = ranks.run(Topology(*sizes), "test_engine:drive", timeout=150, count=9, gap=sizes[1] == 2)[0]
    assert got["results"] == alone(traffic(9))
    assert got["metrics"]["prefill_rows"] > 0


def test_many_requests_share_few_slots() -> None:
    engine = Engine(single_model("tiny", MODE), requests=2, max_context=128, prefill_rows=8)
    assert run(engine, traffic(9)) == alone(traffic(9))


def test_greedy_follows_the_highest_logit() -> None:
    model = single_model("tiny", MODE)
    prompt = [5, 9, 200]
    ids, reason = run(Engine(model, requests=1, max_context=64), [(prompt, SamplingParams(6))])[0]
    tokens = list(prompt)
    for _ in range(6):
        with torch.no_grad():
            logits = model.forward(model.plan_sequences([tokens], asked="last")).logits
        assert logits is not None
        tokens.append(int(logits.argmax()))
    assert (ids, reason) == (tokens[3:], "length")


def test_end_token_is_not_given_out() -> None:
    model = single_model("tiny", MODE)
    request = ([5, 9, 200], SamplingParams(6))
    ids, _ = run(Engine(model, requests=1, max_context=64), [request])[0]
    for place, token in enumerate(ids):
        if token in ids[:place]:
            continue
        params = SamplingParams(6, eos_id=token)
        got = run(Engine(model, requests=1, max_context=64), [(request[0], params)])[0]
        assert got == [ids[:place], "eos"]


def test_cancel_frees_the_seat_and_leaves_the_others_alone() -> None:
    requests = traffic(3)
    engine = Engine(single_model("tiny", MODE), requests=2, max_context=128)
    numbers = [engine.add_request(prompt, params) for prompt, params in requests]
    engine.step()
    engine.cancel(numbers[0])
    engine.cancel(numbers[0])
    seen: dict[int, list] = {number: [[], None] for number in numbers}
    while engine.active:
        for event in engine.step():
            seen[event.request_id][0] += event.token_ids
            seen[event.request_id][1] = event.finish_reason or seen[event.request_id][1]
    assert seen[numbers[0]][1] == "cancelled"
    assert [seen[n] for n in numbers[1:]] == alone(requests[1:])
    assert all(free > 0 for free in engine.caches.free_pages().values())
    engine.caches.check_integrity()


def test_a_broken_row_ends_its_request_with_an_error_not_with_token_zero() -> None:
    model = make_model(Groups.single(), "tiny", MODE)
    model.embed = model.embed.clone()
    model.embed[77] = float("nan")
    engine = Engine(model, requests=2, max_context=64)
    good = ([5, 9, 200], SamplingParams(4))
    assert run(engine, [([77], SamplingParams(4)), good]) == [[[], "error"], alone([good])[0]]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt"),
        ([264], {}, "not allowed"),
        ([1] * 60, {"max_new_tokens": 10}, "max_context 64"),
    ],
)
def test_what_cannot_run_is_refused(prompt: list[int], params: dict, message: str) -> None:
    engine = Engine(single_model("tiny", MODE), requests=1, max_context=64)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, SamplingParams(**params))


@pytest.mark.parametrize("field", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"seed": -1}])
def test_sampling_params_name_what_is_wrong(field: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        SamplingParams(**field)


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).repeat(20000, 1)
    generator = torch.Generator().manual_seed(1)
    draws = torch.rand(20000, generator=generator, dtype=torch.float64)
    ones = torch.ones(20000)
    ids = sample(logits, ones, ones, draws)
    want = torch.softmax(logits[0].double(), dim=0)
    seen = torch.bincount(ids, minlength=4) / 20000
    assert (seen - want).abs().max() < 0.015
    nucleus = sample(logits, ones, 0.6 * ones, draws)
    assert set(nucleus.tolist()) == {2}
    assert set(sample(logits, ones, 0.7 * ones, draws).tolist()) == {1, 2}
    assert set(sample(logits, 0 * ones, ones, draws).tolist()) == {2}


def test_greedy_ties_go_to_the_lowest_id_and_rows_that_are_not_finite_to_none() -> None:
    inf = float("inf")
    rows = torch.tensor([[1.0, 3, 3], [-2.0, -2, -2], [0, float("nan"), 9], [0, inf, inf], [-inf, -inf, 0], [-inf] * 3])
    want = [1, 0, -1, -1, -1, -1]
    assert greedy(rows).tolist() == want
    half = torch.full((6,), 0.5)
    assert sample(rows, half * 0, half, half).tolist() == want
    assert sample(rows, torch.full((6,), 1e-3), half, half * 0).tolist() == want
    ids, _ = return_best(rows, 0, [0] * 6, Groups.single().tp, stage="test")
    assert ids.tolist() == want


def test_what_was_built_for_one_topology_refuses_another() -> None:
    """A shard names both topologies; caches too."""
    config = PRESETS["tiny"]()
    shard = shard_weights(full_weights("tiny", MODE), Topology(2, 1, 2), 1, config)
    with pytest.raises(ValueError, match=r"world=1.*world=2|world=2.*world=1|world 1.*world 2|world 2.*world 1"):
        Model(config, shard, Groups.single(), numerics(MODE))
    model = single_model("tiny", MODE)
    foreign = Caches(config, CacheShape(1, 64, 8), numerics(MODE), Topology(2, 2, 2))
    foreign.admit(0, 64)
    with pytest.raises(ValueError, match="caches"):
        model.forward(model.plan([RequestRows(0, 0, [5], asked=(0,))], foreign), foreign)


def test_a_tap_that_does_not_exist_is_refused() -> None:
    model = single_model("tiny", MODE)
    with pytest.raises(ValueError, match="tap layer is 99"):
        model.forward(model.plan_sequences([[5]]), taps=(Tap(99),))
    with pytest.raises(ValueError, match="tap point"):
        Tap(0, "nonsense")  # type: ignore[arg-type]


def test_a_closed_engine_is_closed() -> None:
    engine = Engine(single_model("tiny", MODE), requests=1, max_context=64)
    for _ in range(2):
        engine.add_request([5, 6], SamplingParams(4))
    engine.step()
    engine.close()
    engine.close()
    assert not engine.active and not engine.requests
    for use in (engine.step, lambda: engine.add_request([5], SamplingParams(1)), lambda: engine.cancel(0)):
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize("prompt", [[1.5], [True], ["5"], [torch.tensor(5)], []])
def test_ids_are_whole_numbers(prompt: list) -> None:
    engine = Engine(single_model("tiny", MODE), requests=1, max_context=64)
    with pytest.raises(ValueError, match="prompt has"):
        engine.add_request(prompt, SamplingParams(1))
