"""Blocks: what stands at each offset of a block, and what is learned there (training.md 7.3).

Offset j of the block at anchor a sits at position a + j and predicts the token at a + 1 + j.
Letters: B samples, S positions, N blocks of a sample, b offsets of a block.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .anchors import Anchors


@dataclass(frozen=True)
class Blocks:
    """All [B, N, b]; indices are int64 and stay inside of the sample also where nothing is learned.

    noise_ids: the anchor, then mask tokens; positions: a + j, unbounded; labels: the token to predict; previous: the
    token before it, the anchor at offset 0; teacher_index: the position whose target state predicts the same token;
    eval_mask bool: what is learned, in every block a prefix; weights: its weight, 0 elsewhere.
    """

    noise_ids: Tensor
    positions: Tensor
    labels: Tensor
    previous: Tensor
    teacher_index: Tensor
    eval_mask: Tensor
    weights: Tensor


def make_blocks(
    input_ids_BS: Tensor,
    loss_mask_BS: Tensor,
    anchors: Anchors,
    *,
    block_size: int,
    mask_token_id: int,
    decay_gamma: float | None = None,
    documents_BS: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Blocks:
    """The blocks of anchors, on the host.

    A block is learned up to its first offset whose label is beyond the sample, unsupervised or in another document
    than the anchor; the weight of offset j is exp(-j / decay_gamma), 1 without a decay_gamma.
    """
    check_block(block_size, mask_token_id, decay_gamma)
    rows, length = anchors.positions_BN.shape[0], input_ids_BS.shape[1]
    if input_ids_BS.shape[0] == 0:  # a rank without samples has one block and no token
        input_ids_BS = input_ids_BS.new_zeros(rows, length)
        loss_mask_BS = loss_mask_BS.new_zeros(rows, length)
        documents_BS = None
    offsets_b = torch.arange(block_size)
    positions = anchors.positions_BN[..., None] + offsets_b
    label_index = (positions + 1).clamp(max=length - 1)
    inside = positions.clamp(max=length - 1)
    learned = (positions + 1 < length) & anchors.keep_BN[..., None] & _pick(loss_mask_BS, label_index)
    if documents_BS is not None:
        learned &= _pick(documents_BS, label_index) == _pick(documents_BS, anchors.positions_BN[..., None])
    eval_mask = learned.cumprod(-1).bool()
    noise_ids = torch.full_like(positions, mask_token_id)
    noise_ids[..., 0] = _pick(input_ids_BS, inside[..., :1])[..., 0]
    decay_b = torch.ones(block_size, dtype=dtype)
    if decay_gamma is not None:
        decay_b = torch.exp(-offsets_b.to(torch.float64) / decay_gamma).to(dtype)
    return Blocks(
        noise_ids,
        positions,
        _pick(input_ids_BS, label_index),
        _pick(input_ids_BS, inside),
        inside,
        eval_mask,
        eval_mask * decay_b,
    )


def check_block(block_size: int, mask_token_id: int, decay_gamma: float | None) -> None:
    """ValueError for numbers that make no block."""
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}, allowed: 1 or more")
    if mask_token_id < 0:
        raise ValueError(f"mask_token_id is {mask_token_id}, allowed: a token id from 0")
    if decay_gamma is not None and not (decay_gamma > 0 and math.isfinite(decay_gamma)):
        raise ValueError(f"loss_decay_gamma is {decay_gamma}, allowed: a finite number above 0, or null for no decay")


def _pick(values_BS: Tensor, index_BNb: Tensor) -> Tensor:
    return values_BS.gather(1, index_BNb.flatten(1)).view(index_BNb.shape)
