"""Which part of every tensor a rank holds, and the weights as one rank holds them."""

from collections.abc import Mapping
from math import prod

import torch

from ...parallel.ownership import expert_slice, output_group_slice, vocab_slice
from ...parallel.topology import Topology
from ..numerics import Numerics
from ..v4.config import V4Config
from .names import TensorSpec, held_table


class RankWeights(dict[str, torch.Tensor]):
    """The target's weights by name as one rank of one topology holds them.

    Routed experts are stacked: layers.{l}.ffn.experts.w1.weight is [local experts, I, H], w3 likewise, w2
    [local experts, H, I]. wo_a holds the rows of the rank's output groups, wo_b their columns, head its rows of
    the vocabulary; everything else is whole. Scales are applied.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        topology: Topology,
        rank: int,
        *,
        notes: tuple[str, ...] = (),
        log: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(tensors)
        self.topology = topology
        self.rank = rank
        self.notes = notes
        self.log = log

    def require(self, topology: Topology, rank: int) -> None:
        """ValueError naming both if these weights were made for another topology or rank."""
        topology.require_same(self.topology, "the loaded share")
        if rank != self.rank:
            raise ValueError(f"the loaded share was built for rank {self.rank}, but is used on rank {rank}")


def check_topology(config: V4Config, topology: Topology) -> None:
    """ValueError unless the topology divides the model."""
    topology.check_model(config.o_groups, config.vocab_size, config.n_routed_experts)


def held_slices(spec: TensorSpec, config: V4Config, topology: Topology, rank: int) -> tuple[slice, ...] | None:
    """Logical index ranges of the tensor that the rank holds, one per dim; None for a foreign expert."""
    at = topology.coordinates(rank)
    whole = tuple(slice(0, size) for size in spec.shape)
    if spec.expert is not None:
        mine = expert_slice(at.ep_rank, topology.ep, config.n_routed_experts)
        return whole if mine.start <= spec.expert < mine.stop else None
    if spec.shard == "vocab":
        return (vocab_slice(at.tp_rank, topology.tp, config.vocab_size), *whole[1:])
    groups = output_group_slice(at.tp_rank, topology.tp, config.o_groups)
    if spec.shard == "group_rows":
        return (_scaled(groups, config.o_lora_rank), whole[1])
    if spec.shard == "group_columns":
        return (whole[0], _scaled(groups, config.o_lora_rank))
    return whole


def held_dtype(spec: TensorSpec, numerics: Numerics) -> torch.dtype:
    """Dtype in which a rank holds the tensor."""
    return {"matmul": numerics.activation, "wide": numerics.accumulation, "ids": torch.int64}[spec.role]


def shard_weights(weights: Mapping[str, torch.Tensor], topology: Topology, rank: int, config: V4Config) -> RankWeights:
    """One rank's own copy of its share of full weights (world 1): what loading them from a file would give."""
    check_topology(config, topology)
    share: dict[str, torch.Tensor] = {}
    for name, specs in held_table(config).items():
        held = [held_slices(spec, config, topology, rank) for spec in specs]
        if specs[0].shard == "experts":
            mine = [index for index, slices in enumerate(held) if slices is not None]
            share[name] = weights[name][mine[0] : mine[-1] + 1].clone()
        else:
            slices = held[0]
            assert slices is not None, name
            share[name] = weights[name][slices].clone(memory_format=torch.contiguous_format)
    return RankWeights(share, topology, rank)


def share_bytes(config: V4Config, topology: Topology, rank: int, numerics: Numerics) -> int:
    """Bytes of the rank's weights in the numerics' dtypes."""
    total = 0
    for specs in held_table(config).values():
        for spec in specs:
            slices = held_slices(spec, config, topology, rank)
            if slices is not None:
                total += prod(s.stop - s.start for s in slices) * held_dtype(spec, numerics).itemsize
    return total


def _scaled(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)
