"""What makes a form of the integer product exact, and the check of it.

Letters: R rows, I inputs, O outputs, X matrices.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

CODE_MAX = 127
EXACT_SUM = 1 << 24
"""FP32 holds every integer up to this magnitude."""

SUMMED_ROWS = 256
"""Channels whose codes are summed at once: they stay in the cache."""


class Products(Protocol):
    """X packed matrices [O, I] of codes."""

    @property
    def name(self) -> str:
        """The form, for tables."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of the packed codes, without what a library adds to fill its blocks."""
        ...

    def sums(self, codes_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Integer sums [R, O], each rounded once to FP32; rows sorted by matrix, counts [X] of them for each. New."""
        ...


Form = Callable[[torch.Tensor], Products]


def exact_length(codes_XOI: torch.Tensor) -> int:
    """Inputs that one FP32 product of these matrices may add at most: all its partial sums are integers FP32 holds.

    No sum over some inputs exceeds 127 times the magnitudes of a channel's codes there: 1040 inputs of any codes fit,
    about 4000 of a real matrix. The inputs are cut into equal lengths, the last filled with zeros.
    """
    inputs = codes_XOI.shape[2]
    for cuts in range(1, inputs):
        length = -(-inputs // cuts)
        if length * CODE_MAX * CODE_MAX <= EXACT_SUM:
            return length
        positive, negative = _signed_sums(codes_XOI, length)
        if int((positive + negative).max()) * CODE_MAX <= EXACT_SUM:
            return length
    return 1


def exact_halves_length(codes_XOI: torch.Tensor) -> int:
    """Inputs of one product of rows without negative codes, whose outputs are subtracted in pairs.

    One cut may be as long as each output is exact: the difference is then rounded once. Of several cuts every
    difference must be exact too.
    """
    inputs = codes_XOI.shape[2]
    if inputs * CODE_MAX * CODE_MAX <= EXACT_SUM:
        return inputs
    largest = max(int(sums.max()) for sums in _signed_sums(codes_XOI, inputs))
    return inputs if largest * CODE_MAX <= EXACT_SUM else exact_length(codes_XOI)


def _signed_sums(codes_XOI: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(sums of the positive codes, of the negative ones as magnitudes) [X * O, cuts] of each cut of the inputs."""
    positive, total = [], []
    for codes_OI in codes_XOI:
        for rows_OI in codes_OI.split(SUMMED_ROWS):
            # Exact in FP32, and ten times as fast as sums of integers.
            wide = F.pad(rows_OI.to(torch.float32), (0, -rows_OI.shape[1] % length)).view(len(rows_OI), -1, length)
            total.append(wide.sum(dim=2))
            positive.append(wide.clamp_(min=0).sum(dim=2))
    positive_OC = torch.cat(positive)
    return positive_OC, positive_OC - torch.cat(total)


def rounded_total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of FP32 tensors of exact integers, rounded once. May be the first of them, mutated."""
    if len(parts) <= 2:
        return parts[0] if len(parts) == 1 else parts[0].add_(parts[1])
    total = parts[0].to(torch.float64)
    for part in parts[1:]:
        total.add_(part)
    return total.to(torch.float32)


def integer_sums(codes_RI: torch.Tensor, codes_XOI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The oracle of `Products.sums`, on the CPU: FP64 holds every sum of fewer than 2^39 products."""
    segments = codes_RI.cpu().to(torch.float64).split(list(counts))
    sums = [rows @ codes_XOI[x].cpu().to(torch.float64).T for x, rows in enumerate(segments)]
    return torch.cat(sums).to(torch.float32)


def failure(form: Form, inputs: int, grouped: bool, device: torch.device) -> str:
    """Why this form cannot be used for matrices of that many inputs on the device; empty where it is exact.

    Tried are the codes that come nearest to the limits of 16, 24 and 32 bits (255 times -127 behind a zero point of
    128 among them), as dense as they can be, and so thin that they fit in one call; by few rows and by more, and where
    grouped is set by rows of several matrices.
    """
    rows_RI = _extremes(inputs)
    dense = torch.cat([rows_RI] * 3)
    thin = dense * (torch.arange(inputs) % 8 < 2)
    rows = len(rows_RI)
    tries: list[tuple[torch.Tensor, tuple[int, ...]]]
    tries = [(codes_OI.unsqueeze(0), (count,)) for codes_OI in (dense, thin) for count in (rows, 1, 3)]
    if grouped:
        tries.append((torch.stack((dense, thin, thin.flip(0))), (3, 0, rows - 3)))
    try:
        for codes_XOI, counts in tries:
            some_RI = rows_RI[: sum(counts)]
            found = form(codes_XOI.to(device)).sums(some_RI.to(device), counts)
            if not torch.equal(found.cpu(), integer_sums(some_RI, codes_XOI, counts)):
                return f"is not exact over {inputs} inputs"
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return f"is not there ({str(error).splitlines()[0]})"
    return ""


def _extremes(inputs: int) -> torch.Tensor:
    """Rows [22, I] of codes at their limits, and of some whose sums need more than 24 bits and end in any."""
    i = torch.arange(inputs)
    signs = [torch.ones_like(i), 1 - i % 2 * 2, 1 - i // 2 % 2 * 2, 1 - (i * i // 7) % 2 * 2]
    uneven = [CODE_MAX - i * step % 7 for step in range(1, 7)]
    mixed = (i * i + i // 3) % (2 * CODE_MAX + 1) - CODE_MAX
    limits = [sign * CODE_MAX for sign in signs] + uneven + [mixed]
    return torch.stack(limits + [-row for row in limits]).to(torch.int8)
