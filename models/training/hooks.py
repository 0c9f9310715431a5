"""What a training step reports, and the hooks that see it (training.md 3.3).

A strategy turns a micro-batch into a `StepOutput`. Hooks are registered at the trainer once and run in that order:
`before_backward` for every micro-batch, `on_step` after every step of the optimiser.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class StepOutput:
    """What one micro-batch gives.

    Attributes:
        loss: this rank's own mean, a scalar. It is what is differentiated where `loss_terms` is None.
        loss_terms: (N, D), numerator with its graph and denominator, scalars; the trainer then differentiates N and
            divides by the D of all ranks and micro-batches of the step (training.md 7.6). None without such a pair.
        metrics: by name a numerator and a denominator, detached, of one shape or broadcast against each other; they
            are summed over micro-batches and ranks and divided once.
    """

    loss: Tensor
    loss_terms: tuple[Tensor, Tensor] | None = None
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class StepHook:
    """Takes part in a step without the trainer knowing in what: override what is needed."""

    def before_backward(self, out: StepOutput) -> StepOutput:
        """The output that is differentiated instead of `out`; it is frozen, so use `dataclasses.replace`."""
        return out

    def on_step(self) -> dict[str, Tensor | float]:
        """Called after the optimiser's step, on every rank; its values join the metrics of the step."""
        return {}
