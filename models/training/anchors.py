"""Anchors: the positions at which blocks are trained (training.md 7.2).

An anchor is the token a block starts from, like the newest token in inference. Letters: B samples, S positions,
N anchors of a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RULES = ("both", "first_target")
"""both: anchor and first target are supervised. first_target: the first target is, so that the first token of a
supervised span is a target too."""


@dataclass(frozen=True)
class Anchors:
    """positions_BN int64, rising, 0 where keep_BN (bool) is False; kept ones come first. candidates_B: how many
    positions there were to choose from."""

    positions_BN: Tensor
    keep_BN: Tensor
    candidates_B: Tensor


def candidates(
    loss_mask_BS: Tensor, documents_BS: Tensor | None = None, rule: str = "both", *, led: bool = False
) -> Tensor:
    """Where an anchor may be, bool [B, S]: never at the last position, never with its first target in a new document.

    led: neither at the first position of a document, for an MTP layer, whose row stands before the anchor.
    ValueError for an unknown rule.
    """
    if rule not in RULES:
        raise ValueError(f"anchor_rule is {rule!r}, allowed: {', '.join(RULES)}")
    valid_BS = torch.zeros_like(loss_mask_BS)
    here, after = loss_mask_BS[:, :-1], loss_mask_BS[:, 1:]
    valid_BS[:, :-1] = (here & after) if rule == "both" else after
    if documents_BS is not None:
        valid_BS[:, :-1] &= documents_BS[:, :-1] == documents_BS[:, 1:]
    if led:
        valid_BS[:, :1] = False
        if documents_BS is not None:
            valid_BS[:, 1:] &= documents_BS[:, :-1] == documents_BS[:, 1:]
    return valid_BS


def draw_anchors(
    loss_mask_BS: Tensor,
    documents_BS: Tensor | None,
    generators: Sequence[torch.Generator],
    num_anchors: int = 512,
    rule: str = "both",
    *,
    led: bool = False,
) -> Anchors:
    """Up to `num_anchors` candidates of each sample, uniform without replacement, rising.

    One generator a sample, which alone decides the draw of that sample, whatever it is batched and padded with; all
    are taken and nothing is drawn where there are no more than `num_anchors`. N is the largest count. Without any
    candidate, or sample, there is one block with keep False, so that the rank can go through the step with the others.
    """
    if num_anchors < 1:
        raise ValueError(f"num_anchors is {num_anchors}, allowed: 1 or more")
    if len(generators) != loss_mask_BS.shape[0]:
        raise ValueError(f"{len(generators)} generators for {loss_mask_BS.shape[0]} samples, needed: one each")
    drawn, counts = [], []
    for valid_S, generator in zip(candidates(loss_mask_BS, documents_BS, rule, led=led), generators, strict=True):
        places = valid_S.nonzero().flatten()
        counts.append(len(places))
        if len(places) > num_anchors:
            chosen = torch.randperm(len(places), generator=generator)[:num_anchors]
            places = places[chosen.sort().values]
        drawn.append(places)
    width = max([len(places) for places in drawn] + [1])
    positions_BN = torch.zeros(max(len(drawn), 1), width, dtype=torch.int64)
    keep_BN = torch.zeros_like(positions_BN, dtype=torch.bool)
    for row, places in enumerate(drawn):
        positions_BN[row, : len(places)] = places
        keep_BN[row, : len(places)] = True
    return Anchors(positions_BN, keep_BN, torch.tensor(counts, dtype=torch.int64))


def sample_generator(seed: int, epoch: int, sample: int) -> torch.Generator:
    """The generator of one sample's anchors in one epoch: the same on whatever rank and in whatever batch it comes.

    Its seed is a mix of the three numbers, each from 0 (below 2^64), by the finaliser of splitmix64 (Steele, Lea and
    Flood, 2014).
    """
    state = 0
    for number in (seed, epoch, sample):
        if not 0 <= number < 1 << 64:
            raise ValueError(f"seed, epoch and sample are {seed}, {epoch}, {sample}, allowed: 0 to 2^64 - 1")
        state = _mixed((state + 0x9E3779B97F4A7C15 + number) % (1 << 64))
    return torch.Generator().manual_seed(state)


def _mixed(word: int) -> int:
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    word = (word ^ word >> 27) * 0x94D049BB133111EB % (1 << 64)
    return word ^ word >> 31
