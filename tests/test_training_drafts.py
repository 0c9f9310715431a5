"""The objective and the trainer's step with drafts of every kind of part."""

from dataclasses import replace

import pytest
import torch
from draft_toys import KINDS, kind_config
from training_scene import sample

from meshspark.models.drafts.draft import DSparkDraft
from meshspark.models.training.anchors import sample_generator
from meshspark.models.training.config import ObjectiveConfig
from meshspark.models.training.core import TrainerCore
from meshspark.models.training.objective import Objective, TargetTables
from meshspark.models.training.packing import DraftBatch
from meshspark.models.training.placement import AdamWSettings
from meshspark.models.training.prepare import context_reach, draft_batch
from meshspark.models.training.samples import FeatureShape, collate
from meshspark.models.training.stepping import Replicated
from meshspark.parallel.groups import Groups

WINDOWED = [name for name, (dflash, _) in KINDS.items() if dflash.get("context_window")]


def made_draft(kind: str) -> DSparkDraft:
    draft = DSparkDraft(kind_config(kind)).double()
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return draft


def made_objective(draft: DSparkDraft, dtype: torch.dtype = torch.float64) -> Objective:
    config, generator = draft.config, torch.Generator().manual_seed(9)
    both = torch.randn(2, config.vocab_size, config.hidden_size, generator=generator, dtype=torch.float64).to(dtype)
    settings = ObjectiveConfig(config.block_size, config.dflash.mask_token_id, num_anchors=16, chunk_blocks=3)
    return Objective(draft, TargetTables(both[0], both[1]), settings)


def made_batch(draft: DSparkDraft, samples: list[dict], window: int | None) -> DraftBatch:
    config = draft.config
    shape = FeatureShape(config.feature_width, config.hidden_size, dtype=torch.float64)
    generator = torch.Generator().manual_seed(10)
    wide = []
    for one in samples:
        length = one["input_ids"].shape[1]
        states = torch.randn(1, length, shape.features + shape.hidden, generator=generator, dtype=torch.float64)
        taps, last = states.split([shape.features, shape.hidden], -1)
        wide.append(one | {"hidden_states": taps, "target_last_hidden_states": last})
    settings = ObjectiveConfig(config.block_size, config.dflash.mask_token_id, num_anchors=16)
    generators = [sample_generator(2, 0, n) for n in range(len(samples))]
    return draft_batch(collate(wide, shape), settings, window, generators, torch.float64)


def reach(draft: DSparkDraft) -> int | None:
    config = draft.config
    return context_reach(config.dflash.context_window, config.sliding_window, config.layer_types)


@pytest.mark.parametrize("kind", WINDOWED)
def test_packed_windows_give_what_whole_contexts_give(kind: str) -> None:
    results = []
    draft = made_draft(kind)
    for window in (reach(draft), None):
        draft.zero_grad()
        batch = made_batch(draft, [sample(0, 40), sample(1, 9)], window)
        terms = made_objective(draft)(batch).loss_terms
        assert terms is not None
        terms[0].backward()
        results.append((batch.features_DPF.shape[1], terms[0].detach(), [p.grad for p in draft.parameters()]))
    assert results[0][0] < results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-9, atol=0)
    for a, b in zip(results[0][2], results[1][2], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_parameter_is_trained(kind: str) -> None:
    """No missing and no zero gradient, but of experts that no token chose; the loss falls."""
    draft = made_draft(kind)
    groups = Groups.single()
    samples = [sample(0, 30), sample(1, 12, (5, 7)), sample(2, 3, supervised=0.0)]
    batch = made_batch(draft, samples, reach(draft))
    terms = made_objective(draft)(batch).loss_terms
    assert terms is not None
    terms[0].backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        assert bool(parameter.grad.any()), name
    draft.zero_grad()
    placement = Replicated.over(draft, groups.world, groups.control, AdamWSettings(learning_rate=1e-2))
    core = TrainerCore(made_objective(draft), placement)
    losses = [core.step([batch]).loss for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", list(KINDS))
def test_an_empty_rank_has_zero_gradients(kind: str) -> None:
    draft = made_draft(kind)
    batch = made_batch(draft, [], reach(draft))
    terms = made_objective(draft)(batch).loss_terms
    assert terms is not None and float(terms[1]) == 0 and float(terms[0].detach()) == 0
    terms[0].backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is None or (bool(parameter.grad.isfinite().all()) and not parameter.grad.any()), name


def test_the_block_of_the_objective_is_the_draft_s() -> None:
    draft = made_draft("v4")
    batch = made_batch(draft, [sample(0, 20)], 4)
    blocks = replace(batch.blocks, noise_ids=batch.blocks.noise_ids[..., :2])
    with pytest.raises(ValueError, match="noise has shape"):
        made_objective(draft)(replace(batch, blocks=blocks))
