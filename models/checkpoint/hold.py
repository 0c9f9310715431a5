"""Float weights as a rank holds them."""

from collections.abc import Mapping

import torch

from ..int8.quantise import quantise_weight
from ..numerics import W8A8, Numerics
from ..v4.config import V4Config
from .forms import is_int8, scale_key
from .names import TensorSpec, held_table
from .share import held_dtype


def hold(spec: TensorSpec, weight: torch.Tensor, numerics: Numerics) -> tuple[torch.Tensor, ...]:
    """One weight (of one expert) in the dtype it is held in; of an INT8 weight (codes [O, I], channel scales [O])."""
    return quantise_weight(weight) if is_int8(spec, numerics) else (weight.to(held_dtype(spec, numerics)),)


def stack_held(
    name: str, specs: tuple[TensorSpec, ...], parts: list[tuple[torch.Tensor, ...]]
) -> dict[str, torch.Tensor]:
    """What `hold` gave for every spec of one key of `held_table`, by key: experts stacked, scales beside codes."""
    keys = (name, scale_key(name))
    stacked = specs[0].shard == "experts"
    columns = zip(*parts, strict=True)
    return {key: torch.stack(each) if stacked else each[0] for key, each in zip(keys, columns, strict=False)}


def quantise_weights(weights: Mapping[str, torch.Tensor], config: V4Config) -> dict[str, torch.Tensor]:
    """Full float weights (world 1, experts stacked) as numerics w8a8 holds them: what loading would make of them.

    mtp.* too, where it is among them. New tensors where the dtype changes. ValueError for a weight that is absent,
    or no float.
    """
    held: dict[str, torch.Tensor] = {}
    draft = any(name.startswith("mtp.") for name in weights)
    for name, specs in held_table(config, draft=draft).items():
        if name not in weights:
            raise ValueError(f"weights: {name} is missing")
        weight = weights[name]
        if specs[0].role != "ids" and not weight.is_floating_point():
            raise ValueError(f"weights: {name} is {weight.dtype}, allowed: a floating dtype")
        each = weight.unbind() if specs[0].shard == "experts" else (weight,)
        held |= stack_held(name, specs, [hold(spec, w, W8A8) for spec, w in zip(specs, each, strict=True)])
    return held
