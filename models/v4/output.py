"""The grouped low-rank output projection: heads -> one partial sum per output group -> rows of full width.

Legend: T local rows, N heads, D head dim, G output groups of this rank, K columns of one group's input, O rank of one
group's output, H hidden, S rows of the whole group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ...comm.projection import Shards, gather_weight_shards, publish_heads, reduce_partials, tree_sum
from ...parallel.groups import Group
from ...parallel.topology import Topology
from ..functions import cast, tile_product
from ..int8.linear import Int8Weight, int8_weight
from ..int8.quantise import quantise_rows
from ..kernels.calls import Kernels
from ..matrix import DenseWeight, Watch
from ..numerics import Numerics
from .config import V4Config


class GroupForm(Protocol):
    """Both halves of the projection for some output groups, in the form of their numerics."""

    def partials(self, heads_SGK: torch.Tensor, watch: Watch | None) -> torch.Tensor:
        """One full-width partial per output group, [S, G, H] in the accumulation dtype."""
        ...

    def finish(self, sum_TH: torch.Tensor) -> torch.Tensor:
        """What follows the sum over all groups: [T, H] in the accumulation dtype. May change sum_TH."""
        ...

    def of_shard(self, wo_a: torch.Tensor, wo_b: torch.Tensor, groups: int) -> "GroupForm":
        """The same form of weights, as they travel, of `groups` output groups that came from other ranks."""
        ...


@dataclass(frozen=True)
class FloatForm:
    """wo_a [G*O, K] and wo_b [H, G*O] as they are; gradients flow to both."""

    wo_a: torch.Tensor
    wo_b: torch.Tensor
    wide: torch.dtype

    def partials(self, heads_SGK: torch.Tensor, watch: Watch | None) -> torch.Tensor:
        num_groups = heads_SGK.shape[1]
        a_GKO = self.wo_a.view(num_groups, -1, self.wo_a.shape[1]).mT
        b_GOH = self.wo_b.view(len(self.wo_b), num_groups, -1).permute(1, 2, 0)
        latent_GSO = tile_product(heads_SGK.transpose(0, 1), a_GKO)
        return cast(tile_product(latent_GSO, b_GOH).transpose(0, 1), self.wide)

    def finish(self, sum_TH: torch.Tensor) -> torch.Tensor:
        return sum_TH

    def of_shard(self, wo_a: torch.Tensor, wo_b: torch.Tensor, groups: int) -> "FloatForm":
        return FloatForm(wo_a, wo_b, self.wide)


@dataclass(frozen=True)
class Int8Form:
    """wo_a in BF16, then wo_b in INT8 with one activation scale per row and output group. The channel scale comes
    after the sum over the groups, so that partials add as integers times row scales. deployment.md 5."""

    a_G: tuple[DenseWeight, ...]
    b: Int8Weight

    def partials(self, heads_SGK: torch.Tensor, watch: Watch | None) -> torch.Tensor:
        rows, num_groups = heads_SGK.shape[:2]
        latents = [a.product(heads_SGK[:, group]) for group, a in enumerate(self.a_G)]
        coded = quantise_rows(torch.cat(latents))
        if watch is not None:
            watch("publish", coded.scale_T)
        partial_XH = self.b.products.sums(coded.codes_TI, (rows,) * num_groups).mul_(coded.scale_T.unsqueeze(1))
        return partial_XH.view(num_groups, rows, partial_XH.shape[1]).transpose(0, 1)

    def finish(self, sum_TH: torch.Tensor) -> torch.Tensor:
        return sum_TH * self.b.scale_XO[0]

    def of_shard(self, wo_a: torch.Tensor, wo_b: torch.Tensor, groups: int) -> "Int8Form":
        return int8_form(wo_a, wo_b, self.b.scale_XO[0], groups)


def int8_form(wo_a: torch.Tensor, wo_b_codes: torch.Tensor, scale_H: torch.Tensor, groups: int) -> Int8Form:
    """wo_a BF16 [G*O, K] and wo_b's codes [H, G*O] of `groups` output groups; scale_H of wo_b's whole rows."""
    codes_GHO = wo_b_codes.view(len(wo_b_codes), groups, -1).transpose(0, 1).contiguous()
    return Int8Form(
        tuple(DenseWeight(part) for part in wo_a.chunk(groups)), int8_weight(codes_GHO, scale_H.expand(groups, -1))
    )


@dataclass(frozen=True)
class OutputWeights:
    """This rank's output groups in the form that it multiplies with, and, where other ranks of the tensor group may
    ask for them, as they travel: stored is (wo_a [G*O, K], wo_b [H, G*O])."""

    form: GroupForm
    stored: tuple[torch.Tensor, torch.Tensor] | None
    activation: torch.dtype


def output_weights(
    wo_a: torch.Tensor,
    wo_b: torch.Tensor,
    scale_H: torch.Tensor | None,
    groups: int,
    config: V4Config,
    wide: torch.dtype,
) -> OutputWeights:
    """The weights of this rank's `groups` output groups out of all; with a scale wo_b holds codes."""
    form = FloatForm(wo_a, wo_b, wide) if scale_H is None else int8_form(wo_a, wo_b, scale_H, groups)
    return OutputWeights(form, (wo_a, wo_b) if groups < config.o_groups else None, wo_a.dtype)


def held_output(
    weights: Mapping[str, torch.Tensor], prefix: str, config: V4Config, topology: Topology, numerics: Numerics
) -> OutputWeights:
    """Those of the attention whose tensor names start with prefix, "layers.0.attn." for example."""
    wo_a, wo_b = weights[f"{prefix}wo_a.weight"], weights[f"{prefix}wo_b.weight"]
    groups = config.o_groups // topology.tp
    return output_weights(wo_a, wo_b, weights.get(f"{prefix}wo_b.scale"), groups, config, numerics.accumulation)


def project_output(
    o_TND: torch.Tensor,
    weights: OutputWeights,
    config: V4Config,
    group: Group,
    *,
    gather_weights: bool = False,
    shards: Shards | None = None,
    watch: Watch | None = None,
    kernels: Kernels | None = None,
) -> torch.Tensor:
    """Grouped low-rank output projection of the own rows -> [T, H] in the dtype of wo_a, complete width.

    Heads go to the owner of their output group and partials come back to the owner of the row, added in a fixed
    tree over the groups; with gather_weights the weight shards travel instead and the same tree is walked at home.
    Both give the same bits. shards: every owner's (wo_a, wo_b), where they have come already; implies gather_weights.
    """
    out = weights.activation
    heads_TGK = cast(o_TND, out).view(o_TND.shape[0], config.o_groups, config.group_columns)
    form = weights.form
    if kernels is not None and group.size == 1 and isinstance(form, FloatForm):
        shapes = (config.group_columns, config.o_lora_rank), (config.o_lora_rank, config.hidden_size)
        if kernels.takes_shapes(heads_TGK.shape[0], *shapes):
            return kernels.project_groups(heads_TGK, form.wo_a, form.wo_b)
    if weights.stored is not None and gather_weights and shards is None:
        shards = (gather_weight_shards(*weights.stored, group, stage="weight_gather"),)
    if shards is not None:
        by_owner = zip(heads_TGK.chunk(len(shards), 1), shards, strict=True)
        each = config.o_groups // len(shards)
        forms = [(heads, form.of_shard(a, b, each)) for heads, (a, b) in by_owner]
        partials = [part for heads, theirs in forms for part in theirs.partials(heads, watch).unbind(1)]
        return cast(form.finish(tree_sum(partials)), out)
    heads_SGK = publish_heads(heads_TGK, group, stage="publish")
    partials_SGH = form.partials(heads_SGK, watch)
    summed_TH = reduce_partials(partials_SGH, group, config.o_groups, stage="publish")
    return cast(form.finish(summed_TH), out)
