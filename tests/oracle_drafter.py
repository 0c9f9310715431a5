"""An oracle drafter: it knows what the target will write, and is right with a chosen probability per position."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from meshspark.models.dspark.draft import Choose, Drafts, choose_greedy
from meshspark.models.dspark.plan import DraftBlock
from meshspark.models.dspark.proposer import KeptRows, Room
from meshspark.models.uniforms import uniforms
from meshspark.models.v4.caches import Caches
from meshspark.models.v4.model import Tap

Right = Callable[[int, int, int], bool]
"""(slot, position of the anchor, number of the draft) -> whether the draft is right."""


def with_chance(chance: float, seed: int = 0) -> Right:
    """Right with this probability, by numbers of slot, position and draft."""
    return lambda slot, anchor, number: bool(uniforms(np.int64(seed + slot), np.int64(anchor), number) < chance)


@dataclass
class OracleProposer:
    """known: tokens by request slot, prompt included; who has no entry is drafted ids that cannot come from a tie.

    blocks counts those drafted.
    """

    gamma: int
    known: dict[int, Sequence[int]]
    right: Right
    vocab: int
    chance: float = 0.5
    stages: int = 0
    taps: tuple[Tap, ...] = ()
    pins_prompt_end: bool = False
    blocks: int = 0
    steps: list[Room] = field(default_factory=list)

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
        """The known tokens behind each anchor, wrong ones among them."""
        self.blocks += len(blocks)
        self.steps.append(room)
        ids = [[self._draft(block, number) for number in range(self.gamma)] for block in blocks]
        odds = float(torch.logit(torch.tensor(self.chance, dtype=torch.float64), eps=1e-9))
        shape = (len(blocks), self.gamma)
        return Drafts(torch.tensor(ids, dtype=torch.int64).view(shape), torch.full(shape, odds), None)

    def _draft(self, block: DraftBlock, number: int) -> int:
        known, position = self.known.get(block.slot, ()), block.position + 1 + number
        token = known[position] if position < len(known) else 0
        right = self.right(block.slot, block.position, number)
        return token if right else (token + 1) % self.vocab
