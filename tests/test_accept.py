"""Acceptance: the greedy rule by hand, the sampled rule by chi-square over sequences of a toy vocabulary, uniforms.

The toy target and drafter are chains: the logits of a token depend on the one before. So what three tokens in a row
should be is known exactly, and a verification, whatever it accepts, must emit just that.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from meshspark.models.dspark.accept import Accepted, accept_greedy, accept_sampled, step_uniforms
from meshspark.models.sampling import draw, greedy, kept_probability, sample, uniform
from meshspark.models.uniforms import DRAFT, TARGET, TEST, uniforms

TRIALS, VOCAB, GAMMA, TOLD = 200_000, 5, 3, 3


@dataclass(frozen=True)
class Case:
    """temperature and filters of the target and of what drafts are drawn from; point: drafts are its highest ids.

    widths: rows verified, one of these.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    drawn_top_k: int | None = None
    drawn_top_p: float | None = None
    point: bool = False
    widths: tuple[int, ...] = (GAMMA + 1,)


CASES = {
    "whole": Case(),
    "trimmed": Case(widths=(1, 2, 3, 4)),
    "point mass": Case(point=True),
    "point mass, trimmed, warm": Case(point=True, widths=(2, 4), temperature=1.7),
    "cool": Case(temperature=0.5),
    "truncated alike": Case(top_k=4, top_p=0.85, drawn_top_k=4, drawn_top_p=0.85),
    "target truncated": Case(top_p=0.7, min_p=0.1),
    "zeros in q": Case(drawn_top_k=2),
    "zeros in both": Case(top_k=3, drawn_top_k=2, temperature=1.3, widths=(1, 4)),
}


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [V, V] of target and drafter by the token before."""
    generator = torch.Generator().manual_seed(4)
    target = 1.2 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)
    return target, target + 0.9 * torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64)


def weights_of(logits: torch.Tensor, case: Case, drawn: bool = False) -> torch.Tensor:
    rows = len(logits)
    top_k = case.drawn_top_k or 0 if drawn else case.top_k
    top_p = case.drawn_top_p or 1.0 if drawn else case.top_p
    return kept_probability(
        logits,
        torch.full((rows,), case.temperature, dtype=torch.float64),
        torch.full((rows,), top_p, dtype=torch.float64),
        top_k=torch.full((rows,), top_k),
        min_p=torch.full((rows,), 0.0 if drawn else case.min_p, dtype=torch.float64),
    )


Rule = Callable[..., Accepted]


def emitted(case: Case, rule: Rule = accept_sampled, *, spoil: bool = False, ahead: bool = False) -> torch.Tensor:
    """The first TOLD tokens [TRIALS, TOLD] behind token 0, by as many steps as they take.

    spoil: the rule is told another distribution than the drafts were drawn from. ahead: widths depend on what this
    block's second draft is drawn with, not on what an earlier block's third one was at the same position.
    """
    target, drafter = tables()
    target_VV, drawn_VV = weights_of(target, case), weights_of(drafter, case, drawn=True)
    told, done = torch.zeros((TRIALS, 1), dtype=torch.int64), torch.zeros(TRIALS, dtype=torch.int64)
    told = torch.cat((told, torch.full((TRIALS, TOLD + GAMMA), -1)), dim=1)
    while bool((going := done < TOLD).any()):
        trial = going.nonzero().squeeze(1)
        seed, anchor, token = trial.numpy(), done[trial].numpy(), told[trial, done[trial]]
        draft_RY, drawn_RYV = draft_block(case, seed, anchor, token, drafter, drawn_VV)
        if spoil:
            drawn_RYV = drawn_VV[token][:, None].expand(-1, GAMMA, -1)
        number = uniforms(seed, anchor + 2, DRAFT + (1 if ahead else 2))
        width_R = torch.tensor(case.widths)[torch.from_numpy((number * len(case.widths)).astype(np.int64))]
        target_RSV = target_VV[torch.cat((token[:, None], draft_RY), dim=1)]
        target_NV = target_RSV[torch.arange(GAMMA + 1) < width_R[:, None]]
        test_RY, final_RS = (step_uniforms(seed, anchor, n, s) for n, s in ((GAMMA, TEST), (GAMMA + 1, TARGET)))
        got = rule(target_NV, width_R, draft_RY, None if case.point else drawn_RYV, test_RY, final_RS)
        assert bool((got.token_R >= 0).all()) and bool((got.count_R < width_R).all())
        new_RS = torch.cat((draft_RY, draft_RY[:, :1]), dim=1)
        new_RS.scatter_(1, got.count_R[:, None], got.token_R[:, None])
        for j in range(GAMMA + 1):
            emits = j <= got.count_R
            told[trial[emits], done[trial[emits]] + 1 + j] = new_RS[emits, j]
        done[trial] += got.count_R + 1
    return told[:, 1 : 1 + TOLD]


def draft_block(
    case: Case, seed: np.ndarray, anchor: np.ndarray, token: torch.Tensor, drafter: torch.Tensor, drawn_VV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts [R, Y] one after the other, and what each was drawn from [R, Y, V]."""
    drafts, before = [], [token]
    for number in range(GAMMA):
        drawn_RV, number_R = drawn_VV[before[-1]], uniforms(seed, anchor + 1 + number, DRAFT + number)
        drafts.append(greedy(drafter[before[-1]]) if case.point else draw(drawn_RV, torch.from_numpy(number_R)))
        before.append(drafts[-1])
    return torch.stack(drafts, dim=1), drawn_VV[torch.stack(before[:-1], dim=1)]


def p_value(told: torch.Tensor, case: Case) -> float:
    """Chi-square over all sequences; those that are expected fewer than 8 times are one cell."""
    chain = weights_of(tables()[0], case)
    chain = chain / chain.sum(1, keepdim=True)
    expected = TRIALS * (chain[0][:, None, None] * chain[:, :, None] * chain[None]).flatten()
    places = torch.tensor([VOCAB**2, VOCAB, 1])
    observed = torch.bincount((told * places).sum(1), minlength=VOCAB**3).double()
    rare = expected < 8
    cells = [(observed[~rare], expected[~rare])]
    if bool(rare.any()) and float(expected[rare].sum()) > 0:
        cells.append((observed[rare].sum()[None], expected[rare].sum()[None]))
    elif float(observed[rare].sum()) > 0:
        return 0.0
    found, wanted = (torch.cat(each) for each in zip(*cells, strict=True))
    statistic = ((found - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


SLOW = ("point mass, trimmed, warm", "cool", "zeros in q")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES])
def test_what_is_emitted_has_the_targets_distribution(name: str) -> None:
    case = CASES[name]
    assert p_value(emitted(case), case) > 1e-4


@pytest.mark.slow
def test_drawn_drafts_may_be_taken_for_certain_ones() -> None:
    """Fewer are accepted, and what is emitted is the target's all the same."""
    case, counts = CASES["whole"], []

    def certain(target_NV, width_R, draft_RY, drawn_RYV, test_RY, final_RS) -> Accepted:  # type: ignore[no-untyped-def]
        both = [accept_sampled(target_NV, width_R, draft_RY, q, test_RY, final_RS) for q in (None, drawn_RYV)]
        counts.append([float(each.count_R.double().mean()) for each in both])
        return both[0]

    assert p_value(emitted(case, certain), case) > 1e-4
    assert all(fewer < more for fewer, more in counts)


def always_target(target_NV, width_R, draft_RY, drawn_RYV, test_RY, final_RS) -> Accepted:  # type: ignore[no-untyped-def]
    """Wrong: after a rejection the target's own distribution, not what is left of it."""
    got = accept_sampled(target_NV, width_R, draft_RY, drawn_RYV, test_RY, final_RS)
    at_R = width_R.cumsum(0) - width_R + got.count_R
    return Accepted(got.count_R, draw(target_NV[at_R], final_RS.gather(1, got.count_R[:, None]).squeeze(1)))


def one_number(target_NV, width_R, draft_RY, drawn_RYV, test_RY, final_RS) -> Accepted:  # type: ignore[no-untyped-def]
    """Wrong: a draft is judged and the token after it drawn with one number."""
    return accept_sampled(target_NV, width_R, draft_RY, drawn_RYV, test_RY, test_RY[:, [0, 1, 2, 2]])


@pytest.mark.parametrize("planted", ["markov term", "residual", "one number", "looks ahead"])
def test_a_wrong_rule_is_seen(planted: str) -> None:
    """Q without the term of the token before; the target's row after a rejection; one number for two purposes; a
    scheduler that looks ahead."""
    case = CASES["trimmed" if planted == "looks ahead" else "whole"]
    rule = {"residual": always_target, "one number": one_number}.get(planted, accept_sampled)
    told = emitted(case, rule, spoil=planted == "markov term", ahead=planted == "looks ahead")
    assert p_value(told, case) < 1e-12


def test_greedy_prefix_by_hand() -> None:
    drafts = torch.tensor([[3, 4, 5], [3, 9, 5], [8, 4, 5], [3, 4, 5], [-1, 4, 5], [3, -1, 5], [7, 7, 7]])
    width = torch.tensor([4, 4, 4, 2, 4, 3, 1])
    best = [[3, 4, 5, 6], [3, 4, 5, 6], [3, 4, 5, 6], [3, 4], [-1, 4, 5, 6], [3, -1, 5], [2]]
    got = accept_greedy(torch.tensor([each for row in best for each in row]), width, drafts)
    assert got.count_R.tolist() == [3, 1, 0, 1, 0, 1, 0]
    assert got.token_R.tolist() == [6, 4, 3, 4, -1, -1, 2]
    none = accept_greedy(torch.tensor([5, 6]), torch.tensor([1, 1]), torch.zeros(2, 0, dtype=torch.int64))
    assert none.count_R.tolist() == [0, 0] and none.token_R.tolist() == [5, 6]


def random_step(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [N, V] of ragged rows, widths, and drafts that are right more often than not."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.randint(1, GAMMA + 2, (40,), generator=generator)
    logits = torch.randn(int(width.sum()), 12, generator=generator, dtype=torch.float64)
    drafts = torch.randint(0, 12, (40, GAMMA), generator=generator)
    first = width.cumsum(0) - width
    for r in range(40):
        for j in range(int(width[r]) - 1):
            if torch.rand((), generator=generator) < 0.7:
                drafts[r, j] = logits[first[r] + j].argmax()
    return logits, width, drafts


def test_temperature_zero_of_the_sampled_rule_is_the_greedy_rule() -> None:
    for seed in range(5):
        logits, width, drafts = random_step(seed)
        logits[3, 5] = float("nan")
        rows = len(logits)
        target = kept_probability(logits, torch.zeros(rows), torch.ones(rows))
        numbers = np.arange(40), np.arange(40) + 7
        test, final = step_uniforms(*numbers, GAMMA, TEST), step_uniforms(*numbers, GAMMA + 1, TARGET)
        want = accept_greedy(greedy(logits), width, drafts)
        got = accept_sampled(target, width, drafts, None, test, final)
        assert torch.equal(got.count_R, want.count_R) and torch.equal(got.token_R, want.token_R)
        assert bool((want.count_R > 0).any()) and bool((want.count_R < width - 1).any())


def test_without_drafts_it_is_plain_sampling() -> None:
    """Width 1, and drafts that are none: the very ids of `sample` with the request's own number."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(300, 50, generator=generator)
    heat, top_p = torch.rand(300, generator=generator) * 2, torch.rand(300, generator=generator)
    heat[::7] = 0
    filters = {"top_k": torch.randint(0, 30, (300,), generator=generator), "min_p": torch.full((300,), 0.02)}
    seed, anchor = np.arange(300), np.arange(300) * 3
    numbers = torch.tensor([uniform(int(s), int(a) + 1) for s, a in zip(seed, anchor, strict=True)])
    want = sample(logits, heat, top_p, numbers.double(), **filters)
    target, width = kept_probability(logits, heat, top_p, **filters), torch.ones(300, dtype=torch.int64)
    for drafts in (torch.zeros(300, 0, dtype=torch.int64), torch.full((300, 2), 4)):
        final = step_uniforms(seed, anchor, drafts.shape[1] + 1, TARGET)
        test = step_uniforms(seed, anchor, drafts.shape[1], TEST)
        got = accept_sampled(target, width, drafts, None, test, final)
        assert torch.equal(got.token_R, want) and not bool(got.count_R.any())
    refused = accept_sampled(
        target.repeat_interleave(2, 0), 2 * width, torch.full((300, 1), -1), None, test[:, :1], final[:, :2]
    )
    assert torch.equal(refused.token_R, want) and not bool(refused.count_R.any()), "no draft: nothing is taken away"


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, width, drafts = random_step(9)
    target = kept_probability(logits, torch.ones(len(logits)), torch.ones(len(logits)))
    drawn = torch.rand(40, GAMMA, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    numbers = np.arange(40), np.arange(40)
    test, final = step_uniforms(*numbers, GAMMA, TEST), step_uniforms(*numbers, GAMMA + 1, TARGET)
    whole = accept_sampled(target, width, drafts, drawn, test, final)
    first = (width.cumsum(0) - width).tolist()
    for r in range(40):
        own, one = slice(first[r], first[r] + int(width[r])), slice(r, r + 1)
        alone = accept_sampled(target[own], width[one], drafts[one], drawn[one], test[one], final[one])
        assert (alone.count_R, alone.token_R) == (whole.count_R[one], whole.token_R[one])


def test_rows_and_drafts_that_are_not_finite() -> None:
    """A draft of a row of NaN is refused and the target's own token drawn; a target's row of NaN has no token."""
    target = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    drawn = torch.tensor([[[float("nan")] * 3]], dtype=torch.float64)
    half = torch.full((1, 2), 0.9, dtype=torch.float64)
    got = accept_sampled(target, torch.tensor([2]), torch.tensor([[-1]]), drawn, half[:, :1] * 0, half)
    assert (got.count_R.tolist(), got.token_R.tolist()) == ([0], [1])
    target[0] = float("nan")
    sound = torch.full((1, 1, 3), 1 / 3, dtype=torch.float64)
    got = accept_sampled(target, torch.tensor([2]), torch.tensor([[1]]), sound, half[:, :1] * 0, half)
    assert (got.count_R.tolist(), got.token_R.tolist()) == ([0], [-1])


def test_equal_distributions_leave_nothing_but_accept_everything() -> None:
    """P = Q up to rounding: a rejection by rounding falls back on the target's row."""
    row = torch.rand(1, 1000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    high = torch.full((1, 2), 1 - 2.0**-53, dtype=torch.float64)
    target = torch.cat((row, row))
    for factor, count in ((1.0, 1), (1 + 1e-12, 1)):
        got = accept_sampled(target, torch.tensor([2]), torch.tensor([[7]]), row[None] * factor, high[:, :1], high)
        assert got.count_R.tolist() == [count] and got.token_R.item() >= 0
    # What is left is all on token 3, and is nothing but rounding.
    moved = row.clone()
    moved[0, 7] += 1e-10
    moved[0, 3] -= 1e-10
    got = accept_sampled(target, torch.tensor([2]), torch.tensor([[7]]), moved[None], high[:, :1], high)
    assert got.count_R.tolist() == [0] and got.token_R.item() == draw(row, high[:, 0]).item() != 3


def test_uniforms_are_those_of_numpys_generator() -> None:
    seeds, positions = [0, 1, 7, -3, 2**63 - 1, 123456789], [0, 5, 9, 1 << 20, 3, 1]
    for stream in (TARGET, TEST, DRAFT, DRAFT + 6):
        want = []
        for seed, position in zip(seeds, positions, strict=True):
            key = np.array([seed % (1 << 64), position], dtype=np.uint64)
            counter = np.array([0, 0, 0, stream], dtype=np.uint64)
            want.append(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())
        assert uniforms(np.array(seeds), np.array(positions), stream).tolist() == want
    plain = [uniform(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert uniforms(np.array(seeds), np.array(positions)).tolist() == plain
    grid = uniforms(np.arange(100)[:, None], np.arange(50), TEST)
    assert grid.shape == (100, 50) and len(np.unique(grid)) == 5000 and 0 <= grid.min() < grid.max() < 1
    table = step_uniforms(np.array([5, 6]), np.array([10, 20]), 3, TEST)
    assert table.tolist() == uniforms(np.array([[5], [6]]), np.array([[11, 12, 13], [21, 22, 23]]), TEST).tolist()
