"""FP8 and FP4 codecs against plain FP64 arithmetic written out here."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshspark.models.v4.quant import FP4, QuantSpec, decode, decode_e8m0, encode, fake_quantise, fp8, is_exact

SPECS = [fp8(), fp8((32, 32)), FP4]
FP4_TABLE = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = (-1) ** (byte >> 7), byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def plain_fp8(codes, scale, block):
    table = torch.tensor([e4m3(b) for b in range(256)], dtype=torch.float64)
    value = table[codes.view(torch.uint8).long()]
    rows, columns = codes.shape
    for i in range(rows):
        value[i] *= scale[i // block[0]].repeat_interleave(block[1])[:columns]
    return value


def random_codes(rows, columns, generator):
    byte = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    byte[byte & 127 == 127] = 1  # NaN codes
    return byte.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["e8m0", "uint8", "float32"])
def test_fp8_decodes_exactly_at_odd_sizes(block, dtype, form):
    generator = torch.Generator().manual_seed(3)
    codes = random_codes(200, 300, generator)
    grid = (-(-200 // block[0]), -(-300 // block[1]))
    byte = torch.randint(100, 140, grid, generator=generator, dtype=torch.uint8)
    value = 2.0 ** (byte.double() - 127)
    stored = {"e8m0": byte.view(torch.float8_e8m0fnu), "uint8": byte, "float32": value.float()}[form]
    decoded = decode(codes, stored, fp8(block), dtype)
    assert decoded.dtype == dtype
    assert torch.equal(decoded.double(), plain_fp8(codes, value, block))


def test_fp8_with_any_float_scale_is_rounded_once():
    generator = torch.Generator().manual_seed(4)
    codes = random_codes(70, 50, generator)
    scale = torch.rand(3, 2, generator=generator) * 0.01
    wanted = plain_fp8(codes, scale.double(), (32, 32))
    assert torch.equal(decode(codes, scale, fp8((32, 32)), torch.float64), wanted)
    assert torch.equal(decode(codes, scale, fp8((32, 32)), torch.bfloat16), wanted.bfloat16())
    assert not is_exact(scale, fp8((32, 32)), torch.bfloat16)


def test_scale_of_wrong_shape_is_refused():
    codes = random_codes(200, 300, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(2, 3\)"):
        decode(codes, torch.ones(3, 2), fp8(), torch.float32)
    with pytest.raises(ValueError, match="scale has shape"):
        decode(torch.zeros(4, 32, dtype=torch.int8), torch.ones(4, 1), FP4, torch.float32)


def test_fp4_all_bytes_low_nibble_first():
    byte = torch.arange(256, dtype=torch.uint8).view(16, 16)
    decoded = decode(byte.view(torch.int8), torch.full((16, 1), 127, dtype=torch.uint8), FP4, torch.float64)
    wanted = torch.tensor([[FP4_TABLE[b % 16], FP4_TABLE[b // 16]] for b in range(256)], dtype=torch.float64)
    assert torch.equal(decoded, wanted.view(16, 32))
    assert torch.equal(torch.signbit(decoded), torch.signbit(wanted.view(16, 32)))
    four = torch.tensor([[0x10, 0x21, 0xF7, 0x8C] * 4], dtype=torch.uint8).view(torch.int8)
    first = decode(four, torch.tensor([[1.0]]), FP4, torch.float32)[0, :8]
    assert first.tolist() == [0, 0.5, 0.5, 1, 6, -6, -2, 0]


@pytest.mark.parametrize("byte", [0, 1, 110, 127, 254])
def test_e8m0_bytes(byte):
    value = decode_e8m0(torch.tensor([byte], dtype=torch.uint8), torch.float32)
    assert value.double().item() == 2.0 ** (byte - 127)
    codes = torch.tensor([[0x21] * 16], dtype=torch.uint8).view(torch.int8)
    scale = torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    decoded = decode(codes, scale, FP4, torch.float32).double()
    assert decoded[0, :2].tolist() == [0.5 * 2.0 ** (byte - 127), 2.0 ** (byte - 127)]
    assert math.isnan(decode_e8m0(torch.tensor([255], dtype=torch.uint8), torch.float32).item())


def test_exactness_is_told_at_the_edges_of_the_range():
    def exact(byte, spec, dtype):
        return is_exact(torch.tensor([[byte]], dtype=torch.uint8), spec, dtype)

    assert exact(3, fp8(), torch.bfloat16) and not exact(2, fp8(), torch.bfloat16)
    assert exact(246, fp8(), torch.float32) and not exact(247, fp8(), torch.float32)
    assert not exact(255, fp8(), torch.float64)


@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    rows=st.integers(1, 70),
    groups=st.integers(1, 5),
    first=st.integers(0, 60),
    column=st.integers(0, 4),
    seed=st.integers(0, 1 << 30),
)
def test_slices_decode_like_the_whole(spec, rows, groups, first, column, seed):
    """Any slice with the scales of the blocks it touches, FP4 by whole groups."""
    weight = torch.randn(first + rows, 32 * (column + groups), generator=torch.Generator().manual_seed(seed))
    codes, scale = encode(weight, spec)
    whole = decode(codes, scale, spec, torch.float32)
    start = 32 * column if spec.kind == "fp4" else 32 * column + seed % 7
    packed = codes[first:, start // 2 :] if spec.kind == "fp4" else codes[first:, start:]
    part = scale.view(torch.uint8)[first // spec.block[0] :, start // spec.block[1] :]
    sliced = decode(packed, part, spec, torch.float32, origin=(first, start))
    assert torch.equal(sliced, whole[first:, start:])


def nearest(value: float, grid: list[float]) -> float:
    """Nearest grid value; at a tie the one whose code is even."""
    return min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2)) if grid else 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_encoding_rounds_to_nearest_even_with_the_least_scale(spec, dtype):
    limit = 448.0 if spec.kind == "fp8" else 6.0
    grid = [e4m3(b) for b in range(127)] if spec.kind == "fp8" else FP4_TABLE[:8]
    weight = (torch.randn(40, 96, generator=torch.Generator().manual_seed(7), dtype=torch.float64) * 0.02).to(dtype)
    weight[0, :8] = torch.tensor([limit, limit / 2 + 1e-3, 2.5, 3.5, 5, -0.75, 0.25, 0.0]).to(dtype)
    codes, scale = encode(weight, spec)
    decoded, step = decode(codes, scale, spec, torch.float64), decode_e8m0(scale, torch.float64)
    for i in range(0, 40, 3):
        for j in range(96):
            unit = step[i // spec.block[0], j // spec.block[1]].item()
            value = weight[i, j].double().item()
            wanted = math.copysign(grid[nearest(abs(value) / unit, grid)] * unit, value)
            assert decoded[i, j].item() == wanted
    for i in range(0, 40, spec.block[0]):
        for j in range(0, 96, spec.block[1]):
            largest = weight[i : i + spec.block[0], j : j + spec.block[1]].double().abs().max().item()
            unit = step[i // spec.block[0], j // spec.block[1]].item()
            assert largest / limit <= unit < 2 * largest / limit


def test_double_rounding_is_avoided():
    """Just above a tie in FP64, on the tie in FP32: the FP64 value decides."""
    weight = torch.full((1, 32), 448.0, dtype=torch.float64)
    weight[0, 1] = 1.0625 + 2.0**-40  # between 1 and 1.125; the tie would go to 1
    weight[0, 2] = 1.1875 - 2.0**-40  # between 1.125 and 1.25; the tie would go to 1.25
    decoded = fake_quantise(weight, fp8())
    assert decoded[0, 1:3].tolist() == [1.125, 1.125]


@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from(SPECS),
    rows=st.integers(1, 150),
    groups=st.integers(1, 5),
    exponent=st.integers(-130, 60),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    seed=st.integers(0, 1 << 30),
)
def test_encoding_again_changes_nothing(spec, rows, groups, exponent, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, 32 * groups, generator=generator, dtype=torch.float64) * 2.0**exponent).to(dtype)
    once = fake_quantise(weight, spec)
    assert torch.equal(once.view(torch.uint8), decode(*encode(weight, spec), spec, dtype).view(torch.uint8))
    assert torch.equal(fake_quantise(once, spec), once)
    assert torch.equal(once.bfloat16().to(dtype), once), "official storage is exact in BF16"


def test_zeros_stacks_and_float_scales():
    weight = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(1))
    weight[1] = 0
    for spec in SPECS:
        codes, scale = encode(weight, spec)
        assert tuple(scale.shape) == spec.scale_shape((3, 40, 64))
        assert tuple(codes.shape) == spec.stored_shape((3, 40, 64))
        stacked = decode(codes, scale, spec, torch.float32)
        assert torch.equal(stacked, torch.stack([fake_quantise(w, spec) for w in weight]))
        assert not stacked[1].any()
        codes32, scale32 = encode(weight, spec, torch.float32)
        assert torch.equal(decode(codes32, scale32, spec, torch.float32), stacked)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_encoding_refuses_what_is_not_finite(bad):
    weight = torch.zeros(4, 32)
    weight[2, 3] = bad
    with pytest.raises(ValueError, match="NaN, infinity"):
        encode(weight, fp8())


def test_widths_and_kinds_are_checked():
    with pytest.raises(ValueError, match="groups of 32"):
        encode(torch.zeros(4, 48), FP4)
    with pytest.raises(ValueError, match="kind"):
        QuantSpec("int3", (1, 32))


@pytest.mark.parametrize("spec", [*SPECS, None], ids=str)
def test_fake_quantise_passes_the_gradient_through(spec):
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    factor = torch.randn(40, 64, generator=torch.Generator().manual_seed(2))
    quantised = fake_quantise(weight, spec)
    assert not torch.equal(quantised, weight)
    (quantised * factor).sum().backward()
    assert torch.equal(weight.grad, factor)
