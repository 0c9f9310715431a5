"""Which rank takes which sample when: one shuffled row of samples per epoch, dealt out over steps and ranks.

Everything follows from the number of the step, so that a run that is resumed, or whose features come from other
ranks, needs no state: the samples of a step are the same however many ranks and micro-batches share them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .anchors import sample_generator

SHUFFLE = (1 << 64) - 1
"""In the place of a sample's number: the generator that shuffles an epoch."""


@dataclass(frozen=True)
class Draw:
    """A sample in an epoch."""

    sample: int
    epoch: int


class DataOrder:
    """Samples of micro-batches. Epochs follow each other without a gap, within a step too."""

    def __init__(self, samples: int, ranks: int, batch: int = 1, accumulate: int = 1, seed: int = 0) -> None:
        """batch: samples of a rank's micro-batch; accumulate: micro-batches of a rank's step."""
        given = {"samples": samples, "ranks": ranks, "batch": batch, "accumulate": accumulate}
        for name, value in given.items():
            if value < 1:
                raise ValueError(f"{name} is {value}, allowed: 1 or more")
        self.samples, self.ranks, self.batch, self.accumulate, self.seed = samples, ranks, batch, accumulate, seed
        self._shuffled: dict[int, list[int]] = {}

    @property
    def step_samples(self) -> int:
        """Samples of a step, over all ranks and micro-batches."""
        return self.ranks * self.batch * self.accumulate

    def micro_batch(self, step: int, micro: int, rank: int) -> list[Draw]:
        """What a rank takes."""
        first = step * self.step_samples + (micro * self.ranks + rank) * self.batch
        return [self._draw(place) for place in range(first, first + self.batch)]

    def _draw(self, place: int) -> Draw:
        epoch, within = divmod(place, self.samples)
        if epoch not in self._shuffled:
            # A step may reach into the next epoch; earlier ones do not come again.
            self._shuffled = {n: order for n, order in self._shuffled.items() if n >= epoch - 1}
            generator = sample_generator(self.seed, epoch, SHUFFLE)
            self._shuffled[epoch] = torch.randperm(self.samples, generator=generator).tolist()
        return Draw(self._shuffled[epoch][within], epoch)


def generators(draws: Sequence[Draw], seed: int) -> list[torch.Generator]:
    """What draws the anchors of these samples."""
    return [sample_generator(seed, draw.epoch, draw.sample) for draw in draws]
