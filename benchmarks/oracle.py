"""An oracle drafter: it knows what the target will write, and is right with a chosen probability.

It stands for drafters of any quality, so that the step and the choice of widths can be judged without one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..models.dspark.draft import Choose, Drafts, choose_greedy
from ..models.dspark.plan import DraftBlock
from ..models.dspark.proposer import KeptRows, Room
from ..models.uniforms import uniforms
from ..models.v4.caches import Caches
from ..models.v4.model import Tap

Right = Callable[[int, int, int], bool]
"""(slot, position of the anchor, number of the draft) -> whether the draft is right."""


def with_chances(chances: Callable[[int], float], seed: int = 0) -> Right:
    """Right with the chance of the slot, at every number of a draft, by a number of its own for each."""
    return lambda slot, anchor, number: bool(uniforms(np.array(seed + slot), np.array(anchor), number) < chances(slot))


@dataclass
class OracleProposer:
    """known: tokens by request slot, prompt included; who has none is drafted zeros. right: whether a draft is.
    chance: by slot, what it says of its confidence. blocks: how many it drafted, rooms: what was agreed for each step.
    """

    gamma: int
    known: Mapping[int, Sequence[int]]
    right: Right
    vocab: int
    chance: Callable[[int], float] = lambda slot: 0.5
    stages: int = 0
    taps: tuple[Tap, ...] = ()
    pins_prompt_end: bool = False
    blocks: int = 0
    rooms: list[Room] = field(default_factory=list)

    def keep(self, rows: KeptRows, taps: Mapping[Tap, torch.Tensor], caches: Caches) -> None:
        """It keeps nothing."""

    def propose(
        self,
        blocks: Sequence[DraftBlock],
        last_rows: Sequence[int],
        taps: Mapping[Tap, torch.Tensor],
        caches: Caches,
        room: Room,
        *,
        choose: Choose = choose_greedy,
        keep_logits: bool = False,
    ) -> Drafts:
        """The known tokens behind each anchor, wrong ones among them. Certain ones: nothing is chosen."""
        self.blocks += len(blocks)
        self.rooms.append(room)
        ids = [[self._draft(block, number) for number in range(self.gamma)] for block in blocks]
        chances = torch.tensor([self.chance(block.slot) for block in blocks], dtype=torch.float64)
        odds_BY = torch.logit(chances, eps=1e-9)[:, None].expand(-1, self.gamma)
        return Drafts(torch.tensor(ids, dtype=torch.int64).view(len(blocks), self.gamma), odds_BY, None)

    def _draft(self, block: DraftBlock, number: int) -> int:
        known, position = self.known.get(block.slot, ()), block.position + 1 + number
        token = known[position] if position < len(known) else 0
        return token if self.right(block.slot, block.position, number) else (token + 1) % self.vocab
