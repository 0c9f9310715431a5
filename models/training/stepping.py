"""Stepped: the trainer's placement over parts, whatever they are; and the plainest of all placements."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ...comm.collectives import all_reduce_rows
from ...parallel.group import Group
from .parts import Part, Share, WholePart, gradient_of
from .placement import AdamWSettings

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


class Stepped:
    """Implements `Placement` over parts. masters: by name; optimizer: over all of them.

    sums: a CPU group over all ranks.
    """

    def __init__(self, parts: Sequence[Part], sums: Group, make_optimizer: MakeOptimizer) -> None:
        self.parts, self.sums, self.world = tuple(parts), sums, sums.size
        self.masters = {name: master for part in parts for name, master in part.masters.items()}
        self.optimizer = make_optimizer(list(self.masters.values()))

    def micro_step(self, last: bool) -> AbstractContextManager[None]:
        """No different for the last: what is reduced in a backward pass is so in every one, the rest in `reduce`."""
        for part in self.parts:
            part.begin()
        return nullcontext()

    def accumulate(self, last: bool) -> None:
        for part in self.parts:
            part.accumulate()

    def reduce(self) -> None:
        for part in self.parts:
            part.reduce()

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for master in self.masters.values():
            gradient_of(master).mul_(factor)

    @torch.no_grad()
    def clip(self, max_norm: float | None) -> float:
        """Squares add up in FP64, each element once: replicas are not counted again, shards are added."""
        total = 0.0
        for part in self.parts:
            squares = [gradient_of(master).double().square().sum() for master in part.masters.values()]
            square = torch.stack(squares).sum().reshape(1)
            for group in part.norm_groups:
                square = all_reduce_rows(square, group, stage="gradient_norm")
            total += float(square)
        norm = total**0.5
        if max_norm is not None and norm > max_norm:
            self.scale(max_norm / norm)
        return norm

    @torch.no_grad()
    def step(self, learning_rate: float | None) -> None:
        if learning_rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
        self.optimizer.step()
        for part in self.parts:
            part.publish()
            part.zero()

    def zero(self) -> None:
        """Also after a forward or backward pass that failed halfway."""
        for part in self.parts:
            part.zero()


class Replicated(Stepped):
    """Whole parameters on every rank in the dtypes that they have, gradients summed at the end of a step.

    A parameter without gradient counts as one with a zero gradient on all ranks, whatever the others have. Parameters
    that need no gradient are left alone.
    """

    def __init__(self, shares: Sequence[Share], sums: Group, settings: AdamWSettings) -> None:
        trained = [
            Share({n: p for n, p in share.parameters.items() if p.requires_grad}, share.replicas, share.shards)
            for share in shares
        ]
        kept = [share for share in trained if share.parameters]
        if not kept:
            raise ValueError("no parameter needs a gradient: there is nothing to train")
        parts = [WholePart(share, {n: p.dtype for n, p in share.parameters.items()}) for share in kept]
        super().__init__(parts, sums, adamw(settings))

    @classmethod
    def over(cls, module: nn.Module, world: Group, sums: Group, settings: AdamWSettings) -> "Replicated":
        """Of a module that every rank of the world holds whole."""
        return cls([Share(dict(module.named_parameters()), world)], sums, settings)


def adamw(settings: AdamWSettings) -> MakeOptimizer:
    """torch's AdamW with these numbers."""
    return lambda masters: torch.optim.AdamW(
        masters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
