"""The fixtures of the drafter: they pass on one rank and on several, and each sees faults planted in what it drives."""

import dataclasses
from unittest import mock

import pytest
import torch
from fixture_runs import BY_NAME, Digest, options_of, run_all

from meshspark.comm.collectives import all_gather_rows
from meshspark.launch import fixture
from meshspark.launch.fixtures import (
    compositions_dspark,
    compositions_step,
    dspark,
    stages_accept,
    stages_commit,
    stages_dspark,
    stages_markov,
    step_scene,
)
from meshspark.launch.fixtures.goldens_dspark import e4m3_numbers
from meshspark.launch.fixtures.harness import FAILED, PASSED, Options, Run, run_fixture
from meshspark.launch.fixtures.record import Recorder, facts_of
from meshspark.layouts import lanes
from meshspark.models.dspark import accept, context, draft, projector, stage, step
from meshspark.models.functions import rms_norm
from meshspark.models.request import RequestState
from meshspark.models.sampling import draw
from meshspark.models.v4 import caches, model
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

NAMES = [each.name for each in dspark.FIXTURES]
PREFILL = {"start_pos": (14, 40), "chunk": (3, 2)}
DECODE = {"mode": "decode", "start_pos": (14, 52), "chunk": (3, 6)}
"""Two requests: the first behind a window that is not full or just full, the second behind the wrap of the ring. In
DECODE some rows of both are rejected."""

FEW = (
    step_scene.Case(15, drafts=7, right=2),
    step_scene.Case(90, drafts=4, right=2, room=4),
    step_scene.Case(20, chunk=3, ends=True),
    step_scene.Case(29, drafts=7, right=1, temperature=0.15),
)
"""Requests of a whole step in which a fault is planted."""

MODES = ["float32", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("float64", "bfloat16", "w8a8"))]
SIZES = [(2, 1, 2), (2, 2, 2), (4, 1, 4), (4, 2, 4), (4, 4, 4), (4, 2, 2)]


def run_drafting(groups, given):
    """Every fixture, and drafter in both modes."""
    names = [name for name in NAMES if name != "dspark-step"]
    digests = [run_all(groups, names, given), run_all(groups, ["drafter"], {**given, "mode": "decode"})]
    return [*digests, run_whole_step(groups, given)]


def run_whole_step(groups, given):
    """The target's golden leaves rows out whose choices were close: of narrow numerics that may be all."""
    recorder = Digest()
    rows = run_fixture(BY_NAME["dspark-step"], Run(groups, options_of(given), recorder))
    close = {"logits, golden", "taps, golden"} if given["numerics"] in ("bfloat16", "w8a8") else set()
    assert {row.output for row in rows if row.verdict != PASSED} <= close, rows
    assert FAILED not in {row.verdict for row in rows}, rows
    return recorder.seen.hexdigest()


@pytest.mark.parametrize("numerics", MODES)
def test_every_fixture_passes_on_one_rank(numerics):
    run_drafting(Groups.single(), {"numerics": numerics})


def test_every_fixture_passes_on_two_ranks(ranks):
    """In mode decode, in dspark-attention and in markov the second rank has neither rows nor blocks."""
    ranks.run(Topology(2, 2, 2), "test_fixtures_dspark:run_drafting", 120, given={"numerics": "float32"})


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["float32", "float64", "bfloat16", "w8a8"])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_fixture_gives_the_same_bits_on_both_transports(ranks, sizes, numerics):
    given = {"numerics": numerics}
    ranks.run_both(Topology(*sizes), "test_fixtures_dspark:run_drafting", 280, given=given)


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["float32", "bfloat16", "w8a8"])
@pytest.mark.parametrize("seed", range(1, 6))
def test_other_numbers(seed, numerics):
    run_drafting(Groups.single(), {"numerics": numerics, "seed": seed})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_anchors_around_window_and_wrap(mode):
    """p + 1 from 1 to far behind several turns of the ring, one after the other."""
    starts = tuple(range(0 if mode == "decode" else 1, 70))
    for first in range(0, len(starts), 23):
        given = {"mode": mode, "start_pos": starts[first : first + 23], "chunk": (4,), "numerics": "float64"}
        run_all(Groups.single(), ["drafter"], given)


@pytest.mark.slow
def test_stages_at_the_widths_of_flash():
    given = {"preset": "flash", "start_pos": (126, 2171), "chunk": (3,)}
    names = ["projector", "context-kv", "markov"]
    run_all(Groups.single(), [*names, "dspark-attention"], given)
    run_all(Groups.single(), names, {**given, "numerics": "w8a8"})


# Planted faults: (fixture, options, output that must fail, the fault).


def _patched(where, name, make):
    return lambda: mock.patch.object(where, name, make(getattr(where, name)))


def _taps_in_another_order(join):
    return lambda taps, config: torch.cat(join(taps, config).chunk(len(taps), dim=1)[::-1], dim=1)


def _one_position_late(keys):
    return lambda main, position, drafter: keys(main, position + 1, drafter)


def _rejected_rows_too(name_rows):
    return lambda slot, stamp, position, kept: name_rows(slot, stamp, position, position >= 0)


def _newest_row_missing(name_rows):
    def names(slot, stamp, position, kept):
        newest = [kept[t] and not (kept & (slot == slot[t]) & (position > position[t])).any() for t in range(len(slot))]
        return name_rows(slot, stamp, position, kept & ~torch.tensor(newest).numpy())

    return names


def _stamps_not_looked_at(places):
    def found(name_G3, pool):
        now = pool.generation_Q[name_G3[:, 0]]
        name_G3[:, 1] = now
        return places(name_G3, pool)

    return found


def _coarser_groups(round_trip):
    return lambda kv, rope, group: round_trip(kv, rope, 2 * group)


def _causal(attend):
    """Rows of a block see those before them only."""

    def masked(q_TAD, keys_BLD, hidden_BW, sink_A):
        blocks, lanes, _ = keys_BLD.shape
        own = lanes - hidden_BW.shape[1]
        rows = []
        for row in range(own):
            q = q_TAD.view(blocks, own, *q_TAD.shape[1:])[:, row].repeat_interleave(row + 1, 0)
            rows.append(attend(q, keys_BLD[:, : hidden_BW.shape[1] + row + 1], hidden_BW, sink_A)[:: row + 1])
        return torch.stack(rows, dim=1).flatten(0, 1)

    return masked


def _transposed_mixing(hc_post):
    return lambda y, streams, post, mix, *rest: hc_post(y, streams, post, mix.mT, *rest)


def _neighbour_slot(fill):
    return lambda self, fresh, pool, *rest: fill(self, fresh, None if pool is None else pool.roll(1, 0), *rest)


def _no_markov_term(bias):
    return lambda *given: bias(*given) * 0


def _confidence_after_the_norm(confidence):
    def late(readout, previous, heads, wide):
        return confidence(rms_norm(readout, torch.ones(readout.shape[1]), 1e-6, wide), previous, heads, wide)

    return late


def _next_row_of_the_block(base):
    return lambda readout, slab, drafter: base(readout.roll(-1, 1), slab, drafter)


def _ties_to_the_highest(greedy):
    return lambda logits: torch.where(greedy(logits) < 0, -1, logits.shape[1] - 1 - greedy(logits.flip(1)))


def _exchange_for_each_draft(markov):
    def loop(base, readout, slab, drafter, *rest, **kwargs):
        for _ in range(base.shape[1]):
            all_gather_rows(torch.zeros(1, 1), drafter.groups.tp, stage="markov")
        return markov(base, readout, slab, drafter, *rest, **kwargs)

    return loop


def _trimmed_widths_forgotten(prefix):
    return lambda self, right: (prefix(self, right) + 1).clamp(max=self.width_R - 1)


def _targets_own_row(_):
    return lambda target, *rest: target


def _borders_belong_to_acceptance(sampled):
    return lambda target, width, drafts, drawn, test, final: sampled(target, width, drafts, drawn, test - 1e-12, final)


def _taken_for_certain(sampled):
    return lambda target, width, drafts, drawn, test, final: sampled(target, width, drafts, None, test, final)


def _id_from_the_top(_):
    return lambda weights, number: draw(weights, number * 0)


def _anchor_one_too_early(plan):
    def moved(blocks, *rest, **kwargs):
        return plan([dataclasses.replace(b, position=max(1, b.position - 1)) for b in blocks], *rest, **kwargs)

    return moved


def _all_rows_kept(kept_rows):
    def kept(plan, *rest):
        found = kept_rows(plan, *rest)
        position_T = torch.where(plan.rows.valid_G, plan.rows.position_G, -1)
        return dataclasses.replace(found, position_T=plan.local(position_T).numpy())

    return kept


def _window_beyond_the_limit(_):
    return property(lambda self: min(1 + len(self.drafts), self.limit - len(self.tokens) + 1))


def _end_token_shown(learn):
    return lambda state, told, held: learn(state, dataclasses.replace(told, finish=None), held)


def _tap_of_what_enters(tap):
    return lambda self, asked, before, after: tap(self, asked, before, before)


PLANTS = [
    ("projector", PREFILL, "rows", _patched(stages_dspark, "join_taps", _taps_in_another_order)),
    (
        "projector",
        PREFILL,
        "rows",
        _patched(projector, "rms_norm", lambda f: lambda x, g, eps, *rest: f(x, g, 1.0, *rest)),
    ),
    ("context-kv", {}, "keys", _patched(stages_dspark, "context_keys", _one_position_late)),
    ("context-kv", {}, "keys through FP8", _patched(projector, "round_trip", _coarser_groups)),
    ("context-kv", {}, "untouched slots", _patched(stages_dspark, "name_rows", _rejected_rows_too)),
    ("context-kv", {}, "ends", _patched(stages_dspark, "name_rows", _newest_row_missing)),
    ("context-kv", {}, "untouched slots", _patched(context, "_places", _stamps_not_looked_at)),
    ("dspark-attention", {}, "heads", _patched(stages_dspark, "attend_block", _causal)),
    ("dspark-attention", {}, "streams", _patched(stage, "attend_block", _causal)),
    ("dspark-attention", {}, "streams", _patched(stage, "hc_post", _transposed_mixing)),
    ("dspark-attention", {}, "context", _patched(lanes.Lanes, "fill", _neighbour_slot)),
    ("markov", {}, "logits", _patched(draft, "markov_bias", _no_markov_term)),
    ("markov", {}, "confidences", _patched(draft, "confidence_logits", _confidence_after_the_norm)),
    ("markov", {}, "base", _patched(stages_markov, "base_logits", _next_row_of_the_block)),
    ("markov", {}, "ids", _patched(draft, "greedy", _ties_to_the_highest)),
    ("markov", {}, "exchanges", _patched(stages_markov, "markov_drafts", _exchange_for_each_draft)),
    ("accept", {}, "greedy: accepted", _patched(accept._Rows, "prefix", _trimmed_widths_forgotten)),
    ("accept", {}, "exact: next token", _patched(accept, "_residual", _targets_own_row)),
    ("accept", {}, "exact: accepted", _patched(stages_accept, "accept_sampled", _borders_belong_to_acceptance)),
    ("accept", {}, "drawn: accepted", _patched(stages_accept, "accept_sampled", _taken_for_certain)),
    ("accept", {}, "point mass: next token", _patched(accept, "draw", _id_from_the_top)),
    ("commit", {}, "rows", _patched(RequestState, "widest", _window_beyond_the_limit)),
    ("commit", {}, "told", _patched(step, "emit", lambda _: lambda state, tokens: (tuple(tokens), None))),
    ("commit", {}, "told", _patched(accept._Rows, "prefix", _trimmed_widths_forgotten)),
    ("commit", {}, "blocks", _patched(step, "_may_draft", lambda _: lambda turn: turn.finish is None)),
    ("commit", {}, "kept rows", _patched(stages_commit, "kept_rows", _all_rows_kept)),
    ("commit", {}, "states", _patched(stages_commit, "learn", _end_token_shown)),
    ("commit", {}, "pages", _patched(caches.Caches, "commit", lambda _: lambda *given: None)),
    ("dspark-step", {}, "taps, golden", _patched(model.Model, "_tap", _tap_of_what_enters)),
    ("dspark-step", {}, "rejected rows", _patched(step, "kept_rows", _all_rows_kept)),
    ("dspark-step", {}, "told", _patched(accept._Rows, "prefix", _trimmed_widths_forgotten)),
    ("dspark-step", {}, "draft logits, golden", _patched(stage, "hc_post", _transposed_mixing)),
    ("drafter", PREFILL, "logits, golden", _patched(stage, "attend_block", _causal)),
    ("drafter", PREFILL, "logits, golden", _patched(draft, "base_logits", _next_row_of_the_block)),
    ("drafter", PREFILL, "logits, golden", _patched(compositions_dspark, "plan_draft", _anchor_one_too_early)),
    ("drafter", PREFILL, "confidences, golden", _patched(draft, "confidence_logits", _confidence_after_the_norm)),
    ("drafter", DECODE, "logits, golden", _patched(draft, "markov_bias", _no_markov_term)),
    ("drafter", DECODE, "logits, golden", _patched(stage, "hc_post", _transposed_mixing)),
    ("drafter", DECODE, "untouched slots", _patched(stages_dspark, "name_rows", _rejected_rows_too)),
]


def run_planted(groups):
    """Per plant, the outputs that fail and what the wanted one says."""
    found = []
    for name, given, wanted, plant in PLANTS:
        with plant(), mock.patch.object(compositions_step, "CASES", FEW):
            rows = run_fixture(BY_NAME[name], Run(groups, options_of(given)))
        failed = [row.output for row in rows if row.verdict == FAILED]
        found.append([failed, [row.detail for row in rows if row.output == wanted]])
    return found


def test_no_fixture_is_without_a_plant():
    assert {name for name, *_ in PLANTS} == set(NAMES)


def test_every_planted_fault_is_seen(ranks):
    """On both ranks alike, and the verdict names a rank."""
    results = ranks.run(Topology(2, 2, 2), "test_fixtures_dspark:run_planted", 120)
    assert results[0] == results[1]
    for (name, _, wanted, _), (failed, details) in zip(PLANTS, results[0], strict=True):
        assert wanted in failed, (name, wanted, failed)
        assert "rank " in details[0], (name, details)


# Around the fixtures.


def test_recorded_inputs_and_goldens_are_replayed(tmp_path):
    """Every fixture records under names of its own, and its recording passes."""
    runs = [(name, DECODE if name == "drafter" else {}) for name in NAMES]
    for number, (name, given) in enumerate(runs):
        groups, options, folder = Groups.single(), Options(**given), tmp_path / str(number)
        facts = facts_of(name, options, groups.topology, 0, BY_NAME[name].flags)
        with mock.patch.object(compositions_step, "CASES", FEW):
            rows = run_fixture(BY_NAME[name], Run(groups, options, Recorder(facts, save=folder)))
            again = run_fixture(BY_NAME[name], Run(groups, options, Recorder(facts, golden=folder)))
        assert fixture.verdict_of(again) == PASSED, (name, again)
        assert [row.verdict for row in again] == [row.verdict for row in rows], (name, again)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["drafter", "--mode", "all"], "--mode is 'all', allowed: prefill, decode"),
        (["publish", "--mode", "decode"], "--mode is 'decode', allowed: all, collectives, sharded"),
        (["markov", "--mode", "decode"], "--mode has no effect on markov, which takes --numerics, --preset"),
        (["drafter", "--mode", "decode", "--chunk", "7"], "--chunk is 7, allowed: 1 to 6 rows"),
        (["drafter", "--start-pos", "5000"], "--start-pos 5000"),
        (["dspark-attention", "--start-pos", "0,3"], "--start-pos is 0, allowed: anchors at 1 or more"),
        (["accept", "--preset", "flash"], "--preset has no effect on accept"),
    ],
)
def test_wrong_command_lines(argv, says, capsys):
    assert fixture.main(["run", *argv]) == 2
    assert says in capsys.readouterr().err


def test_a_run_through_the_command_line(capsys):
    assert fixture.main(["run", "drafter", "--mode", "decode", "--start-pos", "14", "--chunk", "3"]) == 0
    told = capsys.readouterr().out
    assert "logits, golden" in told and "drafter: passed" in told


def test_acceptance_meets_every_kind_of_end():
    """Nothing accepted, some, all, requests without drafts, rows without an id; borders on both sides."""
    rows = stages_accept._exact(Run(Groups.single()))
    found = stages_accept._by_rule(rows)
    spare = [int(width) - 1 - count for width, (count, _) in zip(rows.width_R, found, strict=True)]
    assert {0} < {count for count, _ in found} and 0 in spare and max(spare) > 1
    assert 1 in rows.width_R.tolist() and -1 in rows.draft_RY
    outputs = {o.name: o.got for o in stages_accept.run_accept(Run(Groups.single()))}
    assert -1 in outputs["greedy: next token"] and -1 in outputs["drawn: next token"]


def test_figures_of_the_deployment_page():
    """Anchor 64 runs with all of its 7 drafts; anchor 508 before limit 512 with as many rows as fit."""
    people = step_scene.make_cast(Run(Groups.single()), step_scene.CASES, 264)
    states = step_scene.make_states(people, [[5] * case.drafts for case in people.cases], [None] * len(people.cases))
    rows = [step.prepare(state, 0, 8) for state in states[:2]]
    assert [(each.start, len(each.tokens)) for each in rows] == [(64, 8), (508, 4)]


@pytest.mark.slow
def test_a_step_meets_every_kind_of_request():
    """Ends by token and by limit, all drafts right and some, rows of a prompt, one that takes no part."""
    run = Run(Groups.single())
    rows = {o.name: o.got for o in compositions_step.run_step(run)}
    told = rows["told"]
    assert set(told[:, 3].tolist()) == {0, 1, 2} and {1, 8} < set(told[:, 4].tolist())
    assert set(told[:, 5].tolist()) == {0, 7} and len(rows["rejected rows"].flatten())


def test_numbers_of_e4m3_are_those_of_its_bytes():
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert codes.double().tolist() == e4m3_numbers()
