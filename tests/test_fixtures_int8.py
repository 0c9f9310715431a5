"""The fixtures in numerics w8a8: they pass on several ranks, and each sees faults of quantisation planted in it."""

from unittest import mock

import pytest
import torch
from fixture_runs import BY_NAME, SMALL, options_of, run_all

from meshspark.launch.fixtures import stages, stages_attend, stages_attention, stages_int8, stages_moe
from meshspark.launch.fixtures.harness import FAILED, Output, RelDiff, Run, Tolerance, compare, run_fixture
from meshspark.models import matrix
from meshspark.models.int8 import quantise
from meshspark.models.int8.quantise import QuantisedRows, quantise_rows
from meshspark.models.v4 import block, indexer, moe, output
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

STAGES = tuple(fixture.name for fixture in stages.FIXTURES)
LAYERS = ("layer-swa", "layer-csa", "layer-hca")
SHARDED = ("o-proj", "expert-routed", "moe", "lm-head", "greedy", *LAYERS)
W8A8 = {"numerics": "w8a8", **SMALL}


def test_every_stage_passes_on_one_rank():
    """The default mixture: prompts, chunks, verification and decode rows in one step."""
    run_all(Groups.single(), STAGES, {"numerics": "w8a8"})


def test_sharded_fixtures_pass_on_several_ranks(ranks):
    """Layers are equal to the one-rank twin's to the bit."""
    ranks.run(Topology(2, 2, 2), "fixture_runs:run_all", 120, names=SHARDED, given=W8A8)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 2), (4, 2, 4), (4, 4, 4)])
def test_every_fixture_gives_the_same_bits_on_both_transports(ranks, sizes):
    names = [*STAGES, *LAYERS]
    ranks.run_both(Topology(*sizes), "fixture_runs:run_all", 280, names=names, given=W8A8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_layers_of_other_numbers(seed):
    run_all(Groups.single(), LAYERS, {"numerics": "w8a8", "seed": seed})


@pytest.mark.slow
def test_the_forward_passes():
    run_all(Groups.single(), ["forward"], {"numerics": "w8a8"})


@pytest.mark.slow
def test_stages_of_one_flash_layer():
    names = ("quantise", "int8-linear", "qkv", "indexer-compressor", "indexer", "attend-csa", "o-proj", "expert-shared")
    run_all(Groups.single(), names, {"numerics": "w8a8", "preset": "flash", "start_pos": (0, 2175), "chunk": (5, 1)})


# Planted faults: (fixture, output that must fail, the fault).


def _patched(where, name, make):
    return lambda: mock.patch.object(where, name, make(getattr(where, name)))


def _one_scale_for_all_rows(quantise_rows):
    """The largest number of a column, or of all rows, in the place of the row's."""

    def shared(x):
        together = quantise_rows(x.flatten().unsqueeze(0))
        return QuantisedRows(together.codes_TI.view(x.shape), together.scale_T.expand(len(x)).clone())

    return shared


def _truncated(_):
    def rows(x):
        inverse = 127 / x.float().abs().amax(-1).clamp(min=1e-4)
        return QuantisedRows((x.float() * inverse.unsqueeze(-1)).trunc().to(torch.int8), 1 / inverse)

    return rows


def _next_rows_scale(quantise_rows):
    def moved(x):
        rows = quantise_rows(x)
        return QuantisedRows(rows.codes_TI, rows.scale_T.roll(1))

    return moved


def _scale_left_behind(dispatch):
    """Rows reach their experts with the scale of the row before."""

    def sent(x, i, w, valid, group, n, scale, stage):
        return dispatch(x, i, w, valid, group, n, scale.roll(1), stage=stage)

    return sent


def _weight_in_the_first_scale(experts):
    def early(rows, weight, *rest):
        return experts(QuantisedRows(rows.codes_TI, rows.scale_T * weight), torch.ones_like(weight), *rest)

    return early


def _one_scale_for_all_groups(quantise_rows):
    """One scale for all output groups of a row: wo_b's are stacked group by group."""

    def wide(x):
        together = quantise_rows(torch.cat(x.chunk(8), dim=1))
        return QuantisedRows(torch.cat(together.codes_TI.chunk(8, dim=1)), together.scale_T.repeat(8))

    return wide


def _only_queries_turned(quantise_keys):
    return lambda keys: _coded_as_they_are(keys)


def _coded_as_they_are(keys):
    rows = quantise_rows(keys)
    return torch.cat((rows.codes_TI, rows.scale_T.unsqueeze(1).view(torch.int8)), dim=1)


def _only_keys_turned(index_queries):
    def plain(*given):
        with mock.patch.object(indexer, "_hadamard", lambda x: x.float()):
            return index_queries(*given)

    return plain


PLANTS = [
    ("quantise", "row codes", _patched(stages_int8, "quantise_rows", _one_scale_for_all_rows)),
    ("quantise", "row codes, equal", _patched(stages_int8, "quantise_rows", _truncated)),
    ("quantise", "row scales", _patched(quantise, "LEAST_AMPLITUDE", lambda _: 1e-30)),
    ("quantise", "channel codes", _patched(quantise, "LEAST_AMPLITUDE", lambda _: 1e-30)),
    ("qkv", "latent codes plain, equal", _patched(matrix, "quantise_rows", _truncated)),
    ("qkv", "latent scale compressed", _patched(matrix, "quantise_rows", _next_rows_scale)),
    ("gate", "codes", _patched(matrix, "quantise_rows", _one_scale_for_all_rows)),
    ("gate", "codes, equal", _patched(matrix, "quantise_rows", _truncated)),
    ("indexer", "query codes", _patched(indexer, "quantise_rows", _one_scale_for_all_rows)),
    ("indexer", "query codes, equal", _patched(indexer, "quantise_rows", _truncated)),
    ("indexer", "head weights", _patched(indexer, "quantise_rows", _next_rows_scale)),
    ("indexer", "query codes", _patched(stages_attend, "index_queries", _only_keys_turned)),
    ("indexer-compressor", "cached codes", _patched(stages_attention, "quantise_keys", _only_queries_turned)),
    ("layer-csa", "cache csa_index, golden, codes", _patched(block, "quantise_keys", _only_queries_turned)),
    ("o-proj", "rows travel", _patched(output, "quantise_rows", _one_scale_for_all_groups)),
    ("o-proj", "weights travel", _patched(output, "quantise_rows", _truncated)),
    ("o-proj", "rows travel", _patched(output.Int8Form, "finish", lambda f: lambda self, total: total)),
    ("expert-shared", "rows", _patched(matrix, "quantise_rows", _truncated)),
    ("expert-routed", "rows", _patched(stages_moe, "int8_experts", _weight_in_the_first_scale)),
    ("moe", "rows", _patched(moe, "dispatch", _scale_left_behind)),
    ("moe", "rows", _patched(moe, "quantise_rows", _truncated)),
    ("layer-swa", "streams, golden", _patched(output, "quantise_rows", _one_scale_for_all_groups)),
]


@pytest.mark.parametrize(
    ("name", "wanted", "plant"), PLANTS, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(PLANTS)]
)
def test_a_planted_fault_is_seen(name, wanted, plant):
    with plant():
        rows = run_fixture(BY_NAME[name], Run(Groups.single(), options_of(W8A8)))
    assert wanted in [row.output for row in rows if row.verdict == FAILED]


# The relative difference that deployment.md 11 describes.


@pytest.mark.parametrize(
    ("got", "want", "tolerance", "verdict"),
    [
        # Below the threshold errors are absolute, above relative to the larger number.
        ([0.0, 0.0019], [0.0, 0.0], RelDiff(2e-3), "passed"),
        ([0.0, 0.0021], [0.0, 0.0], RelDiff(2e-3), "failed"),
        ([100.0, 100.19], [100.0, 100.0], RelDiff(2e-3), "passed"),
        ([100.0, 100.21], [100.0, 100.0], RelDiff(2e-3), "failed"),
        ([1.0, 1.5], [1.0, 1.0], RelDiff(2e-3, outliers=0.5), "passed"),
        ([1.0, 1.5], [1.0, 1.0], RelDiff(2e-3, outliers=0.4), "failed"),
        # No outlier may be further off than the cap.
        ([1.0, 1.5], [1.0, 1.0], RelDiff(2e-3, outliers=0.5, cap=0.4), "passed"),
        ([1.0, 1.5], [1.0, 1.0], RelDiff(2e-3, outliers=0.5, cap=0.3), "failed"),
        ([1.0, -0.01], [1.0, 0.01], RelDiff(2e-3, outliers=0.5, cap=1.0), "passed"),
        ([1.0, -0.05], [1.0, 0.05], RelDiff(2e-3, outliers=0.5, cap=1.0), "failed"),
        ([1.0, -0.05], [1.0, 0.05], RelDiff(2e-3, outliers=0.5, cap=0.2, least=1.0), "passed"),
        # Numbers that are not finite are no outliers.
        ([1.0, float("nan")], [1.0, 1.0], RelDiff(2e-3, outliers=0.5), "failed"),
        ([1.0, float("nan")], [1.0, 1.0], Tolerance(1e-3, outliers=0.5), "failed"),
        ([1.0, float("inf")], [1.0, 1.0], Tolerance(1e-3, outliers=0.5), "failed"),
        ([1.0, 9.0], [1.0, 1.0], Tolerance(1e-3, outliers=0.5), "passed"),
    ],
)
def test_relative_differences(got, want, tolerance, verdict):
    assert compare(Output("x", torch.tensor(got), torch.tensor(want), tolerance)).verdict == verdict
