"""The round trip of key rows through FP8, as the release stores them. dspark.md 1.2.

Letters: T rows, D head dim, N groups of channels.
"""

import torch

from ..v4.config import V4Config
from ..v4.quant import fake_quantise, fp8

OFFICIAL_GROUP = 64
"""Channels that share a scale in the release."""

LEAST_AMPLITUDE = 1e-4
"""A group of smaller numbers is scaled as if this were its largest."""


def check_kv_group(config: V4Config, group: int) -> None:
    """ValueError unless groups of this size divide the channels that are not rotated; 0 is no round trip."""
    plain = config.head_dim - config.qk_rope_head_dim
    if group < 0 or (group and plain % group):
        raise ValueError(f"kv_group is {group}, allowed: 0, or a divisor of the {plain} channels that are not rotated")


def round_trip(kv_TD: torch.Tensor, rope_dim: int, group: int) -> torch.Tensor:
    """Key rows with all but their last rope_dim channels rounded to e4m3 in groups, each with one scale, a power of
    two; the rows themselves where group is 0. The gradient passes straight through."""
    if not group:
        return kv_TD
    plain_TC, rotated_TR = kv_TD.split((kv_TD.shape[1] - rope_dim, rope_dim), dim=1)
    # A last column of the least amplitude in each group: the target's own routine then never scales by less.
    padded_NC = torch.nn.functional.pad(plain_TC.reshape(-1, group), (0, 1), value=LEAST_AMPLITUDE)
    rounded_NC = fake_quantise(padded_NC, fp8((1, group + 1)))[:, :group]
    return torch.cat((rounded_NC.reshape(plain_TC.shape), rotated_TR), dim=1)
