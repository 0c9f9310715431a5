"""What drafting exchanges in a step, beside the target: every call of one rank in its order. Pure arithmetic."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..v4.traffic import DRAFT, Exchange, Load, StepPlan, expert_exchanges, head_exchanges, publish_exchanges
from .context import draft_payload
from .plan import slabs_needed
from .shape import DraftShape


@dataclass(frozen=True)
class DraftLoad:
    """The blocks of one tensor group in a step.

    bounds: what each tp_rank may have, as agreed before the step. most: the most of them that any rank of the expert
    block may have; of 0 no rank drafts. blocks: what each tp_rank has; busiest: the most that any rank of the expert
    block has.
    """

    bounds: tuple[int, ...]
    most: int
    blocks: tuple[int, ...]
    busiest: int


def even_drafts(blocks: tuple[int, ...]) -> DraftLoad:
    """Every request that may draft does, and all groups of the expert block have as many."""
    return DraftLoad(blocks, max(blocks), blocks, max(blocks))


def draft_exchanges(plan: StepPlan, load: DraftLoad, shape: DraftShape) -> Iterator[Exchange]:
    """The calls of the drafter after the target's, which `plan` is of; none over a group of one.

    One gather brings the context rows of the step's bands, all stages' keys in a row, to the whole group, also where
    nothing is drafted. Then each slab goes through the stages, each a window layer without a gather, and the head.
    """
    config, numerics = plan.config, plan.numerics
    if plan.topology.tp > 1:
        columns = draft_payload(config, numerics).width
        yield plan.gather(DRAFT, "tp", "draft_gather", numerics.wire, plan.load.local_t, columns)
    for slab in range(slabs_needed(load.most, shape)):
        own = _slab_plan(plan, load, shape, slab)
        for _ in config.draft_ratios:
            if plan.topology.tp > 1:
                yield from publish_exchanges(own, DRAFT)
            if plan.topology.ep > 1:
                yield from expert_exchanges(own, DRAFT)
        if plan.topology.tp > 1:
            yield from head_exchanges(own, DRAFT, ("draft_head", "draft_logits"))


def _slab_plan(plan: StepPlan, load: DraftLoad, shape: DraftShape, slab: int) -> StepPlan:
    """A step of the slab's rows: padded to what the group has room for where its ranks exchange them, else as many as
    there are."""

    def part(blocks: int) -> int:
        return min(max(blocks - slab * shape.slab_blocks, 0), shape.slab_blocks)

    room = [part(bound) for bound in load.bounds]
    rows = Load(
        local_t=max(room) * shape.padded_rows,
        valid=tuple(part(blocks) * shape.rows for blocks in load.blocks),
        asked=tuple(blocks * shape.gamma for blocks in room),
        requests=tuple(map(part, load.blocks)),
    )
    most_routed = part(load.busiest) * shape.rows
    return replace(plan, load=rows, most_routed=most_routed, received=None, want="logits", gather_weights=False)
