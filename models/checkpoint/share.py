"""Which part of every tensor a rank holds, and the weights as one rank holds them."""

from collections.abc import Mapping
from math import prod

import torch

from ...parallel.ownership import expert_slice, output_group_slice, vocab_slice
from ...parallel.topology import Topology
from ..numerics import Numerics
from ..v4.config import V4Config
from .forms import SCALE_BYTES, is_int8, is_narrowed, scale_key
from .names import TensorSpec, held_table


class RankWeights(dict[str, torch.Tensor]):
    """Weights by name as one rank of one topology holds them: the target's, and its drafter's if it was asked for.

    Routed experts are stacked: layers.{l}.ffn.experts.w1.weight is [local experts, I, H], w3 likewise, w2
    [local experts, H, I]. wo_a holds the rows of the rank's output groups, wo_b their columns, head its rows of
    the vocabulary; everything else is whole. mtp.* is held as the layers are, its heads whole. Scales are applied, but
    for numerics w8a8: there an INT8 weight is its codes, and beside it, under the key with .scale instead of .weight,
    stand the FP32 scales of its output channels, [O] or of stacked experts [local experts, O]. A channel of wo_b is
    the whole row over all output groups.
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

    @property
    def is_quantised(self) -> bool:
        """Whether these are weights of numerics w8a8."""
        return any(tensor.dtype == torch.int8 for tensor in self.values())

    def require(self, topology: Topology, rank: int, numerics: Numerics | None = None) -> None:
        """ValueError naming both if these weights were made for another topology or rank, or where their form is not
        that of the numerics: INT8 codes go with w8a8 alone, and w8a8 with them alone."""
        topology.require_same(self.topology, "the loaded share")
        if rank != self.rank:
            raise ValueError(f"the loaded share was built for rank {self.rank}, but is used on rank {rank}")
        if numerics is not None and self.is_quantised != (numerics.quantisation == "w8a8"):
            held = "w8a8" if self.is_quantised else "floats"
            raise ValueError(f"the loaded share is held in {held}, but is used with numerics {numerics.name}")


def check_topology(config: V4Config, topology: Topology) -> None:
    """ValueError unless the topology divides the model."""
    topology.check_model(config.o_groups, config.vocab_size, config.n_routed_experts)


def check_draft(config: V4Config, draft: bool) -> None:
    """ValueError where a drafter's weights are asked for that the model does not have."""
    if draft and config.drafter == "none":
        raise ValueError("draft is True, but the model has no mtp.* tensors; allowed: False")


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
    """Dtype in which a rank holds the tensor; of an INT8 weight that of its codes."""
    if is_int8(spec, numerics):
        return torch.int8
    if is_narrowed(spec, numerics):
        return torch.bfloat16
    return {"matmul": numerics.activation, "wide": numerics.accumulation, "ids": torch.int64}[spec.role]


def shard_weights(
    weights: Mapping[str, torch.Tensor], topology: Topology, rank: int, config: V4Config, *, draft: bool = False
) -> RankWeights:
    """One rank's own copy of its share of full weights (world 1): what loading them from a file would give.

    draft: with mtp.*. Weights of w8a8 are recognised by the scales beside them.
    """
    check_topology(config, topology)
    check_draft(config, draft)
    share: dict[str, torch.Tensor] = {}
    for name, specs in held_table(config, draft=draft).items():
        held = [held_slices(spec, config, topology, rank) for spec in specs]
        if specs[0].shard == "experts":
            mine = [index for index, slices in enumerate(held) if slices is not None]
            for key in (name, scale_key(name)):
                if key in weights:
                    share[key] = weights[key][mine[0] : mine[-1] + 1].clone()
        else:
            slices = held[0]
            assert slices is not None, name
            share[name] = weights[name][slices].clone(memory_format=torch.contiguous_format)
            if scale_key(name) in weights:
                share[scale_key(name)] = weights[scale_key(name)][slices[0]].clone()
    return RankWeights(share, topology, rank)


def share_bytes(config: V4Config, topology: Topology, rank: int, numerics: Numerics, *, draft: bool = False) -> int:
    """Bytes of the rank's weights in the numerics' dtypes, channel scales included; with draft also of mtp.*."""
    total = 0
    for specs in held_table(config, draft=draft).values():
        for spec in specs:
            slices = held_slices(spec, config, topology, rank)
            if slices is not None:
                total += tensor_bytes(spec, tuple(s.stop - s.start for s in slices), numerics)
    return total


def tensor_bytes(spec: TensorSpec, shape: tuple[int, ...], numerics: Numerics) -> int:
    """Bytes of a part of this shape as a rank holds it, channel scales included."""
    scales = SCALE_BYTES * shape[0] if is_int8(spec, numerics) else 0
    return prod(shape) * held_dtype(spec, numerics).itemsize + scales


def _scaled(part: slice, factor: int) -> slice:
    return slice(part.start * factor, part.stop * factor)
