"""What all of a drafter's functions share: sizes, dtypes, groups, and weights with the target's two ends.

Letters: M stages, T rows, H hidden, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from ...parallel.groups import Groups
from ..kernels.calls import Kernels
from ..matrix import Matrix, Watch
from ..numerics import Numerics
from ..stages import StageClock
from ..v4.config import V4Config
from ..v4.projections import Rotation
from ..v4.rope import angles, frequencies, spread
from .round_trip import check_kv_group
from .shape import DraftShape, draft_shape
from .weights import DrafterWeights, NetWeights, drafter_weights

W = TypeVar("W", bound=NetWeights)
W_co = TypeVar("W_co", bound=NetWeights, covariant=True)


@dataclass(frozen=True)
class DraftNet(Generic[W_co]):
    """One rank's share of a drafter whose kind its weights tell.

    embed [V, H] whole, head [V / tp, H] and kernels (None for the plain form) are the target's own. kv_group:
    channels that share a scale where key rows take the round trip through FP8, 0 where they do not (as the target's).
    watch: told the scales of quantised rows.
    """

    config: V4Config
    shape: DraftShape
    numerics: Numerics
    groups: Groups
    weights: W_co
    embed: torch.Tensor
    head: Matrix
    frequencies: torch.Tensor
    kv_group: int = 0
    watch: Watch | None = None
    clock: StageClock = field(default_factory=StageClock)
    kernels: Kernels | None = None

    @property
    def in_kernels(self) -> Kernels | None:
        """None while gradients are recorded: kernels record none."""
        return None if torch.is_grad_enabled() else self.kernels

    @property
    def stages(self) -> int:
        return len(self.weights.stages)

    def rotation(self, position_T: torch.Tensor) -> Rotation:
        """Angles of rows at these positions, plain ones: stages are sliding windows."""
        return angles(position_T, self.frequencies, self.numerics.accumulation)


Net = DraftNet[NetWeights]
"""A drafter of any kind."""

Drafter = DraftNet[DrafterWeights]
"""A DSpark drafter."""


def make_drafter(
    config: V4Config,
    weights: Mapping[str, torch.Tensor],
    embed: torch.Tensor,
    head: Matrix,
    groups: Groups,
    numerics: Numerics,
    *,
    shape: DraftShape | None = None,
    kv_group: int = 0,
    watch: Watch | None = None,
    clock: StageClock | None = None,
) -> Drafter:
    """A rank's DSpark drafter from its share of mtp.*; ValueError where weights, config and topology do not fit."""
    held = drafter_weights(weights, config, groups, numerics)
    shape = draft_shape(config) if shape is None else shape
    return make_net(
        config, held, embed, head, groups, numerics, shape=shape, kv_group=kv_group, watch=watch, clock=clock
    )


def make_net(
    config: V4Config,
    weights: W,
    embed: torch.Tensor,
    head: Matrix,
    groups: Groups,
    numerics: Numerics,
    *,
    shape: DraftShape,
    kv_group: int = 0,
    watch: Watch | None = None,
    clock: StageClock | None = None,
) -> DraftNet[W]:
    """The drafter that these weights make; ValueError where kv_group does not fit the config."""
    check_kv_group(config, kv_group)
    return DraftNet(
        config=config,
        shape=shape,
        numerics=numerics,
        groups=groups,
        weights=weights,
        embed=embed,
        head=head,
        frequencies=spread(frequencies(config, 0, embed.device), config.head_dim),
        kv_group=kv_group,
        watch=watch,
        clock=StageClock(device=groups.device, ledger=groups.ledger) if clock is None else clock,
    )
