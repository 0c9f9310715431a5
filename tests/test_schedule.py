"""Widths of verification: against exhaustive search, without looking ahead, alike whatever the order."""

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from cost_tables import RECORDED, tables
from hypothesis import given, settings
from hypothesis import strategies as st
from proposals import known, proposal

from meshspark.models.dspark.costs import CostTable
from meshspark.models.dspark.schedule import (
    ONE,
    History,
    Proposal,
    parse_verify,
    searched,
    widths,
)

MILLION = 1_000_000
PAPER = CostTable((1, 2, 3), (9 * MILLION, 18 * MILLION, 20 * MILLION))
"""Steps per second 1, 0.5, 0.45, by rows."""

SMOOTH = CostTable(
    (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512),
    tuple(1000 * us for us in (
        20900, 20950, 21050, 21300, 21900, 23400, 27000, 31000, 35600, 45100, 55300, 76000, 97500)),
)  # fmt: skip
"""Bound by memory first, by arithmetic later: what the early stop is made for."""

JAGGED = CostTable.measured(
    (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 24, 25, 28, 29, 32, 33, 40, 41, 48, 49, 56, 57,
     64, 65, 80, 81, 96, 97, 112, 113, 128, 129, 192, 193, 256, 257, 384, 385, 512),
    [1000 * us for us in (
        4110, 4130, 4125, 4140, 5020, 5060, 5035, 5070, 5890, 5900, 5930, 5910, 6740, 6790, 6760, 6800, 7560, 7610,
        8390, 8420, 9200, 9280, 10030, 10100, 10900, 11850, 12600, 13500, 14300, 15200, 16000, 16900, 18600, 20300,
        22000, 23700, 25500, 27100, 28800, 30500, 36900, 43900, 50300, 57400, 70700, 84500, 98000, 111300)],
)  # fmt: skip
"""Rows in multiples of four, as a CPU runs them."""

CONFIDENT = ("all", "threshold:0.5", "scheduled", "lagged")


def throughput(requests: Sequence[Proposal], rows: Sequence[int], table: CostTable, other: int = 0) -> Fraction:
    tokens = sum(ONE + sum(each.survivals[: width - 1]) for each, width in zip(requests, rows, strict=True))
    return Fraction(tokens, table.cost(sum(rows) + other))


# What keeps the distribution


def first_token(policy: str, history: Callable[[Proposal], History]) -> dict[str, Fraction]:
    """The paper's case, exactly: the first token's distribution where drafts are drawn from Q and the first one says
    how confident the second is."""
    target, drawn = {"A": Fraction(7, 10), "B": Fraction(3, 10)}, {"A": Fraction(1, 2), "B": Fraction(1, 2)}
    told = dict.fromkeys(target, Fraction(0))
    left = {token: max(Fraction(0), target[token] - drawn[token]) for token in target}
    for draft, second in (("A", 0.9), ("B", 0.0)):
        request = proposal(0, 0.8, second)
        (width,) = widths(parse_verify(policy), [request], PAPER, history=history(request))
        accepted = min(Fraction(1), target[draft] / drawn[draft]) if width > 1 else Fraction(0)
        told[draft] += drawn[draft] * accepted
        rest = left if width > 1 else target
        for token in target:
            told[token] += drawn[draft] * (1 - accepted) * rest[token] / sum(rest.values())
    return told


@pytest.mark.parametrize("policy", CONFIDENT)
@pytest.mark.parametrize("past", [(), (0.8, 0.9), (0.8, 0.0), (0.1, 0.1)])
def test_the_papers_case_keeps_the_distribution(policy: str, past: tuple[float, ...]) -> None:
    told = first_token(policy, lambda _: known([proposal(0, *past)]))
    assert told == {"A": Fraction(7, 10), "B": Fraction(3, 10)}


def test_a_global_search_over_current_survivals_does_not() -> None:
    """The same search as `lagged`, told this step's survivals: biased just as the paper computes it."""
    assert first_token("lagged", lambda request: known([request])) == {"A": Fraction(17, 20), "B": Fraction(3, 20)}


def test_the_papers_case_by_hand() -> None:
    early = parse_verify("scheduled")
    for second in (0.9, 0.0, 1.0):
        assert widths(early, [proposal(0, 0.8, second)], PAPER) == [1]
    late, request = parse_verify("lagged"), proposal(0, 0.8, 0.9)
    assert widths(late, [request], PAPER, history=known([request])) == [3]
    assert widths(late, [request], PAPER, history=known([proposal(0, 0.8, 0.0)])) == [1]
    assert widths(early, [proposal(0, 1.0, 1.0)], PAPER) == [1], "2 tokens in twice the time are no gain"


survivals = st.lists(st.sampled_from([0, 1, ONE // 3, ONE // 2, ONE - 1, ONE]) | st.integers(0, ONE), max_size=6).map(
    lambda values: tuple(sorted(values, reverse=True))
)


@st.composite
def batches(draw: st.DrawFn, most: int = 6) -> list[Proposal]:
    slots = draw(st.lists(st.integers(0, 30), unique=True, max_size=most))
    return [Proposal(slot, draw(st.integers(1, 2)), draw(survivals), draw(st.integers(1, 8))) for slot in slots]


policies = st.sampled_from(CONFIDENT).map(parse_verify)
histories = st.tuples(batches(), batches()).map(lambda pair: History().after(pair[0]).after(pair[1]))


@settings(deadline=None, max_examples=80)
@given(policies, batches(), tables(), histories, st.integers(0, 20), st.data())
def test_what_is_verified_does_not_depend_on_what_comes_after_it(policy, requests, table, history, other, data) -> None:
    """Confidences behind a draft are known only once it is drawn: none of them may change whether it is verified."""
    assert_blind(policy, requests, table, history, other, data)


def assert_blind(policy, requests, table, history, other, data) -> None:  # type: ignore[no-untyped-def]
    if not any(each.survivals for each in requests):
        return
    number = data.draw(st.sampled_from([n for n, each in enumerate(requests) if each.survivals]))
    request = requests[number]
    draft = data.draw(st.integers(0, len(request.survivals) - 1))
    tail = data.draw(st.lists(st.integers(0, request.survivals[draft]), min_size=6, max_size=6))
    behind = sorted(tail, reverse=True)[: len(request.survivals) - draft - 1]
    changed = [*requests]
    changed[number] = Proposal(
        request.slot, request.generation, (*request.survivals[: draft + 1], *behind), request.most_rows
    )
    before, after = (
        widths(policy, each, table, other_rows=other, history=history)[number] for each in (requests, changed)
    )
    assert (before > draft + 1) == (after > draft + 1)


@settings(deadline=None, max_examples=80)
@given(policies, batches(), tables(), histories, st.integers(0, 20), st.randoms(use_true_random=False))
def test_widths_are_in_bounds_and_do_not_depend_on_order(policy, requests, table, history, other, random) -> None:
    got = widths(policy, requests, table, other_rows=other, history=history)
    assert all(type(width) is int for width in got) and len(got) == len(requests)
    for width, each in zip(got, requests, strict=True):
        assert 1 <= width <= min(1 + len(each.survivals), each.most_rows)
    mixed = random.sample(requests, len(requests))
    again = dict(
        zip(
            [each.slot for each in mixed],
            widths(policy, mixed, table, other_rows=other, history=history),
            strict=True,
        )
    )
    assert [again[each.slot] for each in requests] == got


# Against plain search


def every_choice(requests: Sequence[Proposal]) -> list[tuple[int, ...]]:
    """All widths, whatever the order of survivals."""
    return list(itertools.product(*(range(1, 2 + each.drafts) for each in requests)))


def algorithm_1(requests: Sequence[Proposal], table: CostTable, other: int) -> list[int]:
    """As the paper has it, in fractions."""
    candidates = [
        (Fraction(value, ONE), draft, each.slot, number)
        for number, each in enumerate(requests)
        for draft, value in enumerate(each.survivals[: each.drafts])
        if value
    ]
    candidates.sort(key=lambda c: (-c[0], c[1], c[2]))
    lengths = [0] * len(requests)
    stored, rows, tokens = [*lengths], len(requests), Fraction(len(requests))
    best = tokens / table.cost(rows + other)
    for value, draft, _, number in candidates:
        assert lengths[number] == draft, "a draft before the one in front of it"
        lengths[number] = draft + 1
        rows, tokens = rows + 1, tokens + value
        if tokens / table.cost(rows + other) <= best:
            break
        best, stored = tokens / table.cost(rows + other), [*lengths]
    return [1 + length for length in stored]


@settings(deadline=None, max_examples=80)
@given(batches(3), tables(), st.integers(0, 20))
def test_early_stop_is_algorithm_1(requests, table, other) -> None:
    got = widths(parse_verify("scheduled"), requests, table, other_rows=other)
    assert got == (algorithm_1(requests, table, other) if requests else [])


@settings(deadline=None, max_examples=80)
@given(batches(3), tables(), st.integers(0, 20))
def test_a_capacity_by_the_same_survivals_is_the_best_of_all_choices(requests, table, other) -> None:
    if not all(each.survivals for each in requests) or not requests:
        return
    got = widths(parse_verify("lagged"), requests, table, other_rows=other, history=known(requests))
    best = max(throughput(requests, each, table, other) for each in every_choice(requests))
    assert throughput(requests, got, table, other) == best


@settings(deadline=None, max_examples=80)
@given(batches(3), tables(), st.integers(0, 20))
def test_early_stop_is_the_best_of_all_choices_where_no_row_is_cheaper_than_the_one_before(
    requests, table, other
) -> None:
    """Rows at whole nanoseconds by hull, so that rounding makes no row cheaper."""
    if not requests:
        return
    steps = sorted(b - a for a, b in itertools.pairwise(table.cost(rows) for rows in range(1, 60)))
    convex = CostTable(tuple(range(1, 60)), tuple(itertools.accumulate(steps, initial=table.cost(1))))
    got = widths(parse_verify("scheduled"), requests, convex, other_rows=other)
    best = max(throughput(requests, each, convex, other) for each in every_choice(requests))
    assert throughput(requests, got, convex, other) == best


def test_ties_go_to_the_smaller_position_then_the_smaller_slot() -> None:
    flat = CostTable((1, 5, 6), (1000, 1000, 9000))
    requests = [proposal(9, 0.5, 1.0), proposal(2, 0.5, 1.0), proposal(5, 0.5, 0.9)]
    for policy in ("scheduled", "lagged"):
        assert widths(parse_verify(policy), requests, flat, history=known(requests)) == [1, 2, 2]
    assert widths(parse_verify("scheduled"), requests[:2], flat) == [2, 3], "0.5 at the first position of both first"


def test_floor_of_one_row_and_room_before_the_limit() -> None:
    free = CostTable((1,), (1000,))
    dear = CostTable((1, 2), (1, 10**9))
    requests = [proposal(0, 1, 1, 1), proposal(1), proposal(2, 1, 1, 1, most_rows=1), proposal(3, 1, 1, 1, most_rows=3)]
    for policy in CONFIDENT:
        assert widths(parse_verify(policy), requests, free) == [4, 1, 1, 3]
        assert widths(parse_verify(policy), [], free) == []
        assert widths(parse_verify(policy), requests, None) == [4, 1, 1, 3], "no table, nothing is trimmed"
    for policy in ("scheduled", "lagged"):
        assert widths(parse_verify(policy), requests, dear) == [1, 1, 1, 1]
    for policy in CONFIDENT[1:]:
        assert widths(parse_verify(policy), [proposal(0, 0, 0)], free) == [1], "what cannot be accepted is not verified"


def test_other_rows_and_other_time_count() -> None:
    """Where much is paid anyway one row more is cheap; where many rows are there already it is dear."""
    request, policy = [proposal(0, 0.3)], parse_verify("scheduled")
    steep = CostTable((1, 2, 3), (1000, 2000, 9000))
    assert widths(policy, request, steep) == [1]
    assert widths(policy, request, steep, other_nanoseconds=5000) == [2]
    assert widths(policy, request, steep, other_nanoseconds=5000, other_rows=1) == [1]


def test_threshold_cuts_at_the_first_own_confidence_below() -> None:
    policy = parse_verify("threshold:0.4")
    assert widths(policy, [proposal(0, 0.9, 0.5, 0.39, 1.0)]) == [3]
    assert widths(policy, [proposal(0, 0.41, 0.41, 0.41, 0.41, 0.41)]) == [6], "survival may be far below"
    assert widths(policy, [proposal(0, 0.39, 1.0)]) == [1]
    assert widths(parse_verify("threshold:0.5"), [proposal(0, 0.5, 0.5)]) == [3], "not below"
    assert widths(parse_verify("threshold:1"), [proposal(0, 1.0, 1.0, 0.999)]) == [3]
    assert widths(parse_verify("threshold:0"), [proposal(0, 0.0, 0.0)]) == [3]
    assert widths(parse_verify("threshold:0.001"), [proposal(0, 0.5, 0.0, 0.0)]) == [2]


def test_history_is_of_two_steps_earlier_and_by_generation() -> None:
    table = CostTable((1, 2, 3, 4, 5), (1000, 1100, 1200, 1300, 1400))
    now, policy = [proposal(3, 0.9, 0.9, 0.9)], parse_verify("lagged")
    poor = [proposal(3, 0.01, 0.01, 0.01)]
    history = History().after(poor)
    assert widths(policy, now, table, history=history) == [4], "of the step before: not yet known"
    history = history.after(now)
    assert widths(policy, now, table, history=history) == [1]
    again = [proposal(3, 0.9, 0.9, 0.9, generation=2)]
    assert widths(policy, again, table, history=history) == [4], "another request in the same slot"
    assert widths(policy, now, table, history=history.after(now)) == [4]
    fewer = known([proposal(3, 0.01)])
    assert widths(policy, now, table, history=fewer) == [1], "drafts that it did not have then are no surer"
    assert widths(policy, now, table, history=known([proposal(3)])) == [4]
    assert widths(policy, now, table) == [4]


# Throughput with known acceptance


def expected(policy: str, batch: Sequence[Sequence[float]], table: CostTable) -> tuple[Fraction, Fraction]:
    """(of the policy, of the best choice of all) tokens by time where confidences are right and stay as they are."""
    requests = [proposal(slot, *confidences) for slot, confidences in enumerate(batch)]
    got = widths(parse_verify(policy), requests, table, history=known(requests))
    order = sorted(value for each in requests for value in each.survivals)[::-1]
    tokens = itertools.accumulate(order, initial=ONE * len(requests))
    best = max(Fraction(total, table.cost(len(requests) + count)) for count, total in enumerate(tokens))
    return throughput(requests, got, table), best


@pytest.mark.parametrize("gamma", [1, 3, 5, 7])
@pytest.mark.parametrize("requests", [1, 4, 16, 64])
@pytest.mark.parametrize(
    "policy, table", [("scheduled", SMOOTH), ("lagged", SMOOTH), ("lagged", JAGGED), ("lagged", RECORDED)]
)
def test_throughput_is_that_of_the_best_choice(policy: str, table: CostTable, requests: int, gamma: int) -> None:
    for p in (0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 0.97, 1.0):
        got, best = expected(policy, [[p] * gamma] * requests, table)
        assert got >= Fraction(99, 100) * best, f"p {p}: {float(got / best)}"
    mixed = [[0.3 + 0.65 * slot / requests] * gamma for slot in range(requests)]
    got, best = expected(policy, mixed, table)
    assert got >= Fraction(99, 100) * best


def test_early_stop_on_jumps_is_caught_and_the_hull_frees_it() -> None:
    """Four requests fill the four rows that cost the same: the fifth pays for four, and the search stops there."""
    batch = [[0.9] * 5] * 4
    got, best = expected("scheduled", batch, JAGGED)
    assert got < Fraction(3, 4) * best
    requests = [proposal(slot, *confidences) for slot, confidences in enumerate(batch)]
    policy = parse_verify("scheduled")
    rows = widths(policy, requests, searched(policy, JAGGED, len(requests)))
    assert throughput(requests, rows, JAGGED) > Fraction(95, 100) * best
    assert searched(policy, None, 4) is None and searched(parse_verify("lagged"), JAGGED, 4) is JAGGED


def simulate(policy: str, table: CostTable, requests: int, *, width: int | None = None) -> float:
    """Tokens by time over many steps whose confidences are right, but new at every step, as an engine decides."""
    verify = parse_verify(policy)
    decide = searched(verify, table, requests)
    rng, tokens, time, history = np.random.default_rng(5), 0, 0, History()
    skill = rng.uniform(0.3, 0.95, requests)
    for step in range(-2, 600 // (requests + 4)):
        draws = rng.beta(6 * skill, 6 * (1 - skill), (5, requests)).T
        batch = [Proposal(slot, 1, row, 100) for slot, row in enumerate(map(tuple, rounded(draws)))]
        rows = [width] * requests if width else widths(verify, batch, decide, history=history)
        history = history.after(batch)
        if step < 0:
            continue
        tokens += sum(ONE + sum(each.survivals[: w - 1]) for each, w in zip(batch, rows, strict=True))
        time += table.cost(sum(rows))
    return tokens / time


def rounded(confidence_RY: np.ndarray) -> list[list[int]]:
    rows: list[list[int]] = (confidence_RY.cumprod(1) * ONE).astype(np.int64).tolist()
    return rows


@pytest.mark.parametrize("requests", [1, 4, 16, 64])
@pytest.mark.parametrize(
    ("policy", "table", "least"),
    [
        ("scheduled", SMOOTH, 0.99),
        ("lagged", SMOOTH, 0.99),
        ("lagged", JAGGED, 0.98),
        ("scheduled", JAGGED, 0.97),
        ("lagged", RECORDED, 0.99),
        ("scheduled", RECORDED, 0.99),
    ],
)
def test_throughput_is_that_of_the_best_width_where_confidences_vary(policy, table, least, requests) -> None:
    """Beyond the paper's assumptions a little is lost: confidences of two steps earlier say nothing about these, which
    tells with one request; and an early stop knows a table of jumps by its hull alone."""
    best = max(simulate(policy, table, requests, width=width) for width in range(1, 7))
    assert simulate(policy, table, requests) >= least * best
