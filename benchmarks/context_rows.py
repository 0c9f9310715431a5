"""Cache rows as numbers: floats as they are, INT8 rows as codes and the bytes of an FP32 scale. No code of the model.

Legend: X rows, D numbers of a row.
"""

import torch

SCALE_BYTES = 4


def numbers_of(columns: int, dtype: torch.dtype) -> int:
    """How many numbers a row of so many columns holds."""
    return columns - SCALE_BYTES if dtype == torch.int8 else columns


def as_rows(values_XD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers as rows of a cache of this dtype."""
    if dtype != torch.int8:
        return values_XD.to(dtype)
    values_XD = values_XD.float()
    scale_X = values_XD.abs().amax(dim=1).clamp(min=1e-4) / 127
    codes_XD = torch.round(values_XD / scale_X[:, None]).clamp(-127, 127).to(torch.int8)
    return torch.cat((codes_XD, scale_X.view(torch.int8).view(-1, SCALE_BYTES)), dim=1)


def as_values(rows_XC: torch.Tensor) -> torch.Tensor:
    """What rows of a cache stand for, in FP64 [X, D]."""
    if rows_XC.dtype != torch.int8:
        return rows_XC.double()
    codes_XD = rows_XC[:, :-SCALE_BYTES]
    return codes_XD.double() * rows_XC[:, -SCALE_BYTES:].contiguous().view(torch.float32).double()


def wipe(rows: torch.Tensor) -> None:
    """Make rows NaN: mutates them. All bits of INT8 rows are set, so that their scale is."""
    rows.fill_(float("nan") if rows.is_floating_point() else -1)


def is_written(rows_XC: torch.Tensor) -> bool:
    """Whether nothing of wiped rows is left."""
    return bool(as_values(rows_XC).isfinite().all())
