"""INT8 rows, weights and products: every form of the integer product against the plain one, bit for bit."""

import platform
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from meshspark.models.int8 import forms as forms_module
from meshspark.models.int8.cpu_forms import FbgemmSplit, OnednnOffset, OnednnSplit
from meshspark.models.int8.device_forms import IntMatmul
from meshspark.models.int8.exact import (
    Form,
    exact_halves_length,
    exact_length,
    failure,
    integer_sums,
    rounded_total,
)
from meshspark.models.int8.float_form import FloatProducts
from meshspark.models.int8.forms import SMALL_MATRIX, products
from meshspark.models.int8.linear import Int8Weight, int8_grouped, int8_linear, int8_weight
from meshspark.models.int8.quantise import QuantisedRows, quantise_rows, quantise_weight

CPU = torch.device("cpu")
FORMS: tuple[Form, ...] = (FloatProducts, FbgemmSplit, OnednnSplit, OnednnOffset, IntMatmul)
INPUTS = (1, 64, 160, 1023, 1024, 1025, 2048, 4096)


def name(form: object) -> str:
    return getattr(form, "__name__", str(form))


@pytest.fixture(params=FORMS, ids=name)
def form(request: pytest.FixtureRequest) -> Form:
    """Each form that must be exact on this machine: all but those of x86 elsewhere, and of VNNI without it."""
    candidate: Form = request.param
    if candidate in (FbgemmSplit, OnednnSplit) and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{name(candidate)} is made for x86")
    if candidate is OnednnOffset and (reason := failure(candidate, 2048, True, CPU)):
        pytest.skip(f"{name(candidate)} {reason}")
    return candidate


def random_codes(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


def extreme_codes(inputs: int) -> torch.Tensor:
    """All 127, all -127, alternating, alternating in pairs, and random ones."""
    i = torch.arange(inputs)
    limits = [torch.ones_like(i), -torch.ones_like(i), 1 - i % 2 * 2, i % 2 * 2 - 1, 1 - i // 2 % 2 * 2]
    return torch.cat([127 * torch.stack(limits).to(torch.int8), random_codes(3, inputs, seed=inputs)])


def oracle(rows: QuantisedRows, codes_XOI: torch.Tensor, scale_XO: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Integers in numpy, one rounding to FP32, then row scale and channel scale in FP32."""
    segments = np.split(rows.codes_TI.numpy().astype(np.int64), np.cumsum(counts)[:-1])
    sums = [part @ codes.astype(np.int64).T for part, codes in zip(segments, codes_XOI.numpy(), strict=True)]
    scale = np.repeat(scale_XO.numpy(), counts, axis=0)
    return torch.from_numpy(np.concatenate(sums).astype(np.float32) * rows.scale_T.numpy()[:, None] * scale)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(7)) * 0.01 + 1e-3


@pytest.mark.parametrize("inputs", INPUTS)
def test_every_form_is_the_integer_product(form: Form, inputs: int) -> None:
    codes_OI, rows_RI = extreme_codes(inputs), extreme_codes(inputs)
    codes_XOI = codes_OI.repeat(5, 1)[:37].unsqueeze(0)
    rows = QuantisedRows(rows_RI, scales(len(rows_RI)))
    scale = scales(1, 37)
    found = int8_linear(rows, Int8Weight(form(codes_XOI), scale))
    assert found.dtype == torch.float32
    assert torch.equal(found, oracle(rows, codes_XOI, scale, (len(rows_RI),)))


@pytest.mark.parametrize("inputs", [160, 2048])
def test_every_number_of_rows(form: Form, inputs: int) -> None:
    codes_XOI = random_codes(1, 40, inputs)
    every = inputs == 160 and form is not IntMatmul
    counts = range(1, 601) if every else (1, 2, 3, 5, 8, 15, 16, 17, 18, 63, 64, 65, 66, 127, 129, 600)
    rows_RI = random_codes(600, inputs, seed=1)
    expected_RO = integer_sums(rows_RI, codes_XOI, (600,))
    packed = form(codes_XOI)
    for count in counts:
        first = 600 - count
        assert torch.equal(packed.sums(rows_RI[first:], (count,)), expected_RO[first:]), count


@pytest.mark.parametrize("counts", [(3, 0, 1, 70), (0, 0, 0, 0), (5, 5, 5, 5), (0, 0, 0, 1), (40, 1, 1, 1)])
@pytest.mark.parametrize("inputs", [64, 1025, 4096])
def test_rows_sorted_by_matrix(form: Form, counts: tuple[int, ...], inputs: int) -> None:
    codes_XOI = torch.stack([extreme_codes(inputs).roll(x, 0) for x in range(4)])
    rows_RI = random_codes(sum(counts), inputs, seed=2)
    rows = QuantisedRows(rows_RI, scales(len(rows_RI)))
    scale_XO = scales(4, 8)
    found = int8_grouped(rows, counts, Int8Weight(form(codes_XOI), scale_XO))
    assert torch.equal(found, oracle(rows, codes_XOI, scale_XO, counts))


def test_no_rows_at_all(form: Form) -> None:
    for matrices, counts in ((1, (0,)), (3, (0, 0, 0))):
        rows = QuantisedRows(torch.empty(0, 64, dtype=torch.int8), torch.empty(0))
        weight = Int8Weight(form(random_codes(matrices, 24, 64)), scales(matrices, 24))
        found = int8_grouped(rows, counts, weight)
        assert found.shape == (0, 24) and found.dtype == torch.float32
    assert int8_linear(rows, int8_weight(random_codes(24, 64), scales(24))).shape == (0, 24)


@pytest.mark.parametrize("outputs", [1, 3, 7, 8, 31, 33, 100])
def test_every_number_of_outputs(form: Form, outputs: int) -> None:
    codes_XOI, rows_RI = random_codes(2, outputs, 96), random_codes(9, 96, seed=3)
    assert torch.equal(form(codes_XOI).sums(rows_RI, (4, 5)), integer_sums(rows_RI, codes_XOI, (4, 5)))


def test_the_caller_keeps_its_rows_and_codes(form: Form) -> None:
    codes_XOI, rows_RI = random_codes(1, 16, 64), random_codes(4, 64, seed=5)
    kept = codes_XOI.clone(), rows_RI.clone()
    packed = form(codes_XOI)
    first = packed.sums(rows_RI, (4,))
    codes_XOI.zero_()
    assert torch.equal(packed.sums(rows_RI, (4,)), first)
    assert torch.equal(rows_RI, kept[1])
    assert torch.equal(first, integer_sums(rows_RI, kept[0], (4,)))


def test_rows_in_any_layout(form: Form) -> None:
    codes_XOI, wide_RI = random_codes(1, 16, 64), random_codes(6, 128, seed=6)
    for rows_RI in (wide_RI[:, 64:], wide_RI[:, ::2], wide_RI.T.contiguous().T[:, :64]):
        assert torch.equal(form(codes_XOI).sums(rows_RI, (6,)), integer_sums(rows_RI, codes_XOI, (6,)))


def test_a_saturating_product_is_refused_and_an_exact_one_taken() -> None:
    """Behind a zero point of 128 two products overflow 16 bits wherever the CPU adds them there."""
    codes_XOI = torch.full((1, 1024, 1024), 127, dtype=torch.int8)
    rows_RI = codes_XOI[0, :4]
    expected = integer_sums(rows_RI, codes_XOI, (4,))
    right = torch.equal(OnednnOffset(codes_XOI).sums(rows_RI, (4,)), expected)
    reason = failure(OnednnOffset, 1024, False, CPU)
    assert right == (not reason), reason
    chosen = products(codes_XOI)
    assert (chosen.name == OnednnOffset.name) == right
    assert torch.equal(chosen.sums(rows_RI, (4,)), expected)


def test_rows_behind_a_zero_point_are_right_where_nothing_can_saturate() -> None:
    codes_XOI, rows_RI = random_codes(2, 20, 96) // 3, random_codes(7, 96, seed=9)
    assert torch.equal(OnednnOffset(codes_XOI).sums(rows_RI, (4, 3)), integer_sums(rows_RI, codes_XOI, (4, 3)))


def test_cudas_limits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 16 rows, inputs and outputs in eights, rows contiguous and the matrix by columns."""

    def strict(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        assert len(rows) > 16 and matrix.shape[0] % 8 == 0 and matrix.shape[1] % 8 == 0
        assert rows.is_contiguous() and matrix.T.is_contiguous()
        return (rows.long() @ matrix.long()).to(torch.int32)

    monkeypatch.setattr(torch, "_int_mm", strict)
    for outputs, inputs, counts in ((5, 63, (1, 0, 16)), (8, 64, (17, 18, 3)), (9, 1, (40, 1, 1))):
        codes_XOI, rows_RI = random_codes(3, outputs, inputs), random_codes(sum(counts), inputs, seed=8)
        found = IntMatmul(codes_XOI).sums(rows_RI, counts)
        assert torch.equal(found, integer_sums(rows_RI, codes_XOI, counts))


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_products_on_a_device(kind: str) -> None:
    """What docs/backends.md asks of whoever has one."""
    if not (hasattr(torch, kind) and getattr(torch, kind).is_available()):
        pytest.skip(f"no {kind} device")
    device = torch.device(kind, 0)
    for form in forms_module.FORMS[kind]:
        for inputs in INPUTS:
            assert failure(form, inputs, True, device) == "", (name(form), inputs)
    x_TI = torch.randn(40, 1024, generator=torch.Generator().manual_seed(1))
    x_TI[7] = 0
    expected, found = quantise_rows(x_TI), quantise_rows(x_TI.to(device))
    assert torch.equal(found.codes_TI.cpu(), expected.codes_TI) and torch.equal(found.scale_T.cpu(), expected.scale_T)
    zero = quantise_rows(torch.zeros(2, 64, dtype=torch.bfloat16, device=device))
    assert not zero.codes_TI.any() and zero.scale_T.isfinite().all()


class Saturating(FloatProducts):
    """Each pair of products is cut to 16 bits, as a CPU without VNNI does it."""

    name = "saturating"

    def __init__(self, codes_XOI: torch.Tensor) -> None:
        self._codes_XOI = codes_XOI

    def sums(self, codes_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        segments = codes_RI.split(list(counts))
        return torch.cat([self._of(rows, codes) for rows, codes in zip(segments, self._codes_XOI, strict=True)])

    def _of(self, codes_RI: torch.Tensor, codes_OI: torch.Tensor) -> torch.Tensor:
        moved = codes_RI.to(torch.int32) + 128
        wide = codes_OI.to(torch.int32)
        pairs = (moved.unsqueeze(1) * wide).unflatten(2, (-1, 2)).sum(3).clamp(-32768, 32767)
        return (pairs.sum(2) - 128 * wide.sum(1)).to(torch.float32)


class TwiceRounded(FloatProducts):
    """Cuts whose sums are rounded before they are added."""

    name = "twice rounded"

    def sums(self, codes_RI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        whole = super().sums(codes_RI[:, ::2].contiguous(), counts)
        return whole + self._odd.sums(codes_RI[:, 1::2].contiguous(), counts)

    def __init__(self, codes_XOI: torch.Tensor) -> None:
        super().__init__(codes_XOI[:, :, ::2].contiguous())
        self._odd = FloatProducts(codes_XOI[:, :, 1::2].contiguous())


class Missing(FloatProducts):
    name = "missing"

    def __init__(self, codes_XOI: torch.Tensor) -> None:
        raise RuntimeError("no such operator\nand more")


def test_the_check_sees_saturation_and_double_rounding() -> None:
    assert failure(Saturating, 64, False, CPU) == "is not exact over 64 inputs"
    for inputs in (2200, 4096):
        assert failure(TwiceRounded, inputs, False, CPU) == f"is not exact over {inputs} inputs"
    assert failure(Missing, 64, False, CPU) == "is not there (no such operator)"
    assert failure(FloatProducts, 4096, True, CPU) == ""


def test_no_form_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms_module, "FORMS", {"cpu": (Missing, Saturating)})
    monkeypatch.setattr(forms_module, "FloatProducts", Saturating)
    with pytest.raises(RuntimeError, match=r"over 64 inputs.*saturating is not exact.*missing is not there") as caught:
        products(random_codes(1, 4, 64))
    assert "on cpu" in str(caught.value)


def test_small_matrices_are_multiplied_in_fp32() -> None:
    assert products(random_codes(1, SMALL_MATRIX // 64, 64)).name == "fp32"
    assert products(random_codes(1, 64, 160)).name == "fp32"
    large = products(random_codes(1, 2 * SMALL_MATRIX // 512, 512))
    assert large.name != "fp32" and large.num_bytes == 2 * SMALL_MATRIX


def test_a_code_of_minus_128_is_refused() -> None:
    codes = random_codes(4, 64)
    codes[2, 5] = -128
    with pytest.raises(ValueError, match="-128"):
        int8_weight(codes, scales(4))


def test_where_inputs_are_cut() -> None:
    full = torch.full((1, 2, 4096), 127, dtype=torch.int8)
    assert exact_length(full) == exact_halves_length(full) == 1024
    assert exact_length(full[:, :, :1040]) == 1040
    assert exact_length(full[:, :, :1041]) == 521
    quiet = torch.full((2, 2, 4096), 32, dtype=torch.int8)
    assert exact_length(quiet) == 4096
    quiet[1, 1, :] = 33
    assert exact_length(quiet) == 2048
    # Halves see the negative codes apart.
    quiet[1, 1, ::2] = -33
    assert exact_halves_length(quiet) == 4096
    assert 1040 < exact_halves_length(random_codes(1, 8, 8192)) < 4096


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_totals_are_rounded_once(parts: int) -> None:
    generator = torch.Generator().manual_seed(parts)
    numbers = [torch.randint(-(1 << 24), (1 << 24) + 1, (500,), generator=generator) for _ in range(parts)]
    exact = torch.stack(numbers).sum(0).to(torch.float32)
    assert torch.equal(rounded_total([part.to(torch.float32) for part in numbers]), exact)


def test_a_row_does_not_depend_on_the_others() -> None:
    x_TI = torch.randn(70, 1024, generator=torch.Generator().manual_seed(1))
    weight = int8_weight(*quantise_weight(torch.randn(1024, 1024, generator=torch.Generator().manual_seed(2))))
    whole = int8_linear(quantise_rows(x_TI), weight)
    for rows in (slice(0, 1), slice(3, 8), slice(40, 69)):
        assert torch.equal(int8_linear(quantise_rows(x_TI[rows]), weight), whole[rows])
