"""Integer products of a GPU and of an NPU: signed codes on both sides, INT32 sums.

Letters: R rows, I inputs, O outputs, X matrices.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from . import npu

LEAST_ROWS = 17
"""CUDA's integer product takes more than 16 rows, and numbers of inputs and outputs in eights."""
EIGHT = 8


class IntMatmul:
    """`torch._int_mm`, matrix by matrix. Made for CUDA; it runs on a CPU too, slowly."""

    name = "int_mm"

    def __init__(self, codes_XOI: torch.Tensor) -> None:
        _, self._outputs, inputs = codes_XOI.shape
        self._extra = -inputs % EIGHT
        self._codes_XOI = F.pad(codes_XOI, (0, self._extra, 0, -self._outputs % EIGHT)).contiguous()
        self.num_bytes = self._codes_XOI.numel()

    def sums(self, codes_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        rows_RI = F.pad(codes_RI, (0, self._extra)) if self._extra else codes_RI
        segments = enumerate(rows_RI.split(list(counts)))
        outputs = [self._segment(rows, x) for x, rows in segments if len(rows)]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs) if outputs else rows_RI.new_empty(0, self._outputs, dtype=torch.float32)

    def _segment(self, rows_PI: torch.Tensor, x: int) -> torch.Tensor:
        count = len(rows_PI)
        padded = F.pad(rows_PI, (0, 0, 0, LEAST_ROWS - count)) if count < LEAST_ROWS else rows_PI.contiguous()
        return torch._int_mm(padded, self._codes_XOI[x].T)[:count, : self._outputs].to(torch.float32)


class NpuMatmul:
    """Ascend's integer product: one matrix, or all matrices of a group, in one call. Weights are held [X, I, O]."""

    name = "npu_quant_matmul"

    def __init__(self, codes_XOI: torch.Tensor) -> None:
        self._codes_XIO = codes_XOI.transpose(1, 2).contiguous()
        self._ones_O = torch.ones(codes_XOI.shape[1], device=codes_XOI.device)
        self.num_bytes = self._codes_XIO.numel()

    def sums(self, codes_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        if not len(codes_RI):
            return self._ones_O.new_empty(0, len(self._ones_O))
        if len(counts) == 1:
            return npu.quant_matmul(codes_RI, self._codes_XIO[0], self._ones_O).to(torch.float32)
        return npu.grouped_matmul(codes_RI, self._codes_XIO, counts).to(torch.float32)
