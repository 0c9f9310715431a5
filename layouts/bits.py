"""Bit views: the same bytes under another dtype, never a numeric conversion."""

import torch

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def raw_view(x: torch.Tensor) -> torch.Tensor:
    """The same bits as integers of the same size, a view for any layout."""
    if x.itemsize not in _RAW:
        raise ValueError(f"dtype is {x.dtype} with {x.itemsize} bytes, allowed: 1, 2, 4 or 8 bytes")
    return x.view(_RAW[x.itemsize])


def as_lanes(x: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """[..., columns] of any dtype and layout -> [..., lanes] of `wire`, bit for bit.

    Lanes of one element are neighbours, in the byte order of the host. A view where the layout allows it, else a
    copy of the bits. ValueError where the last dim does not hold a whole number of lanes.
    """
    if x.dtype == wire:
        return x
    if x.ndim < 1:
        raise ValueError(f"a tensor without dims has no lanes of {wire}; its dtype is {x.dtype}")
    if (x.shape[-1] * x.itemsize) % wire.itemsize:
        raise ValueError(
            f"{x.shape[-1]} columns of {x.dtype} are {x.shape[-1] * x.itemsize} bytes, "
            f"not a multiple of {wire.itemsize} as {wire} needs"
        )
    lanes = x.shape[-1] * x.itemsize // wire.itemsize
    if x.numel() == 0:
        return x.new_empty((*x.shape[:-1], lanes), dtype=wire)
    raw = raw_view(x)
    if not _can_view(raw, wire.itemsize):
        # Copied as integers: a floating copy may quieten signalling NaNs on some devices.
        raw = raw.clone(memory_format=torch.contiguous_format)
    return raw.view(wire)


def from_lanes(lanes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `as_lanes`: [..., lanes] -> [..., columns] of `dtype`."""
    return as_lanes(lanes, dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree; NaN equals the same NaN, and -0.0 is not 0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(raw_view(a.detach()), raw_view(b.detach()))


def _can_view(raw: torch.Tensor, itemsize: int) -> bool:
    if raw.stride(-1) != 1:
        return False
    if itemsize <= raw.itemsize:
        return True
    ratio = itemsize // raw.itemsize
    return raw.storage_offset() % ratio == 0 and all(stride % ratio == 0 for stride in raw.stride()[:-1])
