"""Which drafts an engine verifies: policies change what is run, never what a greedy request writes."""

from typing import Any

import pytest
from episodes import make_model, single_model
from rank_pool import RankPools

from meshspark.benchmarks.oracle import OracleProposer, with_chance
from meshspark.launch.engine import Engine
from meshspark.launch.step_costs import step_costs
from meshspark.models.dspark.costs import CostTable
from meshspark.models.dspark.schedule import parse_verify
from meshspark.models.request import SamplingParams
from meshspark.models.v4.model import Model
from meshspark.parallel.groups import Groups
from meshspark.parallel.ownership import first_slots
from meshspark.parallel.topology import Topology

PROMPTS = ([5, 6, 7], [9], [4, 4, 8, 100, 3] * 9, [77] * 20)
NEW = 20
GAMMA = 4
CHEAP = CostTable((1, 20), (100, 120))
"""Rows that cost little beside a step: some drafts pay, whatever this machine is doing."""
POLICIES = ("all", "threshold:0.5", "scheduled", "lagged")


def written(engine: Engine) -> list[list[int]]:
    """What the prompts become, on world rank 0; other ranks serve."""
    if not engine.is_front:
        engine.serve()
        return []
    numbers = [engine.add_request(prompt, SamplingParams(NEW)) for prompt in PROMPTS]
    ids: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.active:
        for event in engine.step():
            ids[event.request_id] += event.token_ids
    engine.close()
    return [ids[number] for number in numbers]


def drafting(model: Model, known: list[list[int]], policy: str, chance: float = 0.6) -> Engine:
    """An engine whose oracle knows the continuations; it looks them up by the slots that seats give."""
    tp = model.groups.topology.tp
    per_rank = -(-len(PROMPTS) // tp)
    slots = first_slots(len(PROMPTS), tp, per_rank)
    tokens = {slot: [*prompt, *ids] for slot, prompt, ids in zip(slots, PROMPTS, known, strict=True)}
    oracle = OracleProposer(GAMMA, tokens, with_chance(chance), model.config.vocab_size, chance)
    return Engine(model, requests=len(PROMPTS), max_context=96, proposer=oracle, verify=parse_verify(policy))


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return written(Engine(single_model("tiny", "float32"), requests=len(PROMPTS), max_context=96))


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_change_rows_and_no_token(policy: str, plain: list[list[int]]) -> None:
    engine = drafting(single_model("tiny", "float32"), plain, policy)
    assert (engine.table is not None) == (policy in ("scheduled", "lagged"))
    engine.table = CHEAP
    assert written(engine) == plain
    metrics = engine.metrics()
    counts = metrics["drafts"]
    assert counts["proposed"] >= counts["verified"] >= counts["accepted"] > 0
    assert metrics["tokens_per_step"] > 1
    engine.caches.check_integrity()


def test_a_threshold_cuts_where_confidence_ends(plain: list[list[int]]) -> None:
    """The oracle's confidence is its chance: just above nothing is verified, just below everything."""
    model = single_model("tiny", "float32")
    for policy, some in (("threshold:0.61", False), ("threshold:0.59", True)):
        engine = drafting(model, plain, policy)
        assert written(engine) == plain
        assert (engine.metrics()["drafts"]["verified"] > 0) == some


def on_ranks(groups: Groups, known: list[list[int]], policy: str) -> dict[str, Any]:
    engine = drafting(make_model(groups, "tiny", "float32"), known, policy)
    chosen: list[dict[int, int]] = []
    inner = engine._widths

    def noting(mine: Any, prompt_rows: int) -> dict[int, int]:
        chosen.append(inner(mine, prompt_rows))
        return chosen[-1]

    engine._widths = noting  # type: ignore[method-assign]
    assert engine.table is not None
    measured, engine.table = engine.table, CHEAP
    return {"ids": written(engine), "widths": chosen, "table": measured.encode()}


@pytest.mark.parametrize("policy", ["scheduled", pytest.param("lagged", marks=pytest.mark.slow)])
def test_ranks_have_one_table_and_one_decision(ranks: RankPools, policy: str, plain: list[list[int]]) -> None:
    """Each rank measures; rank 0's figures hold, and all come to the same widths without a word."""
    first, second = ranks.run(
        Topology(2, 2, 2), "test_verify_policies:on_ranks", timeout=120, known=plain, policy=policy
    )
    assert first["ids"] == plain
    assert first["table"] == second["table"] and first["widths"] == second["widths"]
    assert any(width > 1 for widths in first["widths"] for width in widths.values())


def test_costs_leave_the_caches_as_they_were() -> None:
    model = single_model("tiny", "float32")
    engine = drafting(model, [[] for _ in PROMPTS], "all")
    before = engine.caches.free_pages()
    table = step_costs(engine.decoder, len(PROMPTS), engine.slots_per_rank, repeats=1)
    assert table.rows[0] == 1 and table.rows[-1] == len(PROMPTS) * (1 + GAMMA)
    assert engine.caches.free_pages() == before
    engine.caches.check_integrity()
    small = OracleProposer(GAMMA, {}, with_chance(1.0), model.config.vocab_size)
    with pytest.raises(ValueError, match="max_context is 6, allowed: 7 or more"):
        Engine(model, requests=1, max_context=6, proposer=small, verify=parse_verify("scheduled"))
