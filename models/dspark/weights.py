"""The drafter's weights by official name, as one rank holds them.

Letters: H hidden, V vocabulary, I the taps' width, C the Markov rank.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ...parallel.groups import Groups
from ..checkpoint.names import held_table
from ..checkpoint.share import RankWeights
from ..matrix import Matrix, held_matrix
from ..numerics import Numerics
from ..v4.config import V4Config
from ..v4.hyper import HyperWeights, hyper_weights
from ..v4.moe import MoELayer, make_moe
from ..v4.output import OutputWeights, held_output
from ..v4.projections import ProjectionWeights, projection_weights
from .shape import require_dspark


@dataclass(frozen=True)
class StageWeights:
    """One stage: a block as the target's with a sliding window; its output groups and experts are sharded as there."""

    hc_attn: HyperWeights
    attn_norm: torch.Tensor
    projections: ProjectionWeights
    output: OutputWeights
    sink: torch.Tensor
    hc_ffn: HyperWeights
    ffn_norm: torch.Tensor
    moe: MoELayer


@dataclass(frozen=True)
class MarkovHeads:
    """w1 [V, C] is looked up by the token before, w2 [V, C] makes logits of it; confidence [H + C] over both inputs."""

    w1: torch.Tensor
    w2: Matrix
    confidence: torch.Tensor


@dataclass(frozen=True)
class NetWeights:
    """What drafters of every kind have: stages, and hc_head and norm [H] of their readout."""

    stages: tuple[StageWeights, ...]
    hc_head: HyperWeights
    norm: torch.Tensor


@dataclass(frozen=True)
class DrafterWeights(NetWeights):
    """Beside the stages: main_proj [H, I] and main_norm [H] for the context, and the heads."""

    main_proj: Matrix
    main_norm: torch.Tensor
    heads: MarkovHeads


def count_stages(names: Iterable[str]) -> int:
    """Stages that tensors of these names make: mtp.0 to the last without a gap. ValueError for a gap."""
    found = sorted({int(name.split(".")[1]) for name in names if name.startswith("mtp.")})
    if found != list(range(len(found))):
        raise ValueError(f"mtp.* names stages {found}, allowed: each number from 0 to the last")
    return len(found)


def drafter_weights(
    weights: Mapping[str, torch.Tensor], config: V4Config, groups: Groups, numerics: Numerics
) -> DrafterWeights:
    """A rank's DSpark drafter from its share of mtp.*, on the terms of `net_weights`."""
    require_dspark(config)
    net, last = net_weights(weights, config, groups, numerics), f"mtp.{len(config.draft_ratios) - 1}."
    return DrafterWeights(
        net.stages,
        net.hc_head,
        net.norm,
        main_proj=held_matrix(weights, "mtp.0.main_proj", numerics),
        main_norm=weights["mtp.0.main_norm.weight"],
        heads=MarkovHeads(
            weights[f"{last}markov_head.markov_w1.weight"],
            held_matrix(weights, f"{last}markov_head.markov_w2", numerics),
            weights[f"{last}confidence_head.proj.weight"].flatten(),
        ),
    )


def net_weights(
    weights: Mapping[str, torch.Tensor], config: V4Config, groups: Groups, numerics: Numerics
) -> NetWeights:
    """The stages of a rank's share of mtp.* and their readout, held as the numerics hold the target's: kept, not
    copied.

    Other names are ignored. ValueError where tensors of the config's drafter are missing, or were made for another
    topology.
    """
    groups.topology.check_model(config.o_groups, config.vocab_size, config.n_routed_experts)
    if isinstance(weights, RankWeights):
        weights.require(groups.topology, groups.rank, numerics)
    stages = count_stages(weights)
    if stages != len(config.draft_ratios):
        raise ValueError(
            f"weights have {stages} stages of mtp.*, allowed: {len(config.draft_ratios)} as the config has"
        )
    missing = [name for name in held_table(config, draft=True) if name.startswith("mtp.") and name not in weights]
    if missing:
        raise ValueError(f"weights lack {len(missing)} tensors of the drafter, the first is {missing[0]}")
    last = f"mtp.{stages - 1}."
    return NetWeights(
        stages=tuple(_stage(weights, f"mtp.{stage}.", config, groups, numerics) for stage in range(stages)),
        hc_head=hyper_weights(weights, f"{last}hc_head"),
        norm=weights[f"{last}norm.weight"],
    )


def _stage(
    weights: Mapping[str, torch.Tensor], prefix: str, config: V4Config, groups: Groups, numerics: Numerics
) -> StageWeights:
    attn = f"{prefix}attn."
    return StageWeights(
        hc_attn=hyper_weights(weights, f"{prefix}hc_attn"),
        attn_norm=weights[f"{prefix}attn_norm.weight"],
        projections=projection_weights(weights, attn, numerics),
        output=held_output(weights, attn, config, groups.topology, numerics),
        sink=weights[f"{attn}attn_sink"],
        hc_ffn=hyper_weights(weights, f"{prefix}hc_ffn"),
        ffn_norm=weights[f"{prefix}ffn_norm.weight"],
        moe=make_moe(weights, prefix, config, False, numerics.activation),
    )
