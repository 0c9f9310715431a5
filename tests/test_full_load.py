"""The largest steps: every seat taken, the whole budget of prompt rows, all routes on one rank; and 16 ranks."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from episodes import full_weights, make_model, single_model
from rank_pool import RankPools

from meshspark.launch.engine import Engine
from meshspark.models.checkpoint.share import shard_weights
from meshspark.models.numerics import numerics
from meshspark.models.request import SamplingParams
from meshspark.models.v4.config import tiny
from meshspark.models.v4.model import Model, StepOutput
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

MODE, SEATS, BUDGET = "float32", 4, 24


@cache
def crowded_weights() -> dict[str, torch.Tensor]:
    """Every row of every layer takes experts 0, 1 and 2, which one rank of four holds."""
    weights = dict(full_weights("tiny", MODE))
    for name in [n for n in weights if n.endswith("ffn.gate.bias")]:
        weights[name] = torch.where(torch.arange(len(weights[name])) < 3, 1e4, 0.0).to(weights[name].dtype)
    for name in [n for n in weights if n.endswith("ffn.gate.tid2eid")]:
        weights[name] = torch.tensor([0, 1, 2]).to(weights[name].dtype).expand_as(weights[name]).clone()
    return weights


def crowded_model(groups: Groups) -> Model:
    config = tiny()
    shard = shard_weights(crowded_weights(), groups.topology, groups.rank, config)
    return Model(config, shard, groups, numerics(MODE))


def prompts(count: int) -> list[list[int]]:
    return [[2 + (7 * i + j * j) % 260 for j in range(20 + 9 * (i % 5))] for i in range(count)]


def run_all(engine: Engine, count: int) -> list[list[int]]:
    numbers = [engine.add_request(prompt, SamplingParams(5)) for prompt in prompts(count)]
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.active:
        for event in engine.step():
            ids[event.request_id] += event.token_ids
    return [ids[number] for number in numbers]


def drive_crowded(groups: Groups) -> dict:
    """The front's ids; on every rank, by step, the rows that it sent to the experts 0 to 2 and to others, layer 1."""
    model, sent, forward = crowded_model(groups), [], Model.forward

    def watched(*args: Any, **options: Any) -> StepOutput:
        output = forward(model, *args, **options)
        sent.append([int(output.counts[1][:3].sum()), int(output.counts[1][3:].sum())])
        return output

    model.forward = watched  # type: ignore[method-assign]
    engine = Engine(model, requests=SEATS, max_context=128, prefill_rows=BUDGET)
    ids = []
    if engine.is_front:
        ids = run_all(engine, 3 * SEATS * groups.topology.dp)
        engine.close()
    else:
        engine.serve()
    return {"ids": ids, "sent": sent, "rows": engine.metrics()["most_rows"]}


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 4), (4, 1, 4)])
def test_all_routes_of_a_block_on_one_rank(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    topology = Topology(*sizes)
    got = ranks.run(topology, "test_full_load:drive_crowded", timeout=120)
    single = Engine(crowded_model(Groups.single()), requests=1, max_context=128, prefill_rows=128)
    assert got[0]["ids"] == run_all(single, 3 * SEATS * topology.dp)
    # Most rows of a group in a step: seats that decode beside prompts that take the whole budget.
    assert BUDGET < max(one["rows"] for one in got) <= BUDGET + SEATS
    received = [sum(step) for step in zip(*([a for a, _ in one["sent"]] for one in got), strict=True)]
    assert max(received) >= 3 * topology.dp * BUDGET and not any(other for one in got for _, other in one["sent"])


def drive_sixteen(groups: Groups) -> dict:
    engine = Engine(make_model(groups, "tiny", MODE), requests=SEATS, max_context=96, prefill_rows=64)
    ids = []
    if engine.is_front:
        ids = run_all(engine, 2 * SEATS)
        engine.close()
    else:
        engine.serve()
    return {"ids": ids, "steps": engine.metrics()["steps"]}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sixteen_ranks_at_the_deployment_topology(ranks: RankPools) -> None:
    """World 16, tp 4, ep 16: four groups, one expert a rank."""
    topology = Topology(16, 4, 16)
    got = ranks.run(topology, "test_full_load:drive_sixteen", timeout=300)
    single = Engine(single_model("tiny", MODE), requests=1, max_context=96, prefill_rows=96)
    assert got[0]["ids"] == run_all(single, 2 * SEATS)
    assert all(one["steps"] >= 4 for one in got)


def test_one_request_that_fails_leaves_the_others_alone() -> None:
    """A row of logits that is not finite ends its request as an error; the others write what they always write."""
    config = replace(tiny())
    weights = dict(full_weights("tiny", MODE))
    weights["embed.weight"] = weights["embed.weight"].clone()
    weights["embed.weight"][263] = float("nan")
    model = Model(config, shard_weights(weights, Topology(), 0, config), Groups.single(), numerics(MODE))
    engine = Engine(model, requests=3, max_context=64, prefill_rows=16)
    bad = engine.add_request([5, 263, 7], SamplingParams(5))
    good = [engine.add_request(prompt, SamplingParams(5)) for prompt in ([5, 6, 7], [9, 8])]
    found: dict[int, list] = {number: [[], None, -1] for number in (bad, *good)}
    while engine.active:
        for event in engine.step():
            found[event.request_id][0] += event.token_ids
            found[event.request_id][1:] = [event.finish_reason or found[event.request_id][1], event.rank]
    assert found[bad] == [[], "error", 0]
    clean = Engine(single_model("tiny", MODE), requests=1, max_context=64)
    for number, prompt in zip(good, ([5, 6, 7], [9, 8]), strict=True):
        want: list[int] = []
        clean.add_request(prompt, SamplingParams(5))
        while clean.active:
            want += [token for event in clean.step() for token in event.token_ids]
        assert found[number][:2] == [want, "length"]
