"""Anchors, blocks and samples against plain loops, at every border."""

import itertools
import math

import pytest
import torch
from training_scene import BLOCK, FEATURES, HIDDEN, MASK_ID, SHAPE, sample

from meshspark.models.training.anchors import Anchors, candidates, draw_anchors, sample_generator
from meshspark.models.training.blocks import make_blocks
from meshspark.models.training.samples import FeatureShape, collate, validate_sample


def plain_candidates(mask: list[int], documents: list[int], rule: str) -> list[int]:
    found = []
    for p in range(len(mask) - 1):
        if not mask[p + 1] or documents[p] != documents[p + 1]:
            continue
        if rule == "first_target" or mask[p]:
            found.append(p)
    return found


def plain_block(ids: list[int], mask: list[int], documents: list[int], anchor: int, gamma: float | None) -> list[tuple]:
    """(noise, position, label, previous, teacher, learned, weight) of each offset; None where nothing is learned."""
    rows, learned = [], True
    for j in range(BLOCK):
        at = anchor + 1 + j
        learned = learned and at < len(ids) and bool(mask[at]) and documents[at] == documents[anchor]
        weight = (math.exp(-j / gamma) if gamma else 1.0) if learned else 0.0
        noise = ids[anchor] if j == 0 else MASK_ID
        named = (ids[at], ids[anchor + j], anchor + j) if learned else (None, None, None)
        rows.append((noise, anchor + j, *named, learned, weight))
    return rows


def masks() -> list[tuple[list[int], list[int]]]:
    """Every mask of up to 6 tokens in one document, and every cut of some into two."""
    cases = [(list(bits), [0] * length) for length in range(1, 7) for bits in itertools.product((0, 1), repeat=length)]
    for cut in range(1, 8):
        documents = [0] * cut + [1] * (8 - cut)
        cases += [([1] * 8, documents), ([0, 1, 1, 1, 0, 1, 1, 1], documents), ([1, 0, 1, 0, 1, 1, 1, 0], documents)]
    return cases


@pytest.mark.parametrize("rule", ["both", "first_target"])
@pytest.mark.parametrize("gamma", [None, 4.0])
def test_blocks_equal_plain_loops(rule: str, gamma: float | None) -> None:
    for mask, documents in masks():
        ids = [(7 * p + 3) % 11 for p in range(len(mask))]
        tensors = [torch.tensor([row]) for row in (ids, mask, documents)]
        ids_BS, mask_BS, documents_BS = tensors[0], tensors[1].bool(), tensors[2]
        places = plain_candidates(mask, documents, rule)
        assert candidates(mask_BS, documents_BS, rule)[0].nonzero().flatten().tolist() == places
        anchors = draw_anchors(mask_BS, documents_BS, [torch.Generator()], 512, rule)
        kept = anchors.positions_BN[0][anchors.keep_BN[0]].tolist()
        assert kept == places and int(anchors.candidates_B[0]) == len(places)
        assert anchors.positions_BN.shape == (1, max(len(places), 1))
        blocks = make_blocks(
            ids_BS,
            mask_BS,
            anchors,
            block_size=BLOCK,
            mask_token_id=MASK_ID,
            decay_gamma=gamma,
            documents_BS=documents_BS,
            dtype=torch.float64,
        )
        for n, anchor in enumerate(kept):
            for j, want in enumerate(plain_block(ids, mask, documents, anchor, gamma)):
                noise, position, label, previous, teacher, learned, weight = want
                assert int(blocks.noise_ids[0, n, j]) == noise and int(blocks.positions[0, n, j]) == position
                assert bool(blocks.eval_mask[0, n, j]) == learned
                assert float(blocks.weights[0, n, j]) == pytest.approx(weight, abs=1e-15)
                if learned:
                    assert int(blocks.labels[0, n, j]) == label
                    assert int(blocks.previous[0, n, j]) == previous
                    assert int(blocks.teacher_index[0, n, j]) == teacher
        if not kept:
            assert not blocks.eval_mask.any() and not blocks.weights.any()


def test_a_span_by_hand() -> None:
    """Mask 0001110011, block 3: with both rules what is learned at each anchor."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 1, 1]]).bool()
    ids = torch.arange(20, 30)[None]
    hand = {
        "both": {3: [24, 25], 4: [25], 8: [29]},
        "first_target": {2: [23, 24, 25], 3: [24, 25], 4: [25], 7: [28, 29], 8: [29]},
    }
    for rule, want in hand.items():
        anchors = draw_anchors(mask, None, [torch.Generator()], 512, rule)
        blocks = make_blocks(ids, mask, anchors, block_size=3, mask_token_id=MASK_ID)
        got = {
            int(a): blocks.labels[0, n][blocks.eval_mask[0, n]].tolist()
            for n, a in enumerate(anchors.positions_BN[0].tolist())
        }
        assert got == want


def test_draw_is_uniform_without_replacement_and_a_sample_s_own() -> None:
    mask = torch.ones(1, 9, dtype=torch.bool)
    counts = torch.zeros(9)
    for number in range(2000):
        anchors = draw_anchors(mask, None, [sample_generator(0, 0, number)], 3)
        places = anchors.positions_BN[0].tolist()
        assert places == sorted(set(places)) and len(places) == 3
        counts[places] += 1
    # 8 candidates, 3 of them each time: 750 expected of each, standard deviation 22.
    assert counts[8] == 0 and (counts[:8] - 750).abs().max() < 90
    alone = draw_anchors(mask, None, [sample_generator(4, 1, 7)], 3).positions_BN[0]
    wide = torch.zeros(2, 30, dtype=torch.bool)
    wide[0, :30], wide[1, :9] = True, True
    beside = draw_anchors(wide, None, [sample_generator(4, 1, 3), sample_generator(4, 1, 7)], 3).positions_BN[1]
    padded = candidates(wide)[1].sum()
    assert padded == 8 and torch.equal(alone, beside)
    others = [draw_anchors(mask, None, [sample_generator(*s)], 3).positions_BN.tolist() for s in ((4, 2, 7), (5, 1, 7))]
    assert alone.tolist() not in [other[0] for other in others]


def test_rows_of_different_counts_are_padded_and_none_gives_a_dummy() -> None:
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[0, 2:6], mask[2, 0:3] = True, True
    anchors = draw_anchors(mask, None, [torch.Generator()] * 3)
    assert anchors.positions_BN.tolist() == [[2, 3, 4], [0, 0, 0], [0, 1, 0]]
    assert anchors.keep_BN.tolist() == [[True] * 3, [False] * 3, [True, True, False]]
    for rows in (0, 2):
        empty = draw_anchors(torch.zeros(rows, 5, dtype=torch.bool), None, [torch.Generator()] * rows)
        assert not empty.keep_BN.any() and empty.keep_BN.shape == (max(rows, 1), 1)
        ids = torch.zeros(rows, 5, dtype=torch.int64)
        blocks = make_blocks(ids, ids.bool(), empty, block_size=BLOCK, mask_token_id=MASK_ID)
        assert not blocks.eval_mask.any() and blocks.weights.sum() == 0


def test_a_block_that_is_not_kept_learns_nothing() -> None:
    anchors = Anchors(torch.tensor([[0, 0]]), torch.tensor([[True, False]]), torch.tensor([1]))
    ids, mask = torch.arange(5)[None], torch.ones(1, 5, dtype=torch.bool)
    blocks = make_blocks(ids, mask, anchors, block_size=BLOCK, mask_token_id=MASK_ID)
    assert blocks.eval_mask[0].tolist() == [[True] * 3, [False] * 3]


def test_settings_are_checked() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match="num_anchors is 0"):
        draw_anchors(mask, None, [torch.Generator()], 0)
    with pytest.raises(ValueError, match="anchor_rule is 'last'"):
        candidates(mask, None, "last")
    with pytest.raises(ValueError, match="2 generators for 1"):
        draw_anchors(mask, None, [torch.Generator()] * 2)
    with pytest.raises(ValueError, match="seed, epoch and sample"):
        sample_generator(-1, 0, 0)
    anchors = draw_anchors(mask, None, [torch.Generator()])
    for change, text in (({"block_size": 0}, "block_size"), ({"mask_token_id": -1}, "mask_token_id")):
        with pytest.raises(ValueError, match=text):
            make_blocks(mask.long(), mask, anchors, **({"block_size": 3, "mask_token_id": 1} | change))
    with pytest.raises(ValueError, match="loss_decay_gamma is 0"):
        make_blocks(mask.long(), mask, anchors, block_size=3, mask_token_id=1, decay_gamma=0.0)


def test_samples_are_checked() -> None:
    good = sample(0, 9)
    good["loss_mask"] = torch.tensor([[0, 0, 1, 1, 0, 1, 0, 1, 0]], dtype=torch.uint8)
    validate_sample(good, SHAPE)
    bad: list[tuple[dict, str]] = [
        ({"input_ids": None}, "has no input_ids"),
        ({"hidden_states": None}, "has no hidden_states"),
        ({"target_last_hidden_states": None}, "has no target_last_hidden_states"),
        ({"loss_mask": torch.ones(1, 8, dtype=torch.bool)}, r"loss_mask of s is \[1, 8\], needed: \[1, 9\]"),
        ({"hidden_states": torch.zeros(1, 9, FEATURES + 1)}, "hidden_states of s is"),
        ({"hidden_states": torch.zeros(1, 8, FEATURES)}, "hidden_states of s is"),
        ({"target_last_hidden_states": torch.zeros(1, 8, HIDDEN)}, "target_last_hidden_states of s is"),
        ({"document_ids": torch.zeros(1, 8, dtype=torch.int64)}, "document_ids of s is"),
        ({"input_ids": torch.zeros(9, dtype=torch.int64)}, "input_ids of s is"),
        ({"input_ids": torch.zeros(1, 9)}, "input_ids of s is torch.float32"),
        ({"loss_mask": torch.full((1, 9), 2, dtype=torch.uint8)}, "loss_mask of s is"),
        ({"loss_mask": torch.tensor([[0, 1, 0, 1, 0, 1, 0, 1, 0]]).bool()}, "no two supervised tokens side by side"),
        ({"document_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])}, "no two supervised tokens side by side"),
    ]
    for change, text in bad:
        changed = {key: value for key, value in (good | change).items() if value is not None}
        with pytest.raises(ValueError, match=text):
            validate_sample(changed, SHAPE, name="s")
    lonely = good | {"loss_mask": torch.tensor([[0, 1, 0, 1, 0, 1, 0, 1, 0]]).bool()}
    validate_sample(lonely, SHAPE, "first_target")
    with pytest.raises(ValueError, match="no supervised token after its first"):
        validate_sample(good | {"loss_mask": torch.tensor([[1] + [0] * 8]).bool()}, SHAPE, "first_target")
    with pytest.raises(ValueError, match="features is 0"):
        FeatureShape(0, HIDDEN)
    without = {key: value for key, value in good.items() if key != "target_last_hidden_states"}
    validate_sample(without, FeatureShape(FEATURES, HIDDEN, teacher=False))


def test_collation_pads_at_the_right() -> None:
    batch = collate([sample(0, 4), sample(1, 7, (3, 4))], SHAPE)
    assert batch.input_ids_BS.shape == (2, 7) and not batch.input_ids_BS[0, 4:].any()
    assert not batch.loss_mask_BS[0, 4:].any() and batch.documents_BS[0].tolist() == [0] * 4 + [-1] * 3
    assert batch.documents_BS[1].tolist() == [0] * 3 + [1] * 4
    assert [len(f) for f in batch.features] == [4, 7]
    empty = collate([], SHAPE)
    assert empty.input_ids_BS.shape == (0, 1) and empty.features == () and empty.teacher == ()
