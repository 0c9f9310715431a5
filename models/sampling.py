"""From a row of logits to an id: greedy, or drawn (temperature, top-k, top-p, min-p) by seed and position.

Legend: A asked rows, V vocabulary. A row that holds a NaN or an infinity anywhere has no id: -1, never a token.
"""

import numpy as np
import torch


def uniform(seed: int, position: int) -> float:
    """The one number in [0, 1) that request seed `seed` draws for the token at `position`."""
    # A list of a large and a small number would pass through floats.
    key = np.array([seed & (2**64 - 1), position], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def finite_rows(logits_AV: torch.Tensor) -> torch.Tensor:
    """Which rows hold neither NaN nor infinity, bool [A]."""
    # The extremes tell it without a mask of the size of the logits: a NaN is both.
    return logits_AV.amax(1).isfinite() & logits_AV.amin(1).isfinite()


def greedy(logits_AV: torch.Tensor) -> torch.Tensor:
    """Lowest id of the highest logit of each row, int64 [A]; -1 where a row is not finite."""
    ids_A = (logits_AV == logits_AV.amax(1, keepdim=True)).int().argmax(1)
    return torch.where(finite_rows(logits_AV), ids_A, -1)


def sample(
    logits_AV: torch.Tensor,
    temperature_A: torch.Tensor,
    top_p_A: torch.Tensor,
    uniform_A: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Ids int64 [A] by inverse cumulative probability over the tokens from the most probable down (ties: lowest id).

    temperature, top_p, uniform and min_p are [A] floating, top_k is [A] int64. Probabilities are those at the
    temperature. Kept of that list are, in this order: the first top_k (0: all); of these, renormalised, the shortest
    run whose probability reaches top_p; of these, the tokens with at least min_p times the probability of the first.
    The first always stays. Rows of temperature 0 are greedy whatever else is asked; a row that is not finite gives -1.
    Computed in FP64, row by row independent.
    """
    sorted_AV, order_AV = _descending(_probability(logits_AV, temperature_A))
    cumulative_AV = sorted_AV.cumsum(1)
    kept_A = _kept(sorted_AV, cumulative_AV, top_p_A.double(), top_k, min_p)
    drawn_A = _pick(cumulative_AV, order_AV, kept_A, uniform_A)
    return torch.where((temperature_A > 0) & finite_rows(logits_AV), drawn_A, greedy(logits_AV))


def kept_probability(
    logits_AV: torch.Tensor,
    temperature_A: torch.Tensor,
    top_p_A: torch.Tensor,
    *,
    top_k: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `sample` draws from, FP64 [A, V]: the probabilities of the tokens that are kept, not renormalised, and 0 for
    the others; at temperature 0 a 1 at the greedy id; NaN in a row that is not finite."""
    probability_AV = _probability(logits_AV, temperature_A)
    sorted_AV, order_AV = _descending(probability_AV)
    kept_A = _kept(sorted_AV, sorted_AV.cumsum(1), top_p_A.double(), top_k, min_p)
    among_AV = torch.arange(sorted_AV.shape[1], device=kept_A.device) < kept_A[:, None]
    kept_AV = torch.zeros_like(sorted_AV).scatter_(1, order_AV, torch.where(among_AV, sorted_AV, 0.0))
    best_A = greedy(logits_AV)
    single_AV = torch.zeros_like(kept_AV).scatter_(1, best_A.clamp(min=0)[:, None], 1.0)
    kept_AV = torch.where((temperature_A > 0)[:, None], kept_AV, single_AV)
    return kept_AV.masked_fill((best_A < 0)[:, None], float("nan"))


def draw(weight_AV: torch.Tensor, uniform_A: torch.Tensor) -> torch.Tensor:
    """Ids int64 [A] by weights of any sum above 0, FP64: of `kept_probability` those that `sample` draws. -1 where a
    row has no such sum."""
    sorted_AV, order_AV = _descending(weight_AV)
    cumulative_AV = sorted_AV.cumsum(1)
    drawn_A = _pick(cumulative_AV, order_AV, (sorted_AV > 0).sum(1).clamp(min=1), uniform_A)
    mass_A = cumulative_AV[:, -1]
    return torch.where(mass_A.isfinite() & (mass_A > 0), drawn_A, -1)


def _probability(logits_AV: torch.Tensor, temperature_A: torch.Tensor) -> torch.Tensor:
    """FP64 at the temperature, at 1 where that is 0."""
    # Beside the highest, so that no temperature makes an infinity of it.
    below_AV = logits_AV.double() - logits_AV.amax(1, keepdim=True).double()
    return torch.softmax(below_AV / torch.where(temperature_A > 0, temperature_A, 1.0).double()[:, None], dim=1)


def _descending(weight_AV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.sort(weight_AV, dim=1, descending=True, stable=True)


def _pick(
    cumulative_AV: torch.Tensor, order_AV: torch.Tensor, kept_A: torch.Tensor, uniform_A: torch.Tensor
) -> torch.Tensor:
    mass_A1 = cumulative_AV.gather(1, kept_A[:, None] - 1)
    place_A = (cumulative_AV <= uniform_A.double()[:, None] * mass_A1).sum(1)
    return order_AV.gather(1, torch.minimum(place_A, kept_A - 1)[:, None]).squeeze(1)


def _kept(
    sorted_AV: torch.Tensor,
    cumulative_AV: torch.Tensor,
    top_p_A: torch.Tensor,
    top_k_A: torch.Tensor | None,
    min_p_A: torch.Tensor | None,
) -> torch.Tensor:
    """How many of the most probable tokens all filters keep, int64 [A], at least 1: each keeps a beginning."""
    count = sorted_AV.shape[1]
    kept_A = torch.full_like(top_p_A, count, dtype=torch.int64)
    if top_k_A is not None:
        kept_A = torch.where(top_k_A > 0, top_k_A, count).clamp(max=count)
    reach_A = top_p_A * cumulative_AV.gather(1, kept_A[:, None] - 1).squeeze(1)
    # A token is needed if those before it do not reach; with top_p 1 rounding shall not cost the last ones.
    nucleus_A = 1 + (cumulative_AV[:, :-1] < reach_A[:, None]).sum(1)
    kept_A = torch.where(top_p_A < 1, torch.minimum(kept_A, nucleus_A), kept_A)
    if min_p_A is not None:
        likely_A = (sorted_AV >= min_p_A.double()[:, None] * sorted_AV[:, :1]).sum(1)
        kept_A = torch.minimum(kept_A, likely_A)
    return kept_A.clamp(min=1)
