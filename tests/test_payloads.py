"""Payloads: widths, column order, and bits through pack and unpack in any layout."""

import pytest
import torch

from meshspark.layouts.bits import raw_view, same_bits
from meshspark.layouts.payloads import KINDS, Payload, Span, payload

SIZES = {"head_dim": 512, "index_head_dim": 128}
BF16 = {"kv_dtype": torch.bfloat16, "state_dtype": torch.float32, "wire": torch.bfloat16}


def _random_bits(span, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    count = span.columns * span.dtype.itemsize
    raw = torch.randint(0, 256, (rows, count), dtype=torch.uint8, generator=generator)
    return raw.view(span.dtype) if rows else raw.new_empty((0, span.columns), dtype=span.dtype)


@pytest.mark.parametrize(("kind", "width"), [("kv", 512), ("hca", 2560), ("csa_main", 4096), ("csa_aux", 1536)])
def test_flash_widths_in_bf16_lanes(kind, width):
    assert payload(kind, **SIZES, **BF16).width == width


def test_column_order():
    hca = payload("hca", **SIZES, **BF16)
    assert [hca.span(n) for n in ("value", "score", "kv")] == [slice(0, 1024), slice(1024, 2048), slice(2048, 2560)]
    main = payload("csa_main", **SIZES, **BF16)
    assert [main.span(n) for n in ("value", "score")] == [slice(0, 2048), slice(2048, 4096)]
    aux = payload("csa_aux", **SIZES, **BF16)
    names = ("index_value", "index_score", "kv")
    assert [aux.span(n) for n in names] == [slice(0, 512), slice(512, 1024), slice(1024, 1536)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numerics_have_one_lane_a_column(dtype):
    hca = payload("hca", head_dim=6, index_head_dim=2, kv_dtype=dtype, state_dtype=dtype, wire=dtype)
    assert hca.width == 18


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_pack_and_unpack_keep_every_bit(kind, rows):
    p = payload(kind, head_dim=8, index_head_dim=4, **BF16)
    tensors = {span.name: _random_bits(span, rows, seed) for seed, span in enumerate(p.spans)}
    odd = {name: t.t().contiguous().t() for name, t in tensors.items()}
    packed = p.pack(odd)
    assert packed.shape == (rows, p.width) and packed.dtype == torch.bfloat16
    got = p.unpack(packed)
    assert list(got) == [span.name for span in p.spans]
    assert all(torch.equal(raw_view(got[name]), raw_view(tensors[name])) for name in tensors)


def test_unpack_gives_views():
    p = payload("hca", head_dim=8, index_head_dim=4, **BF16)
    packed = torch.zeros(3, p.width, dtype=torch.bfloat16)
    packed[:, p.span("kv")] = 2
    assert p.unpack(packed)["kv"].data_ptr() == packed[:, p.span("kv")].data_ptr()
    assert (p.unpack(packed)["kv"] == 2).all()


def test_pack_of_one_plain_span_copies_nothing():
    p = payload("kv", head_dim=8, index_head_dim=4, **BF16)
    kv = torch.zeros(3, 8, dtype=torch.bfloat16)
    assert p.pack({"kv": kv}) is kv and same_bits(p.unpack(kv)["kv"], kv)


def test_refusals():
    p = payload("kv", head_dim=8, index_head_dim=4, **BF16)
    with pytest.raises(ValueError, match=r"'mtp'.*kv"):
        payload("mtp", **SIZES, **BF16)
    with pytest.raises(ValueError, match=r"no span 'value'"):
        p.span("value")
    with pytest.raises(ValueError, match=r"torch.float32 \[3, 8\], allowed: torch.bfloat16"):
        p.pack({"kv": torch.zeros(3, 8)})
    with pytest.raises(ValueError, match=r"\[3, 7\]"):
        p.pack({"kv": torch.zeros(3, 7, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match=r"got \['score'\]"):
        p.pack({"score": torch.zeros(3, 8)})
    with pytest.raises(ValueError, match=r"allowed: torch.bfloat16 \[rows, 8\]"):
        p.unpack(torch.zeros(3, 9, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="whole number"):
        Payload("odd", (Span("a", 3, torch.bfloat16),), torch.float32)
    hca = payload("hca", head_dim=2, index_head_dim=2, **BF16)
    short = {"value": torch.zeros(2, 2), "score": torch.zeros(3, 2), "kv": torch.zeros(2, 2, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"\[2, 3\] rows"):
        hca.pack(short)
