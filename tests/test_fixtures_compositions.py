"""The fixtures of compositions: layers and the forward pass on every topology, and each sees planted faults."""

from unittest import mock

import pytest
from fixture_runs import SMALL, options_of, run_all

from meshspark.launch.fixtures.compositions import FIXTURES
from meshspark.launch.fixtures.harness import Options, Run, run_fixture
from meshspark.layouts import lanes
from meshspark.models.v4 import attention, block, caches, model, moe, output
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

BY_NAME = {fixture.name: fixture for fixture in FIXTURES}


def test_every_composition_passes_on_one_rank():
    """The default mixture: prompts, chunks, verification and decode rows in one step. Here the golden is the judge."""
    run_all(Groups.single(), BY_NAME, {"numerics": "float64"})


SIZES = [(2, 2, 2), (2, 1, 2), (4, 4, 4), (4, 2, 4), (4, 2, 2)]


@pytest.mark.parametrize(
    ("sizes", "transport"), list(zip(SIZES, ["local", "torch", "local", "torch", "local"], strict=True))
)
def test_every_composition_passes_on_several_ranks(ranks, sizes, transport):
    target, names = "fixture_runs:run_all", list(BY_NAME)
    ranks.run(Topology(*sizes), target, 150, transport=transport, names=names, given=SMALL)


def test_a_layer_gives_the_same_bits_on_both_transports(ranks):
    ranks.run_both(Topology(2, 2, 2), "fixture_runs:run_all", 150, names=["layer-csa"], given=SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_every_composition_gives_the_same_bits_on_both_transports(ranks, sizes):
    ranks.run_both(Topology(*sizes), "fixture_runs:run_all", 280, names=list(BY_NAME), given=SMALL)


@pytest.mark.parametrize("numerics", ["float64", "bfloat16"])
def test_compositions_pass_in_other_numerics(ranks, numerics):
    """Without the forward: in bfloat16 it has few rows whose golden chose clearly."""
    given, names = {"numerics": numerics, **SMALL}, [name for name in BY_NAME if name != "forward"]
    ranks.run(Topology(2, 2, 2), "fixture_runs:run_all", 150, names=names, given=given)


def test_groups_with_different_requests(ranks):
    """The default mixture, of which the second tensor group lacks a request."""
    given = {"seed": 5}
    ranks.run(Topology(4, 2, 4), "fixture_runs:run_all", 150, names=["layer-csa"], given=given)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 4), (4, 4, 4)])
def test_default_mixture_on_several_ranks(ranks, sizes, seed):
    ranks.run(Topology(*sizes), "fixture_runs:run_all", 280, names=list(BY_NAME), given={"seed": seed})


def test_without_a_settled_row_nothing_is_compared(monkeypatch):
    """Where every choice of the golden was too close, the verdict is not "passed"."""
    monkeypatch.setattr("meshspark.launch.fixtures.compositions.MARGIN", {"float32": 1e9})
    rows = run_fixture(BY_NAME["layer-csa"], Run(Groups.single(), Options(**SMALL)))
    verdicts = {row.output: row.verdict for row in rows}
    assert verdicts.pop("streams, golden") == "not compared"
    assert set(verdicts.values()) == {"passed"}


# Planted faults: fixture -> (outputs that must fail, the fault). A fault in shared code is the twin's too: then the
# golden must see it. A fault of the exchanges, or of one rank, must be seen against the twin.


def _patched(where, name, make):
    return lambda groups: mock.patch.object(where, name, make(getattr(where, name), groups))


def _bands_swapped(gather, groups):
    def swapped(fields, payload, group, stage):
        rows = gather(fields, payload, group, stage=stage)
        return rows if group.size == 1 else {name: x.roll(len(x) // group.size, 0) for name, x in rows.items()}

    return swapped


def _not_written_on_last_rank(family):
    def make(write, groups):
        def some(self, name, place, rows, target, *kernels):
            last = groups.rank == groups.topology.world - 1 and self.topology == groups.topology
            return None if last and name == family else write(self, name, place, rows, target, *kernels)

        return some

    return make


def _written_one_slot_further(write, _):
    def further(self, name, place, rows, target, *kernels):
        source, slot = target
        return write(self, name, place, rows, (source, (slot + 1) % self.pools[name].shape[1]), *kernels)

    return further


def _stale_slot(fill, _):
    def moved(self, fresh, pool, family):
        return fill(self, fresh, None if pool is None else pool.roll(1, 0), family)

    return moved


def _route_order(combine, _):
    """Results of rows on several ranks return in the order of arrival, not of the rows."""

    def reordered(y, handle, stage):
        return combine(y, handle, stage=stage) if handle.group.size == 1 else combine(y.flip(0), handle, stage=stage)

    return reordered


def _position_one_off(angles, _):
    return lambda positions, frequencies, dtype: angles(positions + 1, frequencies, dtype)


def _no_inverse(rotate, _):
    return lambda x, cos, sin, inverse=False, **_: x if inverse else rotate(x, cos, sin)


def _no_sink(attend, _):
    return lambda q, w, e, i, sink, *rest: attend(q, w, e, i, sink - 1e9, *rest)


def _tree_without_a_branch(reduce, _):
    return lambda partials, group, n, stage: reduce(partials * (group.rank == 0), group, n, stage=stage)


def _lowest_scores(select, _):
    return lambda scores, admitted, count: select(-scores, admitted, count)


def _shards_swapped(return_logits, _):
    def swapped(local, destination, group, stage):
        rows = return_logits(local, destination, group, stage=stage)
        return rows if group.size == 1 else rows.roll(local.shape[1], 1)

    return swapped


PLANTS = {
    "layer-swa": [
        (["streams, twin", "cache window_kv, twin"], _patched(block, "gather_context", _bands_swapped)),
        (["streams, golden"], _patched(block, "attend", _no_sink)),
        (["cache window_kv, golden", "untouched slots"], _patched(caches.Caches, "write", _written_one_slot_further)),
    ],
    "layer-csa": [
        (["cache csa_index, twin"], _patched(caches.Caches, "write", _not_written_on_last_rank("csa_index"))),
        (["streams, golden"], _patched(attention, "select", _lowest_scores)),
        (["streams, twin", "streams, golden"], _patched(moe, "combine", _route_order)),
    ],
    "layer-hca": [
        (["streams, golden"], _patched(block, "rotate", _no_inverse)),
        (["cache hca_state, twin"], _patched(caches.Caches, "write", _not_written_on_last_rank("hca_state"))),
        (["streams, golden"], _patched(lanes.Lanes, "fill", _stale_slot)),
        (["streams, twin", "streams, golden"], _patched(output, "reduce_partials", _tree_without_a_branch)),
    ],
    "forward": [
        (["logits, golden"], _patched(model, "angles", _position_one_off)),
        (["logits, twin", "logits, golden"], _patched(model, "return_logits", _shards_swapped)),
    ],
}


def run_planted(groups, given):
    """{fixture: per plant [outputs that must fail, names of those that do]}."""
    found = {}
    for name, plants in PLANTS.items():
        found[name] = []
        for outputs, plant in plants:
            with plant(groups):
                rows = run_fixture(BY_NAME[name], Run(groups, options_of(given)))
            found[name].append([outputs, [row.output for row in rows if row.verdict == "failed"]])
    return found


def test_no_composition_is_without_a_plant():
    assert set(PLANTS) == set(BY_NAME)


def test_every_planted_fault_is_seen(ranks):
    """On both ranks alike."""
    results = ranks.run(Topology(2, 2, 2), "test_fixtures_compositions:run_planted", 150, given=SMALL)
    assert results[0] == results[1]
    for name, plants in results[0].items():
        for number, (outputs, failed) in enumerate(plants):
            assert set(outputs) <= set(failed), (name, number, failed)
