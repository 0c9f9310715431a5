"""The check that nothing a drafter quantised was NaN or infinite: INT8 codes and clamps could hide it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..int8.finite import require_finite
from ..v4.caches import Caches
from ..v4.model import Tap
from .draft import Choose, Drafts, choose_greedy
from .plan import DraftBlock
from .proposer import KeptRows, Proposer, Room


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


@dataclass(frozen=True)
class FiniteProposer:
    """A proposer, and the Watch that its drafter was made with: checked once a step, when drafts are there."""

    inner: Proposer
    scales: DraftScales

    @property
    def gamma(self) -> int:
        return self.inner.gamma

    @property
    def stages(self) -> int:
        return self.inner.stages

    @property
    def taps(self) -> tuple[Tap, ...]:
        return self.inner.taps

    @property
    def pins_prompt_end(self) -> bool:
        return self.inner.pins_prompt_end

    def keep(self, rows: KeptRows, taps: Mapping[Tap, torch.Tensor], caches: Caches) -> None:
        """As the inner one, with its check: a step may keep rows and draft nothing."""
        self.inner.keep(rows, taps, caches)
        self.scales.check()

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
        """As the inner one. NonFiniteActivation where a row of this rank's part was not finite."""
        drafts = self.inner.propose(blocks, last_rows, taps, caches, room, choose=choose, keep_logits=keep_logits)
        self.scales.check()
        return drafts
