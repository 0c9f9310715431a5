"""Index work of a drafting step, on the host: which blocks this rank runs, in which slabs, over which context rows.

Letters: B blocks of a slab, R rows of a block, T = B * R rows, C context lanes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...layouts.lanes import FreshSpan, Lanes, plan_lanes
from ...layouts.move import to_device
from ...layouts.pages import PageTable
from ..v4.pools import DRAFT_FAMILY
from .drafter import Net
from .shape import DraftShape, require_dspark


@dataclass(frozen=True)
class DraftBlock:
    """A request that drafts: its newest token, the anchor, and the anchor's position, for which no context exists yet.

    Its context rows are those of the positions before. Rows from first_fresh on (None: there are none) are fresh ones,
    the first of which is number fresh_row of those given to the forward; older ones are in the pool under `slot`.
    """

    slot: int
    position: int
    token: int
    first_fresh: int | None = None
    fresh_row: int = 0


@dataclass(frozen=True)
class Slab:
    """Blocks that run together. token_T and position_T int64 of their rows by block, then by row; anchor_B int64;
    context [B, C] lanes: of the window before the anchor what comes before the block's first row, in order of position,
    empty lanes first (hidden_BC).

    room: blocks that each tp_rank has room for in exchanges, this rank's B at least; alike on all ranks of the group.
    """

    shape: DraftShape
    first: int
    token_T: torch.Tensor
    position_T: torch.Tensor
    anchor_B: torch.Tensor
    context: Lanes
    hidden_BC: torch.Tensor
    room: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return len(self.anchor_B)

    @property
    def publish_rows(self) -> int:
        """Rows of each rank in the exchange of heads."""
        return max(self.room) * self.shape.padded_rows


@dataclass(frozen=True)
class DraftPlan:
    """The slabs of one rank: as many on every rank of its expert block."""

    blocks: tuple[DraftBlock, ...]
    slabs: tuple[Slab, ...]

    def to(self, device: torch.device) -> "DraftPlan":
        """This plan with its tensors on `device`; itself if they are there."""
        if not self.slabs or self.slabs[0].token_T.device == device:
            return self
        moved: DraftPlan = to_device(self, device)
        return moved


def slabs_needed(blocks: int, shape: DraftShape) -> int:
    """Slabs for the most blocks that any rank of an expert block may come to run."""
    return -(-blocks // shape.slab_blocks)


def plan_draft(
    blocks: Sequence[DraftBlock],
    drafter: Net,
    table: PageTable | None = None,
    *,
    slabs: int | None = None,
    bounds: Sequence[int] | None = None,
) -> DraftPlan:
    """The plan of this rank's blocks, in their order.

    slabs: agreed on all ranks of the expert block beforehand; by default what these blocks need. bounds: by tp_rank, a
    bound of its blocks in this step that all ranks of the tensor group agree on; by default slabs are full of room.
    table: None where all context rows are fresh. ValueError where blocks do not fit, or a context row has no page.
    """
    shape, tp = drafter.shape, drafter.groups.tp
    slabs = slabs_needed(len(blocks), shape) if slabs is None else slabs
    bounds = (slabs * shape.slab_blocks,) * tp.size if bounds is None else tuple(bounds)
    own = bounds[tp.rank] if len(bounds) == tp.size else -1
    if not len(blocks) <= own or max(bounds) > slabs * shape.slab_blocks:
        raise ValueError(
            f"{len(blocks)} blocks of tp_rank {tp.rank} with bounds {list(bounds)} in {slabs} slabs, allowed: a bound "
            f"for each of {tp.size} ranks, no less than its blocks and no more than {shape.slab_blocks} a slab"
        )
    wrong = [block.position for block in blocks if block.position < 1]
    if wrong:
        raise ValueError(f"an anchor's position is {wrong[0]}, allowed: 1 or more, for it needs a context row")
    planned = [_slab(blocks, number * shape.slab_blocks, drafter, table, bounds) for number in range(slabs)]
    return DraftPlan(tuple(blocks), tuple(planned))


def _slab(
    blocks: Sequence[DraftBlock], first: int, drafter: Net, table: PageTable | None, bounds: Sequence[int]
) -> Slab:
    shape, most = drafter.shape, drafter.shape.slab_blocks
    mine = blocks[first : first + most]
    position_B = np.array([block.position for block in mine], dtype=np.int64)
    anchor_B = np.array([block.token for block in mine], dtype=np.int64)
    token_BR = anchor_B[:, None].repeat(shape.rows, axis=1)
    if shape.rows > 1:
        token_BR[:, 1:] = require_dspark(drafter.config).noise_token_id
    window = drafter.config.sliding_window
    index_BC = position_B[:, None] - window + np.arange(window - shape.lead)
    fresh = [block.position if block.first_fresh is None else block.first_fresh for block in mine]
    rows = [block.fresh_row + block.position - start for block, start in zip(mine, fresh, strict=True)]
    span = FreshSpan(*(torch.tensor(each, dtype=torch.int64) for each in _columns(mine, fresh)))
    tables = None if table is None else {DRAFT_FAMILY: table}
    return Slab(
        shape=shape,
        first=first,
        token_T=torch.from_numpy(token_BR.ravel()),
        position_T=torch.from_numpy((position_B[:, None] - shape.lead + np.arange(shape.rows)).ravel()),
        anchor_B=torch.from_numpy(anchor_B),
        context=plan_lanes(index_BC, index_BC >= 0, span, tables, (DRAFT_FAMILY,), torch.arange(max(rows, default=0))),
        hidden_BC=torch.from_numpy(index_BC < 0),
        room=tuple(min(max(bound - first, 0), most) for bound in bounds),
    )


def _columns(blocks: Sequence[DraftBlock], fresh: list[int]) -> tuple[list[int], list[int], list[int]]:
    return [block.slot for block in blocks], fresh, [block.fresh_row for block in blocks]
