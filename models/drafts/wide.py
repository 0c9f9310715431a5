"""What a draft's modules share: a norm with wide arithmetic, and parameters that no cast narrows."""

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from ..functions import rms_norm


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """FP32, or the dtype itself where it is wider."""
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """weight * x / rms(x) over the last dim, in FP32 at least, cast once to x's dtype. training.md 4.1."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = wide_dtype(torch.promote_types(x.dtype, self.weight.dtype))
        return rms_norm(x, self.weight.to(wide), self.eps, x.dtype)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class WideParameters(nn.Module):
    """A module whose own parameters of the names in `wide` stay FP32 when the module is cast to a narrower dtype.

    The values are those before the cast, not rounded and widened again. Moves and casts to FP64 go through.
    """

    wide: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "WideParameters":
        named = ((name, self._parameters.get(name)) for name in self.wide)
        before = {name: parameter.data for name, parameter in named if parameter is not None}
        super()._apply(fn, recurse)
        for name, data in before.items():
            parameter = self._parameters[name]
            assert parameter is not None
            if parameter.dtype.itemsize < torch.float32.itemsize:
                parameter.data = data.to(parameter.device, torch.float32)
        return self
