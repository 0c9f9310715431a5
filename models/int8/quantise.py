"""Symmetric INT8 codes: rows with a scale each, weights with a scale for each output channel. model.md 9.2.

Letters: T rows, I inputs, O outputs; every function takes leading dims before.
"""

from dataclasses import dataclass

import torch

from ..functions import cast, constant
from . import npu
from .exact import CODE_MAX

LEAST_AMPLITUDE = 1e-4
"""Rows and channels of smaller numbers are coded as if this were their largest: zeros stay zeros, scales finite."""

STREAMED_NUMBERS = 1 << 20
"""Numbers of a weight that are quantised at once: what is in between stays in the cache."""


@dataclass(frozen=True)
class QuantisedRows:
    """codes int8 [T, I] in [-127, 127] and scale FP32 [T]: codes * scale are the rows. A row that held NaN or
    infinity has a scale that is not finite."""

    codes_TI: torch.Tensor
    scale_T: torch.Tensor


def quantise_rows(x_TI: torch.Tensor) -> QuantisedRows:
    """rint(x * (127 / a)), ties to even, and the scale 1 / (127 / a), a the row's largest magnitude, at least 1e-4.

    x in FP32, before any rounding to BF16; FP64 is rounded to FP32 first. A row's bits depend on it alone. On an NPU
    rows in BF16 or FP16 go through its own operator, which has no least amplitude.
    """
    if x_TI.device.type == "npu" and x_TI.dtype in (torch.bfloat16, torch.float16):
        return QuantisedRows(*npu.dynamic_quant(x_TI))
    wide_TI = cast(x_TI, torch.float32)
    amplitude_T1 = wide_TI.abs().amax(dim=-1, keepdim=True).clamp_(min=LEAST_AMPLITUDE)
    # A number divided by a tensor would be two operations, and rounded twice.
    inverse_T1 = torch.div(constant((float(CODE_MAX),), torch.float32, wide_TI.device), amplitude_T1)
    codes_TI = torch.mul(wide_TI, inverse_T1).round_().to(torch.int8)
    return QuantisedRows(codes_TI, inverse_T1.reciprocal_().squeeze(-1))


def quantise_weight(
    weight_OI: torch.Tensor, amplitude_O: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes int8 [O, I], scale FP32 [O] = a / 127), codes clamp(rint(w * 127 / a), -127, 127).

    amplitude_O: each whole channel's largest magnitude, where weight_OI is only some of its columns.
    out: int8 of weight_OI's shape, contiguous, mutated and returned. Rows are streamed: little memory beside it.
    """
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.int8, device=weight_OI.device) if out is None else out
    if codes_OI.shape != weight_OI.shape or codes_OI.dtype != torch.int8 or not codes_OI.is_contiguous():
        raise ValueError(f"out is {codes_OI.dtype} {list(codes_OI.shape)}; allowed: int8 {list(weight_OI.shape)}")
    scale_O = torch.empty(weight_OI.shape[:-1], dtype=torch.float32, device=weight_OI.device)
    rows = max(1, STREAMED_NUMBERS // max(1, weight_OI.shape[-1]))
    given = None if amplitude_O is None else amplitude_O.expand(scale_O.shape).reshape(-1).split(rows)
    parts = zip(_rows(weight_OI).split(rows), _rows(codes_OI).split(rows), scale_O.view(-1).split(rows), strict=True)
    for index, (weight, codes, scale) in enumerate(parts):
        wide = cast(weight, torch.float32)
        amplitude = wide.abs().amax(dim=-1) if given is None else cast(given[index], torch.float32)
        amplitude = amplitude.clamp(min=LEAST_AMPLITUDE)
        codes.copy_((wide * CODE_MAX).div_(amplitude.unsqueeze(-1)).round_().clamp_(-CODE_MAX, CODE_MAX))
        torch.div(amplitude, CODE_MAX, out=scale)
    return codes_OI, scale_O


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
