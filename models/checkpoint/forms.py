"""The two stored forms of a checkpoint, and the weights that W8A8 holds otherwise than BF16 does. model.md 9.2."""

from dataclasses import replace

import torch

from ..numerics import Numerics
from ..v4.config import V4Config
from .names import TensorSpec, tensor_table

OFFICIAL, W8A8_FORM = "official", "w8a8"
"""Stored forms: FP8 and FP4 blocks; or the target's INT8 codes with an FP32 scale for each output channel."""

INT8_WEIGHTS = (".wq_b.", ".wo_b.", ".experts.", ".shared_experts.", ".e_proj.", ".h_proj.")
BF16_WEIGHTS = ("head.weight", ".compressor.wkv.", ".compressor.wgate.", ".markov_head.")
"""Marks of W8A8's weights: INT8 ones, and wide ones that are held in BF16."""

SCALE_BYTES = torch.float32.itemsize
"""Of one channel's scale."""


def is_int8(spec: TensorSpec, numerics: Numerics) -> bool:
    """Whether the product with this weight runs in INT8: it is held as codes, beside it its channels' scales."""
    return numerics.quantisation == "w8a8" and _marked(spec, INT8_WEIGHTS)


def is_narrowed(spec: TensorSpec, numerics: Numerics) -> bool:
    """Whether a wide weight is held in BF16."""
    return numerics.quantisation == "w8a8" and _marked(spec, BF16_WEIGHTS)


def scale_key(name: str) -> str:
    """Key of the channel scales of the INT8 weight under `name` in a model's weights."""
    return f"{name.removesuffix('.weight')}.scale"


def stored_table(config: V4Config, form: str) -> tuple[TensorSpec, ...]:
    """`tensor_table` with every tensor as the form stores it."""
    return tuple(stored_spec(spec, form) for spec in tensor_table(config))


def stored_spec(spec: TensorSpec, form: str) -> TensorSpec:
    """The spec as the form stores it: mtp.* and all that is not INT8 are the same in both forms."""
    if form == OFFICIAL or spec.is_draft or not _marked(spec, INT8_WEIGHTS):
        return spec
    return replace(spec, dtype="I8", stored_shape=spec.shape, scale_shape=spec.shape[:1], quant=None)


def stores_codes(spec: TensorSpec) -> bool:
    """Whether the file holds INT8 codes and channel scales of it, and not blocks."""
    return spec.quant is None and spec.scale_name is not None


def _marked(spec: TensorSpec, marks: tuple[str, ...]) -> bool:
    return any(mark in spec.name for mark in marks)
