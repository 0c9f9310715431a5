"""What an owner decided about a request, as numbers of the agreement record: one length for each slot.

Letters: Y drafts (gamma), S = Y + 1.
"""

from collections.abc import Sequence

from ..models.dspark.step import Told
from ..models.request import FINISH_REASONS

GOES_ON = -1
"""Instead of a reason: the request is not finished."""
HEAD = 5
"""Generation, width, tokens, drafts, and reason; then come tokens [S], drafts [Y] and survivals [Y]."""


def told_length(gamma: int) -> int:
    """Numbers of one slot."""
    return HEAD + (gamma + 1) + 2 * gamma


def encode_told(told: Told | None, gamma: int) -> list[int]:
    """The numbers of one slot; None is a slot without news, for no request has generation 0."""
    if told is None:
        return [0] * told_length(gamma)
    finish = GOES_ON if told.finish is None else FINISH_REASONS.index(told.finish)
    head = [told.generation, told.width, len(told.tokens), len(told.drafts), finish]
    return [*head, *_padded(told.tokens, gamma + 1), *_padded(told.drafts, gamma), *_padded(told.survivals, gamma)]


def decode_told(numbers: Sequence[int], slot: int, gamma: int) -> Told | None:
    """What was told of a slot; None where it has no news."""
    generation, width, tokens, drafts, finish = numbers[:HEAD]
    if generation == 0:
        return None
    rest = numbers[HEAD:]
    return Told(
        slot=slot,
        generation=generation,
        width=width,
        tokens=tuple(rest[:tokens]),
        finish=None if finish == GOES_ON else FINISH_REASONS[finish],
        drafts=tuple(rest[gamma + 1 : gamma + 1 + drafts]),
        survivals=tuple(rest[2 * gamma + 1 : 2 * gamma + 1 + drafts]),
    )


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]
