"""Rotary embedding of a draft's queries and keys: half-split or interleaved, over the last channels.

Letters: B samples, L rows, F rotated pairs, D head dim.
"""

from dataclasses import dataclass

import torch

from ..v4.rope import angles, rotate


@dataclass(frozen=True)
class Rotary:
    """theta^(-2i/dim) on the last `dim` channels, [unturned | turned]. No scaling of frequencies: a draft has none.

    interleaved: neighbours are a pair, as V4 has it; otherwise channel i and i + dim/2 are. training.md 4.1.
    It holds no tensor, so nothing is lost when a draft is built on the meta device.
    """

    dim: int
    theta: float
    interleaved: bool = False

    def turns(self, position_BL: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [B, 1, L, F] in dtype, FP32 at least; the angle itself is FP64."""
        exponent_F = torch.arange(0, self.dim, 2, dtype=torch.float64, device=position_BL.device) / self.dim
        wide = torch.promote_types(dtype, torch.float32)
        cos_XF, sin_XF = angles(position_BL.flatten(), self.theta**-exponent_F, wide)
        shape = (position_BL.shape[0], 1, position_BL.shape[1], self.dim // 2)
        return cos_XF.view(shape), sin_XF.view(shape)

    def turn(self, x_BALD: torch.Tensor, position_BL: torch.Tensor, *, inverse: bool = False) -> torch.Tensor:
        """x turned to its positions, or back; in FP32 at least, the result in x's dtype."""
        cos, sin = self.turns(position_BL, x_BALD.dtype)
        if self.interleaved:
            return rotate(x_BALD, cos, sin, inverse=inverse)
        sin = -sin if inverse else sin
        still, first, second = x_BALD.split((x_BALD.shape[-1] - self.dim, self.dim // 2, self.dim // 2), dim=-1)
        first, second = first.to(cos.dtype), second.to(cos.dtype)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BALD.dtype)
        return torch.cat((still, turned), dim=-1) if still.shape[-1] else turned
