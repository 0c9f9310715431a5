"""The compiled kernels: where they are, how they are called, and what they may be given.

They are an optional part of an installation: without a C compiler there is no library, and nothing else changes.
"""

import ctypes
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

NAME = "_kernels"
HERE = Path(__file__).parent

LANES = 8
"""Numbers that the kernels take side by side; a product has at least as many outputs."""
MOST_INPUTS = 1024
MOST_STREAMS = 8
MOST_LANES = 2048
MOST_COLUMNS = 512
"""Limits of the kernels' scratch memory, as in their source."""

INTERFACE = 839950197
"""As in kernels.h: the checksum of all prototypes."""

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class LaneSet(ctypes.Structure):
    """Lanes of a batch of tiles, as attend.c has them."""

    _fields_ = (("fresh", _P), ("pool", _P), ("source", _P), ("count", _N))


class AttendTask(ctypes.Structure):
    """A batch of tiles, as attend.c has it."""

    _fields_ = (
        ("tiles", _N),
        ("rows", _N),
        ("heads", _N),
        ("columns", _N),
        ("row", _P),
        ("shared", LaneSet),
        ("entries", LaneSet),
        ("admitted", _P),
        ("selected", _P),
        ("visible", _P),
        ("scale", _F),
        ("block_scores", _N),
        ("block_values", _N),
    )


_TASK = ctypes.POINTER(AttendTask)
SIGNATURES: dict[str, tuple[type, ...]] = {
    "ms_interface": (),
    "ms_fused": (),
    "ms_product": (_P, _P, _P, _N, _N, _N, _N),
    "ms_experts_in": (_P, _P, _P, _N, _P, _P, _P, _P, _P, _N, _N, _N, _F),
    "ms_experts_out": (_P, _P, _P, _P, _P, _N, _P, _P, _N, _N, _N),
    "ms_project_groups": (_P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _N, _N),
    "ms_norm_turn": (_P, _P, _N, _N, _P, _F, _P, _P, _N, _N, _F),
    "ms_state_rows": (_P, _P, _P, _P, _P, _N, _N, _N),
    "ms_write_rows": (_P, _N, _P, _N, _P, _P, _N, _N),
    "ms_add_routes": (_P, _P, _P, _N, _P, _N, _N, _N),
    "ms_softplus_parts": (_P, _P, _N),
    "ms_route": (_P, _P, _N, _N, _N, _F, _F, _P, _P),
    "ms_sort_routes": (_P, _P, _P, _N, _N, _N, _P, _P, _P, _P),
    "ms_mixing": (_P, _P, _P, _P, _P, _N, _N, _N, _F),
    "ms_gates": (_P, _P, _P, _P, _P, _N, _N, _N, _N, _F),
    "ms_spread": (_P, _P, _P, _P, _P, _N, _N, _N),
    "ms_scores": (_TASK, _P, _P, _P),
    "ms_mix": (_TASK, _P, _P),
}

COUNTING = ("ms_interface", "ms_fused", "ms_write_rows", "ms_route", "ms_sort_routes")
"""Functions that return a number."""


@lru_cache
def load(folder: Path = HERE) -> ctypes.CDLL | None:
    """The library in `folder`, its functions declared; None where none was built, or it is not this version's."""
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"{NAME}{suffix}"
        if path.is_file():
            try:
                library = ctypes.CDLL(str(path))
                for name, arguments in SIGNATURES.items():
                    function = getattr(library, name)
                    function.argtypes, function.restype = arguments, _N if name in COUNTING else None
            except (OSError, AttributeError):
                return None
            return library if library.ms_interface() == INTERFACE else None
    return None


def address(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> int:
    """Where x lies. ValueError where its dtype, device or strides are not what kernels take."""
    if x.dtype != dtype or not x.is_cpu or not x.is_contiguous():
        raise ValueError(
            f"a kernel was given {x.dtype} on {x.device} with strides {x.stride()}, allowed: contiguous {dtype} on cpu"
        )
    return x.data_ptr()
