"""Ownership: partitions cover everything once and their inverse maps agree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshspark.parallel import ownership as own

PARTS = st.integers(1, 9)
SHARE = st.integers(1, 40)

PAIRS = [
    (own.expert_slice, own.expert_owner),
    (own.vocab_slice, own.vocab_owner),
    (own.output_group_slice, own.output_group_owner),
]


@pytest.mark.parametrize(("share_of", "owner_of"), PAIRS)
@given(parts=PARTS, share=SHARE)
def test_equal_shares_cover_once_and_invert(share_of, owner_of, parts, share):
    total = parts * share
    items = [item for part in range(parts) for item in range(total)[share_of(part, parts, total)]]
    assert items == list(range(total))
    for item in range(total):
        owner = owner_of(item, parts, total)
        assert item in range(total)[share_of(owner, parts, total)]


@given(tp=PARTS, slots=SHARE)
def test_request_slots(tp, slots):
    for tp_rank in range(tp):
        for slot in range(tp * slots)[own.request_slots(tp_rank, tp, slots)]:
            assert own.request_owner(slot, tp, slots) == tp_rank


@given(tp=PARTS, local_t=SHARE)
def test_bands(tp, local_t):
    rows = list(range(tp * local_t))
    assert [row for tp_rank in range(tp) for row in rows[own.band_slice(tp_rank, tp, local_t)]] == rows
    for row in rows:
        tp_rank, local = own.band_owner(row, tp, local_t)
        assert rows[own.band_slice(tp_rank, tp, local_t)][local] == row


@given(tp=PARTS, count=st.integers(0, 60))
def test_ragged_rows_cover_once_and_fit_the_band(tp, count):
    rows = list(range(count))
    bands = [rows[own.row_slice(tp_rank, tp, count)] for tp_rank in range(tp)]
    assert [row for band in bands for row in band] == rows
    assert max(len(band) for band in bands) == own.even_band(count, tp)
    assert all(row in bands[own.row_owner(row, tp, count)] for row in rows)


def test_known_values():
    assert own.expert_slice(3, 16, 256) == slice(48, 64)
    assert own.vocab_slice(1, 4, 129280) == slice(32320, 64640)
    assert own.output_group_slice(2, 3, 6) == slice(4, 6)
    assert own.row_slice(2, 4, 5) == slice(4, 5) and own.row_slice(3, 4, 5) == slice(5, 5)
    assert own.band_slice(0, 4, 0) == slice(0, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: own.expert_slice(0, 6, 256), "256 routed experts"),
        (lambda: own.vocab_owner(96, 2, 96), "allowed: 0 to 95"),
        (lambda: own.vocab_owner(-1, 2, 96), "index into vocabulary rows is -1"),
        (lambda: own.output_group_slice(3, 3, 6), "allowed: 0 to 2"),
        (lambda: own.even_band(-1, 2), "rows is -1"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()
