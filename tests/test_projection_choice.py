"""Which form of the output projection a step takes: the costs, one choice on all ranks, the same bits in every form."""

from contextlib import contextmanager

import pytest
import torch
from episodes import CONTEXT, MAX_FRESH, SLOTS, make_model

from meshspark.comm import pending
from meshspark.layouts.bits import same_bits
from meshspark.layouts.rows import RequestRows
from meshspark.models.numerics import BFLOAT16, numerics
from meshspark.models.v4.config import PRESETS
from meshspark.models.v4.output import project_output
from meshspark.models.v4.pools import CacheShape
from meshspark.models.v4.projection_choice import (
    CALL_BYTES,
    ProjectionCosts,
    agree_costs,
    cost_rows,
    prefetch_bytes,
    projection_costs,
)
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

KIB, MIB = 1 << 10, 1 << 20


@contextmanager
def everything_in_the_background():
    """Rows of any size are read by the thread, so that small models take the way of large ones."""
    before, pending.DIRECT_BYTES = pending.DIRECT_BYTES, 1
    try:
        yield
    finally:
        pending.DIRECT_BYTES = before


def test_flash_at_four_ranks_breaks_even_near_1024_rows_of_a_rank():
    costs = projection_costs(PRESETS["flash"](), BFLOAT16, 4)
    # Heads of 6 output groups leave, 4096 columns of 2 bytes; partials of 4096 FP32 go to 3 ranks.
    assert costs.row_bytes == 48 * KIB + 48 * KIB
    assert costs.weight_bytes == 3 * (16 + 16) * MIB
    assert costs.break_even == 1024 + 2 * CALL_BYTES // (96 * KIB) + 1
    for rows, choice in ((0, "activations"), (128, "activations"), (1024, "activations"), (1026, "weights")):
        assert costs.choose(rows) == choice, rows
    assert [row.choice for row in cost_rows(costs, (1025, 1026))] == ["activations", "weights"]
    assert cost_rows(costs, (3,))[0].activation_bytes == 3 * costs.row_bytes
    assert prefetch_bytes(PRESETS["flash"](), BFLOAT16, 4) == 2 * 128 * MIB


def test_a_tie_goes_to_activations_and_a_mode_overrides_the_costs():
    tie = ProjectionCosts(row_bytes=100, weight_bytes=500, call_bytes=0)
    assert [tie.choose(rows) for rows in (4, 5, 6)] == ["activations", "activations", "weights"]
    assert tie.break_even == 6
    assert ProjectionCosts(100, 500, 0, "activations").choose(1 << 20) == "activations"
    forced = ProjectionCosts(100, 500, 0, "weights")
    assert forced.choose(1) == "weights" and forced.choose(0) == "activations"
    alone = projection_costs(PRESETS["flash"](), BFLOAT16, 1)
    assert alone.break_even is None and alone.choose(1 << 20) == "activations"
    assert prefetch_bytes(PRESETS["flash"](), BFLOAT16, 1) == 0


def test_refusals():
    with pytest.raises(ValueError, match="projection is 'fast', allowed: auto, activations, weights"):
        ProjectionCosts(1, 1, mode="fast")
    with pytest.raises(ValueError, match="row_bytes is -1"):
        ProjectionCosts(-1, 1)


def costs_are_the_ledgers(groups, preset, mode):
    """Bytes that one layer's exchanges note, less what a rank sends itself, are those of the model."""
    model, tp, rows = make_model(groups, preset, mode), groups.tp.size, 5
    config = model.config
    costs = projection_costs(config, numerics(mode), tp)
    o_TND = torch.ones(rows, config.num_attention_heads, config.head_dim)
    ledger = groups.tp.ledger
    before, ledger.capacity = ledger.capacity, 1 << 10
    ledger._records = type(ledger._records)(maxlen=1 << 10)
    try:
        found = []
        for gather_weights in (False, True):
            ledger.clear()
            project_output(o_TND, model.blocks[0].attention.output, config, groups.tp, gather_weights=gather_weights)
            found.append(sum(r.bytes * (1 if gather_weights else tp - 1) for r in ledger))
    finally:
        ledger.clear()
        ledger.capacity = before
    assert found == [rows * costs.row_bytes * tp, costs.weight_bytes], (found, costs)


@pytest.mark.parametrize(("preset", "tp"), [("tiny", 2), ("tiny", 4), ("tiny-thirds", 3)])
def test_the_costs_are_those_of_the_ledger(ranks, preset, tp):
    for mode in ("bfloat16", "float32"):
        target = "test_projection_choice:costs_are_the_ledgers"
        ranks.run(Topology(tp, tp, tp), target, preset=preset, mode=mode)


def choices(groups):
    """What this rank chooses, once with its own costs and once with those that were agreed."""
    own = ProjectionCosts(
        100 + 10 * groups.rank, 1000, call_bytes=groups.rank, mode=("auto", "weights")[groups.rank > 1]
    )
    agreed = agree_costs(own, groups)
    rows = range(1, 20)
    return [[costs.choose(n) for n in rows] for costs in (own, agreed)] + [[agreed.row_bytes, agreed.mode]]


def test_ranks_with_other_ideas_choose_as_world_rank_0_does(ranks):
    own, agreed, told = zip(*ranks.run_both(Topology(4, 2, 4), "test_projection_choice:choices"), strict=True)
    assert own[0] != own[1] != own[2]
    assert all(choice == own[0] for choice in agreed) and set(map(tuple, told)) == {(100, "auto")}


def test_a_rank_alone_agrees_with_itself():
    costs = ProjectionCosts(7, 8, 9, "weights")
    assert agree_costs(costs, Groups.single()) == costs


def forms(groups, preset, mode):
    """Steps of ragged, few and no rows: rows travel, weights travel, weights travel one layer ahead."""
    model, tp = make_model(groups, preset, mode), groups.tp.size
    vocab, steps = model.config.vocab_size, ((19, 3, 0), (0, 0, 0), (5, 2, 1))
    results = []
    # Over torch everything goes on in the background as it is.
    for form in ("activations", "weights", "ahead", *(["background"] if groups.tp.transport == "local" else [])):
        caches = model.make_caches(CacheShape(SLOTS, CONTEXT, MAX_FRESH))
        for slot in range(3):
            caches.admit(slot, CONTEXT)
        done, found, ahead = [0, 0, 0], [], model._weights_ahead
        if form == "weights":
            model._weights_ahead = lambda gather_weights: None
        for counts in steps:
            rows = []
            for slot, count in enumerate(counts):
                tokens = [(7 * slot + 3 * i) % vocab for i in range(done[slot], done[slot] + count)]
                if count:
                    rows.append(RequestRows(slot, done[slot], tokens, slot % tp, "prefill", range(count)))
                done[slot] += count
            if model._prefetch is not None:
                # Whatever a layer reads must have arrived in this very step.
                for buffer in (b for pair in model._prefetch._buffers for b in pair):
                    buffer.fill_(float("nan"))
            with torch.no_grad():
                plan = model.plan(rows, caches)
                if form == "background":
                    with everything_in_the_background():
                        output = model.forward(plan, caches, gather_weights=True)
                else:
                    output = model.forward(plan, caches, gather_weights=form != "activations")
            found.append(output.logits)
        model._weights_ahead = ahead
        results.append(found)
    for other in results[1:]:
        for want, got in zip(results[0], other, strict=True):
            assert same_bits(want, got) and bool(torch.isfinite(got).all())
    assert model._prefetch.nbytes == prefetch_bytes(model.config, numerics(mode), tp)
    return sum(len(logits) for logits in results[0])


slow = pytest.mark.slow
FORMS = [
    ("tiny", (2, 2, 2), "float32", "torch"),
    ("tiny", (2, 2, 2), "bfloat16", "local"),
    ("tiny", (4, 4, 4), "bfloat16", "local"),
    ("tiny-thirds", (3, 3, 3), "float32", "local"),
    pytest.param("tiny", (2, 2, 2), "float32", "local", marks=slow),
    pytest.param("tiny", (2, 2, 2), "bfloat16", "torch", marks=slow),
    pytest.param("tiny", (4, 4, 4), "float32", "local", marks=slow),
    pytest.param("tiny", (4, 2, 4), "float32", "torch", marks=slow),
    pytest.param("tiny-thirds", (3, 3, 3), "bfloat16", "torch", marks=slow),
]


@pytest.mark.parametrize(("preset", "sizes", "mode", "transport"), FORMS)
def test_every_form_has_the_same_bits(ranks, preset, sizes, mode, transport):
    topology = Topology(*sizes)
    target = "test_projection_choice:forms"
    asked = ranks.run(topology, target, timeout=120.0, transport=transport, preset=preset, mode=mode)
    assert sum(asked) == 30 * topology.dp


def kept_by_autograd(groups):
    """Where gradients are recorded, nothing is overwritten: the model makes no buffers."""
    model = make_model(groups, "tiny", "float32")
    plan = model.plan_sequences([[5, 6, 7]])
    recorded = model.forward(plan, gather_weights=True).logits
    with torch.no_grad():
        assert model._prefetch is None
        assert same_bits(model.forward(plan).logits, recorded.detach())
    return True


def test_gradients_keep_what_they_need(ranks):
    assert ranks.run(Topology(2, 2, 2), "test_projection_choice:kept_by_autograd") == [True, True]
