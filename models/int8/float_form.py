"""Products of codes in FP32: for matrices so small that the number of calls counts, and wherever nothing else is exact.

Letters: R rows, I inputs, O outputs, X matrices, P rows of each matrix in a batch.
"""

from collections.abc import Sequence

import torch

from ...comm.experts import index_tensor
from ..functions import segment_places
from .exact import exact_length, rounded_total

CALL_PRODUCTS = 200_000
"""Multiplications that take a CPU about as long as one more call of a small product."""


class FloatProducts:
    """FP32 products of integers, exact in any order because no partial sum leaves the integers that FP32 holds."""

    name = "fp32"

    def __init__(self, codes_XOI: torch.Tensor) -> None:
        self._length = exact_length(codes_XOI)
        self._parts = [part.to(torch.float32) for part in codes_XOI.split(self._length, dim=2)]

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self._parts)

    def sums(self, codes_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        rows_RI = codes_RI.to(torch.float32)
        if len(counts) == 1:
            return self._segment(rows_RI, 0)
        X, O, _ = self._parts[0].shape
        longest, active = max(counts), sum(count > 0 for count in counts)
        idle = longest * X - len(rows_RI)
        if idle * O * rows_RI.shape[1] < (active - 1) * CALL_PRODUCTS:
            return self._batch(rows_RI, counts, longest)
        segments = rows_RI.split(list(counts))
        outputs = [self._segment(segment, x) for x, segment in enumerate(segments) if len(segment)]
        return torch.cat(outputs) if outputs else rows_RI.new_empty(0, O)

    def _segment(self, rows_RI: torch.Tensor, x: int) -> torch.Tensor:
        split = rows_RI.split(self._length, dim=1)
        return rounded_total(
            [torch.nn.functional.linear(rows, part_XOI[x]) for rows, part_XOI in zip(split, self._parts, strict=True)]
        )

    def _batch(self, rows_RI: torch.Tensor, counts: Sequence[int], longest: int) -> torch.Tensor:
        """All matrices in one product, segments filled with zeros to the longest."""
        X = len(counts)
        if longest * X == len(rows_RI):
            return self._batched(rows_RI.view(X, longest, -1)).flatten(0, 1)
        place_R = index_tensor(segment_places(counts, longest), rows_RI.device)
        padded = rows_RI.new_zeros(X * longest, rows_RI.shape[1]).index_copy_(0, place_R, rows_RI)
        return self._batched(padded.view(X, longest, -1)).flatten(0, 1).index_select(0, place_R)

    def _batched(self, rows_XPI: torch.Tensor) -> torch.Tensor:
        split = rows_XPI.split(self._length, dim=2)
        return rounded_total([torch.bmm(rows, part.mT) for rows, part in zip(split, self._parts, strict=True)])
