"""Weights of matrix products in the form that fits their numerics and device, and the rows that go into them.

Letters: T rows, I inputs, O outputs.
"""

from collections.abc import Callable, Mapping

import torch

from .functions import cast, row_linear
from .int8.linear import Int8Weight, int8_linear, int8_weight
from .int8.quantise import QuantisedRows, quantise_rows
from .kernels.calls import Kernels
from .numerics import Numerics

PACKED_INPUTS = 512
"""oneDNN's packed products of fewer inputs take longer than plain ones: its calls cost more."""

Watch = Callable[[str, torch.Tensor], None]
"""Told the stage and the scales of rows that were quantised there."""


class DenseWeight:
    """A BF16 matrix [O, I] for rows in BF16, with sums in FP32, packed once for inference.

    CPUs that multiply in BF16 do so and round the sum to BF16; others hold the matrix in FP32, which takes twice its
    memory, and give the FP32 sum. Which of both, and whether it is packed, does not depend on O, so that shards of a
    matrix give the bits of the whole.
    """

    def __init__(self, weight_OI: torch.Tensor) -> None:
        on_cpu = weight_OI.device.type == "cpu"
        packed = on_cpu and weight_OI.shape[1] >= PACKED_INPUTS and torch.backends.mkldnn.is_available()
        native = not on_cpu or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.dtype = torch.bfloat16 if native else torch.float32
        weight_OI = weight_OI.detach().to(self.dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None) if packed else None
        self._plain = None if packed else weight_OI

    def product(self, x_TI: torch.Tensor) -> torch.Tensor:
        """x_TI, rounded to BF16, times the matrix: FP32 [T, O]; a row's bits do not depend on T."""
        rows_TI = cast(cast(x_TI, torch.bfloat16), self.dtype)
        if self._plain is not None:
            return cast(row_linear(rows_TI, self._plain), torch.float32)
        sums_TO = torch.ops.mkldnn._linear_pointwise(rows_TI, self._packed, None, "none", [], "")
        return cast(sums_TO, torch.float32)


Matrix = torch.Tensor | DenseWeight | Int8Weight
Operand = torch.Tensor | QuantisedRows


def held_matrix(weights: Mapping[str, torch.Tensor], name: str, numerics: Numerics) -> Matrix:
    """The matrix `name` of a rank's weights, "layers.0.attn.wq_b" for example, as its numerics multiply it."""
    weight = weights[f"{name}.weight"]
    if numerics.quantisation is None:
        return weight
    return int8_weight(weight, weights[f"{name}.scale"]) if weight.dtype == torch.int8 else DenseWeight(weight)


def operand(x_TI: torch.Tensor, weight: Matrix, activation: torch.dtype, stage: str, watch: Watch | None) -> Operand:
    """Rows as products with `weight` take them: codes for INT8 ones, x in the activation dtype for others."""
    if not isinstance(weight, Int8Weight):
        return cast(x_TI, activation)
    rows = quantise_rows(x_TI)
    if watch is not None:
        watch(stage, rows.scale_T)
    return rows


def product(x: Operand, weight: Matrix, kernels: Kernels | None = None) -> torch.Tensor:
    """x times weight^T, [T, O]: in the weight's dtype, in FP32 where it is packed; a row's bits independent of T."""
    if isinstance(weight, Int8Weight):
        assert isinstance(x, QuantisedRows)
        return int8_linear(x, weight)
    assert isinstance(x, torch.Tensor)
    if kernels is not None and isinstance(weight, torch.Tensor) and kernels.takes(x.shape[0], weight):
        return kernels.product(x, weight)
    return weight.product(x) if isinstance(weight, DenseWeight) else row_linear(cast(x, weight.dtype), weight)
