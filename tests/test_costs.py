"""Cost tables: between and beyond their entries, as they travel, and as they are measured."""

import itertools
import math
from fractions import Fraction

import pytest
from cost_tables import tables
from hypothesis import given, settings
from hypothesis import strategies as st

from meshspark.models.dspark.costs import CostTable, cost_sizes, measure_costs


def test_costs_between_and_beyond_entries() -> None:
    table = CostTable((1, 2, 6, 8), (100, 107, 120, 130))
    assert [table.cost(rows) for rows in range(1, 9)] == [100, 107, 110, 113, 116, 120, 125, 130]
    assert table.cost(10) == 140 and table.cost(9) == 135
    flat = CostTable((1, 4, 8, 9), (100, 140, 200, 200))
    assert flat.cost(14) == 200 + 60, "the line from 4 rows, for the last two are level"
    assert CostTable((1,), (5,)).cost(1000) == 5
    with pytest.raises(ValueError, match="rows is 0, allowed: 1"):
        table.cost(0)


@settings(deadline=None)
@given(tables())
def test_tables_rise_and_travel(table: CostTable) -> None:
    costs = [table.cost(rows) for rows in range(1, 100)]
    assert costs == sorted(costs) and all(type(cost) is int for cost in costs)
    assert CostTable.decode(table.encode()) == table
    assert CostTable.measured(table.rows, table.nanoseconds) == table
    hull = table.convex()
    assert all(hull.cost(rows) <= table.cost(rows) for rows in range(1, table.rows[-1] + 1)), "never above"
    rises = [Fraction(y - x, b - a) for (a, x), (b, y) in itertools.pairwise(zip(hull.rows, hull.nanoseconds))]  # noqa: B905
    assert all(a < b for a, b in itertools.pairwise(rises))
    assert {*zip(hull.rows, hull.nanoseconds, strict=True)} <= {*zip(table.rows, table.nanoseconds, strict=True)}
    for start in (2, 5, table.rows[-1] + 1):
        later = table.convex(start)
        assert later.cost(start) == table.cost(start) and later.rows[:2] == (1, start)
        assert all(later.cost(n) <= table.cost(n) for n in range(start, table.rows[-1] + 1))
        rises = [b - a for a, b in itertools.pairwise(map(later.cost, later.rows[1:]))]
        runs = [b - a for a, b in itertools.pairwise(later.rows[1:])]
        assert all(x * m < y * n for x, y, n, m in zip(rises, rises[1:], runs, runs[1:]))  # noqa: B905


@settings(deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=12))
def test_measured_tables_are_the_nearest_that_rise(times: list[int]) -> None:
    """Against the max-min formula of isotonic regression."""
    count = len(times)
    want = [
        max(min(Fraction(sum(times[i : j + 1]), j + 1 - i) for j in range(k, count)) for i in range(k + 1))
        for k in range(count)
    ]
    assert CostTable.measured(range(1, count + 1), times).nanoseconds == tuple(math.floor(each) for each in want)


@pytest.mark.parametrize(
    ("rows", "times", "message"),
    [
        ((), (), "rows has 0 entries"),
        ((1, 2), (5,), "2 rows with 1 nanoseconds"),
        ((2, 3), (5, 6), "strictly increasing from 1"),
        ((1, 3, 3), (5, 6, 7), "strictly increasing from 1"),
        ((1, 2), (6, 5), "nanoseconds are \\[6, 5\\], allowed: non-decreasing"),
        ((1, 2), (0, 5), "nanoseconds has 0"),
        ((1, 2), (5, 1 << 63), "nanoseconds has 9223372036854775808"),
        ((1, 2), (5.0, 6), "nanoseconds has 5.0"),
        ((True, 2), (5, 6), "rows has True"),
    ],
)
def test_nonsense_is_no_table(rows, times, message) -> None:
    with pytest.raises(ValueError, match=message):
        CostTable(rows, times)


@pytest.mark.parametrize(
    "numbers", [[], [0], [2, 1, 2, 5], [1, 1, 5, 6], [1, 1, 0], [2.0, 1, 2, 3, 4], [-1], [1 << 70]]
)
def test_nonsense_is_not_decoded(numbers) -> None:
    with pytest.raises(ValueError, match="allowed"):
        CostTable.decode(numbers)


def test_sizes_to_measure() -> None:
    assert cost_sizes(1) == (1,) and cost_sizes(5) == (1, 2, 3, 4, 5)
    assert cost_sizes(50) == (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 50)
    with pytest.raises(ValueError, match="most is 0"):
        cost_sizes(0)


def test_costs_are_medians_in_rounds() -> None:
    """Two slow rounds of five, and a warm-up that is slower than all: none of them shows."""
    asked: list[int] = []
    factors = iter([50.0] * 3 + [1.0] * 6 + [9.0] * 9)

    def run(rows: int) -> float:
        asked.append(rows)
        return next(factors) * (0.001 + rows * 0.0001)

    table = measure_costs(run, (1, 2, 4), 5, warm_up=1)
    assert asked == [1, 2, 4] * 6
    assert table.nanoseconds == tuple(round(9e6 * (1 + rows / 10)) for rows in (1, 2, 4)), "three of five rounds slow"
    factors = iter([50.0] * 3 + [1.0] * 9 + [9.0] * 6)
    assert measure_costs(run, (1, 2, 4), 5).nanoseconds == (1_100_000, 1_200_000, 1_400_000)
    noisy = {1: 0.004, 2: 0.002, 4: 0.006}
    assert measure_costs(lambda rows: noisy[rows], (1, 2, 4), 3).nanoseconds == (3_000_000, 3_000_000, 6_000_000)


def test_measurement_refuses_what_is_no_time() -> None:
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a step of 1 rows took"):
            measure_costs(lambda _, seconds=seconds: seconds, (1, 2), 1)
    with pytest.raises(ValueError, match="repeats is 0"):
        measure_costs(lambda _: 1.0, (1, 2), 0)
    with pytest.raises(ValueError, match="strictly increasing from 1"):
        measure_costs(lambda _: 1.0, (2, 4), 1)
