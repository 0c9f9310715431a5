"""The whole model in W8A8: the same bits in every topology, batch and chunking; close to its float twin; never a quiet
zero for numbers that are not finite."""

import pytest
import torch
from episodes import make_model, single_model, twin_logits
from rank_pool import RankPools
from test_chunks import LENGTH, drive, equal_dumps, text
from test_sharded import check

from meshspark.layouts.bits import same_bits
from meshspark.models.int8.finite import NonFiniteActivation
from meshspark.models.selfcheck import row_independence
from meshspark.parallel.groups import Groups

MODE = "w8a8"
PRESET = "tiny"


@pytest.fixture(autouse=True)
def _rows_are_alone() -> None:
    if not row_independence(single_model(PRESET, MODE).config)["holds"]:
        pytest.skip("this machine's products depend on the row count")


@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 2), (4, 2, 4), (4, 4, 4)])
def test_bits_on_many_ranks(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    check(ranks, PRESET, sizes, MODE)


@pytest.mark.parametrize("sizes", [(4, 2, 4), pytest.param((2, 1, 2), marks=pytest.mark.slow)])
def test_bits_where_weights_travel(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    check(ranks, PRESET, sizes, MODE, gather_weights=True)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 3, 3), (4, 1, 4), (4, 2, 2), (6, 3, 6), (8, 4, 8)])
def test_bits_on_more_ranks(ranks: RankPools, sizes: tuple[int, int, int]) -> None:
    check(ranks, "tiny-thirds" if sizes[0] % 3 == 0 else PRESET, sizes, MODE)


def test_bits_alone_in_a_batch_and_in_chunks() -> None:
    """One call without caches, one with, and chunks around every border, all packed with other requests."""
    tokens, other = text(1), text(2, 61)
    sizes = [[n] * (LENGTH // n + 1) for n in (5, 31, 33, 128, 300)]
    want = twin_logits(PRESET, MODE, tokens)
    logits, dumps = drive([*((tokens, chunks) for chunks in sizes), (other, [60, 1])], mode=MODE)
    for got, dump in zip(logits[:-1], dumps[:-1], strict=True):
        assert same_bits(got, want)
        assert equal_dumps(dump, dumps[4])
    assert same_bits(logits[-1], twin_logits(PRESET, MODE, other))


def test_close_to_float() -> None:
    """A wrong scale or a lost rotation is far outside of this band."""
    tokens = text(3)
    got, want = twin_logits(PRESET, MODE, tokens), twin_logits(PRESET, "float64", tokens)
    errors = (got - want).norm(dim=1) / want.norm(dim=1)
    # BF16 alone gives 0.03 in the middle, and more where a row takes another expert.
    assert 0.01 < errors.median() < 0.09, errors.median()


def test_index_keys_are_cached_as_codes() -> None:
    """A row of D codes and a scale; what is selected from the cache is what one call without a cache selects."""
    model = single_model(PRESET, MODE)
    tokens = text(4)
    _, (dump,) = drive([(tokens, [LENGTH])], mode=MODE)
    rows = dump["csa_index"]
    dim = model.config.index_head_dim
    assert rows.dtype == torch.int8 and rows.shape[2] == dim + 4
    scale = rows[..., dim:].contiguous().view(torch.float32)
    assert bool((scale > 0).all()) and bool((rows[..., :dim].abs().amax(dim=2) == 127).all())


@pytest.mark.parametrize(("value", "layer"), [(float("nan"), 0), (float("inf"), 0)])
def test_what_is_not_finite_is_named(value: float, layer: int) -> None:
    model = make_model(Groups.single(), PRESET, MODE)
    model.embed = model.embed.clone()
    model.embed[7] = value
    plan = model.plan_sequences([(5, 6, 7, 8)])
    with torch.no_grad(), pytest.raises(NonFiniteActivation, match=rf"layer {layer}.*row 2"):
        model.forward(plan)
