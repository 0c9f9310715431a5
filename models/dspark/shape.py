"""How many drafts a request gets, how many rows a block has for that, and how many blocks run at once."""

import warnings
from dataclasses import dataclass

from ..v4.config import DSparkFields, V4Config

SLAB_BLOCKS = 16
"""Blocks of a slab at the deployment point."""


@dataclass(frozen=True)
class DraftShape:
    """gamma drafts of a request come from the first of a block's `rows` query rows.

    A rank runs its blocks in slabs of up to slab_blocks. lead: how far before its anchor's position a block's first row
    stands. Rows of DSpark's blocks are the anchor and noise tokens; an MTP layer's is that of the position before, with
    the anchor as its next token.
    """

    gamma: int
    rows: int
    slab_blocks: int
    lead: int = 0

    @property
    def padded_rows(self) -> int:
        """Rows that a block has room for where ranks exchange rows of slabs: one more than it has, so that 7 are 8. A
        single row stays one."""
        return self.rows + 1 if self.rows > 1 else 1


def require_dspark(config: V4Config) -> DSparkFields:
    """The drafter's fields of a config. ValueError where it has none, or stages that are not sliding windows."""
    if config.dspark is None:
        raise ValueError("the checkpoint's config has no dspark_* keys, allowed: that of a DSpark drafter")
    if not config.draft_ratios or any(config.draft_ratios):
        raise ValueError(
            f"compress_ratios of drafter stages are {config.draft_ratios}, allowed: 0 for each, one stage at least"
        )
    return config.dspark


def draft_shape(config: V4Config, gamma: int | None = None, slab_blocks: int = SLAB_BLOCKS) -> DraftShape:
    """The shape for gamma drafts, by default as many as the checkpoint's block has rows.

    Fewer run the whole block, whose rows all see each other, and drop its trailing drafts. More run a wider block than
    the drafter was trained for, and warn. ValueError below 1.
    """
    block = require_dspark(config).block_size
    gamma = block if gamma is None else gamma
    if gamma < 1 or slab_blocks < 1:
        raise ValueError(f"gamma is {gamma} and slab_blocks {slab_blocks}, allowed: 1 or more")
    if gamma > block:
        warnings.warn(
            f"gamma is {gamma}, but the drafter was trained on blocks of {block}: later drafts will be poor, "
            f"and the wider block changes the first {block}",
            stacklevel=2,
        )
    return DraftShape(gamma, max(gamma, block), slab_blocks)
