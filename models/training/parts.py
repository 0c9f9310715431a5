"""Parts of a placement: parameters that are held one way, with the masters that the optimiser steps.

A master is what the optimiser sees: FP32 or wider, whole or this rank's shard, with a gradient once a step. Parameters
in a narrower compute dtype are copies of masters.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ...comm.collectives import all_gather_rows, all_reduce_rows
from ...parallel.group import Group
from ..drafts.wide import WideParameters

BUCKET_ELEMENTS = 1 << 23
"""Elements that are reduced at once: what a reduction needs beside the gradients themselves."""


@dataclass(frozen=True, eq=False)
class Share:
    """Parameters by name that the ranks of `replicas` hold alike, and those of `shards` each a part of.

    Dense parameters: replicas is the world and shards None. Experts over an expert group: shards is that group and
    replicas the ranks with the same experts. Their gradients hold what all ranks of `shards` sent them, so that the
    sum over the replicas is that over the world, as with dense ones.
    """

    parameters: Mapping[str, nn.Parameter]
    replicas: Group
    shards: Group | None = None

    @property
    def world(self) -> int:
        """Ranks over which gradients are averaged."""
        return self.replicas.size * (1 if self.shards is None else self.shards.size)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Replicas first, then the shards where there are any."""
        return (self.replicas,) if self.shards is None else (self.replicas, self.shards)


class Part(Protocol):
    """One way to hold parameters. All ranks call all of it in the same order.

    masters: by name, what the optimiser steps. norm_groups: over which squares of masters' gradients add up, so that
    each element counts once.
    """

    masters: dict[str, nn.Parameter]
    norm_groups: tuple[Group, ...]

    def begin(self) -> None:
        """Before a micro-batch: make room for what its backward pass adds up."""

    def accumulate(self) -> None:
        """Take the gradients of a micro-batch."""

    def reduce(self) -> None:
        """Give every master its gradient: the mean over all ranks, of zeros where nobody had one."""

    def publish(self) -> None:
        """Bring stepped masters to the parameters."""

    def zero(self) -> None:
        """Drop all gradients."""

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole values in the masters' dtype, one after the other, on every rank. Collective."""


def wide_names(module: nn.Module) -> set[str]:
    """Names of parameters that stay FP32 whatever the compute dtype: mixing of streams, sinks."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in module.named_modules()
        if isinstance(owner, WideParameters)
        for name in owner.wide
    }


def master_dtype(parameter: Tensor) -> torch.dtype:
    """FP32, or the parameter's own dtype where that is wider."""
    return torch.promote_types(parameter.dtype, torch.float32)


def gather_shards(value: Tensor, share: Share) -> Tensor:
    """A tensor of which the ranks of `shards` hold the rows one after the other, whole."""
    if share.shards is None:
        return value
    return all_gather_rows(value.detach(), share.shards, stage="whole_parameters")


class WholePart:
    """Whole parameters on every rank of `replicas`; gradients add up locally and are reduced once, at the step.

    Masters are the parameters themselves where the compute dtype is theirs, copies otherwise, made before the cast.
    """

    def __init__(self, share: Share, compute: Mapping[str, torch.dtype]) -> None:
        self.share = share
        self.masters = {name: _master(p, compute[name]) for name, p in share.parameters.items()}
        self.norm_groups = share.groups[1:]
        self._pairs = [(parameter, self.masters[name]) for name, parameter in share.parameters.items()]

    def begin(self) -> None:
        """Nothing: gradients come whole, once a backward pass is over."""

    @torch.no_grad()
    def accumulate(self) -> None:
        for parameter, master in self._pairs:
            if parameter is master or parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad += parameter.grad
            parameter.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        gradients = [gradient_of(master) for master in self.masters.values()]
        for bucket in buckets(gradients):
            self._average(bucket)

    def _average(self, bucket: Sequence[Tensor]) -> None:
        if self.share.replicas.size > 1:
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            flat = all_reduce_rows(flat, self.share.replicas, stage="gradients")
            for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))
        for gradient in bucket:
            gradient.div_(self.share.world)

    @torch.no_grad()
    def publish(self) -> None:
        for parameter, master in self._pairs:
            if parameter is not master:
                parameter.copy_(master)

    def zero(self) -> None:
        for pair in self._pairs:
            for tensor in pair:
                tensor.grad = None

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self.masters.items():
            yield name, gather_shards(master.detach(), self.share)


def gradient_of(master: Tensor) -> Tensor:
    """The gradient that `reduce` gave."""
    assert master.grad is not None, "reduce gives every master a gradient"
    return master.grad


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one dtype, of at most BUCKET_ELEMENTS each but for a tensor that is larger."""
    bucket: list[Tensor] = []
    used = 0
    for tensor in tensors:
        if bucket and (used + tensor.numel() > BUCKET_ELEMENTS or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, used = [], 0
        bucket.append(tensor)
        used += tensor.numel()
    if bucket:
        yield bucket


def _master(parameter: nn.Parameter, compute: torch.dtype) -> nn.Parameter:
    wide = master_dtype(parameter)
    if compute == wide == parameter.dtype:
        return parameter
    master = nn.Parameter(parameter.detach().to(wide, copy=True))
    parameter.data = parameter.data.to(compute)
    return master
