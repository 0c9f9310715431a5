"""Sampling against a plain oracle: filters, proportions, ties, extremes, rows alone or in company, or not finite."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshspark.comm.logits import return_best, return_logits
from meshspark.models.sampling import finite_rows, greedy, sample, uniform
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

DRAWS = 4000
BROKEN = (math.nan, math.inf, -math.inf)


def wide(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# The oracle: one row at a time, tokens in a list, no tensor.


def listed(logits, temperature):
    """(probability, id) from the most probable down, ties to the lowest id."""
    x = np.asarray(logits, dtype=np.float64)
    with np.errstate(over="ignore"):
        weights = np.exp((x - x.max()) / np.float64(temperature))
    return sorted(zip(weights / weights.sum(), range(len(x)), strict=True), key=lambda pair: (-pair[0], pair[1]))


def kept_by_filters(logits, temperature, top_p, top_k, min_p):
    """What the filters leave of the list, one after the other, and how far each decision was from going otherwise."""
    left, margin = listed(logits, temperature), 1.0
    if top_k:
        left = left[:top_k]
    if top_p < 1:
        total, reached, inside = math.fsum(p for p, _ in left), 0.0, []
        for p, token in left:
            if inside and reached >= top_p:
                break
            inside.append((p, token))
            reached = math.fsum(q / total for q, _ in inside)
            margin = min(margin, abs(reached - top_p))
        left = inside
    floor = min_p * left[0][0]
    if min_p:
        margin = min([margin, *(abs(p - floor) / left[0][0] for p, _ in left[1:])])
        left = [left[0], *(pair for pair in left[1:] if pair[0] >= floor)]
    return left, margin


def drawn(logits, temperature, top_p, top_k, min_p, draw):
    """(id, how far any decision was from going otherwise)."""
    if not all(math.isfinite(value) for value in logits):
        return -1, 1.0
    if temperature == 0:
        return int(np.argmax(logits)), 1.0
    left, margin = kept_by_filters(logits, temperature, top_p, top_k, min_p)
    total, reached = math.fsum(p for p, _ in left), 0.0
    for p, token in left:
        reached = math.fsum((reached, p / total))
        margin = min(margin, abs(reached - draw))
        if draw < reached:
            return token, margin
    return left[-1][1], margin


LEVELS = st.sampled_from([-3.0, -0.5, 0.0, 0.25, 2.0])
NEAR = st.one_of(LEVELS, st.floats(-3, 3, width=32))
FAR = st.one_of(NEAR, st.floats(-90, 90, width=32), st.sampled_from([-3e38, 3e38, 1e-42, -0.0]))


def rows_of(count):
    """Rows of so many logits: mostly such that many tokens have a part in it."""
    return st.one_of(st.lists(NEAR, min_size=count, max_size=count), st.lists(FAR, min_size=count, max_size=count))


SETTING = st.fixed_dictionaries(
    {
        "temperature": st.one_of(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.0, 1e-300, 1e-3, 1e300])),
        "top_p": st.sampled_from([1e-9, 0.3, 0.77, 0.9, 1 - 1e-9, 1.0]),
        "top_k": st.one_of(st.just(0), st.sampled_from([1, 2, 3, 4, 7, 40, 2**31 - 1])),
        "min_p": st.one_of(st.just(0.0), st.sampled_from([1e-9, 0.05, 0.31, 1.0])),
        "draw": st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
    }
)


def sampled(rows, settings_of_rows, columns=None):
    """The library's ids of rows of one length."""
    columns = columns or {name: [one[name] for one in settings_of_rows] for name in settings_of_rows[0]}
    return sample(
        torch.tensor(rows, dtype=torch.float32),
        wide(columns["temperature"]),
        wide(columns["top_p"]),
        wide(columns["draw"]),
        top_k=torch.tensor(columns["top_k"]),
        min_p=wide(columns["min_p"]),
    ).tolist()


@settings(max_examples=250, deadline=None)
@given(st.integers(1, 12).flatmap(rows_of), SETTING)
def test_every_draw_is_the_oracles(row, setting):
    """But where the oracle's own decision hangs on the last bits."""
    exact = torch.tensor(row, dtype=torch.float32).tolist()
    want, margin = drawn(exact, *(setting[n] for n in ("temperature", "top_p", "top_k", "min_p", "draw")))
    (got,) = sampled([row], [setting])
    left = {token for _, token in kept_by_filters(exact, setting["temperature"] or 1.0, 1.0, setting["top_k"], 0.0)[0]}
    assert got in left or setting["temperature"] == 0
    if margin > 1e-12:
        assert got == want


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12).flatmap(lambda n: st.lists(rows_of(n), min_size=2, max_size=9)), st.data())
def test_a_row_draws_the_same_alone_and_in_any_batch(rows, data):
    each = [data.draw(SETTING) for _ in rows]
    together = sampled(rows, each)
    assert together == [sampled([row], [one])[0] for row, one in zip(rows, each, strict=True)]
    order = data.draw(st.permutations(range(len(rows))))
    assert [together[i] for i in order] == sampled([rows[i] for i in order], [each[i] for i in order])


def test_a_wide_row_does_not_depend_on_layout_or_company():
    """A width beyond vector bodies and thread blocks, as a view, as a copy, beside rows that are not finite."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(9, 5003, generator=generator)
    half, draws = torch.full((9,), 0.8), torch.rand(9, generator=generator, dtype=torch.float64)
    more = {"top_k": torch.full((9,), 700), "min_p": torch.full((9,), 0.01)}
    want = sample(rows, half, half, draws, **more)
    turned = rows.T.contiguous().T
    assert torch.equal(sample(turned, half, half, draws, **more), want)
    padded = torch.cat([rows, torch.full((3, 5003), math.nan)])
    longer = {name: torch.cat([x, x[:3]]) for name, x in more.items()}
    halves, more_draws = torch.full((12,), 0.8), torch.cat([draws, draws[:3]])
    assert sample(padded, halves, halves, more_draws, **longer).tolist() == [*want.tolist(), -1, -1, -1]
    for row in range(9):
        one = {name: x[row : row + 1] for name, x in more.items()}
        assert int(sample(rows[row : row + 1], half[:1], half[:1], draws[row : row + 1], **one)) == want[row]


def test_ties_of_a_wide_row_stand_by_id():
    """Wide enough for a sort that is not stable to show."""
    row = torch.randint(0, 3, (5003,), generator=torch.Generator().manual_seed(4)).float().tolist()
    each = [{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "draw": i / 50 + 0.001} for i in range(50)]
    want = [drawn(row, 1.0, 1.0, 0, 0.0, one["draw"])[0] for one in each]
    assert sampled([row] * 50, each) == want


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 5e-324])
def test_no_temperature_is_too_low(temperature):
    """The highest logits share it all, though logits over temperature would be infinite."""
    rows = torch.tensor([[3.0, 7.0, 7.0, -2.0]]).repeat(2, 1)
    ids = sample(rows, wide([temperature] * 2), torch.ones(2), wide([0.4, 0.6]))
    assert ids.tolist() == [1, 2]


def test_no_row_at_all():
    none = torch.zeros(0)
    assert sample(torch.zeros(0, 5), none, none, none, top_k=none.long(), min_p=none).shape == (0,)
    assert greedy(torch.zeros(0, 5)).shape == (0,)


# Proportions, over uniforms that fill [0, 1) evenly.

PROBABILITY = (0.23, 0.61, 0.04, 0.12)


def frequencies(**more):
    draws = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    ones = torch.ones(DRAWS, dtype=torch.float64)
    top_p, temperature = (ones * more.pop(name, 1.0) for name in ("top_p", "temperature"))
    if "top_k" in more:
        more["top_k"] = torch.full((DRAWS,), more["top_k"])
    if "min_p" in more:
        more["min_p"] = ones * more["min_p"]
    ids = sample(wide(PROBABILITY).log().expand(DRAWS, 4), temperature, top_p, draws, **more)
    return torch.bincount(ids, minlength=4) / DRAWS


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"top_p": 0.6}, [1]),
        ({"top_p": 0.7}, [1, 0]),
        ({"top_p": 0.95}, [1, 0, 3]),
        ({"top_p": 1.0}, [1, 0, 3, 2]),
        ({"top_k": 0}, [1, 0, 3, 2]),
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 0, 3]),
        ({"top_k": 99}, [1, 0, 3, 2]),
        ({"min_p": 0.0}, [1, 0, 3, 2]),
        ({"min_p": 0.1}, [1, 0, 3]),
        ({"min_p": 0.3}, [1, 0]),
        ({"min_p": 1.0}, [1]),
        # Of the first two top-p 0.73 is the 0.726 of the first and a little: both; of all four, 0.61 and 0.23 likewise.
        ({"top_k": 2, "top_p": 0.72}, [1]),
        ({"top_p": 0.72}, [1, 0]),
        ({"top_k": 2, "top_p": 0.73}, [1, 0]),
        # Top-p before min-p: after min-p the first two would be the whole, and 0.72 of it the first alone.
        ({"top_p": 0.72, "min_p": 0.3}, [1, 0]),
        ({"top_k": 3, "top_p": 0.95, "min_p": 0.3}, [1, 0]),
        ({"top_p": 0.7, "min_p": 0.01}, [1, 0]),
    ],
)
def test_what_is_left_is_renormalised(more, kept):
    """What lies outside is shared by all that is inside, not given to the last of them."""
    want = torch.zeros(4, dtype=torch.float64)
    want[kept] = wide(PROBABILITY)[kept]
    assert (frequencies(**more) - want / want.sum()).abs().max() <= 2 / DRAWS


def test_filters_are_those_of_the_tempered_probabilities():
    """Temperature 0.5 squares the odds: 0.61 and 0.23 become 0.85 and 0.12 of the whole."""
    want = wide(PROBABILITY) ** 2
    assert (frequencies(temperature=0.5) - want / want.sum()).abs().max() <= 2 / DRAWS
    assert frequencies(temperature=0.5, top_p=0.8).tolist() == [0, 1, 0, 0]
    assert frequencies(temperature=0.5, top_p=0.95)[[2, 3]].tolist() == [0, 0]
    # 0.23 is more than 0.3 of 0.61, but its square is not of the other's.
    assert frequencies(temperature=0.5, min_p=0.3).tolist() == [0, 1, 0, 0]


def test_equal_tokens_are_kept_from_the_lowest_id_on():
    ones, draws = torch.ones(4), wide([0.0, 0.3, 0.6, 0.999])
    flat = torch.zeros(4, 6)
    assert sample(flat, ones, ones, draws, top_k=torch.full((4,), 3)).tolist() == [0, 0, 1, 2]
    assert sample(flat, ones, 0.5 * ones, draws).tolist() == [0, 0, 1, 2]
    assert sample(flat, ones, ones, draws, min_p=ones).tolist() == [0, 1, 3, 5]


def test_uniforms_are_of_seed_and_position_alone_and_evenly_spread():
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(seed, position) for seed in (0, 1, 2**63 - 1) for position in range(100)}) == 300
    found = np.sort([uniform(7, position) for position in range(DRAWS)])
    assert found[0] >= 0 and found[-1] < 1
    # Kolmogorov's bound for one in a thousand.
    assert np.abs(found - np.arange(DRAWS) / DRAWS).max() < 1.95 / math.sqrt(DRAWS)


def test_the_seeded_draws_have_the_models_distribution():
    draws = wide([uniform(11, position) for position in range(DRAWS)])
    ones = torch.ones(DRAWS, dtype=torch.float64)
    ids = sample(wide(PROBABILITY).log().expand(DRAWS, 4), ones, ones, draws)
    seen = torch.bincount(ids, minlength=4).double()
    expected = wide(PROBABILITY) * DRAWS
    # Chi squared with 3 degrees of freedom: beyond this once in a thousand seeds.
    assert float(((seen - expected) ** 2 / expected).sum()) < 16.27


# Rows that are not finite.


@pytest.mark.parametrize("value", BROKEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_that_is_not_finite_has_no_id_wherever_the_value_stands(value, dtype):
    rows = torch.randn(11, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    clean = greedy(rows).tolist()
    for column in range(9):
        rows[column, column] = value
    want = [-1] * 9 + clean[9:]
    assert greedy(rows).tolist() == want
    assert finite_rows(rows).tolist() == [False] * 9 + [True] * 2
    for temperature in (0.0, 1.0):
        ids = sample(rows, torch.full((11,), temperature), torch.ones(11), torch.zeros(11))
        assert ids.tolist() == want
    ids, values = return_best(rows, 0, [0] * 11, Groups.single().tp, stage="best")
    assert ids.tolist() == want and values.isnan().tolist() == [True] * 9 + [False] * 2


def test_the_greatest_finite_values_are_ordinary():
    big = torch.finfo(torch.float32).max
    rows = torch.tensor([[-big, big, big], [-big, -big, -big]])
    assert greedy(rows).tolist() == [1, 0]
    assert sample(rows, torch.ones(2), torch.ones(2), wide([0.6, 0.6])).tolist() == [2, 1]


def over_shards(groups):
    """Per (value, column): what the exchange of the best and the exchange of whole rows give this rank."""
    group = groups.tp
    width = 3
    count = width * group.size
    rows = torch.randn(count + 1, count, generator=torch.Generator().manual_seed(5))
    destination = [row % group.size for row in range(count + 1)]
    found = []
    for value in BROKEN:
        spoiled = rows.clone()
        spoiled[range(count), range(count)] = value
        mine = spoiled[:, width * group.rank : width * (group.rank + 1)]
        ids, values = return_best(mine, width * group.rank, destination, group, stage="best")
        whole = return_logits(mine, destination, group, stage="logits")
        nothing = torch.zeros(len(whole))
        again = [
            greedy(whole),
            sample(whole, nothing, nothing + 1, nothing),
            sample(whole, nothing + 1, nothing + 1, nothing),
        ]
        found.append([ids.tolist(), values.isnan().tolist(), *(x.tolist() for x in again)])
    own = [row for row in range(count + 1) if destination[row] == group.rank]
    return [own, greedy(rows[-1:]).tolist(), found]


@pytest.mark.parametrize("tp", [2, 4])
def test_a_value_in_any_shard_spoils_the_row_and_no_other(ranks, tp):
    last = 3 * tp
    for own, best, found in ranks.run_both(Topology(tp, tp, tp), "test_sampling:over_shards"):
        want = [best[0] if row == last else -1 for row in own]
        for ids, missing, *again in found:
            assert ids == want and missing == [row != last for row in own]
            assert again == [want] * 3


def test_the_exchange_of_the_best_stays_one_message_of_a_few_bytes(monkeypatch):
    """Whatever the row holds: 8 bytes of id, and the value."""
    from meshspark.comm import logits

    seen = []

    def exchange(rows, destination, group, stage):
        seen.append(list(rows.shape))
        return torch.stack([rows, rows])

    monkeypatch.setattr(logits, "_to_destination", exchange)
    monkeypatch.setattr(logits, "_check_destination", lambda *_: None)
    group = type("Pair", (), {"size": 2})()
    ids, _ = logits.return_best(torch.tensor([[1.0, 2.0], [math.inf, 0.0]]), 0, [0, 0], group, stage="best")
    assert seen == [[2, 12]] and ids.tolist() == [1, -1]


def test_the_oracle_is_right_by_hand():
    third = Fraction(1, 3)
    logits = [math.log(float(third * 2)), math.log(float(third))]
    assert [token for _, token in listed(logits, 1.0)] == [0, 1]
    assert [drawn(logits, 1.0, 1.0, 0, 0.0, u)[0] for u in (0.0, 0.66, 0.67, 0.99)] == [0, 0, 1, 1]
    assert drawn(logits, 1.0, 0.5, 0, 0.0, 0.99)[0] == 0 and drawn(logits, 1.0, 1.0, 1, 0.0, 0.99)[0] == 0
    assert drawn(logits, 1.0, 1.0, 0, 0.6, 0.99)[0] == 0 and drawn(logits, 1.0, 1.0, 0, 0.4, 0.99)[0] == 1
