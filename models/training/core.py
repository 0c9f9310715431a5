"""TrainerCore: one step of the optimiser from micro-batches, over any placement (training.md 3.3, 7.6).

The gradient is that of (the sum of all numerators) / (the sum of all denominators), over all ranks and micro-batches
of the step: the mean over what is learned, however it is distributed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .hooks import StepHook, StepOutput
from .metrics import Pairs, add_pairs, divided, pool_pairs
from .placement import Placement

M = TypeVar("M")

LOSS, MEAN, COUNT = "loss", "loss/mean", "loss/micro_batches"


@dataclass(frozen=True)
class StepReport:
    """What a step came to, alike on all ranks but for what hooks add on their own.

    step: number of steps taken, this one included; loss: the value that was differentiated; denominator: the sum of
    all weights, or of micro-batches without loss_terms; gradient_norm: before clipping; metrics: by name.
    """

    step: int
    loss: float
    denominator: float
    gradient_norm: float
    metrics: dict[str, float]


class TrainerCore(Generic[M]):
    """Runs steps. `strategy` makes the StepOutput of a micro-batch; everything about ranks is the placement's.

    learning_rate: by step from 0, None for the placement's own. `steps` is the number of steps taken and may be set
    where a run is resumed.
    """

    def __init__(
        self,
        strategy: Callable[[M], StepOutput],
        placement: Placement,
        *,
        max_grad_norm: float | None = 1.0,
        learning_rate: Callable[[int], float] | None = None,
    ) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm is {max_grad_norm}, allowed: above 0, or None for no clipping")
        self.strategy, self.placement = strategy, placement
        self.max_grad_norm, self.learning_rate = max_grad_norm, learning_rate
        self.steps = 0
        self._hooks: list[StepHook] = []

    def register_step_hook(self, hook: StepHook) -> None:
        """Add a hook behind those that are registered. All ranks register the same ones, before the first step."""
        self._hooks.append(hook)

    def step(self, micro_batches: Sequence[M]) -> StepReport:
        """One step of the optimiser; every rank gives as many micro-batches, some may learn nothing.

        Raises on all ranks alike, before anything is changed: ValueError if nothing is learned on any rank or ranks
        disagree about their micro-batches or metrics, FloatingPointError if the loss or the gradient is not finite.
        """
        if not micro_batches:
            raise ValueError("no micro-batches: a rank without samples gives batches that learn nothing")
        placement, count = self.placement, len(micro_batches)
        try:
            pairs = [self._backward(batch, count, last=m == count - 1) for m, batch in enumerate(micro_batches)]
            pooled = self._pooled(pairs, count)
            loss, denominator = self._normalise(pooled, count)
            norm = placement.clip(self.max_grad_norm)
            if not (math.isfinite(norm) and math.isfinite(loss)):
                raise FloatingPointError(f"step {self.steps}: loss {loss}, norm of the gradient {norm}")
        except BaseException:
            placement.zero()
            raise
        placement.step(None if self.learning_rate is None else self.learning_rate(self.steps))
        self.steps += 1
        return StepReport(self.steps, loss, denominator, norm, self._metrics(pooled))

    def _backward(self, batch: M, count: int, last: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """Differentiate a micro-batch; its metrics, with what the step's loss is made of beside them."""
        with self.placement.micro_step(last):
            out = self.strategy(batch)
            for hook in self._hooks:
                out = hook.before_backward(out)
            numerator, denominator = (out.loss, None) if out.loss_terms is None else out.loss_terms
            for name, value in (("loss", numerator), ("denominator", denominator)):
                if value is not None and value.numel() != 1:
                    raise ValueError(f"{name} of a micro-batch has shape {list(value.shape)}, needed: one number")
            (numerator / count).backward()
        self.placement.accumulate(last)
        own: Pairs = {LOSS: (numerator, torch.ones(()) if denominator is None else denominator)}
        if denominator is None:
            own = {MEAN: own[LOSS]}
        if clash := {LOSS, MEAN, COUNT} & set(out.metrics):
            raise ValueError(f"metrics {sorted(clash)} are the trainer's own names")
        return add_pairs([{**out.metrics, **own}])

    def _pooled(self, pairs: Sequence[Pairs], count: int) -> dict[str, tuple[Tensor, Tensor]]:
        # The count is part of a name, so that ranks that disagree about it are found with those about metrics.
        one = torch.ones((), dtype=torch.float64)
        return pool_pairs({**add_pairs(pairs), f"{COUNT}={count}": (one, one)}, self.placement.sums)

    def _normalise(self, pooled: dict[str, tuple[Tensor, Tensor]], count: int) -> tuple[float, float]:
        """Average the gradients and scale them to the step's mean: (loss, denominator)."""
        del pooled[f"{COUNT}={count}"]
        terms = LOSS in pooled
        numerator, total = (float(part) for part in pooled.pop(LOSS if terms else MEAN))
        if not total > 0:
            raise ValueError(f"step {self.steps}: the weights of all ranks and micro-batches sum up to {total}")
        self.placement.reduce()
        if terms:
            self.placement.scale(self.placement.world * count / total)
        return numerator / total, total

    def _metrics(self, pooled: Pairs) -> dict[str, float]:
        metrics = divided(pooled)
        for hook in self._hooks:
            for name, value in hook.on_step().items():
                if name in metrics:
                    raise ValueError(f"metric {name} of {type(hook).__name__} has the name of another")
                metrics[name] = float(value)
        return metrics
