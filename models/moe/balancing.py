"""Keeping the load of experts even while a drafter trains: the bias step, the auxiliary loss, the figures.

training.md 3.2 to 3.6. Legend: L mixture layers, E experts (of the layer that has most), K experts of a token.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...parallel.groups import Group
from ..training.hooks import StepHook, StepOutput
from .auxiliary import load_balancing_loss, pool_counts, routed_counts
from .layer import MoELayer


def mixture_layers(model: nn.Module) -> list[MoELayer]:
    """All mixture layers, through any wrapper, in the order of the modules."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def refuse_recompute(model: nn.Module) -> None:
    """ValueError if the model has mixture layers: for those who build a model that recomputes activations.

    A recomputed forward would count its tokens, and add its auxiliary loss, a second time. training.md 3.5.
    """
    layers = len(mixture_layers(model))
    if layers:
        raise ValueError(
            f"gradient checkpointing is not supported with MoE drafts: the forward of {layers} mixture layers counts "
            f"tokens, and recomputing it would count them twice"
        )


class MoEBalancing(StepHook):
    """Balances every mixture layer of a model: one exchange of counts per optimizer step for all of them.

    group: the ranks over which the batch is split, those that saw other tokens (the world at tp 1, expert ranks
    included: counts are taken before tokens leave their rank). Every rank runs every forward in training mode and every
    hook, with tokens or without. Sets the `aux` of layers with an auxiliary loss: batch-wise, that is one exchange of
    [E] int64 per layer and forward more, with the counts of the step so far.
    """

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.layers, self.group = mixture_layers(model), group
        if not self.layers:
            raise ValueError("the model has no mixture layers, so there is nothing to balance")
        for layer in self.layers:
            layer.aux = _Auxiliary(layer, group) if layer.aux_loss_coef else None

    def before_backward(self, out: StepOutput) -> StepOutput:
        """Add the layers' auxiliary losses, each times its coefficient, and forget them. training.md 3.6.

        The numerator takes denominator times the sum, since gradients are divided by the global denominator at the end.
        `moe/aux_loss` is the mean over layers, without coefficients. Unchanged where no layer left one.
        """
        left = [(layer.aux_loss_coef, layer.aux_loss) for layer in self.layers if layer.aux_loss is not None]
        for layer in self.layers:
            layer.aux_loss = None
        if not left:
            return out
        extra = torch.stack([coef * loss for coef, loss in left]).sum()
        raw = torch.stack([loss.detach() for _, loss in left]).mean()
        terms = out.loss_terms
        if terms is not None:
            numerator, denominator = terms
            terms = numerator + denominator.detach() * extra, denominator
        metrics = {**out.metrics, "moe/aux_loss": (raw, torch.ones_like(raw))}
        return replace(out, loss=out.loss + extra, loss_terms=terms, metrics=metrics)

    @torch.no_grad()
    def on_step(self) -> dict[str, Tensor | float]:
        """Pool the step's counts, step every bias that has a rate, zero the counters. Collective over the group.

        -> `moe/step_balance`, E * sum_e f_e^2 with the shares f of the load: 1 for a uniform one, E / K where K experts
        take all; and `moe/load_max_ratio`, E * max_e f_e, between the same ends; means over the layers, 0-dim FP64, the
        same on all ranks, 0 for a step without a token.
        """
        most = max(len(layer.tokens_per_expert) for layer in self.layers)
        own_LE = torch.stack([F.pad(n, (0, most - len(n))) for n in (x.tokens_per_expert for x in self.layers)])
        pooled_LE = pool_counts(own_LE, self.group, stage="balance")
        balances, ratios = [], []
        for layer, pooled_E in zip(self.layers, pooled_LE, strict=True):
            counts_E = pooled_E[: len(layer.tokens_per_expert)]
            if layer.gate.expert_bias is not None:
                layer.gate.update_expert_bias(counts_E)
            share_E = counts_E.double() / counts_E.sum().clamp_min(1).double()
            balances.append(len(counts_E) * share_E.square().sum())
            ratios.append(len(counts_E) * share_E.max())
            layer.reset_counts()
        return {"moe/step_balance": torch.stack(balances).mean(), "moe/load_max_ratio": torch.stack(ratios).mean()}


class _Auxiliary:
    """What a layer calls in its forward, after it has counted. Not a module: the layer would contain itself."""

    def __init__(self, layer: MoELayer, group: Group) -> None:
        self._layer, self._group = layer, group

    def __call__(self, scores_TE: Tensor, indices_TK: Tensor, mask_T: Tensor | None) -> Tensor:
        layer, top_k = self._layer, indices_TK.shape[1]
        with torch.no_grad():
            if layer.aux_loss_type == "batch_wise":
                counts_E = pool_counts(layer.tokens_per_expert, self._group, stage="auxiliary")
            else:
                counts_E = routed_counts(indices_TK, mask_T, scores_TE.shape[1])
        # A softmax sums to 1; other scores are made to. training.md 3.6.
        normalise = getattr(layer.gate, "score_name", "") != "softmax"
        return load_balancing_loss(scores_TE, counts_E, mask_T, top_k, normalise=normalise)
