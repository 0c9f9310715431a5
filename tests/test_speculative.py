"""Drafting changes no token: on one rank, whatever is drafted, accepted, stopped, cancelled or shared.

The drafter is that of the random tiny-dspark; an oracle beside it makes its drafts right or wrong where a test wants
it. `drafting` tells what serial decoding is, with which tokens and caches are compared after every step.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafting import (
    FORCED,
    LENGTH,
    NATURAL,
    RIGHT,
    TEXTS,
    WRONG,
    Call,
    Known,
    Recorder,
    Texts,
    Watch,
    Watched,
    from_text,
    oracle,
    rank_model,
    real_proposer,
    same_drafts,
    serial,
    serve,
    single,
    text_call,
    wanted,
    watched,
)

from meshspark.benchmarks.oracle import OracleProposer
from meshspark.models.dspark.schedule import parse_verify
from meshspark.models.dspark.step import Told
from meshspark.models.numerics import numerics
from meshspark.models.processors import IgnoreEos, RowHistory, banned
from meshspark.models.request import SamplingParams
from meshspark.models.selfcheck import row_independence
from meshspark.models.v4.config import tiny_dspark

GAMMAS = range(1, 9)
STARTS = (*range(1, 20), *range(24, 41), *range(60, 76), *range(124, 134), *range(146, 154))
"""Around multiples of 4, 32 and 128, the window of 16, and the wraps of rings: at 36 and 72 of windows of 4 positions
a page, at 26 and 52 of states of ratio 4, at 152 of those of ratio 128."""
FAST = (1, 5, 8)


def by_gamma(gammas: Sequence[int] = GAMMAS) -> list:
    return [pytest.param(gamma, marks=() if gamma in FAST else pytest.mark.slow) for gamma in gammas]


def require_bits(mode: str) -> None:
    if mode != "float64" and not row_independence(tiny_dspark(), (numerics(mode),))["holds"]:
        pytest.skip("this machine's products depend on the row count")


def check_episodes(mode: str, gamma: int, episodes: Sequence[tuple[int, int]], seed: int) -> None:
    """(start, drafts) as requests of one engine, each with a first block at `start` and some that follow."""
    texts = serial(mode)
    watch, recorder = Watch(mode, texts), Recorder(oracle(mode, gamma, Known(texts)))
    engine = watched(
        mode, recorder, look=watch, start=from_text(texts), seed=seed, requests=min(len(episodes), 160), prefix_points=0
    )
    calls = [
        text_call(texts[TEXTS[i % len(TEXTS)]], start, gamma + 6, drafts) for i, (start, drafts) in enumerate(episodes)
    ]
    results = serve(engine, calls)
    assert watch.fault == ""
    for call, result in zip(calls, results, strict=True):
        assert result == wanted(texts[call.prompt[0]], call), (len(call.prompt), call.params.seed)
    assert {number for number, _ in recorder.drafted} == set(range(len(calls)))
    for (number, position), token in recorder.anchors.items():
        assert texts[calls[number].prompt[0]].tokens[position] == token, (
            "an anchor is the newest token, where it stands"
        )


def forced(gamma: int) -> list[int]:
    return [*range(FORCED, FORCED + gamma + 1), NATURAL, RIGHT, WRONG]


@pytest.mark.parametrize("gamma", GAMMAS)
def test_starts_widths_and_acceptances(gamma: int) -> None:
    """A sample: every start with three widths, every width with all that can be accepted of it."""
    kinds = forced(gamma)
    episodes = [(start, kinds[i % len(kinds)]) for i, start in enumerate(STARTS[gamma % 3 :: 3])]
    check_episodes("float64", gamma, episodes, seed=gamma)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", GAMMAS)
def test_every_start_width_and_acceptance(gamma: int) -> None:
    check_episodes("float64", gamma, [(start, kind) for start in STARTS for kind in forced(gamma)], seed=gamma)


def company(texts: Texts, gamma: int, seed: int, count: int = 20) -> list[Call]:
    """Requests that come and go: some draft, some do not, some are cancelled."""
    draw, calls = random.Random(seed), []
    for number in range(count):
        start = draw.choice((*STARTS, 129, 131, 133, 140))
        kind = draw.choice((NATURAL, RIGHT, WRONG, FORCED + draw.randint(0, gamma), FORCED + draw.randint(0, gamma)))
        new = min(draw.randint(1, 20), LENGTH - start)
        rest = {"step": draw.randrange(16), "cancel_after": draw.choice((0, 0, 0, 2))}
        text = texts[TEXTS[number % len(TEXTS)]]
        calls.append(text_call(text, start, new, kind, draft=draw.random() > 0.15, **rest))
    return calls


def check_results(texts: Texts, calls: Sequence[Call], results: Sequence[list]) -> None:
    """Ids and reasons of requests that go on with texts; of cancelled ones the ids until then."""
    for call, (ids, reason) in zip(calls, results, strict=True):
        want, _ = wanted(texts[call.prompt[0]], call)
        if reason == "cancelled":
            assert call.cancel_after <= len(ids) and ids == want[: len(ids)]
        else:
            assert (ids, reason) == (want, "length")
    assert {reason for _, reason in results} == {"length", "cancelled"}


def check_company(mode: str, gamma: int, block_size: int, seed: int, verify: str = "all") -> None:
    require_bits(mode)
    texts = serial(mode)
    watch, calls = Watch(mode, texts), company(texts, gamma, seed)
    proposer = oracle(mode, gamma, Known(texts))
    engine = watched(
        mode, proposer, look=watch, seed=seed, requests=7, prefill_rows=80, block_size=block_size,
        verify=parse_verify(verify),
    )  # fmt: skip
    results = serve(engine, calls)
    assert watch.fault == ""
    check_results(texts, calls, results)
    assert {1, 7} <= set(map(len, watch.places))
    assert any(places != sorted(places) for places in watch.places)
    assert any(places and max(places) >= len(places) for places in watch.places), "no gaps"
    metrics = engine.metrics()
    assert proposer.proposed > 0 and metrics["prefix"]["hits"] > 0
    if verify.startswith("threshold"):
        assert 0 < metrics["drafts"]["verified"] < metrics["drafts"]["proposed"]


@pytest.mark.parametrize(
    ("mode", "gamma", "block_size"),
    [
        ("float64", 5, 4),
        ("float32", 7, 32),
        pytest.param("bfloat16", 5, 4, marks=pytest.mark.slow),
        pytest.param("float64", 8, 32, marks=pytest.mark.slow),
        pytest.param("float64", 1, 4, marks=pytest.mark.slow),
        pytest.param("float32", 8, 4, marks=pytest.mark.slow),
        pytest.param("bfloat16", 8, 32, marks=pytest.mark.slow),
        pytest.param("w8a8", 5, 4, marks=pytest.mark.slow),
        pytest.param("w8a8", 8, 32, marks=pytest.mark.slow),
    ],
)
def test_company_that_comes_and_goes(mode: str, gamma: int, block_size: int) -> None:
    """1 to 7 requests in slots with gaps, in no order; ids and caches equal serial decoding's, bit for bit but in
    FP64, with prefixes that are shared and rings that wrap."""
    check_company(mode, gamma, block_size, seed=gamma)


@pytest.mark.parametrize(
    "verify",
    [
        "threshold:0.5",
        pytest.param("scheduled", marks=pytest.mark.slow),
        pytest.param("lagged", marks=pytest.mark.slow),
    ],
)
def test_widths_of_verification_change_no_token(verify: str) -> None:
    """By the real drafter's confidences, some blocks are cut."""
    check_company("float64", 5, 4, seed=11, verify=verify)


def plain_ids(mode: str, calls: Sequence[Call], **kwargs) -> list[list]:
    """Results of an engine without any proposer."""
    return serve(watched(mode, None, requests=len(calls), **kwargs), calls)


def known_of(calls: Sequence[Call], results: Sequence[list]) -> Known:
    """What requests write, by number, from an earlier run of all of them."""
    return Known(
        {}, {i: [*call.prompt, *result[0]] for i, (call, result) in enumerate(zip(calls, results, strict=True))}
    )


@pytest.mark.slow
def test_512_tokens() -> None:
    calls = [Call([9, 200, 3], SamplingParams(512, seed=kind)) for kind in (NATURAL, RIGHT, FORCED + 2, WRONG)]
    calls.append(replace(calls[0], params=SamplingParams(512, draft=False)))
    big = {"max_context": 520}
    want = plain_ids("float64", calls[:1], **big)[0]
    proposer = oracle("float64", 5, known_of(calls, [want] * 5))
    dumps: list[dict] = []

    def look(engine: Watched) -> None:
        Watch("float64")(engine)
        dumps.extend(engine.caches.dump(r.slot, 500) for r in engine.mine if r.computed == 500)

    assert serve(watched("float64", proposer, look=look, requests=5, **big), calls) == [want] * 5
    assert len(want[0]) == 512 and len(dumps) > 1
    for dump in dumps[1:]:
        for name, rows in dump.items():
            torch.testing.assert_close(rows, dumps[0][name], rtol=0, atol=1e-10)


# Prefixes and chunks.


def drafts_of(mode: str, calls: Sequence[Call], **kwargs) -> tuple[list[list], Recorder, Watched]:
    recorder = Recorder(real_proposer(mode))
    engine = watched(mode, recorder, look=Watch(mode), requests=2, **{"max_context": 320, **kwargs})
    results = serve(engine, calls)
    assert recorder.drafted
    return results, recorder, engine


def long_prompt() -> list[int]:
    return torch.randint(2, 260, (299,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize(
    ("mode", "rows"), [("float64", 16), ("float32", 33), pytest.param("float32", 1, marks=pytest.mark.slow)]
)
def test_chunked_prefill_drafts_as_one_shot(mode: str, rows: int) -> None:
    require_bits(mode)
    calls = [Call(long_prompt(), SamplingParams(9))]
    want, cold, _ = drafts_of(mode, calls, prefill_rows=320, prefix_points=0)
    got, chunked, _ = drafts_of(mode, calls, prefill_rows=rows, prefix_points=0)
    assert got == want
    assert same_drafts(chunked.drafted, cold.drafted, mode) == ""


@pytest.mark.parametrize(("mode", "shared"), [("float64", 128), ("float32", 256)])
def test_a_prefix_hit_drafts_as_a_cold_run(mode: str, shared: int) -> None:
    """Drafts and confidences of the very first block on, whose window lies in the prefix but for 1, 3, or no rows; its
    pages were noise before. The one that published the prefix drafted, was partly rejected, and is gone."""
    require_bits(mode)
    prompt = long_prompt()
    calls = [Call(prompt[: shared + 1], SamplingParams(6))]
    calls += [Call(prompt[: shared + rest], SamplingParams(9), step=30 * rest) for rest in (1, 3, 40)]
    want, cold, _ = drafts_of(mode, calls, prefill_rows=320, prefix_points=0)
    got, warm, engine = drafts_of(mode, calls, prefill_rows=320, prefix_points=8)
    assert engine.metrics()["prefix"] == {"hits": 3, "tokens": 3 * shared}
    assert got == want
    assert same_drafts(warm.drafted, cold.drafted, mode) == ""


# Ends.


@pytest.mark.parametrize("gamma", by_gamma())
def test_an_end_token_ends_wherever_it_stands_in_a_block(gamma: int) -> None:
    text = serial("float64")[TEXTS[0]]
    new = text.tokens[1:17]
    assert len(set(new)) == 16
    calls = [text_call(text, 1, 20, kind, eos_id=token) for token in new for kind in (RIGHT, FORCED + gamma // 2)]
    proposer = oracle("float64", gamma, Known(serial("float64")), inner=False)
    engine = watched("float64", proposer, look=Watch("float64"), requests=len(calls))
    assert serve(engine, calls) == [[new[:i], "eos"] for i in range(16) for _ in range(2)]
    drafts = engine.metrics()["drafts"]
    assert drafts["accepted"] > 0 and proposer.proposed > 0
    # The first token of each comes with its prompt. An end that comes with it has no turn.
    assert engine.counters.drafts.emitted == sum(max(i - 1, 0) for i in range(16) for _ in range(2))


@pytest.mark.parametrize("gamma", by_gamma())
def test_limits_count_every_token(gamma: int) -> None:
    """Also where fewer are left than a block has; what is counted is what was emitted."""
    text = serial("float64")[TEXTS[0]]
    calls = [text_call(text, 7, new, RIGHT) for new in range(1, 21)]
    proposer = oracle("float64", gamma, Known(serial("float64")))
    watch = Watch("float64", serial("float64"))
    engine = watched("float64", proposer, look=watch, requests=len(calls))
    assert serve(engine, calls) == [wanted(text, call) for call in calls] and watch.fault == ""
    counts, emitted = engine.counters.drafts, sum(range(20))
    assert counts.emitted == emitted
    turns = sum(-(-(new - 1) // (gamma + 1)) for new in range(1, 21))
    assert counts.turns == turns and counts.proposed == proposer.proposed > 0
    metrics = engine.metrics()
    assert metrics["drafts"]["accepted"] == emitted - turns
    assert metrics["drafts"]["wasted_rows"] == 0
    assert metrics["tokens_per_step"] == emitted / turns


@pytest.mark.parametrize("drafts", [RIGHT, FORCED + 3])
def test_rows_at_the_ceiling_of_the_context(drafts: int) -> None:
    """max_context is a multiple of the page; prompts around every page's end run up to it, beside one whose caches
    must stay what they are."""
    ceiling, gamma = 96, 8
    texts = serial("float64")
    prompts = (31, 32, 33, 63, 64, 65, *range(86, 96))
    calls = [text_call(texts[TEXTS[0]], start, ceiling - start, drafts) for start in prompts]
    calls.append(text_call(texts[TEXTS[1]], 40, ceiling - 40, NATURAL, draft=False))
    watch = Watch("float64", texts)
    ends: list[int] = []

    def look(engine: Watched) -> None:
        watch(engine)
        ends.extend(held.mapped["window_kv"][1] for held in engine.caches._held.values())

    proposer = oracle("float64", gamma, Known(texts))
    engine = watched(
        "float64", proposer, look=look, start=from_text(texts), requests=len(calls), max_context=ceiling,
        block_size=32, prefix_points=0,
    )  # fmt: skip
    assert serve(engine, calls) == [wanted(texts[call.prompt[0]], call) for call in calls]
    assert watch.fault == "" and max(ends) == 3 and proposer.proposed > 0


def test_a_row_that_is_not_finite_is_an_error_and_never_a_token() -> None:
    """A draft whose own row is broken, right or rejected, spoils the rows before it, for rows of a tile share products.
    The request goes on all the same, and ends where it does in plain decoding: with an error, not token 0."""
    model = rank_model("float64", single())[0]
    text = serial("float64")[TEXTS[0]]
    sound = model.embed
    model.embed = model.embed.clone()
    model.embed[text.tokens[12]] = float("nan")
    assert text.tokens[12] not in text.tokens[:12]
    try:
        calls = [text_call(text, start, 20, kind) for start in (7, 9, 11) for kind in (RIGHT, FORCED + 3, WRONG)]
        calls.append(text_call(text, 7, 20, NATURAL, draft=False))
        engine = watched("float64", oracle("float64", 4, Known(serial("float64"))), requests=len(calls))
        *results, plain = serve(engine, calls)
    finally:
        model.embed = sound
    assert plain == [text.tokens[7:13], "error"]
    for call, (ids, reason) in zip(calls, results, strict=False):
        start = len(call.prompt)
        assert (ids, reason) == (text.tokens[start:13], "error")


# Company of other kinds.


def mixed_calls() -> list[Call]:
    """Greedy and sampled, drafting and not, in the order in which they come."""
    draw = random.Random(8)
    calls = []
    for number in range(12):
        prompt = [draw.randrange(2, 260) for _ in range(draw.choice((1, 5, 17, 40)))]
        temperature = (0.0, 0.0, 0.9, 0.9)[number % 4]
        more = {"top_p": 0.95, "top_k": (0, 20)[number % 2]} if temperature else {}
        params = SamplingParams(6 + number, temperature, seed=FORCED + number, draft=number % 2 == 0, **more)
        calls.append(Call(prompt, params, step=number % 5))
    return sorted(calls, key=lambda call: call.step)


def alone(call: Call) -> Call:
    return replace(call, step=0)


def test_drafting_changes_nobody_else() -> None:
    """In FP32: greedy requests, and sampled ones that do not draft, have the tokens of an engine that never drafts;
    sampled ones that do have those that they draw alone."""
    require_bits("float32")
    calls = mixed_calls()
    recorder = Recorder(real_proposer("float32"))
    results = serve(watched("float32", recorder, look=Watch("float32"), requests=5, prefill_rows=24), calls)
    assert {request for request, _ in recorder.drafted} == {i for i, call in enumerate(calls) if call.params.draft}
    for number, call in enumerate(calls):
        own = [alone(call)]
        if call.params.temperature and call.params.draft:
            want = serve(watched("float32", real_proposer("float32"), requests=1), own)
        else:
            want = plain_ids("float32", own)
        assert results[number] == want[0], number


@pytest.mark.parametrize("mode", ["float32", "bfloat16"])
def test_an_oracle_changes_nobody_else_either(mode: str) -> None:
    """Greedy requests whose drafts are right here and wrong there, beside sampled ones that draft too."""
    require_bits(mode)
    calls = mixed_calls()
    want = plain_ids(mode, calls)
    proposer = oracle(mode, 7, known_of(calls, want))
    results = serve(watched(mode, proposer, look=Watch(mode), requests=12), calls)
    for number, call in enumerate(calls):
        assert (call.params.temperature and call.params.draft) or results[number] == want[number], number
    assert proposer.proposed > 0


def test_no_drafts_is_plain_decoding() -> None:
    """gamma 0 and no proposer, sampled requests too."""
    require_bits("float32")
    calls = mixed_calls()
    nothing = OracleProposer(0, {}, lambda *_: True, tiny_dspark().vocab_size)
    got = serve(watched("float32", nothing, look=Watch("float32"), requests=12), calls)
    assert got == plain_ids("float32", calls) and nothing.proposed == 0


class Grammar:
    """The token's remainder by 4 is that of the sum of the two before it; those of `free` requests are not touched."""

    def wanted(self, params: SamplingParams) -> bool:
        return params.eos_id is None

    def __call__(self, logits_NV: torch.Tensor, rows: Sequence[RowHistory]) -> torch.Tensor:
        token_V, logits_NV = torch.arange(logits_NV.shape[1]), logits_NV.clone()
        for row_V, row in zip(logits_NV, rows, strict=True):
            before = [*row.tokens, *row.supposed][-2:]
            row_V[token_V % 4 != sum(before) % 4] = banned(logits_NV.dtype)
        return logits_NV


@pytest.mark.parametrize("gamma", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_processors_see_each_rows_own_history(gamma: int) -> None:
    """A grammar over the tokens before, beside requests without it, and end tokens that are not wanted."""
    draw, processors = random.Random(5), (IgnoreEos(), Grammar())
    calls = []
    for number in range(12):
        prompt = [draw.randrange(2, 260) for _ in range(draw.choice((1, 2, 18)))]
        free = {"eos_id": draw.randrange(260), "ignore_eos": True} if number % 4 == 3 else {}
        calls.append(Call(prompt, SamplingParams(14, seed=(NATURAL, FORCED + number % 6)[number % 2], **free)))
    want = plain_ids("float64", calls, processors=processors)
    assert want != plain_ids("float64", calls)
    proposer = oracle("float64", gamma, known_of(calls, want))
    assert serve(watched("float64", proposer, requests=12, processors=processors), calls) == want
    recorder = Recorder(real_proposer("float64", gamma))
    assert serve(watched("float64", recorder, requests=12, processors=processors), calls) == want
    # What is drafted follows the grammar too, over drafts of its own block.
    for (number, anchor), (ids, _) in recorder.drafted.items():
        call, history = calls[number], [*calls[number].prompt, *want[number][0]][: anchor + 1]
        for token in ids if call.params.eos_id is None else ():
            assert token % 4 == sum(history[-2:]) % 4
            history.append(token)


def test_an_end_token_that_is_not_wanted_never_comes() -> None:
    text = serial("float64")[TEXTS[0]]
    calls = [
        text_call(text, 1, 20, kind, eos_id=text.tokens[4], ignore_eos=True) for kind in (NATURAL, RIGHT, FORCED + 1)
    ]
    want = plain_ids("float64", calls)
    assert all(call.params.eos_id not in ids and len(ids) == 20 for call, (ids, _) in zip(calls, want, strict=True))
    proposer = oracle("float64", 5, known_of(calls, want))
    assert serve(watched("float64", proposer, requests=3), calls) == want and proposer.proposed > 0


# Slots that change hands.


def test_late_news_of_an_earlier_lease_leave_no_trace() -> None:
    engine = watched("float64", real_proposer("float64"), requests=1)
    for prompt in ([5, 6], [7, 8, 9]):
        number = engine.add_request(prompt, SamplingParams(12))
        for _ in range(3):
            engine.step()
        request = engine.requests[number]
        assert request.drafts and request.owner == 0
        before = (list(request.tokens), request.computed, request.drafts, request.survivals)
        for generation in (request.generation - 1, request.generation + 1):
            late = Told(request.slot, generation, 6, (9, 9, 9), "eos", (1, 2, 3, 4, 5))
            assert engine._apply((request.dp_rank, request.slot), late) == []
        assert (request.tokens, request.computed, request.drafts, request.survivals) == before
        while engine.active:
            engine.step()
    assert request.generation == 2


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_who_follows_a_cancelled_request_starts_afresh(steps: int) -> None:
    """The drafts of the first are verified in the very step that cancels it; the second gets its slot and drafts what
    it drafts on a fresh engine."""
    second = Call([7, 8, 9], SamplingParams(12))
    want, fresh, _ = drafts_of("float64", [second], prefix_points=0)
    texts = serial("float64")
    recorder = Recorder(real_proposer("float64"))
    watch = Watch("float64", texts)
    engine = watched("float64", recorder, look=watch, requests=1, max_context=320)
    first = engine.add_request(texts[TEXTS[0]].tokens[:5], SamplingParams(30))
    for _ in range(steps):
        engine.step()
    assert steps < 2 or engine.requests[first].drafts
    engine.cancel(first)
    number = engine.add_request(second.prompt, second.params)
    ids: list[int] = []
    while engine.active:
        for event in engine.step():
            if event.request_id == number:
                ids += event.token_ids
    engine.caches.check_integrity()
    assert watch.fault == "" and [ids, "length"] == want[0]
    got = {(0, anchor): drafts for (request, anchor), drafts in recorder.drafted.items() if request == number}
    assert same_drafts(got, fresh.drafted, "float64") == ""
