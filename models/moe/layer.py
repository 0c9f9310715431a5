"""The mixture layer of a drafter, the expert that every token passes, and the dense feed-forward. training.md 2.2.

Legend: B samples, Q draft tokens of a sample, T = B * Q tokens, H hidden, E experts, K experts of a token, I width.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import nn

from .experts import Experts
from .router import INITIAL_STD, Router
from .scores import clamped_swiglu, wide_dtype

AuxLossType = Literal["batch_wise", "microbatch_wise"]

AuxLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(scores [T, E], indices [T, K], mask [T] bool or None) -> a scalar with a graph."""


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) without biases, clamped where a limit is given."""

    def __init__(self, hidden: int, width: int, limit: float | None = None) -> None:
        super().__init__()
        self.limit = limit
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H] in x's dtype; the nonlinearity is computed in a wide one."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        wide = wide_dtype(gate.dtype)
        return self.down_proj(clamped_swiglu(gate.to(wide), up.to(wide), self.limit).to(gate.dtype))

    @torch.no_grad()
    def reset_parameters(self, std: float = INITIAL_STD) -> None:
        """Draw the three matrices from normal(0, std). Leaves tensors on the meta device alone."""
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            linear.weight.normal_(0, std)


class SharedExpert(GatedMLP):
    """The expert that every token passes."""


class MoELayer(nn.Module):
    """Any router, its experts, and perhaps a shared expert, alone or behind a sigmoid gate (a Linear of one output).

    In training mode each forward adds the routed tokens to `tokens_per_expert` [E] int64, which is not in the state
    dict, and, where aux_loss_coef is not 0, leaves what `aux` makes of the routing in `aux_loss`. Both are side
    effects of forward: a recomputed forward would count twice. Balancing sets `aux`, reads both and clears them.
    """

    tokens_per_expert: torch.Tensor

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: nn.Module | None = None,
        shared_gate: nn.Linear | None = None,
        aux_loss_coef: float = 0.0,
        aux_loss_type: AuxLossType = "batch_wise",
    ) -> None:
        super().__init__()
        if router.num_experts != experts.num_experts:
            raise ValueError(f"the router has {router.num_experts} experts, the layer {experts.num_experts}")
        if shared_gate is not None and shared is None:
            raise ValueError("a gate of the shared expert needs a shared expert")
        if aux_loss_coef < 0:
            raise ValueError(f"moe_router_aux_loss_coef is {aux_loss_coef}, allowed: 0 or more")
        if aux_loss_type not in get_args(AuxLossType):
            known = ", ".join(map(repr, get_args(AuxLossType)))
            raise ValueError(f"moe_router_aux_loss_type is {aux_loss_type!r}, allowed: {known}")
        self.gate, self.experts = router, experts
        self.shared_experts, self.shared_expert_gate = shared, shared_gate
        self.aux_loss_coef, self.aux_loss_type = aux_loss_coef, aux_loss_type
        self.aux: AuxLoss | None = None
        self.aux_loss: torch.Tensor | None = None
        self.register_buffer("tokens_per_expert", torch.zeros(router.num_experts, dtype=torch.int64), persistent=False)

    def forward(
        self,
        x_BQH: torch.Tensor,
        moe_token_mask_BQ: torch.Tensor | None = None,
        token_ids_BQ: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, Q, H] -> [B, Q, H]. Tokens outside the mask (None: all are in it) are routed, but neither counted nor
        in the auxiliary loss. token_ids [B, Q] go to the router. No host sync of its own.
        """
        flat_TH = x_BQH.reshape(-1, x_BQH.shape[-1])
        token_ids = None if token_ids_BQ is None else token_ids_BQ.reshape(-1)
        scores_TE, indices_TK, weights_TK = self.gate(flat_TH, token_ids=token_ids)
        if self.training:
            mask_T = None if moe_token_mask_BQ is None else moe_token_mask_BQ.reshape(-1)
            self._count(indices_TK, mask_T)
            if self.aux_loss_coef:
                self.aux_loss = self._auxiliary(scores_TE, indices_TK, mask_T)
        y_TH = self.experts(flat_TH, indices_TK, weights_TK)
        if self.shared_experts is not None:
            shared_TH = self.shared_experts(flat_TH)
            if self.shared_expert_gate is not None:
                shared_TH = torch.sigmoid(self.shared_expert_gate(flat_TH)) * shared_TH
            y_TH = y_TH + shared_TH
        return y_TH.view_as(x_BQH)

    @torch.no_grad()
    def _count(self, indices_TK: torch.Tensor, mask_T: torch.Tensor | None) -> None:
        """Add this forward's kept tokens to the counter, in place. training.md 3.1."""
        if self.tokens_per_expert.is_meta:
            self.tokens_per_expert = self.tokens_per_expert.new_zeros(self.gate.num_experts, device=indices_TK.device)
        flat_R = indices_TK.reshape(-1)
        kept_R = (
            torch.ones_like(flat_R) if mask_T is None else mask_T.to(torch.int64).repeat_interleave(indices_TK.shape[1])
        )
        self.tokens_per_expert.scatter_add_(0, flat_R, kept_R)

    def _auxiliary(
        self, scores_TE: torch.Tensor, indices_TK: torch.Tensor, mask_T: torch.Tensor | None
    ) -> torch.Tensor:
        if self.aux is None:
            raise ValueError(
                f"moe_router_aux_loss_coef is {self.aux_loss_coef}, but no balancing computes it: attach MoEBalancing"
            )
        return self.aux(scores_TE, indices_TK, mask_T)

    @torch.no_grad()
    def reset_counts(self) -> None:
        """Zero the counter and forget the auxiliary loss."""
        self.tokens_per_expert.zero_()
        self.aux_loss = None

    @torch.no_grad()
    def reset_parameters(self, std: float = INITIAL_STD) -> None:
        """Draw weights from normal(0, std), zero bias and counter. Leaves the meta device alone. training.md 2.6."""
        self.gate.reset_parameters(std)
        self.experts.reset_parameters(std)
        if isinstance(self.shared_experts, GatedMLP):
            self.shared_experts.reset_parameters(std)
        if self.shared_expert_gate is not None:
            self.shared_expert_gate.weight.normal_(0, std)
        self.reset_counts()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "MoELayer":
        # What leaves the meta device without a state dict's value comes up uninitialised.
        was_meta = self.tokens_per_expert.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.tokens_per_expert.is_meta:
            self.tokens_per_expert.zero_()
        return self
