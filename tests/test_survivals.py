"""Survivals in fixed point; policies and proposals that are parsed, or refused."""

import math

import numpy as np
import pytest
import torch
from proposals import fixed, proposal

from meshspark.models.dspark.schedule import ONE, Proposal, Verification, parse_verify, survival, to_fixed, widths


def test_survivals_in_fixed_point() -> None:
    logits = torch.tensor([[0.0, 0.0, math.inf], [-math.inf, 5.0, 5.0], [math.inf, math.nan, 3.0]])
    assert to_fixed(logits).tolist() == [[ONE // 2, ONE // 4, ONE // 4], [0, 0, 0], [ONE, 0, 0]]
    assert to_fixed(logits).dtype == torch.int64 and to_fixed(torch.zeros(2, 3, 4)).shape == (2, 3, 4)
    assert to_fixed(torch.zeros(0, 3)).shape == (0, 3) and to_fixed(torch.zeros(2, 0)).shape == (2, 0)
    random = 4 * torch.randn(500, 7, generator=torch.Generator().manual_seed(1))
    heat = [0.25, 0.5, 1, 1.5, 2, 4, 8]
    want = [
        fixed([1 / (1 + math.exp(-z / t)) for z, t in zip(row, heat, strict=True)]) for row in random.double().tolist()
    ]
    got = to_fixed(random, heat)
    assert np.abs(got.numpy() - np.array(want)).max() <= 1, "another exp may differ in its last bit"
    assert bool((got.diff(dim=1) <= 0).all()) and float(survival(random, heat).max()) <= 1
    # Confidences so high that products are rounded at every step.
    high = to_fixed(torch.linspace(10, 40, 7000, dtype=torch.float64).view(-1, 7).flip(1))
    assert bool((high.diff(dim=1) <= 0).all()) and int(high.max()) <= ONE
    small = torch.tensor([0.0] * 30 + [math.log(3)], dtype=torch.float64)
    assert to_fixed(small)[-2:].tolist() == [1, 0], "down, not to the nearest"
    alone = torch.cat([to_fixed(row[None], heat) for row in random])
    assert torch.equal(alone, got), "a row does not depend on the others"


@pytest.mark.parametrize("heat", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [math.inf, 1.0]])
def test_wrong_temperatures_are_refused(heat: list[float]) -> None:
    with pytest.raises(ValueError, match="allowed: 2 finite numbers above 0"):
        to_fixed(torch.zeros(3, 2), heat)


def test_policies_are_parsed() -> None:
    assert parse_verify("all") == Verification() == Verification("all")
    assert parse_verify("threshold:0.5") == Verification("threshold", ONE // 2)
    assert (parse_verify("threshold:1").theta, parse_verify("threshold:0").theta) == (ONE, 0)
    texts = ("all", "threshold:0.5", "scheduled", "lagged")
    uses = {text: (parse_verify(text).uses_confidence, parse_verify(text).uses_costs) for text in texts}
    assert [*uses.values()] == [(False, False), (True, False), (True, True), (True, True)]


@pytest.mark.parametrize(
    "text",
    ["", "some", "All", "threshold", "threshold:", "threshold:x", "threshold:1.1", "threshold:-0.1", "threshold:nan",
     "all:1", "scheduled:0.4", "lagged:", "threshold:0.4:1"],
)  # fmt: skip
def test_wrong_policies_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: all, threshold:NUMBER from 0 to 1, scheduled, lagged"):
        parse_verify(text)


def test_wrong_proposals_are_refused() -> None:
    for values in ((ONE + 1,), (-1,), (5, 6)):
        with pytest.raises(ValueError, match="survivals of slot 4"):
            Proposal(4, 1, values, 3)
    with pytest.raises(ValueError, match="most_rows of slot 4 is 0"):
        Proposal(4, 1, (), 0)
    with pytest.raises(ValueError, match="slots are \\[4, 4\\]"):
        widths(parse_verify("all"), [proposal(4), proposal(4)])
    with pytest.raises(ValueError, match="verification is 'scheduled' with theta 5"):
        Verification("scheduled", 5)
