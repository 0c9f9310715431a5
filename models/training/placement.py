"""What the trainer's step asks of a placement: where parameters, gradients and the optimiser's state live.

`TrainerCore` runs the same step over any of them (training.md 7.6, 9.1); placed.py makes them.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from ...parallel.group import Group


class Placement(Protocol):
    """What the trainer's step asks of a placement. All ranks call all of it in the same order.

    world: ranks over which `reduce` averages, which are those that split the batch. sums: a CPU group over the same
    ranks, for denominators and metrics.
    """

    world: int
    sums: Group

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; `last` is that before the optimiser's step."""

    def accumulate(self, last: bool) -> None:
        """After the backward pass of a micro-batch: take its gradients."""

    def reduce(self) -> None:
        """Make the gradients the means over all ranks, as far as backward passes have not done so."""

    def scale(self, factor: float) -> None:
        """Multiply the gradients."""

    def clip(self, max_norm: float | None) -> float:
        """The norm of the whole gradient, alike on all ranks; above max_norm gradients are scaled to it."""

    def step(self, learning_rate: float | None) -> None:
        """Step the optimiser (None: its own learning rate) and drop the gradients."""

    def zero(self) -> None:
        """Drop the gradients."""


@dataclass(frozen=True)
class AdamWSettings:
    """torch.optim.AdamW's numbers."""

    learning_rate: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
