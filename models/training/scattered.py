"""ScatteredPart: whole parameters on every rank, whose gradients are reduce-scattered as soon as backward has them.

What a full shard keeps outside of its units: heads that are used beside the module's forward, projections and norms
around the layers, parameters that stay FP32 inside units of a narrower dtype. No more than one of their gradients is
whole at a time; masters and moments are divided over the ranks as in units.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ...comm.collectives import all_gather_rows, reduce_scatter_rows
from .parts import Share, gather_shards, master_dtype


class _Held:
    """One parameter, and this rank's slice of its flat, padded master."""

    def __init__(self, parameter: nn.Parameter, share: Share, compute: torch.dtype) -> None:
        self.parameter, self.share, self.compute = parameter, share, compute
        replicas = share.replicas
        self.slice = -(-parameter.numel() // replicas.size)
        wide = master_dtype(parameter)
        flat = self._padded(parameter.detach(), wide)
        start = replicas.rank * self.slice
        # A rank alone steps the parameter itself, unless that is narrower.
        own = flat[start : start + self.slice]
        self.alias = replicas.size == 1 and compute == parameter.dtype and own.data_ptr() == parameter.data_ptr()
        self.master = nn.Parameter(own if self.alias else own.clone())
        if not self.alias:
            parameter.data = parameter.data.to(compute)
        parameter.register_post_accumulate_grad_hook(self._scatter)

    def _padded(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        flat = value.reshape(-1).to(dtype)
        beyond = self.slice * self.share.replicas.size - flat.numel()
        return torch.cat([flat, flat.new_zeros(beyond)]) if beyond else flat

    def begin(self) -> None:
        if self.master.grad is None:
            self.master.grad = torch.zeros_like(self.master)

    @torch.no_grad()
    def _scatter(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.begin()
        assert self.master.grad is not None
        flat = self._padded(parameter.grad, self.master.dtype)
        parameter.grad = None
        self.master.grad += reduce_scatter_rows(flat, self.share.replicas, stage="gradients")

    def gather(self, value: Tensor) -> Tensor:
        flat = all_gather_rows(value, self.share.replicas, stage="parameters")
        return flat[: self.parameter.numel()].view_as(self.parameter)


class ScatteredPart:
    """Parameters of a share, each by itself. Masters are flat slices under the parameters' names.

    Every rank's backward pass reaches the same parameters, or none does; an objective that learns nothing of a batch
    multiplies with zero.
    """

    def __init__(self, share: Share, compute: Mapping[str, torch.dtype]) -> None:
        self.share = share
        self._held = {name: _Held(p, share, compute[name]) for name, p in share.parameters.items()}
        self.masters = {name: held.master for name, held in self._held.items()}
        self.norm_groups = share.groups

    def begin(self) -> None:
        for held in self._held.values():
            held.begin()

    def accumulate(self) -> None:
        """Nothing: hooks have reduced and added up."""

    @torch.no_grad()
    def reduce(self) -> None:
        for held in self._held.values():
            assert held.master.grad is not None, "a micro-batch begins before its gradients are reduced"
            held.master.grad /= self.share.world

    @torch.no_grad()
    def publish(self) -> None:
        for held in self._held.values():
            if not held.alias:
                held.parameter.copy_(held.gather(held.master.detach().to(held.compute)))

    def zero(self) -> None:
        for held in self._held.values():
            held.parameter.grad = held.master.grad = None

    @torch.no_grad()
    def whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, held in self._held.items():
            yield name, gather_shards(held.gather(held.master.detach()), self.share)
