"""Products and elementwise functions whose bits for one row do not depend on the other rows.

Torch's sigmoid, silu, softplus and exp2 give an element other bits in the vector body of a loop than in its
scalar tail; exp, log1p, sqrt, rsqrt, addcmul, addcdiv, softmax, norms and row sums do not. So the first are spelled
with the second, here and nowhere else. FP32 matrix products on CPUs change a row's bits at row counts that are not
a multiple of 4.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from .kernels.calls import Kernels

ROW_MULTIPLE = 4
"""Row counts at which an FP32 product on a CPU treats every row alike are the multiples of this."""

SMALL_PRODUCT = 400
"""Matrices of fewer numbers take another way through a batched product than through one of their own."""


def segment_places(counts: Sequence[int], longest: int) -> np.ndarray:
    """Where the rows of sorted segments stand once every segment is padded to `longest`: int64, row by row."""
    count_X = np.array(counts, dtype=np.int64)
    shift_X = np.arange(0, longest * len(counts), longest) + count_X - count_X.cumsum()
    return shift_X.repeat(count_X) + np.arange(count_X.sum())


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in dtype. Small steps are bound by the number of calls, and most casts of a mode change nothing."""
    return x if x.dtype == dtype else x.to(dtype)


@lru_cache
@torch.inference_mode(False)
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """These numbers as a tensor that every caller shares and nobody mutates."""
    return torch.tensor(values, dtype=dtype, device=device)


def sigmoid_inverse(x: torch.Tensor) -> torch.Tensor:
    """1 / sigmoid(x), for those that divide."""
    return x.neg().exp_() + 1


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return sigmoid_inverse(x).reciprocal_()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / sigmoid_inverse(x)


def softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.log1p(x.abs().neg_().exp_()).add_(torch.clamp(x, min=0))


def missing_rows(num_rows: int, x: torch.Tensor) -> int:
    """Rows to add to num_rows before a product of x's dtype and device treats each row alike."""
    extra = -num_rows % ROW_MULTIPLE
    return extra if extra and x.dtype == torch.float32 and x.device.type == "cpu" else 0


def row_linear(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """x_TI @ weight_OI^T -> [T, O], each row's bits independent of T. Takes x in the weight's dtype."""
    extra = missing_rows(x_TI.shape[0], x_TI)
    if not extra:
        return F.linear(x_TI, weight_OI)
    return F.linear(F.pad(x_TI, (0, 0, 0, extra)), weight_OI)[: x_TI.shape[0]]


def tile_product(a_NMK: torch.Tensor, b_NKL: torch.Tensor) -> torch.Tensor:
    """Batched a_NMK @ b_NKL -> [N, M, L]; the bits of row m depend on its row of a and on b[n] alone."""
    num_rows = a_NMK.shape[1]
    extra = missing_rows(num_rows, a_NMK)
    if not extra:
        return torch.bmm(a_NMK, b_NKL)
    return torch.bmm(F.pad(a_NMK, (0, 0, 0, extra)), b_NKL)[:, :num_rows]


def mean_square_rsqrt(x: torch.Tensor, eps: float) -> torch.Tensor:
    """rsqrt(mean of squares over the last dim + eps), that dim kept with size 1; x is in a wide dtype."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(constant((eps,), x.dtype, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def rms_norm(
    x: torch.Tensor, gain: torch.Tensor | None, eps: float, out: torch.dtype, kernels: Kernels | None = None
) -> torch.Tensor:
    """gain * x * rsqrt(mean(x^2) + eps) over the last dim, in the gain's (wide) dtype, cast once to `out`.

    Without a gain x must be wide already. model.md 2.1.
    """
    if kernels is not None and kernels.norms:
        return kernels.norm_turn(x, gain, eps, None)
    wide = x if gain is None else cast(x, gain.dtype)
    normed = wide * mean_square_rsqrt(wide, eps)
    return cast(normed if gain is None else normed.mul_(gain), out)
