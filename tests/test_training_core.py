"""The trainer's step on one rank: denominators, accumulation, clipping, masters, hooks and errors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from training_scene import SmallDraft, clipped, gradients, objective, packed, sample

from meshspark.models.training.core import TrainerCore
from meshspark.models.training.hooks import StepHook, StepOutput
from meshspark.models.training.packing import DraftBatch
from meshspark.models.training.placement import AdamWSettings
from meshspark.models.training.stepping import Replicated
from meshspark.parallel.groups import Groups

SAMPLES = [sample(n, length) for n, length in enumerate((19, 4, 25, 8, 13, 30))]
SETTINGS = AdamWSettings(learning_rate=1e-2, weight_decay=0.1)


def one_rank(module: nn.Module, settings: AdamWSettings = SETTINGS) -> Replicated:
    groups = Groups.single()
    return Replicated.over(module, groups.world, groups.control, settings)


def batches(cuts: Sequence[int]) -> list[DraftBatch]:
    """The samples in micro-batches, cut at these places."""
    edges = [0, *cuts, len(SAMPLES)]
    return [packed(SAMPLES[a:b], first=a) for a, b in pairwise(edges)]


def direct(steps: int, clip: float | None = None) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses, weights and norms of steps on all samples at once: plain autograd of N / D, plain AdamW."""
    draft = SmallDraft()
    adam = torch.optim.AdamW(draft.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for _ in range(steps):
        out = objective(draft)(packed(SAMPLES))
        assert out.loss_terms is not None
        adam.zero_grad()
        (out.loss_terms[0] / out.loss_terms[1]).backward()
        norms.append(clipped(list(draft.parameters()), clip))
        adam.step()
        losses.append(float(out.loss.detach()))
    return losses, {n: p.detach() for n, p in draft.named_parameters()}, norms


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("cuts", [[], [1, 2], [4, 5]])
def test_accumulated_steps_equal_one_batch(cuts: list[int], clip: float | None) -> None:
    draft = SmallDraft()
    core = TrainerCore(objective(draft), one_rank(draft), max_grad_norm=clip)
    losses, weights, norms = direct(5, clip)
    for step in range(5):
        report = core.step(batches(cuts))
        assert report.step == core.steps == step + 1
        assert report.loss == pytest.approx(losses[step], rel=1e-12)
        assert report.gradient_norm == pytest.approx(norms[step], rel=1e-10)
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=0, atol=1e-11)
    assert clip is None or norms[0] > clip


class Seen(Replicated):
    """Keeps the gradients that the optimiser would step along."""

    kept: dict[str, Tensor]

    def clip(self, max_norm: float | None) -> float:
        self.kept = {str(n): p.grad.clone() for n, p in enumerate(self.masters.values()) if p.grad is not None}
        return super().clip(max_norm)


def test_gradient_is_that_of_the_ratio_of_sums() -> None:
    """Three micro-batches whose denominators are far apart, one of them 0."""
    draft, oracle = SmallDraft(), SmallDraft()
    groups = Groups.single()
    placement = Seen.over(draft, groups.world, groups.control, SETTINGS)
    parts = [packed(SAMPLES[:1]), packed([]), packed(SAMPLES[1:], first=1)]
    report = TrainerCore(objective(draft), placement, max_grad_norm=None).step(parts)
    outs = [objective(oracle)(part) for part in (parts[0], parts[2])]
    terms = [out.loss_terms for out in outs if out.loss_terms is not None]
    (sum(n for n, _ in terms) / sum(d for _, d in terms)).backward()  # type: ignore[union-attr]
    assert report.denominator == pytest.approx(float(sum(d for _, d in terms)), rel=1e-14)
    assert isinstance(placement, Seen)
    for got, want in zip(placement.kept.values(), gradients(oracle).values(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_metrics_are_sums_divided_once() -> None:
    draft = SmallDraft()
    whole = TrainerCore(objective(draft), one_rank(draft)).step(batches([]))
    draft = SmallDraft()
    parts = TrainerCore(objective(draft), one_rank(draft)).step(batches([1, 5]))
    assert parts.metrics == pytest.approx(whole.metrics, rel=1e-12, abs=1e-13)
    assert not any(name.startswith("loss") for name in whole.metrics)


def scalar_strategy(weight: nn.Parameter) -> Callable[[float], StepOutput]:
    """Loss weight * x without terms."""
    return lambda x: StepOutput((weight * x).sum(), None, {"x": (torch.tensor(x), torch.ones(()))})


def test_without_terms_the_mean_over_micro_batches_is_differentiated() -> None:
    module = nn.Linear(1, 1, bias=False).double()
    groups = Groups.single()
    placement = Seen.over(module, groups.world, groups.control, SETTINGS)
    report = TrainerCore(scalar_strategy(module.weight), placement, max_grad_norm=None).step([1.0, 2.0, 6.0])
    assert isinstance(placement, Seen)
    assert float(placement.kept["0"]) == 3.0 and report.metrics == {"x": 3.0} and report.denominator == 3


class Noted(StepHook):
    def __init__(self, name: str, notes: list[str], extra: float = 0.0) -> None:
        self.name, self.notes, self.extra = name, notes, extra

    def before_backward(self, out: StepOutput) -> StepOutput:
        self.notes.append(f"{self.name} before")
        if not self.extra or out.loss_terms is None:
            return out
        numerator, denominator = out.loss_terms
        return replace(out, loss_terms=(numerator + denominator.detach() * self.extra * numerator, denominator))

    def on_step(self) -> dict[str, Tensor | float]:
        self.notes.append(f"{self.name} step")
        return {f"hook/{self.name}": torch.tensor(2.0)}


def test_hooks_run_in_order_and_change_what_is_differentiated() -> None:
    notes: list[str] = []
    draft = SmallDraft()
    placement = one_rank(draft)
    step = placement.step
    placement.step = lambda rate: (notes.append("optimiser"), step(rate))[1]  # type: ignore[method-assign, func-returns-value]
    core = TrainerCore(objective(draft), placement)
    core.register_step_hook(Noted("a", notes, extra=1.0))
    core.register_step_hook(Noted("b", notes))
    report = core.step(batches([3]))
    assert notes == ["a before", "b before"] * 2 + ["optimiser", "a step", "b step"]
    assert report.metrics["hook/a"] == report.metrics["hook/b"] == 2.0
    outs = [objective(SmallDraft())(part).loss_terms for part in batches([3])]
    want = sum(n * (1 + d) for n, d in outs) / sum(d for _, d in outs)  # type: ignore[misc]
    assert report.loss == pytest.approx(float(want.detach()), rel=1e-12)  # type: ignore[union-attr]


def test_errors_change_nothing() -> None:
    draft = SmallDraft()
    placement = one_rank(draft)
    core = TrainerCore(objective(draft), placement)
    before = [p.detach().clone() for p in draft.parameters()]
    with pytest.raises(ValueError, match="sum up to 0"):
        core.step([packed([]), packed([])])
    broken = batches([])[0]
    with pytest.raises(FloatingPointError, match="step 0: loss nan"):
        core.step([replace(broken, features_DPF=broken.features_DPF * math.nan)])
    with pytest.raises(ValueError, match="no micro-batches"):
        core.step([])
    for parameter, old in zip(draft.parameters(), before, strict=True):
        assert parameter.grad is None and torch.equal(parameter.detach(), old)
    assert core.steps == 0 and not placement.optimizer.state
    core.step(batches([]))
    assert core.steps == 1


def test_outputs_are_checked() -> None:
    module = nn.Linear(2, 1, bias=False)
    placement = one_rank(module)

    def wide(x: float) -> StepOutput:
        return StepOutput(module.weight.sum(), (module.weight[0] * x, torch.ones(())))

    with pytest.raises(ValueError, match=r"loss of a micro-batch has shape \[2\]"):
        TrainerCore(wide, placement).step([1.0])

    def many(x: float) -> StepOutput:
        return StepOutput(module.weight.sum(), (module.weight.sum() * x, torch.ones(2)))

    with pytest.raises(ValueError, match=r"denominator of a micro-batch has shape \[2\]"):
        TrainerCore(many, placement).step([1.0])
    one = torch.ones(())
    taken = TrainerCore(lambda x: StepOutput(module.weight.sum(), None, {"loss": (one, one)}), placement)
    with pytest.raises(ValueError, match=r"metrics \['loss'\] are the trainer's own"):
        taken.step([1.0])
    core = TrainerCore(scalar_strategy(module.weight), placement)
    for _ in range(2):
        core.register_step_hook(Noted("same", []))
    with pytest.raises(ValueError, match="metric hook/same of Noted has the name of another"):
        core.step([1.0])
    with pytest.raises(ValueError, match="max_grad_norm is 0"):
        TrainerCore(wide, placement, max_grad_norm=0)
    with pytest.raises(ValueError, match="nothing to train"):
        one_rank(module.requires_grad_(False))


def test_masters_are_fp32_beside_narrow_parameters() -> None:
    """Steps too small for bfloat16 add up in the masters; gradients of micro-batches add up in FP32."""
    module = nn.Linear(3, 1, bias=False).bfloat16()
    oracle = nn.Parameter(module.weight.detach().float())
    adam = torch.optim.AdamW([oracle], lr=1e-5, weight_decay=0.1)
    placement = one_rank(module, AdamWSettings(learning_rate=1e-5, weight_decay=0.1))
    xs = [1.0, 2.0**-9, 2.0**-9]

    def strategy(x: float) -> StepOutput:
        return StepOutput(module.weight.sum(), (module.weight.sum() * x, torch.ones(())))

    core = TrainerCore(strategy, placement, max_grad_norm=None)
    for _ in range(30):
        core.step(xs)
        # Each micro-batch's own gradient is rounded to bfloat16, their sum is not.
        oracle.grad = torch.full_like(oracle, sum(float(torch.tensor(x / 3).bfloat16()) for x in xs))
        adam.step()
    master = placement.masters["weight"]
    assert master.dtype == torch.float32 and master is not module.weight
    torch.testing.assert_close(master.detach(), oracle.detach(), rtol=0, atol=1e-7)
    assert torch.equal(module.weight.detach(), master.detach().bfloat16())
    assert not torch.equal(module.weight.detach().float(), master.detach())


def test_learning_rate_is_a_function_of_the_step() -> None:
    module = nn.Linear(1, 1, bias=False)
    placement = one_rank(module)
    rates = []
    core = TrainerCore(scalar_strategy(module.weight), placement, learning_rate=lambda step: 0.5 / (step + 1))
    for _ in range(2):
        core.step([1.0])
        rates.append(placement.optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.25]


def test_a_parameter_without_gradient_is_decayed_like_one_with_a_zero_gradient() -> None:
    module = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    core = TrainerCore(scalar_strategy(module[0].weight), one_rank(module))  # type: ignore[arg-type]
    before = float(module[1].weight)  # type: ignore[arg-type]
    core.step([1.0])
    assert float(module[1].weight) == pytest.approx(before * (1 - 1e-2 * 0.1))  # type: ignore[arg-type]


def test_loss_falls() -> None:
    draft = SmallDraft()
    core = TrainerCore(objective(draft), one_rank(draft, AdamWSettings(learning_rate=5e-2)))
    losses = [core.step(batches([3])).loss for _ in range(12)]
    assert losses[-1] < 0.85 * losses[0]
