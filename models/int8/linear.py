"""The seam of INT8 products: `int8_linear` for rows of one matrix, `int8_grouped` for rows sorted by matrix.

Letters: T or R rows, I inputs, O outputs, X matrices of one shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...comm.experts import index_tensor
from .forms import Products, products
from .quantise import QuantisedRows


@dataclass(frozen=True)
class Int8Weight:
    """X matrices in the form of the device's integer product, and their channel scales [X, O] in FP32."""

    products: Products
    scale_XO: torch.Tensor


def int8_weight(codes_XOI: torch.Tensor, scale_XO: torch.Tensor) -> Int8Weight:
    """Codes [X, O, I] or [O, I] with scales [X, O] or [O], packed for their device; the codes are copied.

    ValueError where a code is -128. RuntimeError where no form of the product is exact here.
    """
    if codes_XOI.ndim == 2:
        codes_XOI, scale_XO = codes_XOI.unsqueeze(0), scale_XO.unsqueeze(0)
    return Int8Weight(products(codes_XOI), scale_XO)


def int8_linear(rows: QuantisedRows, weight: Int8Weight) -> torch.Tensor:
    """(integer sum of the row and the channel, rounded once to FP32) * row scale * channel scale -> FP32 [T, O]."""
    sums_TO = weight.products.sums(rows.codes_TI, (len(rows.codes_TI),))
    return sums_TO.mul_(rows.scale_T.unsqueeze(1)).mul_(weight.scale_XO[0])


def int8_grouped(rows: QuantisedRows, counts: Sequence[int], weight: Int8Weight) -> torch.Tensor:
    """`int8_linear` of rows sorted by matrix, counts [X] of them through each -> FP32 [R, O]."""
    sums_RO = weight.products.sums(rows.codes_TI, counts)
    sums_RO.mul_(rows.scale_T.unsqueeze(1))
    if len(counts) == 1:
        return sums_RO.mul_(weight.scale_XO)
    matrix_R = index_tensor(np.arange(len(counts)).repeat(counts), sums_RO.device)
    return sums_RO.mul_(weight.scale_XO.index_select(0, matrix_R))
