"""Packed contexts: which rows, where anchors stand, and that the draft sees what it sees of whole samples."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from training_scene import (
    CONFIG,
    FEATURES,
    HIDDEN,
    SHAPE,
    VOCABULARY,
    WINDOW,
    SmallDraft,
    gradients,
    objective,
    packed,
    sample,
)

from meshspark.models.training.anchors import draw_anchors
from meshspark.models.training.blocks import make_blocks
from meshspark.models.training.packing import context_rows, pack
from meshspark.models.training.prepare import context_reach
from meshspark.models.training.samples import FeatureShape, collate


def plain_rows(anchors: Sequence[int], start: int, window: int | None) -> list[int]:
    reach = 10**9 if window is None else window
    if window is None:
        return list(range(start, max(anchors)))
    return sorted({p for a in anchors for p in range(max(start, a - reach), a)})


@pytest.mark.parametrize("window", [None, 1, 2, 4, 128])
def test_context_rows_equal_a_plain_union(window: int | None) -> None:
    generator = torch.Generator().manual_seed(3)
    for start in (0, 5):
        for count in (1, 2, 5, 12):
            places = (torch.randperm(40, generator=generator)[:count].sort().values + start).tolist()
            rows = context_rows(torch.tensor(places), start, window)
            index = rows.index.tolist()
            assert index == plain_rows(places, start, window)
            for anchor, place in zip(places, rows.places.tolist(), strict=True):
                seen = plain_rows([anchor], start, window)
                assert index[place - len(seen) : place] == seen and place == sum(p < anchor for p in index)
                # Nothing else is within the window's reach from there.
                assert len(seen) == window or place == len(seen)


def test_context_rows_at_the_first_position_are_none() -> None:
    rows = context_rows(torch.tensor([4]), 4, 2)
    assert rows.index.tolist() == [] and rows.places.tolist() == [0]
    with pytest.raises(ValueError, match="context_window is 0"):
        context_rows(torch.tensor([4]), 0, 0)


def test_packed_features_and_teacher_states_are_the_samples_rows() -> None:
    samples = [sample(0, 11, (4, 7)), sample(1, 6)]
    batch = collate(samples, SHAPE)
    generators = [torch.Generator()] * 2
    anchors = draw_anchors(batch.loss_mask_BS, batch.documents_BS, generators)
    blocks = make_blocks(
        batch.input_ids_BS,
        batch.loss_mask_BS,
        anchors,
        block_size=3,
        mask_token_id=1,
        documents_BS=batch.documents_BS,
        dtype=torch.float64,
    )
    made = pack(batch, anchors, blocks, 2)
    kept = anchors.positions_BN[anchors.keep_BN].tolist()
    assert made.blocks.positions[..., 0][made.keep_DN].tolist() == kept
    assert made.candidates == len(kept) and made.samples == 2
    # Three documents: two of the first sample, one of the second.
    sources = [(0, 0, 4), (0, 4, 11), (1, 0, 6)]
    assert made.features_DPF.shape[0] == 3
    for place, (row, start, stop) in enumerate(sources):
        own = [p for p in anchors.positions_BN[row][anchors.keep_BN[row]].tolist() if start <= p < stop]
        rows = plain_rows(own, start, 2)
        count = len(rows)
        assert made.context_positions_DP[place].tolist() == rows + [-1] * (made.features_DPF.shape[1] - count)
        assert torch.equal(made.features_DPF[place, :count], batch.features[row][rows])
        assert not made.features_DPF[place, count:].any()
        assert int(made.keep_DN[place].sum()) == len(own)
        for n, anchor in enumerate(own):
            for j in range(3):
                if made.blocks.eval_mask[place, n, j]:
                    assert made.teacher_DNbH is not None and batch.teacher is not None
                    assert torch.equal(made.teacher_DNbH[place, n, j], batch.teacher[row][anchor + j])
    assert made.blocks.eval_mask.sum() == blocks.eval_mask.sum()
    assert made.blocks.weights.sum() == blocks.weights.sum()


def value_and_gradients(samples: list[dict], window: int | None, reach: int | None, chunk: int = 2) -> tuple:
    draft = SmallDraft(window)
    out = objective(draft, replace(CONFIG, chunk_blocks=chunk))(packed(samples, window=reach))
    assert out.loss_terms is not None
    out.loss_terms[0].backward()
    return float(out.loss_terms[0].detach()), float(out.loss_terms[1]), gradients(draft)


def assert_same(one: tuple, other: tuple) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-13) and one[1] == pytest.approx(other[1], rel=1e-14)
    for name, gradient in one[2].items():
        torch.testing.assert_close(gradient, other[2][name], rtol=0, atol=1e-12)


def test_packed_windows_give_what_whole_contexts_give() -> None:
    """The draft masks by its window in both; packing changes only which rows it is given."""
    samples = [sample(0, 40), sample(1, 23), sample(2, 3)]
    whole = value_and_gradients(samples, WINDOW, None)
    for reach in (WINDOW, WINDOW + 3):
        assert_same(value_and_gradients(samples, WINDOW, reach), whole)
    assert packed(samples, window=WINDOW).features_DPF.shape[1] <= packed(samples, window=None).features_DPF.shape[1]


@pytest.mark.parametrize("window", [None, WINDOW])
def test_documents_in_one_sample_are_like_documents_apart(window: int | None) -> None:
    lengths = (7, 12, 2, 9)
    joined = sample(0, sum(lengths), lengths)
    apart, start = [], 0
    for length in lengths:
        part = {k: v[:, start : start + length] for k, v in joined.items() if k != "document_ids"}
        apart.append(part)
        start += length
    config = replace(CONFIG, num_anchors=512)
    results = []
    for samples in ([joined], apart):
        draft = SmallDraft(window)
        out = objective(draft, config)(packed(samples, config, window))
        assert out.loss_terms is not None
        out.loss_terms[0].backward()
        results.append((float(out.loss_terms[0].detach()), float(out.loss_terms[1]), gradients(draft)))
    assert results[0][1] > 0
    assert_same(results[0], results[1])


def long_sample(length: int) -> dict:
    """Features that are views of one row: reading all of them would cost as much as their length."""
    made = {
        "input_ids": torch.zeros(1, length, dtype=torch.int64),
        "loss_mask": torch.zeros(1, length, dtype=torch.bool),
        "hidden_states": torch.ones(1, 1, FEATURES, dtype=torch.float64).expand(1, length, FEATURES),
        "target_last_hidden_states": torch.ones(1, 1, HIDDEN, dtype=torch.float64).expand(1, length, HIDDEN),
    }
    generator = torch.Generator().manual_seed(4)
    made["input_ids"][0, -600:] = torch.randint(0, VOCABULARY, (600,), generator=generator)
    made["loss_mask"][0, -600:] = True
    return made


def test_memory_of_a_step_is_flat_in_the_length() -> None:
    """Elements that autograd keeps and the packed batch holds: the same from 1k to 64k positions."""
    kept = []
    for length in (1024, 8192, 65536):
        batch = packed([long_sample(length)], replace(CONFIG, num_anchors=64))
        elements = [0]

        def count(tensor: torch.Tensor, elements: list[int] = elements) -> torch.Tensor:
            elements[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            out = objective(SmallDraft())(batch)
        held = sum(t.numel() for t in (batch.features_DPF, batch.blocks.labels, batch.keep_DN))
        assert out.loss_terms is not None and float(out.loss_terms[1]) > 0
        # The draws differ with nothing: the candidates are the same 599 places from the end.
        kept.append((elements[0], held))
    assert kept[0] == kept[1] == kept[2]


def test_chunks_bound_what_is_kept() -> None:
    """With chunks no logits are kept: autograd holds fewer elements than one copy of them has."""
    batch = packed([sample(0, 60, supervised=1.0)], replace(CONFIG, num_anchors=40))
    sizes = {}
    for chunk in (0, 4):
        elements = [0]

        def count(tensor: torch.Tensor, elements: list[int] = elements) -> torch.Tensor:
            if tensor.ndim >= 2 and tensor.shape[-1] == VOCABULARY:
                elements[0] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            objective(SmallDraft(), replace(CONFIG, num_anchors=40, chunk_blocks=chunk))(batch)
        sizes[chunk] = elements[0]
    assert sizes[4] == 0 and sizes[0] >= 2 * 40 * 3 * VOCABULARY


def test_a_batch_without_anchors_is_one_dummy() -> None:
    silent = sample(0, 9, supervised=0.0)
    for samples in ([], [silent], [silent, silent]):
        made = packed(samples)
        assert made.features_DPF.shape == (1, 1, FEATURES) and not made.keep_DN.any()
        assert made.teacher_DNbH is not None and made.teacher_DNbH.shape == (1, 1, 3, HIDDEN)
        draft = SmallDraft()
        out = objective(draft)(made)
        assert out.loss_terms is not None and float(out.loss.detach()) == 0
        assert [float(part.detach()) for part in out.loss_terms] == [0, 0]
        out.loss_terms[0].backward()
        for name, parameter in draft.named_parameters():
            assert parameter.grad is not None and not parameter.grad.any(), name


def test_without_teacher_states_there_are_none() -> None:
    shape = FeatureShape(FEATURES, HIDDEN, teacher=False, dtype=torch.float64)
    batch = collate([sample(0, 9)], shape)
    anchors = draw_anchors(batch.loss_mask_BS, batch.documents_BS, [torch.Generator()])
    blocks = make_blocks(batch.input_ids_BS, batch.loss_mask_BS, anchors, block_size=3, mask_token_id=1)
    assert pack(batch, anchors, blocks, 2).teacher_DNbH is None
    moved = pack(batch, anchors, blocks, 2).to("meta")
    assert moved.features_DPF.is_meta and moved.blocks.weights.is_meta and moved.samples == 1


def test_reach_of_a_draft() -> None:
    sliding, full = "sliding_attention", "full_attention"
    assert context_reach(None) is None and context_reach(128) == 128
    assert context_reach(None, 9, [sliding, sliding]) == 8
    assert context_reach(4, 9, [sliding]) == 4
    assert context_reach(None, 9, [sliding, full]) is None
    assert context_reach(128, 9, [sliding, full]) == 128
    assert context_reach(None, 1, [sliding]) == 1
