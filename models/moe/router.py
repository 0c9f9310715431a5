"""Routers: which experts a token goes to, and with what weights. training.md 1.

Legend: T tokens, H hidden, E experts, K experts of a token, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .scores import best_experts, limit_groups, score_function, weigh, wide_dtype

INITIAL_STD = 0.02
"""Standard deviation of weights that were not given another."""

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""scores [T, E], indices [T, K] int64, weights [T, K]; scores and weights in FP32 (FP64 for FP64 inputs)."""


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    """Autocast off on a kind of device; the meta device has none to turn off."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class Router(nn.Module):
    """The steps from tokens to experts; a family overrides `logits`, `score`, `select` or `routing_weights`.

    `expert_bias` [E] shifts what `select` sees, and nothing else: weights are made from unshifted scores. It is an
    FP32 buffer of the state dict, or None, and stays FP32 when the module is cast.
    With top_k 1 and normalize every weight is route_scale, so the router gets no gradient through the weights.
    """

    expert_bias: torch.Tensor | None

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        route_scale: float = 1.0,
        enable_expert_bias: bool = False,
        bias_update_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if num_experts < 1 or not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k is {top_k}, allowed: 1 to num_experts {num_experts}")
        if bias_update_rate < 0:
            raise ValueError(f"moe_router_bias_update_rate is {bias_update_rate}, allowed: 0 or more")
        if bias_update_rate and not enable_expert_bias:
            reason = "for moe_router_enable_expert_bias is off"
            raise ValueError(f"moe_router_bias_update_rate is {bias_update_rate}, allowed: 0, {reason}")
        self.num_experts, self.top_k = num_experts, top_k
        self.normalize, self.route_scale, self.bias_update_rate = normalize, route_scale, bias_update_rate
        self.register_buffer(
            "expert_bias", torch.zeros(num_experts, dtype=torch.float32) if enable_expert_bias else None
        )

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Logits [T, E] in a wide dtype."""
        raise NotImplementedError(f"{type(self).__name__} has no logits")

    def score(self, logits_TE: torch.Tensor) -> torch.Tensor:
        """Scores [T, E], not negative, in the logits' dtype."""
        raise NotImplementedError(f"{type(self).__name__} has no scores")

    def select(self, choice_TE: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Experts [T, K] int64 by the shifted scores, which carry no gradient."""
        return best_experts(choice_TE, self.top_k)

    def routing_weights(self, scores_TE: torch.Tensor, indices_TK: torch.Tensor) -> torch.Tensor:
        """Weights [T, K] of the chosen experts, from unshifted scores."""
        return weigh(scores_TE, indices_TK, self.route_scale, self.normalize)

    def forward(self, x_TH: torch.Tensor, *, token_ids: torch.Tensor | None = None) -> Routing:
        """(scores, indices, weights) of tokens x [T, H]. token_ids [T]: the tokens themselves, for hash routers."""
        with _without_autocast(x_TH.device.type):
            scores_TE = self.score(self.logits(x_TH))
            choice_TE = scores_TE.detach()
            if self.expert_bias is not None:
                choice_TE = choice_TE + self.expert_bias
            indices_TK = self.select(choice_TE, token_ids)
            return scores_TE, indices_TK, self.routing_weights(scores_TE, indices_TK)

    @torch.no_grad()
    def update_expert_bias(self, counts_E: torch.Tensor) -> None:
        """Step the bias toward balance, in place, by pooled counts [E] int64 of one optimizer step. training.md 3.2.

        An expert above the mean goes down by bias_update_rate, one below goes up; then the steps' mean is taken off.
        The signs are exact for any counts, so ranks with equal counts keep equal bits.
        """
        if self.expert_bias is None:
            raise ValueError("this router has no expert_bias to update")
        if not self.bias_update_rate:
            return
        if counts_E.shape != (self.num_experts,) or counts_E.dtype != torch.int64:
            raise ValueError(f"counts are {counts_E.dtype} {list(counts_E.shape)}, allowed: int64 [{self.num_experts}]")
        sign_E = torch.sign(counts_E.sum() - self.num_experts * counts_E).to(torch.float64)
        self.expert_bias.add_((sign_E - sign_E.mean()) * self.bias_update_rate)

    def reset_parameters(self, std: float = INITIAL_STD) -> None:
        """Zero the bias; routers with weights draw them. Leaves tensors on the meta device alone."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Router":
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != torch.float32:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # With assign=True the loaded tensor becomes the buffer, whatever its dtype.
        bias = state_dict.get(f"{prefix}expert_bias")
        if bias is not None and self.expert_bias is not None:
            state_dict[f"{prefix}expert_bias"] = bias.to(torch.float32)
        super()._load_from_state_dict(state_dict, prefix, *args)


class TopKRouter(Router):
    """The K best experts by a score of x W^T, W [E, H] without bias, computed in FP32 under any autocast."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, score: str = "softmax", **options: Any) -> None:
        super().__init__(num_experts, top_k, **options)
        if hidden_size < 1:
            raise ValueError(f"hidden_size is {hidden_size}, allowed: 1 or more")
        self.score_name, self._score = score, score_function(score)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_parameters()

    def logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        wide = wide_dtype(x_TH.dtype)
        return F.linear(x_TH.to(wide), self.weight.to(wide))

    def score(self, logits_TE: torch.Tensor) -> torch.Tensor:
        return self._score(logits_TE)

    @torch.no_grad()
    def reset_parameters(self, std: float = INITIAL_STD) -> None:
        super().reset_parameters(std)
        self.weight.normal_(0, std)


class GroupLimitedRouter(TopKRouter):
    """TopKRouter that picks inside the topk_group of num_groups groups whose two best experts sum highest."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, num_groups: int, topk_group: int | None, **options: Any
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, **options)
        if num_groups < 1 or num_experts % num_groups:
            raise ValueError(f"num_groups is {num_groups}, allowed: a divisor of {num_experts} experts")
        size = num_experts // num_groups
        if size < 2:
            raise ValueError(f"num_groups is {num_groups}, allowed: groups of 2 experts or more of {num_experts}")
        if topk_group is None or not 1 <= topk_group <= num_groups:
            raise ValueError(f"topk_group is {topk_group}, allowed: 1 to num_groups {num_groups}")
        if topk_group * size < top_k:
            raise ValueError(
                f"topk_group is {topk_group}, allowed: groups with top_k {top_k} experts in all, {size} in each"
            )
        self.num_groups, self.topk_group = num_groups, topk_group

    def select(self, choice_TE: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        return super().select(limit_groups(choice_TE, self.num_groups, self.topk_group))


class HashRouter(TopKRouter):
    """Experts from the token's row of a frozen table `tid2eid` [V, K], weights from the gate. training.md 1.4."""

    tid2eid: torch.Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        vocab_size: int,
        score: str = "sqrtsoftplus",
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_experts, top_k, score, **options)
        if self.expert_bias is not None:
            raise ValueError("a hash router chooses by its table: moe_router_enable_expert_bias has nothing to shift")
        self.register_buffer("tid2eid", torch.zeros(vocab_size, top_k, dtype=torch.int64))

    def select(self, choice_TE: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        if token_ids is None:
            raise ValueError("a hash router needs token_ids")
        return self.tid2eid[token_ids.reshape(-1)].long()
