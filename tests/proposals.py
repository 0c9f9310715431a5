"""Requests with drafts, made from confidences that are given as numbers."""

import math
from collections.abc import Sequence
from fractions import Fraction

from meshspark.models.dspark.schedule import ONE, History, Proposal


def fixed(confidences: Sequence[float]) -> tuple[int, ...]:
    """Survivals of confidences that are given as numbers in [0, 1], not as logits."""
    kept, product = [], Fraction(1)
    for value in confidences:
        product *= Fraction(value)
        kept.append(math.floor(product * ONE))
    return tuple(kept)


def proposal(slot: int, *confidences: float, generation: int = 1, most_rows: int = 100) -> Proposal:
    return Proposal(slot, generation, fixed(confidences), most_rows)


def known(requests: Sequence[Proposal]) -> History:
    """A history in which the survivals of two steps earlier were these."""
    return History().after(requests).after(())
