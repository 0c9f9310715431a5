"""Which keys a row of a block sees: the rule for one element, and the masks and plans that are made from it.

Letters: B samples, S context rows, N blocks a sample, b rows a block, Q = N * b, L = S + Q, W rows of a window.
Keys are the S context rows, then the Q rows of the blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

PLAIN_BLOCK_MASK: Callable[..., BlockMask] = create_block_mask


@dataclass(frozen=True)
class MaskRule:
    """What a layer's rows see. training.md 4.4.

    causal: within the block, a row sees itself and those before it; otherwise the whole block. context_window: that
    many positions before the anchor, the same for every row of the block. sliding_window: that many positions up to
    the row's own, which uses one of them. Both together: what both allow.
    """

    causal: bool = False
    context_window: int | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        check_window("context_window", self.context_window)
        check_window("sliding_window", self.sliding_window)


def check_window(name: str, window: object) -> None:
    """ValueError unless window is None or a whole number from 1."""
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"{name} is {window!r}; it must be a whole number from 1, or null for no limit")


def sees_context(rule: MaskRule, keep: Any, anchor: Any, offset: Any, position: Any) -> Any:
    """Whether row `offset` of a block at `anchor` sees the context row at `position`. training.md 4.4.

    Takes numbers or tensors that broadcast; so does `sees_block`.
    """
    seen = keep & (position < anchor)
    if rule.context_window is not None:
        seen = seen & (position >= anchor - rule.context_window)
    if rule.sliding_window is not None:
        seen = seen & (position >= anchor + offset - (rule.sliding_window - 1))
    return seen


def sees_block(rule: MaskRule, keep: Any, block: Any, offset: Any, key_block: Any, key_offset: Any) -> Any:
    """Whether row `offset` of `block` sees row `key_offset` of `key_block`."""
    seen = keep & (key_block == block)
    return seen & (key_offset <= offset) if rule.causal else seen


def dense_mask(
    rule: MaskRule,
    anchors_BN: torch.Tensor,
    keep_BN: torch.Tensor,
    context_position_BS: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """bool [B, 1, Q, S + Q], True where the row sees the key."""
    anchor_BQ1 = anchors_BN.repeat_interleave(block_size, dim=1).unsqueeze(2)
    keep_BQ1 = keep_BN.repeat_interleave(block_size, dim=1).unsqueeze(2)
    row_Q = torch.arange(anchor_BQ1.shape[1], device=anchors_BN.device)
    block_Q, offset_Q = row_Q // block_size, row_Q % block_size
    context_BQS = sees_context(rule, keep_BQ1, anchor_BQ1, offset_Q[:, None], context_position_BS[:, None])
    block_BQQ = sees_block(rule, keep_BQ1, block_Q[:, None], offset_Q[:, None], block_Q, offset_Q)
    return torch.cat((context_BQS, block_BQQ), dim=2).unsqueeze(1)


def flex_mask(
    rule: MaskRule,
    anchors_BN: torch.Tensor,
    keep_BN: torch.Tensor,
    context_position_BS: torch.Tensor,
    block_size: int,
) -> BlockMask:
    """The same as a BlockMask of Q x (S + Q), in tiles of 128."""
    (batch, blocks), context = anchors_BN.shape, context_position_BS.shape[1]
    rows = blocks * block_size
    element = flex_element(rule, anchors_BN, keep_BN, context_position_BS, block_size)
    # The plain form holds Q x (S + Q) numbers of 64 bit in between: the check on a CPU can afford it.
    make = compiled_block_mask() if anchors_BN.device.type == "cuda" else PLAIN_BLOCK_MASK
    return make(element, batch, None, rows, context + rows, device=anchors_BN.device)


@cache
def compiled_block_mask() -> Callable[..., BlockMask]:
    """create_block_mask compiled, once per process: its own cache of kernels is the point."""
    return torch.compile(create_block_mask)


def flex_element(
    rule: MaskRule,
    anchors_BN: torch.Tensor,
    keep_BN: torch.Tensor,
    context_position_BS: torch.Tensor,
    block_size: int,
) -> Callable[..., torch.Tensor]:
    """mask_mod(sample, head, row, key). Rows and keys may lie beyond the last: flex rounds up to whole tiles."""
    blocks, context = anchors_BN.shape[1], context_position_BS.shape[1]
    # A lookup needs a row to fall on, if only one that nothing sees.
    positions = context_position_BS if context else context_position_BS.new_zeros((len(anchors_BN), 1))

    def element(sample: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        block, offset = row // block_size, row % block_size
        real = block < blocks
        block = torch.clamp(block, max=blocks - 1)
        anchor, keep = anchors_BN[sample, block], keep_BN[sample, block]
        position = positions[sample, torch.clamp(key, max=positions.shape[1] - 1)]
        own = key - context
        in_context = (key < context) & sees_context(rule, keep, anchor, offset, position)
        in_block = (own >= 0) & sees_block(rule, keep, block, offset, own // block_size, own % block_size)
        return real & (in_context | in_block)

    return element


@dataclass(frozen=True)
class WindowPlan:
    """The context rows that each block can see at all, for gathering, and what each of its rows sees of them.

    index_BNW int64: context rows; visible_BNbL bool: over those W rows, then the block's own b rows.
    """

    index_BNW: torch.Tensor
    visible_BNbL: torch.Tensor


def window_plan(
    rule: MaskRule,
    anchors_BN: torch.Tensor,
    keep_BN: torch.Tensor,
    context_position_BS: torch.Tensor,
    block_size: int,
) -> WindowPlan:
    """Positions must ascend. W is context_window, or S if that is less, so nothing made here grows with S."""
    assert rule.context_window is not None
    context = context_position_BS.shape[1]
    width = min(rule.context_window, context)
    device = anchors_BN.device
    first_BN = torch.searchsorted(context_position_BS.contiguous(), (anchors_BN - rule.context_window).contiguous())
    first_BN = torch.clamp(first_BN, max=context - width)
    index_BNW = first_BN.unsqueeze(2) + torch.arange(width, device=device)
    position_BNW = context_position_BS.gather(1, index_BNW.flatten(1)).view(index_BNW.shape)
    offset_b = torch.arange(block_size, device=device)
    keep_BN11, anchor_BN11 = keep_BN[:, :, None, None], anchors_BN[:, :, None, None]
    context_BNbW = sees_context(rule, keep_BN11, anchor_BN11, offset_b[:, None], position_BNW.unsqueeze(2))
    block_BNbb = sees_block(rule, keep_BN11, 0, offset_b[:, None], torch.zeros_like(offset_b), offset_b)
    parts = [part.expand(-1, -1, block_size, -1) for part in (context_BNbW, block_BNbb)]
    return WindowPlan(index_BNW, torch.cat(parts, dim=3))
