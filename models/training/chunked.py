"""A sum over chunks of blocks whose insides are computed again in the backward pass (training.md 7.5)."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Sums = tuple[Tensor, ...]


def checkpointed_chunk_reduce(
    function: Callable[..., Sums], *aligned: Tensor | None, chunk_size: int, dim: int = 0
) -> Sums:
    """The sum of function(*slices) over slices of `chunk_size` along `dim` of all tensors, which share its length.

    A slice of a None is None. The function gives a tuple of tensors, of one length in every chunk; the sums are added
    in the order of the chunks. A chunk is checkpointed (without re-entering) where any of its slices needs a gradient,
    so of the function's insides only one chunk lives at a time. chunk_size 0 is one call without checkpoint.

    ValueError: a negative size, no tensor, an empty dim, lengths that differ, a result that is no tuple of tensors,
    tuples of different lengths.
    """
    length = _length(aligned, chunk_size, dim)
    if chunk_size == 0:
        return _checked(function(*aligned), None)
    sums: Sums | None = None
    for start in range(0, length, chunk_size):
        size = min(chunk_size, length - start)
        slices = [None if tensor is None else tensor.narrow(dim, start, size) for tensor in aligned]
        again = torch.is_grad_enabled() and any(part is not None and part.requires_grad for part in slices)
        # Nothing in here draws random numbers, so their state need not be kept for the second time.
        result = checkpoint(function, *slices, use_reentrant=False, preserve_rng_state=False) if again else None
        result = _checked(function(*slices) if result is None else result, sums)
        sums = result if sums is None else tuple(a + b for a, b in zip(sums, result, strict=True))
    assert sums is not None, "a dim that is not empty has a chunk"
    return sums


def _length(aligned: tuple[Tensor | None, ...], chunk_size: int, dim: int) -> int:
    if chunk_size < 0:
        raise ValueError(f"chunk_size is {chunk_size}, allowed: 0 for one call, or more")
    tensors = [tensor for tensor in aligned if tensor is not None]
    if not tensors:
        raise ValueError("no tensor to slice: give at least one that is not None")
    for tensor in tensors:
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(f"dim is {dim}, but a tensor has shape {list(tensor.shape)}")
    lengths = [tensor.shape[dim] for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(f"lengths along dim {dim} are {lengths}, needed: one length for all")
    if lengths[0] == 0:
        raise ValueError(f"dim {dim} is empty: there is nothing to sum")
    return lengths[0]


def _checked(result: object, sums: Sums | None) -> Sums:
    if not isinstance(result, tuple) or not all(isinstance(part, Tensor) for part in result):
        raise ValueError(f"the function gave {type(result).__name__}, needed: a tuple of tensors")
    if sums is not None and len(result) != len(sums):
        raise ValueError(f"the function gave {len(result)} tensors, but {len(sums)} for the chunk before")
    return result
