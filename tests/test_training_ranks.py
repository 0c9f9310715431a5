"""The trainer's step over ranks: uneven, empty, accumulated; the same numbers as one process, the same errors."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_pool import RankPools, from_bytes, to_bytes
from torch import Tensor, nn
from training_scene import CONFIG, SHAPE, WINDOW, SmallDraft, clipped, objective, packed, sample, tables

from meshspark.models.training.anchors import sample_generator
from meshspark.models.training.core import TrainerCore
from meshspark.models.training.hooks import StepHook, StepOutput
from meshspark.models.training.objective import Objective
from meshspark.models.training.packing import DraftBatch
from meshspark.models.training.parts import Share
from meshspark.models.training.placement import AdamWSettings
from meshspark.models.training.prepare import draft_batch
from meshspark.models.training.samples import collate
from meshspark.models.training.stepping import Replicated
from meshspark.models.training.terms import VocabularyShard
from meshspark.parallel.groups import Groups
from meshspark.parallel.topology import Topology

SETTINGS = AdamWSettings(learning_rate=1e-2, weight_decay=0.1)
STEPS = 5
LENGTHS = (19, 4, 25, 8, 13, 30, 3, 12)

# By rank, then micro-batch: which samples. Every plan holds all of them once.
PLANS: dict[str, list[list[list[int]]]] = {
    "one": [[[0, 1, 2, 3, 4, 5, 6, 7]]],
    "one, three micro-batches": [[[0, 5], [1], [2, 3, 4, 6, 7]]],
    "two": [[[0, 1, 2, 3]], [[4, 5, 6, 7]]],
    "two, three micro-batches, uneven": [[[0], [1, 6], [2]], [[3, 4, 5], [], [7]]],
    "two, one empty": [[[], []], [[0, 1, 2, 3], [4, 5, 6, 7]]],
    "four, uneven, one empty": [[[6]], [[0, 1, 2, 3, 4]], [[]], [[5, 7]]],
    "four, three micro-batches, one empty": [[[0], [1], [2]], [[], [], []], [[3], [], [4]], [[5], [6, 7], []]],
}


def train(groups: Groups, plan: list[list[list[int]]], clip: float) -> dict[str, Any]:
    """Losses, metrics and weights of some steps of this rank."""
    draft = SmallDraft()
    samples = {n: sample(n, LENGTHS[n]) for n in range(len(LENGTHS))}
    placement = Replicated.over(draft, groups.world, groups.control, SETTINGS)
    core = TrainerCore(objective(draft), placement, max_grad_norm=clip)
    reports = []
    for _ in range(STEPS):
        parts = [packed_of(samples, numbers) for numbers in plan[groups.rank]]
        report = core.step(parts)
        reports.append([report.loss, report.denominator, report.gradient_norm, report.metrics])
    return {"reports": reports, "weights": [to_bytes(p) for p in draft.parameters()]}


def packed_of(samples: dict[int, dict], numbers: list[int]) -> DraftBatch:
    """Some samples in one micro-batch; each one's anchors are drawn by its number."""
    generators = [sample_generator(1, 0, n) for n in numbers]
    return draft_batch(collate([samples[n] for n in numbers], SHAPE), CONFIG, WINDOW, generators, torch.float64)


@pytest.mark.parametrize("name", [name for name in PLANS if name != "one"])
def test_all_distributions_train_alike(ranks: RankPools, name: str) -> None:
    """Losses, metrics and weights after 5 AdamW steps, FP64."""
    want = train(Groups.single(), PLANS["one"], 0.1)
    assert all(report[2] > 0.1 for report in want["reports"])
    plan = PLANS[name]
    if len(plan) == 1:
        results = [train(Groups.single(), plan, 0.1)]
    else:
        world = len(plan)
        results = ranks.run(Topology(world, 1, world), "test_training_ranks:train", timeout=150, plan=plan, clip=0.1)
    for result in results:
        assert result == results[0]
        for got, report in zip(result["reports"], want["reports"], strict=True):
            assert got[:3] == pytest.approx(report[:3], rel=1e-12)
            assert got[3] == pytest.approx(report[3], rel=1e-11, abs=1e-12)
        for got, weight in zip(result["weights"], want["weights"], strict=True):
            torch.testing.assert_close(from_bytes(got), from_bytes(weight), rtol=0, atol=1e-12)


class Seen(Replicated):
    """Keeps the gradients before they are clipped."""

    def clip(self, max_norm: float | None) -> float:
        self.kept = [p.grad.clone() for p in self.masters.values() if p.grad is not None]
        return super().clip(max_norm)


def counted(tokens: int, number: int) -> dict:
    """A sample that has `tokens` labels with blocks of one offset."""
    made = sample(number, tokens + 3, supervised=0.0)
    made["loss_mask"][0, 1 : tokens + 2] = True
    return made


TOKENS = [[2, 1], [90, 7]]


def gradients_of_tokens(groups: Groups, tokens: list[list[int]]) -> dict[str, Any]:
    config = replace(CONFIG, block_size=1, num_anchors=128)
    draft = SmallDraft()
    placement = Seen.over(draft, groups.world, groups.control, SETTINGS)
    core = TrainerCore(objective(draft, config), placement, max_grad_norm=None)
    parts = [packed([counted(n, n)], config, first=n) for n in tokens[groups.rank]]
    report = core.step(parts)
    assert isinstance(placement, Seen)
    return {"denominator": report.denominator, "gradients": [to_bytes(g) for g in placement.kept]}


def test_ranks_with_3_and_97_tokens_give_the_mean_over_all(ranks: RankPools) -> None:
    results = ranks.run(Topology(2, 1, 2), "test_training_ranks:gradients_of_tokens", timeout=60, tokens=TOKENS)
    config = replace(CONFIG, block_size=1, num_anchors=128)
    draft = SmallDraft()
    numerator, denominator = torch.zeros(()), 0.0
    for n in (n for row in TOKENS for n in row):
        terms = objective(draft, config)(packed([counted(n, n)], config, first=n)).loss_terms
        assert terms is not None and float(terms[1]) == n
        numerator, denominator = numerator + terms[0], denominator + float(terms[1])
    (numerator / denominator).backward()
    for result in results:
        assert result["denominator"] == denominator == 100
        for got, parameter in zip(result["gradients"], draft.parameters(), strict=True):
            torch.testing.assert_close(from_bytes(got), parameter.grad, rtol=0, atol=1e-13)


def train_vocabulary(groups: Groups, cuts: list[int]) -> dict[str, Any]:
    """Steps of ranks that see the same samples and hold a shard of the target's head each."""
    draft = SmallDraft()
    start, stop = cuts[groups.rank], cuts[groups.rank + 1]
    shard = VocabularyShard(start, groups.world)
    placement = Replicated.over(draft, groups.world, groups.control, SETTINGS)
    core = TrainerCore(Objective(draft, tables(shard=shard, size=stop - start), CONFIG), placement, max_grad_norm=0.1)
    parts = [packed([sample(n, LENGTHS[n]) for n in numbers], first=numbers[0]) for numbers in ([0, 1], [2, 3, 4])]
    reports = [core.step(parts) for _ in range(STEPS)]
    return {
        "reports": [[r.loss, r.gradient_norm, r.metrics] for r in reports],
        "weights": [to_bytes(p) for p in draft.parameters()],
    }


@pytest.mark.parametrize("cuts", [[0, 5, 13], [0, 3, 4, 9, 13]])
def test_a_vocabulary_over_ranks_trains_like_a_whole_one(ranks: RankPools, cuts: list[int]) -> None:
    world = len(cuts) - 1
    want = train_vocabulary(Groups.single(), [0, 13])
    for result in ranks.run(Topology(world, 1, world), "test_training_ranks:train_vocabulary", timeout=150, cuts=cuts):
        for got, report in zip(result["reports"], want["reports"], strict=True):
            assert got[:2] == pytest.approx(report[:2], rel=1e-12)
            assert got[2] == pytest.approx(report[2], rel=1e-11, abs=1e-12)
        for got, weight in zip(result["weights"], want["weights"], strict=True):
            torch.testing.assert_close(from_bytes(got), from_bytes(weight), rtol=0, atol=1e-12)


class Loud(StepHook):
    """A metric that this rank alone reports."""

    def before_backward(self, out: StepOutput) -> StepOutput:
        metrics = {("bcc" if name == "acc" else name): pair for name, pair in out.metrics.items()}
        return replace(out, metrics=metrics)


def errors_of_a_step(groups: Groups) -> list[str]:
    """What goes wrong on one rank or on all is an error on all, and the next step is like any other."""
    draft = SmallDraft()
    placement = Replicated.over(draft, groups.world, groups.control, SETTINGS)
    core = TrainerCore(objective(draft), placement)
    good, empty = packed([sample(0, 19)]), packed([])
    before = [p.detach().clone() for p in draft.parameters()]
    first = groups.rank == 0
    broken = replace(good, features_DPF=good.features_DPF * math.nan)
    seen = []
    for parts in ([empty], [broken if first else good], [good] * (1 if first else 2)):
        try:
            core.step(parts)
        except (ValueError, FloatingPointError) as problem:
            seen.append(f"{type(problem).__name__}: {problem}")
    loud = TrainerCore(objective(draft), placement)
    if first:
        loud.register_step_hook(Loud())
    try:
        loud.step([good])
    except ValueError as problem:
        seen.append(f"{type(problem).__name__}: {problem}")
    unchanged = all(torch.equal(a, b.detach()) for a, b in zip(before, draft.parameters(), strict=True))
    seen.append(f"unchanged {unchanged}")
    core.step([good if first else empty])
    return [*seen, f"steps {core.steps}"]


@pytest.mark.parametrize("world", [2, 4])
def test_errors_are_raised_on_all_ranks_alike(ranks: RankPools, world: int) -> None:
    for seen in ranks.run(Topology(world, 1, world), "test_training_ranks:errors_of_a_step", timeout=100):
        assert len(seen) == 6
        assert seen[0].startswith("ValueError: step 0: the weights of all ranks and micro-batches sum up to 0")
        assert seen[1].startswith("FloatingPointError: step 0: loss nan")
        for problem in seen[2:4]:
            assert problem.startswith("ValueError: ranks report different metrics or numbers of micro-batches")
        assert seen[4:] == ["unchanged True", "steps 1"]


def rows_of(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(40 + rank)
    count = 3 + 4 * rank
    return torch.randn(count, 4, generator=generator, dtype=torch.float64), torch.rand(
        count, generator=generator, dtype=torch.float64
    )


def start(seed: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def train_shards(groups: Groups) -> dict[str, Any]:
    """A dense vector that all ranks hold, and one of its own on each rank, which meets the rows of all ranks."""
    world, rank = groups.world.size, groups.rank
    dense, own = start(1), start(10 + rank)
    everyones = [rows_of(r) for r in range(world)]

    def strategy(_: int) -> StepOutput:
        x, w = everyones[rank]
        value = (w * (x @ dense).square()).sum()
        # What an exchange of rows does: this rank's vector gets the gradient of all ranks' losses.
        met = sum(((w * (x @ own).square()).sum() for x, w in everyones), torch.zeros(()))
        numerator = value + met - met.detach()
        return StepOutput(numerator / w.sum(), (numerator, w.sum()))

    shares = [Share({"dense": dense}, groups.world), Share({"own": own}, Groups.single().world, groups.world)]
    placement = Replicated(shares, groups.control, SETTINGS)
    core = TrainerCore(strategy, placement, max_grad_norm=0.5)
    norms = [core.step([0]).gradient_norm for _ in range(3)]
    return {"norms": norms, "dense": to_bytes(dense), "own": to_bytes(own)}


@pytest.mark.parametrize("world", [2, 4])
def test_sharded_parameters_are_averaged_over_the_world_and_counted_once(ranks: RankPools, world: int) -> None:
    results = ranks.run(Topology(world, 1, world), "test_training_ranks:train_shards", timeout=60)
    vectors = [start(1), *(start(10 + rank) for rank in range(world))]
    adam = torch.optim.AdamW(vectors, lr=1e-2, weight_decay=0.1)
    rows = [rows_of(rank) for rank in range(world)]
    for step in range(3):
        adam.zero_grad()
        total = sum((w * sum((x @ v).square() for v in vectors)).sum() for x, w in rows)
        (total / sum(w.sum() for _, w in rows)).backward()  # type: ignore[union-attr]
        norm = clipped(vectors, 0.5)
        adam.step()
        assert all(result["norms"][step] == pytest.approx(norm, rel=1e-12) for result in results) and norm > 0.5
    for rank, result in enumerate(results):
        torch.testing.assert_close(from_bytes(result["dense"]), vectors[0].detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(from_bytes(result["own"]), vectors[1 + rank].detach(), rtol=0, atol=1e-12)
