"""The check that nothing a drafter quantised was NaN or infinite: INT8 codes and clamps could hide it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..int8.finite import require_finite
from ..v4.caches import Caches
from ..v4.model import Tap
from .draft import Choose, Drafts, choose_greedy
from .proposer import Anchors, Beside, KeptRows


class DraftScales:
    """A Watch that keeps what it is told until the next check."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, str, torch.Tensor]] = []

    def __call__(self, stage: str, scale_T: torch.Tensor) -> None:
        """Keep the scales of rows that were quantised in this stage."""
        self._kept.append(("drafter", stage, scale_T))

    def check(self) -> None:
        """NonFiniteActivation naming stage and row of the first scale that is not finite. Forgets all."""
        kept, self._kept = self._kept, []
        require_finite(kept)


@dataclass
class FiniteProposer(Beside):
    """A proposer, and the Watch that its drafter was made with: checked once a step, when drafts are there."""

    scales: DraftScales

    def keep(self, rows: KeptRows, taps: Mapping[Tap, torch.Tensor], caches: Caches) -> None:
        """As the inner one, with its check: a step may keep rows and draft nothing."""
        super().keep(rows, taps, caches)
        self.scales.check()

    def propose(
        self, anchors: Anchors, caches: Caches, *, choose: Choose = choose_greedy, keep_logits: bool = False
    ) -> Drafts:
        """As the inner one. NonFiniteActivation where a row of this rank's part was not finite."""
        drafts = super().propose(anchors, caches, choose=choose, keep_logits=keep_logits)
        self.scales.check()
        return drafts
