"""Divergences judged: distances of the two highest logits in FP64, on one rank and on four."""

import math

import pytest
import torch
from episodes import full_weights, make_model
from rank_pool import RankPools

from meshspark.launch.compare_runs import Comparison, Divergence
from meshspark.launch.ties import ulps, with_ties
from meshspark.models.numerics import BFLOAT16, FLOAT32, FLOAT64, W8A8
from meshspark.models.v4.config import tiny
from meshspark.models.v4.model import Model
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

PARTED = (Divergence(1, 3, 5, 9, (1, 7, 30, 4)), Divergence(2, 0, 5, None, tuple(range(2, 150))))


def judged(groups: Groups) -> list[float | None] | None:
    """What every rank gets: the distances on world rank 0, None elsewhere."""
    mine = Comparison((), PARTED) if groups.rank == 0 else None
    found = with_ties(mine, groups, FLOAT32, lambda: make_model(groups, "tiny", "float64"))
    return None if found is None else [each.ulps for each in found.divergences]


def by_hand(common: tuple[int, ...]) -> float:
    model = Model(tiny(), full_weights("tiny", "float64"), Groups.single(), FLOAT64)
    with torch.inference_mode():
        logits = model.forward(model.plan_sequences([common], asked="all")).logits
    assert logits is not None
    highest, second = sorted(logits[-1].tolist())[:-3:-1]
    return (highest - second) / 2.0 ** (math.floor(math.log2(abs(highest))) - 23)


def test_distances_on_one_rank_and_on_four(ranks: RankPools) -> None:
    want = [pytest.approx(by_hand(each.common), rel=1e-6) for each in PARTED]
    assert judged(Groups.single()) == want
    assert ranks.run(Topology(4, 2, 4), "test_ties:judged", timeout=90) == [want, None, None, None]


def test_a_tie_is_one() -> None:
    """The head's row of the likeliest id, doubled into another one."""
    weights = dict(full_weights("tiny", "float64"))

    def load() -> Model:
        return Model(tiny(), weights, Groups.single(), FLOAT64)

    model = load()
    with torch.inference_mode():
        logits = model.forward(model.plan_sequences([PARTED[0].common], asked="last")).logits
    assert logits is not None
    best = int(logits[0].argmax())
    head = weights["head.weight"].clone()
    head[(best + 1) % len(head)] = head[best]
    weights["head.weight"] = head
    found = with_ties(Comparison((), PARTED[:1]), Groups.single(), FLOAT32, load)
    assert found is not None and found.divergences[0].ulps == 0 and found.divergences[0].tied is True
    assert str(found.divergences[0]).endswith("9 drafted (a tie: 0 ulps apart)")


@pytest.mark.parametrize(("comparison", "mode"), [(Comparison((), ()), FLOAT32), (Comparison((), PARTED), W8A8)])
def test_nothing_is_loaded_where_nothing_is_told(comparison: Comparison, mode) -> None:
    found = with_ties(comparison, Groups.single(), mode, lambda: pytest.fail("loaded"))
    assert found == comparison and all(each.tied is None for each in comparison.divergences)


@pytest.mark.parametrize(
    ("highest", "second", "mode", "want"),
    [
        (1.0, 1.0 - 2**-23, FLOAT32, 1.0),
        (1.99, 1.99 - 3 * 2**-23, FLOAT32, 3.0),
        (-4.0, -4.0 - 2**-5, BFLOAT16, 1.0),
        (0.0, -(2.0**-52), FLOAT64, 1.0),
    ],
)
def test_units_of_the_last_place(highest: float, second: float, mode, want: float) -> None:
    assert ulps(highest, second, mode) == pytest.approx(want)
