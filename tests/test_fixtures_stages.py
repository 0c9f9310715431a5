"""The fixtures of stages: they pass on every number of ranks, and each sees a fault planted in what it drives."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch
from fixture_runs import SMALL, options_of, run_all

from meshspark.comm import logits
from meshspark.launch.fixtures import (
    stages_attend,
    stages_attention,
    stages_int8,
    stages_moe,
    stages_rows,
    stages_scene,
    tolerances,
)
from meshspark.launch.fixtures.harness import Options, Run, run_fixture
from meshspark.launch.fixtures.record import Recorder, facts_of
from meshspark.launch.fixtures.stages import FIXTURES
from meshspark.layouts import entry_lanes, lanes, tiles
from meshspark.models import functions
from meshspark.models.v4 import attention, compressor, hyper, indexer, model, moe, output, projections
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

BY_NAME = {fixture.name: fixture for fixture in FIXTURES}
SHARDED = tuple(fixture.name for fixture in FIXTURES if fixture.group)


@pytest.mark.parametrize("numerics", ["float32", "float64", "bfloat16"])
def test_every_stage_passes_on_one_rank(numerics):
    """The default mixture: prompts, chunks, verification and decode rows in one step."""
    run_all(Groups.single(), BY_NAME, {"numerics": numerics})


@pytest.mark.parametrize(("sizes", "transport"), [((2, 2, 2), "local"), ((4, 4, 4), "torch")])
def test_every_stage_passes_on_several_ranks(ranks, sizes, transport):
    target, names = "fixture_runs:run_all", list(BY_NAME)
    ranks.run(Topology(*sizes), target, 120, transport=transport, names=names, given=SMALL)


def test_sharded_stages_give_the_same_bits_on_both_transports(ranks):
    ranks.run_both(Topology(4, 2, 4), "fixture_runs:run_all", 120, names=SHARDED, given=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 2), (4, 2, 4), (4, 4, 4), (4, 2, 2)])
def test_every_stage_gives_the_same_bits_on_both_transports(ranks, sizes, numerics):
    given = {"numerics": numerics, **SMALL}
    ranks.run_both(Topology(*sizes), "fixture_runs:run_all", 200, names=list(BY_NAME), given=given)


@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 2, 4), (4, 2, 2)])
def test_sharded_stages_pass_with_several_tensor_groups(ranks, sizes):
    """Groups with different requests and numbers of rows."""
    ranks.run(Topology(*sizes), "fixture_runs:run_all", 120, names=SHARDED, given={"seed": 3})


@pytest.mark.parametrize("numerics", ["float64", "bfloat16"])
def test_sharded_stages_pass_in_other_numerics(ranks, numerics):
    given = {"numerics": numerics, **SMALL}
    ranks.run(Topology(2, 2, 2), "fixture_runs:run_all", 120, names=SHARDED, given=given)


@pytest.mark.parametrize(
    "given", [{"start_pos": (5, 200, 0, 3)}, {"chunk": (3, 40)}, {"start_pos": (130,), "chunk": (1, 7)}]
)
def test_start_positions_and_chunks(given):
    """Lengths are batches; one number stands for all. Not every batch ends an entry of every kind."""
    names = ["metadata", "attend-csa", "compressor-4", "lm-head"]
    run_all(Groups.single(), names, given, may_be_empty=True)


@pytest.mark.slow
def test_stages_of_one_flash_layer():
    """At Flash's widths; the head is long and tested in tiny."""
    names = [name for name in BY_NAME if name not in ("embedding", "lm-head", "greedy", "moe", "expert-routed")]
    run_all(Groups.single(), names, {"preset": "flash", "start_pos": (0, 2175), "chunk": (5, 1)})


# Planted faults: fixture -> (output that must fail, the fault).


def _patched(where, name, make):
    """`name` of `where` becomes make(what it was)."""
    return lambda: mock.patch.object(where, name, make(getattr(where, name)))


def _next_row_of_table(init):
    def build(self, *args):
        init(self, *args)
        self.embed = self.embed.roll(1, 0)

    return build


def _ties_to_highest_index(select):
    return lambda scores, admitted, count: select(scores.flip(2), admitted.flip(2), count).flip(2)


def _ties_to_highest_expert(forward):
    def route(self, x_TH, token_ids=None):
        turned = dataclasses.replace(self, gate=self.gate.flip(0), bias=self.bias.flip(0))
        scores, indices, weights = forward(turned, x_TH, token_ids)
        return scores.flip(1), len(self.gate) - 1 - indices, weights

    return route


def _neighbour_slot(fill):
    def moved(self, fresh, pool, *rest):
        return fill(self, fresh, None if pool is None else pool.roll(1, 0), *rest)

    return moved


def _one_position_earlier(entries):
    return lambda tile, *rest: entries(dataclasses.replace(tile, position_NR=tile.position_NR - 1), *rest)


def _other_source_rank(publish):
    return lambda heads, group, stage: publish(heads, group, stage=stage).roll(len(heads), 0)


def _shards_swapped(return_logits):
    def swapped(local, destination, group, stage):
        return return_logits(local, destination, group, stage=stage).roll(local.shape[1], 1)

    return swapped


def _highest_id(best):
    def highest(ids, values):
        return torch.where(values == values.amax(0), ids, -1).amax(0), best(ids, values)[1]

    return highest


def _results_one_row_late(combine):
    return lambda y, handle, stage: combine(y, handle, stage=stage).roll(1, 0)


def _invalid_rows_travel(dispatch):
    return lambda x, i, w, valid, group, n, stage: dispatch(x, i, w, torch.ones_like(valid), group, n, stage=stage)


PLANTS = {
    "embedding": [("rows", _patched(model.Model, "__init__", _next_row_of_table))],
    "metadata": [
        ("window 0", _patched(tiles, "_admitted", lambda f: lambda p, b, w: f(p, b, w) & f(p + 1, b, w))),
        ("visible hca_kv", _patched(tiles, "_entries", _one_position_earlier)),
        ("visible csa_kv", _patched(entry_lanes.EntryLanes, "fill", _neighbour_slot)),
    ],
    "rmsnorm": [("normed", _patched(functions, "mean_square_rsqrt", lambda f: lambda x, eps: f(2 * x, eps)))],
    "hc-pre": [
        ("mix", _patched(hyper, "sinkhorn", lambda f: lambda m, n, eps: f(m, n, eps).transpose(1, 2))),
        ("mix", _patched(hyper, "sinkhorn", lambda f: lambda m, n, eps: f(m, 1, eps))),
        ("x", _patched(hyper, "mean_square_rsqrt", lambda f: lambda x, eps: torch.ones_like(x[:, :1]))),
    ],
    "hc-post": [
        ("streams", _patched(stages_rows, "hc_post", lambda f: lambda y, s, p, m: f(y, s, p, m.transpose(1, 2))))
    ],
    "hc-head": [("hidden", _patched(hyper, "sigmoid", lambda f: lambda x: 2 * f(x)))],
    "qkv": [
        ("queries plain", _patched(projections, "rotate", lambda f: lambda x, c, s, **_: f(x, c, s, inverse=True))),
        ("keys compressed", _patched(projections, "rotate", lambda f: lambda x, c, s, **_: f(x, c, -s))),
        ("queries compressed", _patched(stages_attention, "frequencies", lambda f: lambda c, r, d: f(c, 0, d))),
    ],
    "compressor-4": [("entries", _patched(compressor, "_overlap", lambda f: lambda x: f(x).roll(4, 1).flip(2)))],
    "compressor-128": [
        ("state", _patched(stages_attention, "state_rows", lambda f: lambda v, s, p, w: f(v, s, p + 1, w)))
    ],
    "indexer-compressor": [("entries", _patched(compressor, "rotate", lambda f: lambda x, *rotation, **_: x))],
    "indexer": [
        ("choice", _patched(attention, "select", _ties_to_highest_index)),
        ("queries", _patched(indexer, "rotate", lambda f: lambda x, c, s, **_: f(x, c, -s))),
        ("scores", _patched(stages_attend, "index_scores", lambda f: lambda q, h, k: f(q, h.abs(), k))),
    ],
    "attend-swa": [
        (
            "heads",
            _patched(stages_attend, "attend", lambda f: lambda q, w, e, i, s, *rest: f(q, w, e, i, s - 1e9, *rest)),
        ),
        ("heads", _patched(lanes.Lanes, "fill", _neighbour_slot)),
    ],
    "attend-csa": [("heads", _patched(attention, "select", _ties_to_highest_index))],
    "attend-hca": [("heads", _patched(tiles, "_entries", _one_position_earlier))],
    "o-proj": [("rows travel", _patched(output, "publish_heads", _other_source_rank))],
    "gate": [
        ("experts learned", _patched(moe.LearnedRouter, "forward", _ties_to_highest_expert)),
        ("weights hash", _patched(moe, "weigh", lambda f: lambda s, i, factor: f(s, i, 1.0))),
    ],
    "expert-shared": [("rows", _patched(moe, "clamped_swiglu", lambda f: lambda g, u, limit: f(g, u, 10 * limit)))],
    "expert-routed": [
        (
            "rows",
            _patched(stages_moe, "routed_experts", lambda f: lambda x, w, *rest: f(x, torch.ones_like(w), *rest)),
        )
    ],
    "moe": [
        ("rows", _patched(moe, "combine", _results_one_row_late)),
        ("rows", _patched(moe, "shared_expert", lambda f: lambda *given: f(*given) * 0)),
    ],
    "quantise": [("row scales", _patched(stages_int8, "quantise_rows", lambda f: lambda x: f(x * 2)))],
    "int8-linear": [("rows", _patched(stages_int8, "int8_linear", lambda f: lambda rows, weight: f(rows, weight) * 2))],
    "lm-head": [("logits", _patched(model, "return_logits", _shards_swapped))],
    "greedy": [("ids over the shards", _patched(logits, "_best_of_shards", _highest_id))],
}


def run_planted(groups, given):
    """{fixture: per plant [output that must fail, names of those that do, what the first says]}."""
    found = {}
    for name, plants in PLANTS.items():
        found[name] = []
        for wanted, plant in plants:
            with plant():
                rows = run_fixture(BY_NAME[name], Run(groups, options_of(given)))
            failed = [row.output for row in rows if row.verdict == "failed"]
            details = [row.detail for row in rows if row.output == wanted]
            found[name].append([wanted, failed, details])
    return found


def test_no_fixture_is_without_a_plant():
    assert set(PLANTS) == set(BY_NAME)


def test_every_planted_fault_is_seen(ranks):
    """On both ranks alike, and the verdict names a rank."""
    results = ranks.run(Topology(2, 2, 2), "test_fixtures_stages:run_planted", 120, given=SMALL)
    assert results[0] == results[1]
    for name, plants in results[0].items():
        for number, (wanted, failed, details) in enumerate(plants):
            assert wanted in failed, (name, number, failed)
            assert "rank " in details[0], (name, details)


# Around the fixtures.


def test_the_table_of_tolerances_is_the_one_in_the_docs():
    text = (Path(__file__).parent.parent / "docs" / "numerics.md").read_text(encoding="utf-8")
    assert tolerances.markdown() in text and tolerances.markdown_w8a8() in text


def test_every_bound_has_a_reason_and_none_is_looser_than_bfloat16():
    for name, bound in tolerances.TABLE.items():
        assert bound.reason, name
        assert bound.float32.bits or bound.float64.atol <= bound.float32.atol <= bound.bfloat16.atol, name


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"start_pos": (1, 2), "chunk": (1, 2, 3)}, "--start-pos has 2 numbers and --chunk 3"),
        ({"start_pos": (4096,)}, "--start-pos 4096 with --chunk 1 ends at position 4097"),
        ({"chunk": (0,)}, "--start-pos 0 with --chunk 0"),
        ({"preset": "huge"}, "--preset is 'huge', allowed: tiny, flash"),
    ],
)
def test_what_a_user_got_wrong_is_named(given, words):
    with pytest.raises(ValueError, match=words):
        BY_NAME["rmsnorm"].check(Options(**given))


def test_page_maps_are_permuted_and_differ_between_ranks(ranks):
    maps = ranks.run(Topology(2, 2, 2), "test_fixtures_stages:page_maps")
    assert maps[0] != maps[1]
    for one in maps:
        mapped = [page for page in one if page >= 0]
        assert len(mapped) == len(set(mapped)) and mapped != sorted(mapped)


def page_maps(groups):
    scene = stages_scene.make_scene(Run(groups), (0, 4, 128))
    caches, _ = stages_scene.filled_caches(scene)
    assert all(bool(pool.isnan().any()) for pool in caches.pools.values()), "unmapped slots hold poison"
    return caches.tables["window_kv"].table.flatten().tolist()


def test_recorded_inputs_and_goldens_are_replayed(tmp_path):
    """Every stage records under names of its own, and its recording passes."""
    for name, fixture in BY_NAME.items():
        groups, options = Groups.single(), Options(**SMALL)
        facts = facts_of(name, options, groups.topology, 0, fixture.flags)
        rows = run_fixture(fixture, Run(groups, options, Recorder(facts, save=tmp_path / name)))
        again = run_fixture(fixture, Run(groups, options, Recorder(facts, golden=tmp_path / name)))
        assert [row.verdict for row in again] == ["passed"] * len(rows), (name, again)
