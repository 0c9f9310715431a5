"""The rule of what a row sees, and every mask made of it, element by element."""

import pytest
import torch
from draft_attention_scene import WINDOW, config, edge_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_draft_attention import naive_mask

from meshspark.models.drafts.masks import MaskRule, dense_mask, flex_element, flex_mask, sees_context, window_plan
from meshspark.models.drafts.plans import varlen_plan
from meshspark.models.drafts.resume import attention_contract, check_contract

windows = st.one_of(st.none(), st.integers(1, 9))


@st.composite
def places(draw):
    batch, count, size = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = draw(st.integers(0, 12))
    anchors = draw(
        st.lists(st.lists(st.integers(0, 14), min_size=count, max_size=count), min_size=batch, max_size=batch)
    )
    keep = draw(st.lists(st.lists(st.booleans(), min_size=count, max_size=count), min_size=batch, max_size=batch))
    first = draw(st.integers(0, 3))
    positions = torch.arange(first, first + rows).repeat(batch, 1)
    return torch.tensor(anchors), torch.tensor(keep), positions, size


@settings(max_examples=60, deadline=None)
@given(places(), st.booleans(), windows, windows)
def test_every_form_is_the_rule_element_by_element(place, causal, context_window, sliding_window):
    rule = MaskRule(causal, context_window, sliding_window)
    expected_BQL = naive_mask(rule, *place)
    assert torch.equal(dense_mask(rule, *place), expected_BQL.unsqueeze(1))
    assert torch.equal(elements(rule, *place), expected_BQL)
    if context_window is not None:
        assert torch.equal(spread_windows(rule, *place), expected_BQL)


@settings(max_examples=60, deadline=None)
@given(places(), st.booleans(), windows, windows)
def test_flash_sequences_are_the_rule(place, causal, context_window, sliding_window):
    rule = MaskRule(causal, context_window, sliding_window)
    anchors, _, positions, size = place
    if sliding_window is not None and sliding_window < size:
        with pytest.raises(ValueError, match=f"sliding_window {sliding_window} is below block_size {size}"):
            varlen_plan(rule, *place)
        return
    try:
        plan = varlen_plan(rule, *place)
    except ValueError as error:
        assert "gap" in str(error) and sliding_window is not None and (anchors > positions[:, -1:] + 1).any()
        return
    expected_BQL = naive_mask(rule, *place)
    assert torch.equal(spread_sequences(plan, anchors.shape[1], size, expected_BQL), expected_BQL)


def spread_sequences(plan, count, size, like_BQL):
    """A plan of sequences as a mask over all keys."""
    found_BQL, length, (left, right) = torch.zeros_like(like_BQL), like_BQL.shape[2], plan.window
    assert plan.longest == plan.key_ends_X.diff().max()
    assert plan.query_ends_X.tolist() == list(range(0, like_BQL.shape[0] * like_BQL.shape[1] + 1, size))
    for sequence in range(like_BQL.shape[0] * count):
        sample, block = divmod(sequence, count)
        index = plan.index_K[plan.key_ends_X[sequence] : plan.key_ends_X[sequence + 1]]
        assert (index // length == sample).all()
        assert plan.keep_BQ[sample, block * size] or len(index) == size
        row, key = len(index) - size + torch.arange(size)[:, None], torch.arange(len(index))
        seen = ((left < 0) | (key >= row - left)) & ((right < 0) | (key <= row + right))
        found_BQL[sample, block * size : (block + 1) * size, index % length] = seen
    return found_BQL & plan.keep_BQ.unsqueeze(2)


def elements(rule, anchors, keep, positions, size):
    """What flex asks for, one row and key after another, some beyond the last."""
    batch, rows, length = len(anchors), anchors.shape[1] * size, positions.shape[1] + anchors.shape[1] * size
    element = flex_element(rule, anchors, keep, positions, size)
    row, key = torch.arange(rows + 5)[:, None], torch.arange(length + 5)
    seen = torch.stack([element(torch.tensor(sample), torch.tensor(0), row, key) for sample in range(batch)])
    assert not seen[:, rows:].any() and not seen[:, :, length:].any()
    return seen[:, :rows, :length]


def spread_windows(rule, anchors, keep, positions, size):
    """A window plan as a mask over all keys."""
    plan = window_plan(rule, anchors, keep, positions, size)
    (batch, count, width), context = plan.index_BNW.shape, positions.shape[1]
    assert width == min(rule.context_window, context)
    seen = torch.zeros(batch, count, size, context + count * size, dtype=torch.bool)
    for block in range(count):
        index = plan.index_BNW[:, block, None].expand(-1, size, -1)
        seen[:, block].scatter_(2, index, plan.visible_BNbL[:, block, :, :width])
        seen[:, block, :, context + block * size : context + (block + 1) * size] = plan.visible_BNbL[
            :, block, :, width:
        ]
    return seen.flatten(1, 2)


def test_block_mask_is_the_dense_mask():
    for rule in (MaskRule(), MaskRule(context_window=WINDOW), MaskRule(True, 6, 3)):
        given_places = edge_blocks().places()
        mask = flex_mask(rule, *given_places)
        assert mask.shape == (2, 1, 15, 24)
        sample, row, key = torch.meshgrid(torch.arange(2), torch.arange(15), torch.arange(24), indexing="ij")
        seen = mask.mask_mod(sample, torch.zeros_like(sample), row, key)
        assert torch.equal(seen.unsqueeze(1), dense_mask(rule, *given_places))


def test_block_mask_leaves_out_the_tiles_that_nothing_sees():
    """A window of 128 over 1,024 rows: 2 blocks need at most 4 of the 8 tiles, and the tile of the blocks."""
    anchors, keep = torch.tensor([[256, 1000]]), torch.ones(1, 2, dtype=torch.bool)
    mask = flex_mask(MaskRule(context_window=128), anchors, keep, torch.arange(1024).unsqueeze(0), 5)
    assert mask.to_dense()[0, 0].tolist() == [[0, 1, 0, 0, 0, 0, 1, 1, 1]]


def test_visible_keys_per_offset():
    """Anchor 6, block of 3, all written out: both windows, both directions in the block."""
    anchors, keep, positions = torch.tensor([[6]]), torch.tensor([[True]]), torch.arange(8).unsqueeze(0)

    def shown(rule):
        rows = dense_mask(rule, anchors, keep, positions, 3)[0, 0]
        return [[key for key in range(11) if row[key]] for row in rows]

    assert shown(MaskRule(context_window=2)) == [[4, 5, 8, 9, 10]] * 3
    assert shown(MaskRule(True, 2)) == [[4, 5, 8], [4, 5, 8, 9], [4, 5, 8, 9, 10]]
    assert shown(MaskRule(sliding_window=3)) == [[4, 5, 8, 9, 10], [5, 8, 9, 10], [8, 9, 10]]
    assert shown(MaskRule(True, sliding_window=1)) == [[8], [8, 9], [8, 9, 10]]
    assert shown(MaskRule(True, 1, 4)) == [[5, 8], [5, 8, 9], [5, 8, 9, 10]]
    assert shown(MaskRule(False, 5, 3)) == [[4, 5, 8, 9, 10], [5, 8, 9, 10], [8, 9, 10]]
    assert shown(MaskRule()) == [[0, 1, 2, 3, 4, 5, 8, 9, 10]] * 3


def test_window_clips_at_the_start():
    for anchor, expected in ((0, 0), (1, 1), (127, 127), (128, 128), (129, 128), (4000, 128)):
        rule = MaskRule(context_window=128)
        assert sum(sees_context(rule, True, anchor, 4, position) for position in range(4096)) == expected


@pytest.mark.parametrize("name", ["context_window", "sliding_window"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "128", True])
def test_windows_are_whole_numbers_from_1(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        MaskRule(**{name: value})
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        config("gqa", **{name: value})


def test_rule_of_a_layer():
    types = ("full_attention", "sliding_attention")
    mixed = config("gqa", sliding_window=3, layer_types=types)
    assert mixed.rule(0) == MaskRule(False, WINDOW) and mixed.rule(1) == MaskRule(True, WINDOW, 3)
    assert config("gqa", is_causal=True).rule(5) == MaskRule(True, WINDOW)


def test_resume_contract_has_windows_only_when_set():
    plain = attention_contract(config("gqa", context_window=None))
    assert plain == {"attention_backend": "auto", "attention_mode": "gqa"}
    windowed = attention_contract(config("gqa"))
    assert windowed == plain | {"context_window": WINDOW}
    types = ("sliding_attention", "full_attention")
    sliding = attention_contract(
        config("gqa", context_window=None, sliding_window=3, layer_types=types, is_causal=True)
    )
    assert sliding == plain | {"sliding_window": 3, "layer_types": list(types), "is_causal": True}
    check_contract(windowed, dict(windowed))
    check_contract({"layers": (1, 2)}, {"layers": [1, 2]})
    with pytest.raises(ValueError, match="context_window: not set when saved, 4 now"):
        check_contract(plain, windowed)
    with pytest.raises(ValueError, match="context_window: 4 when saved, 5 now; extra: 1 when saved, not set now"):
        check_contract(windowed | {"extra": 1}, windowed | {"context_window": 5})
    with pytest.raises(ValueError, match="extra: None when saved, not set now"):
        check_contract({"extra": None}, {})
