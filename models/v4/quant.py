"""Block-scaled FP8 and FP4 weights: pure codecs between stored codes with scales and plain tensors.

FP8 is e4m3 with one scale per block of rows x columns; FP4 is e2m1, two codes a byte (low nibble = even
column) with one scale per 32 columns. Scales are powers of two stored as e8m0, or any FP32 number.
Shape letters: R rows, C columns (logical), P packed columns (C / 2), U and V scale rows and columns.
Every function takes leading dims before R and C too.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

FP8_MAX = 448.0
FP4_MAX = 6.0
FP4_GROUP = 32
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIN_SCALE_EXPONENT = -120
"""Encoders go no lower: the least code times 2^-120 is still a BF16 number, so decoding stays exact."""

CHUNK_ELEMENTS = 1 << 20
"""Decoding works on about this many elements at a time, so that temporaries stay small beside the result."""


@dataclass(frozen=True)
class QuantSpec:
    """How one weight is stored: kind "fp8" or "fp4", and the logical (rows, columns) that share a scale."""

    kind: str
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if self.kind not in ("fp8", "fp4"):
            raise ValueError(f"kind is {self.kind!r}, allowed: 'fp8', 'fp4'")
        if self.kind == "fp4" and self.block != (1, FP4_GROUP):
            raise ValueError(f"block of fp4 is {self.block}, allowed: {(1, FP4_GROUP)}")

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale of a weight of this logical shape."""
        return (*shape[:-2], *(-(-size // step) for size, step in zip(shape[-2:], self.block, strict=True)))

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the codes of a weight of this logical shape."""
        if self.kind == "fp8":
            return shape
        if shape[-1] % FP4_GROUP:
            raise ValueError(f"fp4 needs columns in groups of {FP4_GROUP}, got {shape[-1]} in {shape}")
        return (*shape[:-1], shape[-1] // 2)


FP4 = QuantSpec("fp4", (1, FP4_GROUP))


def fp8(block: tuple[int, int] = (128, 128)) -> QuantSpec:
    """FP8 e4m3 with one scale per block of (rows, columns)."""
    return QuantSpec("fp8", block)


def decode_e8m0(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Byte b -> 2^(b - 127) in dtype; 255 is NaN. Takes float8_e8m0fnu or uint8."""
    exponent = scale.view(torch.uint8).to(torch.int32) - 127
    return torch.where(exponent == 128, math.nan, _power_of_two(exponent)).to(dtype)


def encode_e8m0(exponent: torch.Tensor) -> torch.Tensor:
    """Integer exponents -127..127 -> float8_e8m0fnu of 2^exponent."""
    return (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def encode(
    weight_RC: torch.Tensor,
    spec: QuantSpec,
    scale_dtype: torch.dtype = torch.float8_e8m0fnu,
    *,
    least: int = MIN_SCALE_EXPONENT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scale) of a finite floating weight: scale 2^ceil(log2(largest / format's largest)), ties to even.

    Codes are float8_e4m3fn [R, C] or int8 [R, P]; the scale is [U, V] in scale_dtype, float8_e8m0fnu or float32.
    Encoding what was decoded gives the same values again, if no scale was below 2^least. Raises ValueError for NaN,
    infinity or a wrong width.
    """
    scaled_RC, exponent_UV = _scaled(weight_RC, spec, least)
    scale_e8m0 = encode_e8m0(exponent_UV)
    scale = scale_e8m0 if scale_dtype == torch.float8_e8m0fnu else decode_e8m0(scale_e8m0, scale_dtype)
    return _codes(scaled_RC, spec), scale


def encode_with(weight_RC: torch.Tensor, scale_UV: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    """The codes of a weight for given scales, float8_e8m0fnu or uint8 [U, V].

    Those that it was decoded from, if it was; else what fits best, cut off at the format's largest: to be compared by
    the caller. A NaN among the scales is the caller's to refuse.
    """
    limit = FP8_MAX if spec.kind == "fp8" else FP4_MAX
    return _codes(_divided(weight_RC, scale_UV.view(torch.uint8).to(torch.int32) - 127, spec.block, limit), spec)


def decode(
    codes: torch.Tensor,
    scale_UV: torch.Tensor,
    spec: QuantSpec,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    origin: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """Codes times scales -> [R, C] in dtype, rounded once if dtype cannot hold the product (see is_exact).

    scale_UV: float8_e8m0fnu, uint8 (the same bytes) or float32. origin is the place of codes[0, 0] in the whole
    weight: with it a slice is decoded with the scales of the blocks that it touches, blocks cut by its border
    included. `out` is filled and returned where given. Raises ValueError for a scale of the wrong shape.
    """
    *lead, rows, packed = codes.shape
    columns = packed * 2 if spec.kind == "fp4" else packed
    wanted = (*lead, *(touched_blocks(o, n, b) for o, n, b in zip(origin, (rows, columns), spec.block, strict=True)))
    if tuple(scale_UV.shape) != wanted:
        raise ValueError(
            f"scale has shape {tuple(scale_UV.shape)}, {spec.kind} of {(*lead, rows, columns)} is {wanted}"
        )
    result = torch.empty((*lead, rows, columns), dtype=dtype, device=codes.device) if out is None else out
    wide = dtype if is_exact(scale_UV, spec, dtype) else torch.float64
    scale = scale_UV.to(wide) if scale_UV.dtype == torch.float32 else decode_e8m0(scale_UV, wide)
    column_scale = _spread_dim(scale, -1, spec.block[1], origin[1], columns)
    step = max(1, CHUNK_ELEMENTS // max(1, columns * math.prod(lead)))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = _code_values(codes[..., start:stop, :], spec, wide)
        row = torch.arange(start, stop, device=scale.device)
        block_of_row = (row + origin[0] % spec.block[0]) // spec.block[0]
        result[..., start:stop, :].copy_(values.mul_(column_scale.index_select(-2, block_of_row)))
    return result


def touched_blocks(origin: int, size: int, block: int) -> int:
    """Number of scale blocks that indices origin .. origin + size - 1 touch."""
    return 0 if size == 0 else (origin + size - 1) // block - origin // block + 1


def is_exact(scale_UV: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> bool:
    """Whether any codes times these scales are numbers of dtype: true for powers of two well inside its range."""
    value = scale_UV.double() if scale_UV.dtype == torch.float32 else decode_e8m0(scale_UV, torch.float64)
    if value.numel() == 0:
        return True
    info = torch.finfo(dtype)
    least_code, limit = (2.0**-9, FP8_MAX) if spec.kind == "fp8" else (0.5, FP4_MAX)
    mantissa, _ = torch.frexp(value)
    least = info.smallest_normal * info.eps / least_code
    return bool(((mantissa == 0.5) & (value >= least) & (value <= info.max / limit)).all())


def fake_quantise(weight_RC: torch.Tensor, spec: QuantSpec | None) -> torch.Tensor:
    """What storage would make of the weight, in its own dtype; the gradient passes straight through.

    spec None stands for a weight that is stored as BF16.
    """
    result: torch.Tensor = _FakeQuantise.apply(weight_RC, spec)
    return result


class _FakeQuantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, spec: QuantSpec | None) -> torch.Tensor:
        if spec is None:
            return weight.to(torch.bfloat16).to(weight.dtype)
        # decode(encode(weight)), without a detour over packed codes.
        scaled_RC, exponent_UV = _scaled(weight, spec)
        scale_UV = _power_of_two(exponent_UV).to(_wide(weight.dtype))
        rounded_RC = scaled_RC.to(torch.float8_e4m3fn) if spec.kind == "fp8" else _round_fp4(scaled_RC)
        return (rounded_RC.to(scale_UV.dtype) * _spread(scale_UV, spec.block, tuple(weight.shape))).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def _codes(scaled_RC: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
    return scaled_RC.to(torch.float8_e4m3fn) if spec.kind == "fp8" else _pack_fp4(scaled_RC)


def _scaled(
    weight_RC: torch.Tensor, spec: QuantSpec, least: int = MIN_SCALE_EXPONENT
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 values within the format's range, and the exponents of the scales they were divided by."""
    spec.stored_shape(tuple(weight_RC.shape))
    limit = FP8_MAX if spec.kind == "fp8" else FP4_MAX
    largest_UV = _block_largest(weight_RC, spec.block)
    if not bool((largest_UV.double() <= limit * 2.0**127).all()):
        raise ValueError(
            f"weight of shape {tuple(weight_RC.shape)} holds NaN, infinity or a number beyond the largest scale, "
            f"allowed: finite values up to {limit} * 2^127"
        )
    exponent_UV = _scale_exponent(largest_UV, limit, least)
    return _divided(weight_RC, exponent_UV, spec.block, limit), exponent_UV


def _divided(weight_RC: torch.Tensor, exponent_UV: torch.Tensor, block: tuple[int, int], limit: float) -> torch.Tensor:
    inverse_UV = _power_of_two(-exponent_UV).to(_wide(weight_RC.dtype))
    scaled_RC = _narrow(weight_RC.to(inverse_UV.dtype) * _spread(inverse_UV, block, tuple(weight_RC.shape)))
    return scaled_RC.clamp(-limit, limit)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent in FP64, by its bits; exponents -1022 to 1023."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _narrow(x: torch.Tensor) -> torch.Tensor:
    """x in FP32; FP64 is rounded to odd, so that a second rounding to few bits acts like a single one."""
    if x.dtype == torch.float32:
        return x
    near = x.to(torch.float32)
    away = near.double().abs() > x.abs()
    bits = near.view(torch.int32) - away.to(torch.int32)
    toward_zero = bits.view(torch.float32)
    return (bits | (toward_zero.double() != x).to(torch.int32)).view(torch.float32)


def _scale_exponent(largest: torch.Tensor, limit: float, least: int) -> torch.Tensor:
    mantissa, exponent = torch.frexp(largest.double() / limit)
    ceiling = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.where(largest == 0, MIN_SCALE_EXPONENT, ceiling).clamp(least, 127)


def _block_largest(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    *lead, rows, columns = weight.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padding = (0, across * block[1] - columns, 0, down * block[0] - rows)
    padded = torch.nn.functional.pad(weight.abs(), padding)
    return padded.view(*lead, down, block[0], across, block[1]).amax((-3, -1))


def _spread(scale: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    return _spread_dim(_spread_dim(scale, -1, block[1], 0, shape[-1]), -2, block[0], 0, shape[-2])


def _spread_dim(scale: torch.Tensor, dim: int, block: int, origin: int, size: int) -> torch.Tensor:
    """The scale of each of `size` indices from `origin`, for a scale that starts at the block of `origin`."""
    index = (torch.arange(size, device=scale.device) + origin % block) // block
    return scale.index_select(dim, index)


def _code_values(codes: torch.Tensor, spec: QuantSpec, dtype: torch.dtype) -> torch.Tensor:
    if spec.kind == "fp8":
        return codes.to(dtype)
    pairs = _fp4_pairs(dtype).to(codes.device).index_select(0, codes.reshape(-1).view(torch.uint8).to(torch.int32))
    return pairs.view(*codes.shape[:-1], codes.shape[-1] * 2)


def _fp4_pairs(dtype: torch.dtype) -> torch.Tensor:
    """[256, 2]: the two values of every byte, low nibble first."""
    values = torch.tensor(FP4_VALUES + tuple(-v for v in FP4_VALUES), dtype=dtype)
    byte = torch.arange(256)
    return torch.stack((values[byte % 16], values[byte // 16]), dim=-1)


def _round_fp4(scaled: torch.Tensor) -> torch.Tensor:
    """Values in [-6, 6] to the nearest of the grid, ties to even; its step is 0.5 below 2, 1 below 4, 2 above."""
    size = scaled.abs()
    step = 0.5 + 0.5 * (size >= 2).to(scaled.dtype) + (size >= 4).to(scaled.dtype)
    return torch.round(scaled / step) * step


def _pack_fp4(scaled: torch.Tensor) -> torch.Tensor:
    """Values in [-6, 6] -> int8 codes of the nearest grid values, two a byte."""
    rounded = _round_fp4(scaled)
    size = rounded.abs()
    code = torch.where(size < 2, size * 2, torch.where(size < 4, size + 2, size / 2 + 4)).to(torch.uint8)
    code = code + 8 * torch.signbit(rounded).to(torch.uint8)
    return (code[..., 0::2] + 16 * code[..., 1::2]).contiguous().view(torch.int8)
