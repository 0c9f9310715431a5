"""From samples to what a step of the draft reads: anchors drawn, blocks made, context packed."""

from collections.abc import Sequence

import torch

from ..drafts.config import DraftConfig
from .anchors import draw_anchors
from .blocks import make_blocks
from .config import ObjectiveConfig
from .packing import DraftBatch, pack
from .samples import Batch


def draft_batch(
    batch: Batch,
    config: ObjectiveConfig,
    context_window: int | None,
    generators: Sequence[torch.Generator],
    dtype: torch.dtype = torch.float32,
    *,
    led: bool = False,
) -> DraftBatch:
    """The packed micro-batch of one step, on the host; `generators` draw the anchors, one a sample.

    context_window is how far the draft sees (`draft_reach`); dtype that of the weights; led: no anchor at the first
    position of a document, for an MTP layer. What follows costs by the number of anchors; only the masks of tokens are
    read whole.
    """
    count, rule = config.num_anchors, config.anchor_rule
    anchors = draw_anchors(batch.loss_mask_BS, batch.documents_BS, generators, count, rule, led=led)
    blocks = make_blocks(
        batch.input_ids_BS,
        batch.loss_mask_BS,
        anchors,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        decay_gamma=config.loss_decay_gamma,
        documents_BS=batch.documents_BS,
        dtype=dtype,
    )
    return pack(batch, anchors, blocks, context_window)


def draft_reach(config: DraftConfig) -> int | None:
    """How many positions before its anchor a draft reads, None for all: an MTP layer the window that ends with the row
    before the anchor."""
    if config.is_mtp:
        return config.sliding_window
    return context_reach(config.dflash.context_window, config.sliding_window, config.layer_types)


def context_reach(
    context_window: int | None, sliding_window: int | None = None, layer_types: Sequence[str] | None = None
) -> int | None:
    """How many context rows before its anchor a block of a draft sees in any layer, None for all (training.md 4.4).

    A layer of type "sliding_attention" sees sliding_window - 1 at most, and every layer the context_window at most.
    """
    reaches = [context_window]
    if layer_types and sliding_window is not None and set(layer_types) == {"sliding_attention"}:
        # A window of one row is the row itself; the packed batch keeps one row all the same.
        reaches.append(max(sliding_window - 1, 1))
    known = [reach for reach in reaches if reach is not None]
    return min(known) if known else None
