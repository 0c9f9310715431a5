"""From a row of logits to an id: greedy, or temperature and top-p with a uniform keyed by seed and position.

Legend: A asked rows, V vocabulary.
"""

import numpy as np
import torch


def uniform(seed: int, position: int) -> float:
    """The one number in [0, 1) that request seed `seed` draws for the token at `position`."""
    return float(np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), position])).random())


def greedy(logits_AV: torch.Tensor) -> torch.Tensor:
    """Lowest id of the highest logit of each row, int64 [A]; -1 where a row has a NaN."""
    best_A = logits_AV.amax(1, keepdim=True)
    ids_A = (logits_AV == best_A).int().argmax(1)
    return torch.where(best_A.squeeze(1).isnan(), -1, ids_A)


def sample(
    logits_AV: torch.Tensor, temperature_A: torch.Tensor, top_p_A: torch.Tensor, uniform_A: torch.Tensor
) -> torch.Tensor:
    """Ids [A] by inverse cumulative probability over the tokens from the most probable down (ties: lowest id).

    The nucleus is the shortest such run whose probability reaches top_p. Rows of temperature 0 are greedy; a row
    with a NaN gives -1; where +inf is the highest logit, or all are -inf, the lowest such id is certain.
    Computed in FP64, row by row independent.
    """
    safe_A1 = torch.where(temperature_A > 0, temperature_A, 1.0).double()[:, None]
    probability_AV = torch.softmax(logits_AV.double() / safe_A1, dim=1)
    sorted_AV, order_AV = torch.sort(probability_AV, dim=1, descending=True, stable=True)
    cumulative_AV = sorted_AV.cumsum(1)
    inside_AV = (cumulative_AV - sorted_AV) < top_p_A.double()[:, None]
    mass_A = torch.where(inside_AV, sorted_AV, 0.0).sum(1)
    place_A = (cumulative_AV <= (uniform_A.double() * mass_A)[:, None]).sum(1)
    place_A = torch.minimum(place_A, inside_AV.sum(1) - 1).clamp(min=0)
    drawn_A = order_AV.gather(1, place_A[:, None]).squeeze(1)
    greedy_A = greedy(logits_AV)
    spread_A = logits_AV.amax(1).isfinite() & (temperature_A > 0)
    return torch.where(spread_A, drawn_A, greedy_A)
