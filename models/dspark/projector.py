"""From the target's taps to the drafter's context: one row of hidden width, then one key row for each stage.

Letters: T rows, I the taps' width, H hidden, M stages, D head dim.
"""

from collections.abc import Mapping

import torch

from ..functions import cast, rms_norm
from ..matrix import product
from ..v4.config import V4Config
from ..v4.model import Tap
from ..v4.projections import Rotation, key_value
from .drafter import Drafter, Net
from .round_trip import round_trip
from .shape import require_dspark
from .weights import StageWeights


def draft_taps(config: V4Config) -> tuple[Tap, ...]:
    """What a step of the target must export for its drafter, in the order in which the projector takes it."""
    return tuple(Tap(layer) for layer in require_dspark(config).target_layer_ids)


def join_taps(taps: Mapping[Tap, torch.Tensor], config: V4Config) -> torch.Tensor:
    """The taps of a step side by side, [T, I]."""
    return torch.cat([taps[tap] for tap in draft_taps(config)], dim=1)


def project(taps_TI: torch.Tensor, drafter: Drafter) -> torch.Tensor:
    """Context rows [T, H] in the activation dtype, shared by all stages. The product is rounded before its norm."""
    act, weights = drafter.numerics.activation, drafter.weights
    main_TH = cast(product(cast(taps_TI, act), weights.main_proj, drafter.in_kernels), act)
    return rms_norm(main_TH, weights.main_norm, drafter.config.rms_norm_eps, act, drafter.in_kernels)


def context_keys(main_TH: torch.Tensor, position_T: torch.Tensor, drafter: Drafter) -> torch.Tensor:
    """Key rows of every stage [M, T, D] in the kv dtype, of context rows at these positions: no hyper-connection and no
    attention norm comes between."""
    rotation = drafter.rotation(position_T)
    return torch.stack([stage_keys(main_TH, stage, rotation, drafter) for stage in drafter.weights.stages])


def stage_keys(x_TH: torch.Tensor, stage: StageWeights, rotation: Rotation, drafter: Net) -> torch.Tensor:
    """Key rows [T, D] of one stage, for context rows and for the normed rows of blocks alike."""
    kv_TD = key_value(x_TH, stage.projections, drafter.config, rotation, drafter.numerics.kv, drafter.in_kernels)
    return round_trip(kv_TD, drafter.config.qk_rope_head_dim, drafter.kv_group)
