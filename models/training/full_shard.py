"""Full shard: torch's fully_shard over our groups, and the part of a placement that it makes.

Each unit gathers its parameters before its forward and its backward and frees them behind; its gradients are
reduce-scattered in every micro-step, in FP32 at least, and add up sharded (training.md 9.1, FULL_SHARD). The exchanges
are those of `comm.collectives`: sums from rank 0 on, typed errors, the ledger.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor, Shard

from ...comm.collectives import all_gather_rows, reduce_scatter_rows
from ...parallel.group import Group
from .parts import Share, gather_shards


class _Comm:
    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _GatherRows(_Comm, AllGather):
    """fully_shard's gather over one of our groups. The input is a view of the output, which not every way of moving
    rows takes."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        all_gather_rows(input_tensor.clone(), self._group, stage="unit_parameters", out=output_tensor)


class _ScatterSums(_Comm, ReduceScatter):
    """fully_shard's reduce-scatter over one of our groups; it divides by the ranks itself."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"the reduction of a unit is {op}, allowed: SUM")
        reduce_scatter_rows(input_tensor, self._group, stage="unit_gradients", out=output_tensor)


def mesh_of(group: Group) -> DeviceMesh:
    """The ranks of a group of several as a one-dimensional mesh; makes no process group."""
    assert group.process_group is not None, "a group of one shards nothing"
    return DeviceMesh.from_group(group.process_group, torch.device(group.device).type, mesh_dim_names=(group.name,))


def shard_module(
    module: nn.Module,
    group: Group,
    held: set[nn.Parameter],
    compute_dtype: torch.dtype | None,
    reshard_after_forward: bool,
) -> FSDPModule:
    """Make `module` a unit over `group`, in place: those of its parameters that are in `held` and in no unit inside it.

    Inputs are not cast: what layers hand on may be FP32 on purpose. A parameter whose rows do not divide by the ranks
    is sharded along another dim, if one divides.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=None if compute_dtype is None else torch.promote_types(compute_dtype, torch.float32),
        cast_forward_inputs=False,
    )

    def placement(parameter: nn.Parameter) -> Shard | None:
        fitting = [dim for dim, size in enumerate(parameter.shape) if size % group.size == 0]
        return Shard(fitting[0]) if fitting else None

    unit: FSDPModule = fully_shard(
        module,
        mesh=mesh_of(group),
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=placement,
        mp_policy=policy,
        ignored_params=set(module.parameters()) - held,
    )
    unit.set_custom_all_gather(_GatherRows(group))
    unit.set_custom_reduce_scatter(_ScatterSums(group))
    unit.set_force_sum_reduction_for_comms(True)
    # Reduce-scatter in every micro-step, also of parameters that this rank alone did not use.
    unit.set_requires_gradient_sync(True, recurse=False)
    unit.set_reshard_after_backward(True, recurse=False)
    unit.set_reduce_scatter_unused_params(True, recurse=False)
    return unit


class UnitPart:
    """Parameters that `shard_module` sharded over `replicas`. Masters are their local shards, sharing memory.

    fully_shard averages over the replicas; experts over an expert group need the factor 1 / ep beside it, for their
    gradients hold the tokens of the whole group (training.md 7.6).
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self.norm_groups = share.groups
        self.masters = {name: nn.Parameter(_local(p).detach()) for name, p in share.parameters.items()}

    def begin(self) -> None:
        """Sharded gradients, so that the first micro-batch needs as much memory as any other."""
        for parameter in self.share.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def accumulate(self) -> None:
        """Nothing: the backward pass has reduced and added up."""

    @torch.no_grad()
    def reduce(self) -> None:
        for name, parameter in self.share.parameters.items():
            master = self.masters[name]
            assert parameter.grad is not None, "a micro-batch begins before its gradients are reduced"
            master.grad = _local(parameter.grad)
            if self.share.shards is not None:
                master.grad /= self.share.shards.size

    def publish(self) -> None:
        """Nothing: parameters are masters, and units gather them anew."""

    def zero(self) -> None:
        for name, parameter in self.share.parameters.items():
            parameter.grad = self.masters[name].grad = None

    @torch.no_grad()
    def whole(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.share.parameters.items():
            assert isinstance(parameter, DTensor)
            yield name, gather_shards(parameter.full_tensor(), self.share)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
