"""FlatPart: whole parameters on every rank, gradients and what the optimiser keeps divided over the ranks.

Parameters of one dtype lie one after the other in flat buckets, padded to a multiple of the ranks; each rank keeps the
master of its slice. Micro-batches add up in the whole flat bucket, which is reduce-scattered once a step and freed, so
that a slice may cross parameters and no rank needs to own some. training.md 9.1, SHARD_GRAD_OP.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ...comm.collectives import all_gather_rows, reduce_scatter_rows
from ...parallel.group import Group
from .parts import Share, buckets, gather_shards, master_dtype


class _Bucket:
    def __init__(self, parameters: Mapping[str, nn.Parameter], replicas: Group, compute: torch.dtype) -> None:
        self.parameters, self.replicas = dict(parameters), replicas
        self.sizes = [p.numel() for p in parameters.values()]
        self.slice = -(-sum(self.sizes) // replicas.size)
        self.sum: Tensor | None = None
        first = next(iter(self.parameters.values()))
        self.dtype, self.device = master_dtype(first), first.device
        self.compute = compute
        flat = self.empty()
        with torch.no_grad():
            for parameter, part in zip(self.parameters.values(), self.split(flat), strict=True):
                part.copy_(parameter.reshape(-1))
        start = replicas.rank * self.slice
        self.master = nn.Parameter(flat[start : start + self.slice].clone())
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(compute)

    def empty(self) -> Tensor:
        return torch.zeros(self.slice * self.replicas.size, dtype=self.dtype, device=self.device)

    def split(self, flat: Tensor) -> tuple[Tensor, ...]:
        return flat[: sum(self.sizes)].split(self.sizes)

    def accumulate(self) -> None:
        if self.sum is None:
            self.sum = self.empty()
        for parameter, part in zip(self.parameters.values(), self.split(self.sum), strict=True):
            if parameter.grad is not None:
                part += parameter.grad.reshape(-1)
                parameter.grad = None

    def reduce(self, world: int) -> None:
        total = self.empty() if self.sum is None else self.sum
        self.sum = None
        self.master.grad = reduce_scatter_rows(total, self.replicas, stage="gradients").div_(world)

    def publish(self) -> None:
        flat = all_gather_rows(self.master.detach().to(self.compute), self.replicas, stage="parameters")
        for parameter, part in zip(self.parameters.values(), self.split(flat), strict=True):
            parameter.copy_(part.view_as(parameter))


class FlatPart:
    """Parameters of a share in flat buckets. Masters are this rank's slices, named by bucket."""

    def __init__(self, share: Share, compute: Mapping[str, torch.dtype], prefix: str) -> None:
        self.share = share
        self.norm_groups = share.groups
        self._buckets: dict[str, _Bucket] = {}
        for dtype in sorted({compute[name] for name in share.parameters}, key=str):
            of_dtype = {name: p for name, p in share.parameters.items() if compute[name] == dtype}
            names = {id(p): name for name, p in of_dtype.items()}
            for bucket in buckets(list(of_dtype.values())):
                key = f"{prefix}.bucket{len(self._buckets)}"
                own = {names[id(p)]: of_dtype[names[id(p)]] for p in bucket}
                self._buckets[key] = _Bucket(own, share.replicas, dtype)
        self.masters = {key: bucket.master for key, bucket in self._buckets.items()}

    def begin(self) -> None:
        """Nothing: gradients come whole, once a backward pass is over."""

    @torch.no_grad()
    def accumulate(self) -> None:
        for bucket in self._buckets.values():
            bucket.accumulate()

    @torch.no_grad()
    def reduce(self) -> None:
        for bucket in self._buckets.values():
            bucket.reduce(self.share.world)

    @torch.no_grad()
    def publish(self) -> None:
        for bucket in self._buckets.values():
            bucket.publish()

    def zero(self) -> None:
        for bucket in self._buckets.values():
            bucket.sum = bucket.master.grad = None
            for parameter in bucket.parameters.values():
                parameter.grad = None

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self._buckets.values():
            flat = all_gather_rows(bucket.master.detach(), self.share.replicas, stage="whole_parameters")
            for (name, parameter), part in zip(bucket.parameters.items(), bucket.split(flat), strict=True):
                yield name, gather_shards(part.view_as(parameter).clone(), self.share)
