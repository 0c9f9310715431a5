"""INT8 codes and scales of rows and weights, the Hadamard rotation, and what is not finite."""

import math

import numpy as np
import pytest
import torch
from test_int8 import CPU, random_codes, scales

from meshspark.models.int8.finite import NonFiniteActivation, require_finite
from meshspark.models.int8.hadamard import hadamard_matrix
from meshspark.models.int8.linear import int8_linear, int8_weight
from meshspark.models.int8.quantise import LEAST_AMPLITUDE, quantise_rows, quantise_weight


def quantised_in_fp64(x_TI: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Unrounded codes and scales."""
    x = x_TI.numpy().astype(np.float64)
    amplitude = np.maximum(np.abs(x).max(axis=1), LEAST_AMPLITUDE)
    return x * (127 / amplitude[:, None]), amplitude / 127


ORDINARY = {
    "zeros": [0.0, 0.0, 0.0, 0.0],
    "negative zeros": [-0.0, -0.0, -0.0, 0.0],
    "1e-30": [0.0, 1e-30, 0.0, -1e-30],
    "subnormal": [1e-40, 0.0, 0.0, 1e-45],
    "3e38": [3e38, 3e38, -3e38, 3e38],
    "largest": [torch.finfo(torch.float32).max, 1.0, 0.0, -1.0],
    "at the floor": [1e-4, -1e-4, 5e-5, 0.0],
    "below the floor": [9e-5, -1e-5, 5e-7, 0.0],
    "one outlier": [1e6, 1.0, -1.0, 3937.1],
    "ordinary": [0.3, -0.2, 0.11, 0.05],
}


@pytest.mark.parametrize("case", ORDINARY)
def test_codes_and_scales_of_a_row(case: str) -> None:
    x_TI = torch.tensor([ORDINARY[case]])
    rows = quantise_rows(x_TI)
    codes, scale = quantised_in_fp64(x_TI)
    assert rows.codes_TI.dtype == torch.int8 and rows.scale_T.dtype == torch.float32 and rows.scale_T.shape == (1,)
    assert torch.isfinite(rows.scale_T).all() and rows.scale_T[0] > 0
    np.testing.assert_allclose(rows.scale_T.numpy(), scale, rtol=3e-7)
    assert np.abs(rows.codes_TI.numpy() - codes).max() <= 0.5 + 1e-4
    assert rows.codes_TI.abs().max() <= 127
    if case in ("zeros", "negative zeros", "1e-30", "subnormal"):
        assert not rows.codes_TI.any()


def test_halves_go_to_even() -> None:
    x_TI = torch.tensor([[127.0, 0.5, 1.5, -0.5, -1.5, 2.5, 126.5, -126.5, 3.5]])
    rows = quantise_rows(x_TI)
    assert rows.scale_T.item() == 1.0
    assert rows.codes_TI.tolist() == [[127, 0, 2, 0, -2, 2, 126, -126, 4]]
    # The largest at half a step: 127.5 / (127.5 / 127) is 127, never 128.
    assert quantise_rows(torch.tensor([[127.5, -127.5]])).codes_TI.tolist() == [[127, -127]]


def test_random_rows_against_fp64() -> None:
    generator = torch.Generator().manual_seed(3)
    x_TI = torch.randn(300, 160, generator=generator) * torch.logspace(-6, 30, 300).unsqueeze(1)
    rows = quantise_rows(x_TI)
    codes, scale = quantised_in_fp64(x_TI)
    np.testing.assert_allclose(rows.scale_T.numpy(), scale, rtol=3e-7)
    near_tie = np.abs(np.abs(codes - np.trunc(codes)) - 0.5) < 1e-4
    assert ((rows.codes_TI.numpy() == np.rint(codes)) | near_tie).all()
    assert (rows.codes_TI.abs().amax(1) == 127).sum() >= 250
    for part in (slice(0, 1), slice(7, 12), slice(100, 299)):
        alone = quantise_rows(x_TI[part].clone())
        assert torch.equal(alone.codes_TI, rows.codes_TI[part]) and torch.equal(alone.scale_T, rows.scale_T[part])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("column", [0, 5, 36])
def test_a_bad_row_says_so_and_spoils_no_other(bad: float, column: int) -> None:
    x_TI = torch.randn(5, 37, generator=torch.Generator().manual_seed(4))
    good = quantise_rows(x_TI)
    x_TI[2, column] = bad
    rows = quantise_rows(x_TI)
    assert rows.scale_T.isfinite().tolist() == [True, True, False, True, True]
    assert rows.codes_TI.abs().max() <= 127 and rows.codes_TI.min() >= -127
    others = [0, 1, 3, 4]
    assert torch.equal(rows.codes_TI[others], good.codes_TI[others])
    assert torch.equal(rows.scale_T[others], good.scale_T[others])
    found = int8_linear(rows, int8_weight(random_codes(3, 37), scales(3)))
    assert not found[2].isfinite().any() and found[others].isfinite().all()


def test_rows_in_every_dtype_and_with_leading_dims() -> None:
    x = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(5))
    kept = x.clone()
    rows = quantise_rows(x)
    assert torch.equal(x, kept) and rows.codes_TI.shape == (3, 4, 64) and rows.scale_T.shape == (3, 4)
    flat = quantise_rows(x.flatten(0, 1))
    assert torch.equal(rows.codes_TI.flatten(0, 1), flat.codes_TI)
    assert torch.equal(rows.scale_T.flatten(), flat.scale_T)
    assert torch.equal(quantise_rows(x.to(torch.float64)).codes_TI, rows.codes_TI)
    narrow = x.to(torch.bfloat16)
    assert torch.equal(quantise_rows(narrow).codes_TI, quantise_rows(narrow.float()).codes_TI)
    empty = quantise_rows(x[:0])
    assert empty.codes_TI.shape == (0, 4, 64) and empty.scale_T.shape == (0, 4)


def test_weights_against_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_XOI = torch.randn(2, 50, 96, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    weight_XOI[1, 3] = 0
    weight_XOI[0, 4] = 1e-7
    codes, scale = quantise_weight(weight_XOI)
    wide = weight_XOI.to(torch.float64)
    amplitude = wide.abs().amax(-1).clamp(min=LEAST_AMPLITUDE)
    assert torch.equal(scale, (amplitude.float() / 127))
    exact = wide * 127 / amplitude.unsqueeze(-1)
    assert (codes - exact).abs().max() <= 0.5 + 1e-4
    assert codes.abs().max() == 127 and not codes[1, 3].any()
    # In pieces, into given memory, from columns with the whole channel's amplitude: the same bits.
    monkeypatch.setattr("meshspark.models.int8.quantise.STREAMED_NUMBERS", 96 * 7)
    out = torch.empty_like(codes)
    again, scale_again = quantise_weight(weight_XOI, out=out)
    assert again is out and torch.equal(out, codes) and torch.equal(scale_again, scale)
    whole = weight_XOI.abs().amax(-1)
    left, left_scale = quantise_weight(weight_XOI[..., :32], amplitude_O=whole)
    assert torch.equal(left, codes[..., :32]) and torch.equal(left_scale, scale)


def test_weight_memory_of_the_wrong_kind_is_refused() -> None:
    for out in (torch.empty(4, 63, dtype=torch.int8), torch.empty(4, 64), torch.empty(64, 4, dtype=torch.int8).T):
        with pytest.raises(ValueError, match="out is"):
            quantise_weight(torch.zeros(4, 64), out=out)


# --- rotation and the check of activations ---


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_hadamard_is_orthonormal(size: int) -> None:
    matrix = hadamard_matrix(size, torch.float64, CPU)
    assert torch.allclose(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-14, rtol=0)
    assert torch.equal(matrix, matrix.T) and torch.equal(matrix.abs(), torch.full_like(matrix, size**-0.5))
    # Sylvester's order: the sign is the parity of the common bits of row and column.
    signs = [[1 - 2 * ((i & j).bit_count() % 2) for j in range(size)] for i in range(size)]
    assert torch.equal(matrix.sign(), torch.tensor(signs, dtype=torch.float64))
    assert hadamard_matrix(size, torch.float32, CPU) is hadamard_matrix(size, torch.float32, CPU)


@pytest.mark.parametrize("size", [0, -2, 3, 96])
def test_hadamard_of_another_size(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size}; allowed are powers of two"):
        hadamard_matrix(size, torch.float32, CPU)


def test_what_is_not_finite_is_named() -> None:
    good = torch.ones(5)
    require_finite([])
    require_finite([(0, "qkv", good), (1, "experts", torch.empty(0))])
    bad = good.clone()
    bad[3] = math.nan
    with pytest.raises(NonFiniteActivation, match="layer 7, stage experts, row 3"):
        require_finite([(6, "qkv", good), (7, "experts", bad), (8, "qkv", bad * math.inf)])
    groups = torch.ones(4, 2)
    groups[2, 1] = math.inf
    with pytest.raises(RuntimeError, match="layer 1, stage wo_b, row 2"):
        require_finite([(0, "qkv", good), (1, "wo_b", groups)])
