"""Draws inside a nucleus keep the proportions of the model's probabilities."""

import pytest
import torch

from meshspark.models.sampling import sample

DRAWS = 4000


@pytest.mark.parametrize(("top_p", "kept"), [(0.6, 1), (0.7, 2), (0.95, 3), (1.0, 4)])
def test_a_nucleus_is_renormalised(top_p: float, kept: int) -> None:
    """What lies outside is shared by all that is inside, not given to the last of them."""
    probability = torch.tensor([0.23, 0.61, 0.04, 0.12], dtype=torch.float64)
    inside = probability.argsort(descending=True)[:kept]
    want = torch.zeros(4, dtype=torch.float64)
    want[inside] = probability[inside] / probability[inside].sum()
    draws = (torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS
    ones = torch.ones(DRAWS)
    ids = sample(probability.log().expand(DRAWS, 4), ones, top_p * ones.double(), draws)
    seen = torch.bincount(ids, minlength=4) / DRAWS
    assert (seen - want).abs().max() <= 2 / DRAWS


def test_a_nucleus_is_that_of_the_tempered_probabilities() -> None:
    """Temperature 0.5 squares the odds: 0.61 and 0.23 become 0.85 and 0.12 of the whole."""
    logits = torch.tensor([[0.23, 0.61, 0.04, 0.12]], dtype=torch.float64).log().expand(3, 4)
    draws = torch.tensor([0.1, 0.5, 0.999], dtype=torch.float64)
    half = torch.full((3,), 0.5)
    assert sample(logits, half, torch.full((3,), 0.8, dtype=torch.float64), draws).tolist() == [1, 1, 1]
    assert sample(logits, half, torch.full((3,), 0.95, dtype=torch.float64), draws).tolist() == [1, 1, 0]
