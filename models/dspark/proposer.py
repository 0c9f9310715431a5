"""Who proposes drafts to a step: the seam between the step, which knows no drafter, and drafters.

Letters: T rows of this rank's band, B blocks, Y drafts of a block (gamma), M stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..v4.caches import Caches
from ..v4.model import Tap
from .context import draft_pool, name_rows, write_context
from .draft import Choose, Drafts, choose_greedy, draft
from .drafter import Drafter
from .plan import DraftBlock, plan_draft, slabs_needed
from .projector import context_keys, draft_taps, join_taps, project


@dataclass(frozen=True)
class KeptRows:
    """This rank's band of a step after acceptance, padding included, so of one length on all ranks of the group.

    slot_T, generation_T int64: whose rows they are. position_T int64: -1 where a row is not kept, for it was rejected
    or is padding. next_T int64: the token behind each kept row, -1 where this rank cannot know it.
    """

    slot_T: np.ndarray
    generation_T: np.ndarray
    position_T: np.ndarray
    next_T: np.ndarray


@dataclass(frozen=True)
class Room:
    """What all ranks have agreed for a step before it began: blocks that each tp_rank of the group has at most, and the
    most that any rank of the expert block has."""

    blocks: tuple[int, ...]
    most: int


@dataclass(frozen=True)
class Anchors:
    """Behind what this rank drafts at the end of a step: its blocks, maybe none.

    last_rows: where in this rank's band the row before each anchor stands, -1 where it is another rank's. taps: of that
    band, as the proposer wanted them.
    """

    blocks: Sequence[DraftBlock]
    last_rows: Sequence[int]
    taps: Mapping[Tap, torch.Tensor]
    room: Room


class Proposer(Protocol):
    """Keeps what it needs of accepted rows, and drafts behind anchors.

    Every rank of the group and of its expert block calls both with every step, rows or blocks or not.
    """

    @property
    def gamma(self) -> int:
        """Drafts of a block."""

    @property
    def stages(self) -> int:
        """Key rows that it keeps of a position: `draft_stages` of the caches, 0 for none."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        """What the target's forward must export for it."""

    @property
    def pins_prompt_end(self) -> bool:
        """Whether the last row of a prompt has to stand in its owner's band."""

    def keep(self, rows: KeptRows, taps: Mapping[Tap, torch.Tensor], caches: Caches) -> None:
        """Take what later drafts need of the rows that are kept. Mutates the caches' pool of context rows."""

    def propose(
        self, anchors: Anchors, caches: Caches, *, choose: Choose = choose_greedy, keep_logits: bool = False
    ) -> Drafts:
        """Drafts behind the anchors, in the order of their blocks; keep_logits: with what they were chosen from."""


@dataclass(frozen=True)
class DSparkProposer:
    """The DSpark drafter of a rank."""

    drafter: Drafter

    @property
    def gamma(self) -> int:
        return self.drafter.shape.gamma

    @property
    def stages(self) -> int:
        return self.drafter.stages

    @property
    def taps(self) -> tuple[Tap, ...]:
        return draft_taps(self.drafter.config)

    @property
    def pins_prompt_end(self) -> bool:
        return False

    def keep(self, rows: KeptRows, taps: Mapping[Tap, torch.Tensor], caches: Caches) -> None:
        """Project the taps and write context rows; one exchange over the group."""
        with self.drafter.clock("draft_context"):
            main_TH = project(join_taps(taps, self.drafter.config), self.drafter)
            position_T = torch.from_numpy(rows.position_T.clip(0)).to(main_TH.device)
            keys_MTD = context_keys(main_TH, position_T, self.drafter)
        names_T3 = name_rows(rows.slot_T, rows.generation_T, rows.position_T)
        write_context(keys_MTD, names_T3, draft_pool(caches), self.drafter)

    def propose(
        self, anchors: Anchors, caches: Caches, *, choose: Choose = choose_greedy, keep_logits: bool = False
    ) -> Drafts:
        """Drafts from the context that is kept; taps and last_rows are not needed any more."""
        pool, room = draft_pool(caches), anchors.room
        slabs = slabs_needed(room.most, self.drafter.shape)
        plan = plan_draft(anchors.blocks, self.drafter, pool.table, slabs=slabs, bounds=room.blocks)
        return draft(plan, self.drafter, pool.keys_MSD, choose=choose, keep_logits=keep_logits)


@dataclass
class Beside:
    """A proposer that is another one in everything that it does not do itself."""

    inner: Proposer

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
        """As the inner one."""
        self.inner.keep(rows, taps, caches)

    def propose(
        self, anchors: Anchors, caches: Caches, *, choose: Choose = choose_greedy, keep_logits: bool = False
    ) -> Drafts:
        """As the inner one."""
        return self.inner.propose(anchors, caches, choose=choose, keep_logits=keep_logits)
