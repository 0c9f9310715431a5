"""Which form of the integer product multiplies some matrices: by device, by size, and only if it is exact here.

Letters: I inputs, O outputs, X matrices.
"""

from functools import cache

import torch

from .cpu_forms import FbgemmSplit, OnednnOffset, OnednnSplit
from .device_forms import IntMatmul, NpuMatmul
from .exact import Form, Products, failure
from .float_form import FloatProducts

__all__ = ["FORMS", "SMALL_MATRIX", "Products", "products"]

SMALL_MATRIX = 1 << 19
"""Numbers of a matrix up to which a CPU spends more time on the calls around a packed product than FP32 takes."""

FORMS: dict[str, tuple[Form, ...]] = {
    "cpu": (OnednnOffset, FbgemmSplit, OnednnSplit, FloatProducts),
    "cuda": (IntMatmul, FloatProducts),
    "npu": (NpuMatmul, FloatProducts),
}
"""Fastest first, for each type of device."""


def products(codes_XOI: torch.Tensor) -> Products:
    """The fastest exact form for these matrices [X, O, I] on their device; its `name` says which. Copies the codes.

    ValueError for codes of -128, which symmetric codes never have. RuntimeError where no form is exact here.
    """
    device, (X, O, I) = codes_XOI.device, codes_XOI.shape
    if codes_XOI.numel() and int(codes_XOI.min()) < -127:
        raise ValueError("codes of an INT8 weight hold -128; allowed are -127 to 127")
    forms = FORMS.get(device.type, (FloatProducts,))
    if device.type == "cpu" and O * I <= SMALL_MATRIX:
        forms = (FloatProducts, *(form for form in forms if form is not FloatProducts))
    refused = []
    for form in forms:
        reason = _failure(form, I, X > 1, device)
        if not reason:
            return form(codes_XOI)
        refused.append(f"{getattr(form, 'name', form)} {reason}")
    raise RuntimeError(f"no form of the INT8 product over {I} inputs is exact on {device}: " + "; ".join(refused))


@cache
def _failure(form: Form, inputs: int, grouped: bool, device: torch.device) -> str:
    return failure(form, inputs, grouped, device)
