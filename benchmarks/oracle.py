"""An oracle drafter: it knows what the target will write, and is right where it is told to be.

It stands for drafters of any quality, so that the step and the choice of widths can be judged without one. Beside
another proposer it keeps that one's context rows and lets it draft too, so that caches and exchanges are those of the
real drafter while the drafts are chosen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from ..models.dspark.draft import Choose, Drafts, choose_greedy
from ..models.dspark.plan import DraftBlock
from ..models.dspark.proposer import Anchors, KeptRows, Proposer, Room
from ..models.uniforms import uniforms
from ..models.v4.caches import Caches
from ..models.v4.model import Tap

Right = Callable[[int, int, int], bool | None]
"""(slot, position of the anchor, number of the draft) -> whether the draft is right; None leaves it to the proposer
beside the oracle."""

ANCHORS, NUMBERS = 256, 8
"""Positions and drafts that numbers are drawn for at once."""

Chance = float | Callable[[int], float]
"""One for all, or by request slot."""


def with_chance(chance: Chance, seed: int = 0) -> Right:
    """Right with this probability, by a number of its own for each slot, position and draft."""

    # Drawn a block at a time: one by one they would cost more than the step that they stand for.
    @cache
    def drawn(slot: int, block: int, numbers: int) -> list[list[bool]]:
        anchor_X1 = np.arange(block * ANCHORS, (block + 1) * ANCHORS)[:, None]
        number_Y = np.arange(numbers * NUMBERS, (numbers + 1) * NUMBERS)
        found: list[list[bool]] = (
            uniforms(np.array(seed + slot), anchor_X1, number_Y) < _of_slot(chance, slot)
        ).tolist()
        return found

    def right(slot: int, anchor: int, number: int) -> bool:
        (block, place), (numbers, column) = divmod(anchor, ANCHORS), divmod(number, NUMBERS)
        return drawn(slot, block, numbers)[place][column]

    return right


def _of_slot(chance: Chance, slot: int) -> float:
    return chance(slot) if callable(chance) else chance


@dataclass
class OracleProposer:
    """known: tokens by request slot, prompt included; behind their end, and for who has none, a draft is token 0 or 1.

    A wrong draft is the next token id after the right one. chance: the confidence that it shows, None for that of the
    proposer beside it. inner: that proposer, of the same gamma. blocks counts those drafted, proposed their drafts.
    """

    gamma: int
    known: Mapping[int, Sequence[int]]
    right: Right
    vocab: int
    chance: Chance | None = 0.5
    stages: int = 0
    taps: tuple[Tap, ...] = ()
    pins_prompt_end: bool = False
    blocks: int = 0
    steps: list[Room] = field(default_factory=list)
    inner: Proposer | None = None

    def __post_init__(self) -> None:
        if self.inner is not None:
            self.stages, self.taps = self.inner.stages, self.inner.taps
            self.pins_prompt_end = self.inner.pins_prompt_end

    @property
    def proposed(self) -> int:
        return self.blocks * self.gamma

    def keep(self, rows: KeptRows, taps: Mapping[Tap, torch.Tensor], caches: Caches) -> None:
        """What the proposer beside it keeps; nothing of its own."""
        if self.inner is not None:
            self.inner.keep(rows, taps, caches)

    def propose(
        self, anchors: Anchors, caches: Caches, *, choose: Choose = choose_greedy, keep_logits: bool = False
    ) -> Drafts:
        """The known tokens behind each anchor, wrong ones among them: certain ones, that `choose` has not drawn."""
        blocks = anchors.blocks
        self.blocks += len(blocks)
        self.steps.append(anchors.room)
        shape = (len(blocks), self.gamma)
        beside = Drafts(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape), None)
        if self.inner is not None:
            beside = self.inner.propose(anchors, caches)
        ids = [
            [self._draft(block, number, int(beside.ids[place, number])) for number in range(self.gamma)]
            for place, block in enumerate(blocks)
        ]
        confidence_BY = beside.confidence
        if self.chance is not None:
            chances = [_of_slot(self.chance, block.slot) for block in blocks]
            odds_B = torch.logit(torch.tensor(chances, dtype=torch.float64), eps=1e-9)
            confidence_BY = odds_B[:, None].expand(shape)
        return Drafts(torch.tensor(ids, dtype=torch.int64).view(shape), confidence_BY, None)

    def _draft(self, block: DraftBlock, number: int, natural: int) -> int:
        known, position = self.known.get(block.slot, ()), block.position + 1 + number
        token = known[position] if position < len(known) else 0
        right = self.right(block.slot, block.position, number)
        if right is None:
            return natural
        return token if right else (token + 1) % self.vocab
