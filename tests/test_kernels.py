"""The compiled kernels: bits of the plain forms at every number of rows, and nothing but their own memory touched."""

import ctypes
import dataclasses
import re
import shutil
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch

from meshspark.layouts.bits import same_bits
from meshspark.layouts.rows import RequestRows
from meshspark.layouts.tiles import TILE
from meshspark.models.checkpoint.synthetic import random_weights
from meshspark.models.functions import mean_square_rsqrt, rms_norm, row_linear
from meshspark.models.kernels import calls, choice, library
from meshspark.models.kernels.calls import Kernels
from meshspark.models.kernels.experts import mixture, route
from meshspark.models.kernels.library import address, load
from meshspark.models.numerics import BFLOAT16, FLOAT32, FLOAT64, W8A8, Numerics
from meshspark.models.v4.compressor import CompressorWeights, state_rows
from meshspark.models.v4.config import V4Config, tiny
from meshspark.models.v4.hyper import HyperWeights, hc_post, hc_pre
from meshspark.models.v4.model import Model
from meshspark.models.v4.moe import ExpertWeights, HashRouter, LearnedRouter, MoELayer
from meshspark.models.v4.output import output_weights, project_output
from meshspark.models.v4.pools import CacheShape
from meshspark.models.v4.rope import rotate
from meshspark.parallel.groups import Groups

COUNTS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 130)
H, W = 48, 24
randn = partial(torch.randn, generator=torch.Generator().manual_seed(2))


def _shape() -> V4Config:
    """A config whose widths the kernels take, none a multiple of the vectors' sixteen."""
    return dataclasses.replace(tiny(), hidden_size=H, moe_intermediate_size=W, num_experts_per_tok=2)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    built = load()
    if built is None or not built.ms_fused():
        pytest.skip("no compiled kernels, or no fused multiply-add, here")
    found = choice.choose_kernels(_shape(), FLOAT32, Groups.single())
    assert found is not None
    everything = found.norms and found.hyper and found.routes and found.products and found.lanes
    # Where torch's sums have the order that the kernels were written for, a kernel with other bits is wrong.
    known = torch.backends.cpu.get_cpu_capability() == "AVX2" and torch.backends.mkl.is_available()
    assert everything or not known, found
    if not everything:
        pytest.skip(f"torch's sums have another order here: {found}")
    return found


def test_kernels_are_built_where_there_is_a_compiler() -> None:
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    assert load() is not None, "install again (pip install -e .): the kernels are not built"


def test_a_folder_without_a_library_has_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(tmp_path) is None
    monkeypatch.setattr(choice, "load", lambda: None)
    assert choice._proven.__wrapped__(_shape(), 1, "") is None


def test_other_numerics_share_the_kernels_of_the_streams_at_most(kernels: Kernels) -> None:
    assert choice.choose_kernels(_shape(), FLOAT64, Groups.single()) is None
    for mode in (BFLOAT16, W8A8):
        found = choice.choose_kernels(_shape(), mode, Groups.single())
        assert found is not None and found.parts() == ["hyper"]


@pytest.mark.parametrize("mode", [BFLOAT16, W8A8])
def test_kernels_change_no_bit_of_other_numerics(kernels: Kernels, mode: Numerics) -> None:
    config = tiny()
    weights = random_weights(config, 7, mode)
    tokens = [tuple(range(2, 39)), (5,), tuple(range(60, 71))]
    results = []
    for kernels in (None, "auto"):
        model = Model(config, weights, Groups.single(), mode, kernels)
        caches = model.make_caches(CacheShape(len(tokens), 64, 64))
        rows = [RequestRows(slot, 0, text, asked=range(len(text))) for slot, text in enumerate(tokens)]
        for slot in range(len(tokens)):
            caches.admit(slot, 64)
        with torch.inference_mode():
            results.append((model.forward(model.plan(rows, caches), caches).logits, caches.pools))
    (plain, pools), (own, own_pools) = results
    assert same_bits(plain, own)
    assert all(same_bits(pools[name], own_pools[name]) for name in pools)


@pytest.mark.parametrize("width", [8, 30, 96, 160, 330])
def test_norms_and_turns(kernels: Kernels, width: int) -> None:
    gain = randn(width)
    for rows in COUNTS:
        x, cos, sin = randn(rows, width), randn(rows, width + 6), randn(rows, width + 6)
        assert same_bits(kernels.norm_turn(x, gain, 1e-6, None), rms_norm(x, gain, 1e-6, x.dtype))
        heads = randn(rows, 3, width)
        plain = rotate(heads * mean_square_rsqrt(heads, 1e-6), cos.unsqueeze(1), sin.unsqueeze(1))
        assert same_bits(kernels.norm_turn(heads, None, 1e-6, (cos, sin)), plain)
        back = rotate(heads, cos.unsqueeze(1), sin.unsqueeze(1), inverse=True)
        assert same_bits(kernels.norm_turn(heads, None, None, (cos, sin), inverse=True), back)


def test_norm_against_wide_sums(kernels: Kernels) -> None:
    x, gain = randn(9, 160), randn(160)
    wide = rms_norm(x.double(), gain.double(), 1e-6, torch.float64)
    torch.testing.assert_close(kernels.norm_turn(x, gain, 1e-6, None).double(), wide, rtol=1e-6, atol=1e-6)


def test_hyper_connections(kernels: Kernels) -> None:
    config = _shape()
    h = config.hc_mult
    weights = HyperWeights(randn((2 + h) * h, h * H) / 8, randn((2 + h) * h), randn(3))
    for rows in COUNTS:
        streams, y = randn(rows, h, H), randn(rows, H)
        plain, own = (hc_pre(streams, weights, config, y.dtype, form) for form in (None, kernels))
        assert all(same_bits(a, b) for a, b in zip(plain, own, strict=True)), rows
        assert same_bits(hc_post(y, streams, *own[1:]), hc_post(y, streams, *own[1:], kernels))
    first = randn(5, H)[:, None].expand(-1, h, -1)
    assert same_bits(hc_pre(first, weights, config, y.dtype)[0], hc_pre(first, weights, config, y.dtype, kernels)[0])


@pytest.mark.parametrize("outputs", [13, 24, 160])
def test_products(kernels: Kernels, outputs: int) -> None:
    weight = randn(outputs, 96)
    for rows in COUNTS:
        x = randn(rows, 96)
        assert same_bits(kernels.product(x, weight), row_linear(x, weight)), rows
        wide = x.double() @ weight.double().mT
        torch.testing.assert_close(kernels.product(x, weight).double(), wide, rtol=1e-5, atol=1e-4)


def test_a_row_does_not_depend_on_its_company(kernels: Kernels) -> None:
    x, weight = randn(130, 160), randn(24, 160)
    whole = kernels.product(x, weight)
    for first, count in ((0, 1), (3, 5), (17, 8), (64, 66)):
        assert same_bits(kernels.product(x[first : first + count], weight), whole[first : first + count])


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_mixture_of_experts(kernels: Kernels, learned: bool, valid: bool) -> None:
    E, k = 16, 2
    experts = ExpertWeights(randn(E, W, H) / 4, randn(E, W, H) / 4, randn(E, H, W) / 4)
    shared = ExpertWeights(randn(W, H), randn(W, H), randn(H, W))
    table = torch.randint(E, (200, k))
    router = LearnedRouter(randn(E, H), randn(E), k, 1.5) if learned else HashRouter(randn(E, H), table, 1.5)
    layer = MoELayer(router, experts, shared, E, 2.0, torch.float32)
    for rows in COUNTS:
        x, tokens = randn(rows, H), torch.arange(rows)
        kept = torch.arange(rows) % 3 > 0 if valid else None
        plain, own = (layer.forward(x, tokens, kept, Groups.single().ep, None, form) for form in (None, kernels))
        assert all(same_bits(a, b) for a, b in zip(plain, own, strict=True)), rows


def test_an_expert_that_does_not_exist_is_refused(kernels: Kernels) -> None:
    x, gate, three = randn(2, H), randn(16, H), tuple(randn(*shape) for shape in ((16, W, H), (16, W, H), (16, H, W)))
    with pytest.raises(ValueError, match="not among the 16"):
        route(kernels, x, gate, torch.tensor([[0, 1], [2, 16]]), 2, 1e-20, 1.0)
    with pytest.raises(ValueError, match="reach 16"):
        mixture(kernels, x, torch.tensor([[0, 1], [2, 16]]), torch.ones(2, 2), None, three, three, 1.0)


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_output_projection(kernels: Kernels, groups: int) -> None:
    config = dataclasses.replace(_shape(), o_groups=groups, o_lora_rank=16, num_attention_heads=groups, head_dim=40)
    weights = output_weights(randn(groups * 16, 40), randn(H, groups * 16), None, groups, config, torch.float32)
    proven = dataclasses.replace(kernels, products=frozenset({(40, 16), (16, H)}))
    for rows in COUNTS:
        heads = randn(rows, groups, 40)
        plain, own = (project_output(heads, weights, config, Groups.single().tp, kernels=f) for f in (None, proven))
        assert same_bits(plain, own), rows


def test_state_rows_and_cache_writes(kernels: Kernels) -> None:
    weights = CompressorWeights(randn(24, H), randn(24, H), randn(4, 24), randn(12))
    for rows in COUNTS:
        value, score, position = randn(rows, 24), randn(rows, 24), torch.arange(7, 7 + rows)
        own = state_rows(value, score, position, weights, kernels)
        assert same_bits(own, state_rows(value, score, position, weights))
        pool, slot, source = torch.full((300, 48), torch.nan), 2 * torch.arange(rows), torch.arange(rows).flip(0)
        expected = pool.clone()
        expected[slot] = own[source]
        kernels.write_rows(pool, own, source, slot)
        assert same_bits(pool, expected)


@pytest.mark.parametrize(("source", "slot"), [(0, 9), (0, -1), (2, 0), (-1, 0)])
def test_a_write_beyond_the_pool_is_refused(kernels: Kernels, source: int, slot: int) -> None:
    with pytest.raises(IndexError, match="1 rows of 1"):
        kernels.write_rows(torch.zeros(9, 4), torch.ones(2, 4), torch.tensor([source]), torch.tensor([slot]))


def test_strides_and_dtypes_are_refused(kernels: Kernels) -> None:
    for wrong in (randn(4, 8).mT, randn(4, 8)[:, ::2], randn(4, 8).double()):
        with pytest.raises(ValueError, match="a kernel was given"):
            address(wrong)
    with pytest.raises(ValueError, match="strides"):
        kernels.product(randn(3, 8), randn(8, 16).mT)


@pytest.mark.parametrize("outputs", [8, 13])
def test_memory_around_an_output_stays(kernels: Kernels, outputs: int) -> None:
    for rows in (1, 7, 9):
        x, weight = randn(rows, 20), randn(outputs, 20)
        memory = torch.full((rows * outputs + 64,), torch.nan)
        place = ctypes.c_void_p(memory.data_ptr() + 4 * 32)
        kernels.library.ms_product(address(x), address(weight), place, rows, 20, outputs, 20)
        assert memory[:32].isnan().all() and memory[-32:].isnan().all() and not memory[32:-32].isnan().any()
        memory = torch.full((rows * 20 + 64,), torch.nan)
        kernels.library.ms_norm_turn(
            address(x), ctypes.c_void_p(memory.data_ptr() + 4 * 32), rows, 20, None, 1e-6, None, None, 0, 1, 1.0
        )
        assert memory[:32].isnan().all() and memory[-32:].isnan().all() and not memory[32:-32].isnan().any()


def test_a_kernel_with_other_bits_is_not_used(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    assert choice._equal_product(kernels, 96, 24, generator)
    monkeypatch.setattr(calls, "block_of", lambda inputs: inputs // 2)
    assert not choice._equal_product(kernels, 96, 24, generator)


@pytest.mark.parametrize(("window", "prompt"), [(16, 50), (192, 180)])
def test_steps_have_the_plain_forms_bits(kernels: Kernels, window: int, prompt: int) -> None:
    """Ragged steps of three requests through caches, with selection, idle lanes and completed entries."""
    config = dataclasses.replace(tiny(), num_experts_per_tok=2, sliding_window=window)
    kernels = choice.choose_kernels(config, FLOAT32, Groups.single())
    assert kernels is not None and TILE + window in kernels.lanes
    weights = dict(random_weights(config, 7, FLOAT32))
    results = []
    for form in (None, kernels):
        model = Model(config, weights, Groups.single(), FLOAT32, form)
        caches = model.make_caches(CacheShape(3, 400, 200))
        logits, positions = [], [0, 0, 0]
        for slot in range(3):
            caches.admit(slot, 400)
        for step in range(24):
            rows = []
            for slot in range(3):
                count = (prompt + 9 * slot) if step == 0 else 1 + (step + slot) % 3
                tokens = [(7 * step + 3 * slot + i) % config.vocab_size for i in range(count)]
                rows.append(RequestRows(slot, positions[slot], tokens, asked=(count - 1,)))
                positions[slot] += count
            with torch.inference_mode():
                output = model.forward(model.plan(rows, caches), caches)
            logits.append(output.logits)
        results.append((logits, caches.pools))
    (plain, pools), (own, own_pools) = results
    assert all(same_bits(a, b) for a, b in zip(plain, own, strict=True))
    assert all(same_bits(pools[name], own_pools[name]) for name in pools)


def test_a_changed_prototype_changes_the_interface() -> None:
    """Else a library that was built before would be called with other arguments than it takes."""
    folder = Path(library.__file__).parent
    if not list(folder.glob("*.c")):
        folder = Path(__file__).parent.parent / "models" / "kernels"
    text = "".join(path.read_text(encoding="ascii") for path in sorted(folder.glob("*.c")))
    found = re.findall(r"EXPORT (?:CLONES )?([^{;]*\([^{;]*\))\s*\{", text)
    checksum = zlib.crc32("\n".join(sorted(" ".join(each.split()) for each in found)).encode()) & 0x7FFFFFFF
    assert {re.search(r"(ms_\w+)\(", each)[1] for each in found} == set(library.SIGNATURES)
    header = (folder / "kernels.h").read_text(encoding="ascii")
    assert f"#define INTERFACE {checksum}\n" in header and checksum == library.INTERFACE, f"write {checksum} in both"


def test_a_library_of_another_interface_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "INTERFACE", library.INTERFACE + 1)
    assert load.__wrapped__() is None
