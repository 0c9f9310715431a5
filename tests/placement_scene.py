"""A toy draft and micro-batches of uneven weight for tests of placements, and the runs that they compare.

Every sample has a weight; the step's loss is a mean over all samples of all ranks. Samples of weight 0 are those of a
rank or micro-batch that learns nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from draft_toys import V4, V4_MOE, toy_config
from torch import Tensor, nn

from meshspark.models.drafts.config import DraftConfig
from meshspark.models.drafts.draft import DSparkDraft
from meshspark.models.moe.balancing import MoEBalancing
from meshspark.models.moe.expert_parallel import shard_experts
from meshspark.models.training.core import TrainerCore
from meshspark.models.training.hooks import StepOutput
from meshspark.models.training.placed import Placed, place
from meshspark.models.training.placement import AdamWSettings
from meshspark.parallel.groups import Groups

SAMPLES, CONTEXT, BLOCKS = 12, 7, 2


def config(**changes: Any) -> DraftConfig:
    """Two layers of a V4 draft with mixtures of experts, a bias that steps, sinks, mixed streams and both heads."""
    dflash = {
        "attention_mode": "deepseek_v4",
        "context_window": 4,
        "confidence_head_input": "pre_norm",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
    }
    keys = V4 | V4_MOE | {"draft_residual": {"kind": "mhc", "pre_from_prev": False}}
    made = toy_config(dflash, **keys)
    return replace(made, **changes)


@dataclass(frozen=True)
class Micro:
    """Samples [B, ...] of a micro-batch and what they weigh [B]."""

    noise_BQH: Tensor
    features_BSF: Tensor
    anchors_BN: Tensor
    tokens_BNb: Tensor
    weight_B: Tensor


def samples(step: int, shape: DraftConfig, dtype: torch.dtype, empty: Sequence[int] = ()) -> list[Micro]:
    """All samples of a step, those of `empty` with weight 0."""
    generator = torch.Generator().manual_seed(1000 + step)
    made = []
    for number in range(SAMPLES):
        rows = BLOCKS * shape.block_size
        noise = torch.randn(1, rows, shape.hidden_size, generator=generator, dtype=torch.float64)
        features = torch.randn(1, CONTEXT, shape.feature_width, generator=generator, dtype=torch.float64)
        anchors = torch.randint(1, CONTEXT, (1, BLOCKS), generator=generator)
        tokens = torch.randint(0, shape.vocab_size, (1, BLOCKS, shape.block_size), generator=generator)
        weight = torch.tensor([0.0 if number in empty else 0.25 + number % 5], dtype=torch.float64)
        made.append(Micro(noise.to(dtype), features.to(dtype), anchors, tokens, weight.to(dtype)))
    return made


def strategy(draft: DSparkDraft) -> Any:
    """Weighted squares of the readout and of both heads' outputs, which are used outside the draft's forward."""

    def run(micro: Micro) -> StepOutput:
        keep_BN = (micro.weight_B > 0)[:, None].expand_as(micro.anchors_BN)
        out = draft(micro.noise_BQH, micro.features_BSF, micro.anchors_BN, keep_BN)
        b = draft.config.block_size
        hidden, readout = (x.unflatten(1, (-1, b)) for x in (out.hidden_BQH, out.readout_BQH))
        assert draft.markov_head is not None and draft.confidence_head is not None
        term = draft.markov_head(micro.tokens_BNb, hidden)
        sure = draft.confidence_head(hidden, readout, draft.markov_head.embedding(micro.tokens_BNb))
        wide = torch.promote_types(hidden.dtype, torch.float32)
        errors = hidden.to(wide) - 0.3, term.to(wide) - 0.1, sure - 0.5
        value_B = torch.stack([error.square().flatten(1).mean(1) for error in errors]).sum(0)
        numerator = (value_B * micro.weight_B.to(wide)).sum()
        denominator = micro.weight_B.to(wide).sum()
        return StepOutput(numerator / denominator.clamp(min=1), (numerator, denominator))

    return run


def batch(parts: Sequence[Micro]) -> Micro:
    names = ("noise_BQH", "features_BSF", "anchors_BN", "tokens_BNb", "weight_B")
    return Micro(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def micro_batches(step: int, shape: DraftConfig, world: int, rank: int, accumulate: int, options: Any) -> list[Micro]:
    """This rank's share of the step's samples, contiguous, in `accumulate` micro-batches."""
    mine = samples(step, shape, options["dtype"], options["empty"])
    count = SAMPLES // world
    own = mine[rank * count : (rank + 1) * count]
    size = count // accumulate
    return [batch(own[m * size : (m + 1) * size]) for m in range(accumulate)]


def fresh(shape: DraftConfig, dtype: torch.dtype) -> DSparkDraft:
    torch.manual_seed(3)
    draft = DSparkDraft(shape, attention_backend="eager").to(dtype)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 1 or not parameter.any():
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(parameter) * 0.1)
    return draft


def build(groups: Groups, kind: str, ep: bool, dtype: torch.dtype, **options: Any) -> tuple[Placed, TrainerCore]:
    """A placed draft with its trainer."""
    shape = config()
    draft = fresh(shape, dtype)
    if ep:
        shard_experts(draft, groups.ep, "all_to_all")
    optimizer = options.pop("optimizer", AdamWSettings(1e-2, weight_decay=0.01))
    placed = place(draft, groups, kind, optimizer=optimizer, **options)
    core = TrainerCore(strategy(draft), placed, max_grad_norm=0.7)
    core.register_step_hook(MoEBalancing(draft, groups.world))
    return placed, core


def values(placed: Placed) -> dict[str, Tensor]:
    """Whole parameters and biases of routers."""
    return dict(placed.whole_parameters()) | {
        name: buffer.clone() for name, buffer in placed.module.named_buffers() if name.endswith("expert_bias")
    }


def sgd(masters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(masters, lr=0.05)
