"""Packed 8-bit products of a CPU. Its instructions take unsigned rows and signed weights.

Letters: R rows, I inputs, O outputs, X matrices, C cuts of the inputs, L inputs of each cut.

Without VNNI those instructions add two products in 16 bits and saturate there. Rows split into what is positive and
what is negative stay in 0..127, so that two products always fit: exact on every CPU, for twice the rows. With VNNI
rows moved by 128 are exact at once.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from .exact import exact_halves_length, rounded_total

ROW_BLOCK = 64
"""Rows whose outputs are finished before the next are begun: two halves of 4096 columns stay in the cache."""


class SplitProducts:
    """Positive and negative parts as rows of their own: subclasses pack and multiply."""

    name = "split"

    def __init__(self, codes_XOI: torch.Tensor) -> None:
        X, self._outputs, self._inputs = codes_XOI.shape
        self._length = exact_halves_length(codes_XOI)
        self._cuts = -(-self._inputs // self._length)
        self.num_bytes = X * self._outputs * self._length * self._cuts
        self._packed_XC = [[self._pack(cut) for cut in self._cut(codes_OI)] for codes_OI in codes_XOI]

    def sums(self, codes_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        halves_CHL = self._halves(codes_RI)
        out_RO = torch.empty(len(codes_RI), self._outputs)
        first = 0
        for packed_C, count in zip(self._packed_XC, counts, strict=True):
            for start in range(first, first + count, ROW_BLOCK):
                stop = min(start + ROW_BLOCK, first + count)
                self._block(halves_CHL[:, 2 * start : 2 * stop], packed_C, out_RO[start:stop])
            first += count
        return out_RO

    def _block(self, halves_CHL: torch.Tensor, packed_C: list[Any], out_RO: torch.Tensor) -> None:
        products = [self._product(part, packed) for part, packed in zip(halves_CHL, packed_C, strict=True)]
        pairs = [(sums[0::2], sums[1::2]) for sums in products]
        if len(pairs) == 1:
            torch.sub(*pairs[0], out=out_RO)
        else:
            out_RO.copy_(rounded_total([torch.sub(*pair) for pair in pairs]))

    def _halves(self, codes_RI: torch.Tensor) -> torch.Tensor:
        """[C, 2R, L] contiguous: of each row the codes, then the codes negated, before both lose what is negative."""
        codes_HI = torch.stack((codes_RI, codes_RI.neg()), dim=1).flatten(0, 1)
        if self._cuts == 1:
            return self._unsigned(codes_HI).unsqueeze(0)
        missing = self._cuts * self._length - self._inputs
        padded = F.pad(codes_HI, (0, missing)) if missing else codes_HI
        return self._unsigned(padded.view(-1, self._cuts, self._length).transpose(0, 1).contiguous())

    def _cut(self, codes_OI: torch.Tensor) -> list[torch.Tensor]:
        padded = F.pad(codes_OI, (0, self._cuts * self._length - self._inputs))
        return [part.contiguous() for part in padded.split(self._length, dim=1)]

    def _unsigned(self, codes: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _pack(self, codes_OL: torch.Tensor) -> Any:
        raise NotImplementedError

    def _product(self, rows_HL: torch.Tensor, packed: Any) -> torch.Tensor:
        raise NotImplementedError


class FbgemmSplit(SplitProducts):
    """Weights in FBGEMM's blocks. It takes rows in FP32 and makes them unsigned itself: what is negative becomes 0."""

    name = "fbgemm u8 split"

    def _unsigned(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.to(torch.float32)

    def _pack(self, codes_OL: torch.Tensor) -> Any:
        with warnings.catch_warnings():
            # Torch announces an end of quantised tensors, the only way to these kernels.
            warnings.simplefilter("ignore", UserWarning)
            quantised = torch._make_per_tensor_quantized_tensor(codes_OL, 1.0, 0)
        return torch.ops.quantized.linear_prepack(quantised, None)

    def _product(self, rows_HL: torch.Tensor, packed: Any) -> torch.Tensor:
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(rows_HL, 1.0, 0, packed)


class OnednnSplit(SplitProducts):
    name = "onednn u8 split"

    def __init__(self, codes_XOI: torch.Tensor) -> None:
        self._weight = OnednnWeight(codes_XOI.shape[1])
        super().__init__(codes_XOI)

    def _unsigned(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.clamp(min=0).view(torch.uint8)

    def _pack(self, codes_OL: torch.Tensor) -> Any:
        return self._weight.pack(codes_OL)

    def _product(self, rows_HL: torch.Tensor, packed: Any) -> torch.Tensor:
        return self._weight.product(rows_HL, 0, packed)


class OnednnOffset:
    """Rows moved by 128, one call a matrix; oneDNN adds in 32 bits and takes 128 times the weights away again."""

    name = "onednn u8 zero point 128"

    def __init__(self, codes_XOI: torch.Tensor) -> None:
        self._outputs = codes_XOI.shape[1]
        self._weight = OnednnWeight(self._outputs)
        self.num_bytes = codes_XOI.numel()
        self._packed_X = [self._weight.pack(codes_OI.contiguous()) for codes_OI in codes_XOI]

    def sums(self, codes_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        # Flipping the sign bit adds 128.
        moved_RI = codes_RI.contiguous().view(torch.uint8) ^ 128
        segments = zip(moved_RI.split(list(counts)), self._packed_X, strict=True)
        outputs = [self._weight.product(rows, 128, packed) for rows, packed in segments if len(rows)]
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs) if outputs else torch.empty(0, self._outputs)


class OnednnWeight:
    """oneDNN's packing and product with scales of one."""

    def __init__(self, outputs: int) -> None:
        self._scale_O, self._zero_O = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int32)

    def pack(self, codes_OI: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(codes_OI, None)
        return packed

    def product(self, rows_RI: torch.Tensor, zero_point: int, packed: torch.Tensor) -> torch.Tensor:
        sums: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            rows_RI, 1.0, zero_point, packed, self._scale_O, self._zero_O,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return sums
