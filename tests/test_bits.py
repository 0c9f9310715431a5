"""Bit views: every pattern, every layout, and what cannot be viewed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshspark.layouts.bits import as_lanes, from_lanes, raw_view, same_bits

SPECIALS = [0x7F800001, 0x7FC00001, 0xFFC07FC1, 0x7FC1FFC1, 0x80000000, 0x00000001, 0x7F80FFFF, 0xFFFFFFFF]


def _words(rows=6, columns=4):
    values = torch.tensor([v - (1 << 32) if v >= 1 << 31 else v for v in SPECIALS * 3], dtype=torch.int32)
    return values[: rows * columns].view(rows, columns).view(torch.float32)


LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "column slice": lambda x: torch.cat([x, x, x[:, :1]], 1)[:, 1 : 1 + x.shape[1]],
    "row step": lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2],
    "offset": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "one row": lambda x: x[2:3],
    "one column": lambda x: x[:, 1:2],
    "odd stride of a size 1": lambda x: torch.as_strided(x, (1, 4), (3, 1)),
    "zero rows": lambda x: x[:0],
    "three dims": lambda x: x.view(3, 2, 4).transpose(0, 1),
}


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.uint8, torch.float16, torch.int32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_to_lanes_and_back(layout, wire):
    x = LAYOUTS[layout](_words())
    lanes = as_lanes(x, wire)
    assert lanes.dtype == wire and lanes.shape == (*x.shape[:-1], x.shape[-1] * 4 // wire.itemsize)
    back = from_lanes(lanes, torch.float32)
    assert torch.equal(raw_view(back), raw_view(x))


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.uint8])
def test_fp64_keeps_its_bits(wire):
    x = torch.tensor([[0x7FF0000000000001, -1], [1 << 63 - 1, -(1 << 63)]]).view(torch.float64)
    assert same_bits(from_lanes(as_lanes(x, wire), torch.float64), x)


def test_all_16_bit_patterns_come_back_from_odd_windows():
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    window = torch.zeros(256, 259, dtype=torch.bfloat16)
    window[:, 1:257] = patterns
    as_words = from_lanes(window[:, 1:257], torch.float32)
    assert torch.equal(as_lanes(as_words, torch.int16), patterns.view(torch.int16))


def test_lanes_are_neighbours_low_half_first():
    lanes = as_lanes(torch.tensor([[0x11112222]], dtype=torch.int32), torch.int16)
    assert lanes.tolist() == [[0x2222, 0x1111]]


def test_a_view_where_the_layout_allows_it():
    x = torch.zeros(4, 8)
    assert as_lanes(x[:, 2:6], torch.bfloat16).data_ptr() == x[:, 2:].data_ptr()


@given(st.integers(1, 5), st.integers(0, 5), st.sampled_from([torch.bfloat16, torch.uint8]))
def test_any_odd_width_is_refused_or_comes_back(columns, rows, narrow):
    x = torch.randint(0, 200, (rows, columns), dtype=torch.uint8).to(narrow)
    if columns * narrow.itemsize % 4:
        with pytest.raises(ValueError, match="not a multiple of 4"):
            as_lanes(x, torch.float32)
    else:
        assert same_bits(from_lanes(as_lanes(x, torch.float32), narrow), x)


def test_no_dims_and_wide_elements_are_refused():
    with pytest.raises(ValueError, match="without dims"):
        as_lanes(torch.tensor(1.0), torch.bfloat16)
    with pytest.raises(ValueError, match="16 bytes"):
        raw_view(torch.zeros(1, dtype=torch.complex128))


def test_same_bits_tells_what_equality_does_not():
    nan, quiet = torch.tensor([0x7F800001]).to(torch.int32).view(torch.float32), torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone()) and not same_bits(nan, quiet)
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(2, 1))
