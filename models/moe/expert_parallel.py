"""Routed experts shared out over an expert group, with gradients both ways. training.md 7.6, 10.

Legend: T tokens of a rank, R rows at a rank, K experts of a token, H hidden, E experts, X experts of a rank,
P routes of this rank's experts, sorted by expert.

Gradients: an expert's owner gets the sum over the tokens of its whole expert group, where a dense weight gets those of
its own rank. What averages dense gradients over all W ranks makes them sum / W; averaged over the W / ep ranks that
hold the same experts, those of experts are ep times as large. `scale_expert_gradients` takes that factor off, so both
are the mean over all ranks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ...comm.collectives import all_gather_rows
from ...comm.tokens import STRATEGIES, SpreadTokens, collect_sums, spread_tokens
from ...parallel.groups import Group
from ...parallel.ownership import expert_slice
from .experts import Experts, expert_rows
from .layer import MoELayer
from .router import INITIAL_STD
from .scores import wide_dtype


@dataclass(frozen=True, eq=False)
class LocalRoutes:
    """Routes of this rank's experts: order_P the place row * K + k of each, place_RK its inverse (P for no route here),
    counts_X rows by expert."""

    order_P: torch.Tensor
    place_RK: torch.Tensor
    counts_X: torch.Tensor

    def take(self, x_RH: torch.Tensor) -> torch.Tensor:
        """The row of each route, [P, H]."""
        return x_RH.index_select(0, self.order_P // self.place_RK.shape[1])

    def total(self, y_PH: torch.Tensor) -> torch.Tensor:
        """The sum over each row's routes in the order of its picks, [R, H] in y's dtype: added in a wide one."""
        ended_PH = torch.cat([y_PH, y_PH.new_zeros(1, y_PH.shape[1])])
        wide = wide_dtype(y_PH.dtype)
        total = ended_PH.new_zeros((self.place_RK.shape[0], y_PH.shape[1]), dtype=wide)
        for place_R in self.place_RK.unbind(1):
            total += ended_PH.index_select(0, place_R)
        return total.to(y_PH.dtype)


def local_routes(indices_RK: torch.Tensor, num_local: int) -> LocalRoutes:
    """Routes whose expert is not below 0, by expert, then by row, then by pick. One host sync, for their number."""
    flat = indices_RK.reshape(-1)
    key = torch.where(flat < 0, num_local, flat)
    order = torch.sort(key, stable=True).indices
    counts = torch.zeros(num_local + 1, dtype=torch.int64, device=flat.device)
    counts_X = counts.scatter_add_(0, key, torch.ones_like(key))[:num_local]
    routes = int(counts_X.sum())
    places = torch.arange(len(flat), device=flat.device).clamp_(max=routes)
    place_RK = torch.empty_like(order).scatter_(0, order, places).view(indices_RK.shape)
    return LocalRoutes(order[:routes], place_RK, counts_X)


class _TakeRoutes(torch.autograd.Function):
    """`take` and `total` are adjoint, and both have one order of additions on every device."""

    @staticmethod
    def forward(ctx: Any, x_RH: torch.Tensor, routes: LocalRoutes) -> torch.Tensor:
        ctx.routes = routes
        return routes.take(x_RH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.routes.total(gradients[0]), None


class _SumRoutes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_PH: torch.Tensor, routes: LocalRoutes) -> torch.Tensor:
        ctx.routes = routes
        return routes.total(y_PH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.routes.take(gradients[0]), None


class ParallelExperts(Experts):
    """The experts of one ep_rank, in the place of all: parameters [X, ...], `num_experts` still E.

    Forward and backward are exchanges over `group`: all its ranks run both, in the same order, with any number of
    tokens or none. strategy and most_rows as `spread_tokens` has them. The module does not average anything.
    ValueError where E does not split equally over the group.
    """

    def __init__(self, experts: Experts, group: Group, strategy: str = "all_to_all") -> None:
        nn.Module.__init__(self)
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy is {strategy!r}, allowed: {list(STRATEGIES)}")
        self.own = expert_slice(group.rank, group.size, experts.num_experts)
        self.group, self.strategy = group, strategy
        self.num_experts, self.limit, self.backend = experts.num_experts, experts.limit, experts.backend
        self.most_rows: int | None = None
        for name, parameter in experts.named_parameters():
            share = parameter.detach()[self.own].clone()
            self.register_parameter(name, nn.Parameter(share, requires_grad=parameter.requires_grad))

    def forward(self, x_TH: torch.Tensor, indices_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """As `Experts.forward`, for the tokens of this rank; partial sums travel and are added in a wide dtype."""
        if self.group.size == 1:
            return super().forward(x_TH, indices_TK, weights_TK)
        tokens = spread_tokens(
            x_TH,
            indices_TK,
            weights_TK,
            self.group,
            self.num_experts,
            strategy=self.strategy,
            most_rows=self.most_rows if self.strategy == "all_gather" else None,
            stage="experts.spread",
        )
        partial_RH, dtype = self._partial_sums(tokens)
        return collect_sums(partial_RH, tokens, stage="experts.collect").to(dtype)

    def _partial_sums(self, tokens: SpreadTokens) -> tuple[torch.Tensor, torch.dtype]:
        """What this rank's experts add to each row, [R, H] in a wide dtype, and the dtype of their products."""
        routes = local_routes(tokens.indices_RK, self.own.stop - self.own.start)
        x_PH = _TakeRoutes.apply(tokens.x_RH, routes)
        y_PH = expert_rows(x_PH, routes.counts_X, self.gate_up_proj, self.down_proj, self.limit, self.backend)
        weights_P = tokens.weights_RK.reshape(-1).index_select(0, routes.order_P)
        wide = torch.promote_types(weights_P.dtype, wide_dtype(y_PH.dtype))
        total: torch.Tensor = _SumRoutes.apply(y_PH.to(wide) * weights_P.unsqueeze(1), routes)
        return total, y_PH.dtype

    @torch.no_grad()
    def reset_parameters(self, std: float = INITIAL_STD) -> None:
        """Draw all E experts one after the other and keep the own ones: ranks with equal generators differ in experts,
        and agree in all that is drawn after them. On the CPU they are those of one rank where a matrix of an expert
        has a multiple of 16 numbers. Leaves tensors on the meta device alone.
        """
        for stack in (self.gate_up_proj, self.down_proj):
            drawn = torch.empty_like(stack[0])
            for expert in range(self.num_experts):
                drawn.normal_(0, std)
                if self.own.start <= expert < self.own.stop:
                    stack[expert - self.own.start] = drawn


def shard_experts(model: nn.Module, group: Group, strategy: str = "all_to_all") -> list[ParallelExperts]:
    """Replace the experts of every mixture layer by this ep_rank's share, in place; names of tensors stay.

    Before an optimiser or a wrapper sees the model. ValueError where experts do not split equally, or are split.
    """
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    for layer in layers:
        if isinstance(layer.experts, ParallelExperts):
            raise ValueError("the experts of this model are shared out already")
    shares = [ParallelExperts(layer.experts, group, strategy) for layer in layers]
    for layer, share in zip(layers, shares, strict=True):
        layer.experts = share
    return shares


def expert_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters that ep_ranks have shares of: what a wrapper must not average over all ranks."""
    for name, module in model.named_modules():
        if isinstance(module, ParallelExperts):
            yield from module.named_parameters(prefix=name)


@torch.no_grad()
def scale_expert_gradients(model: nn.Module) -> None:
    """Multiply the experts' gradients by 1 / ep, in place: the scale of the dense ones (module docstring).

    Once per optimizer step, after the average over the ranks that hold the same experts (`Groups.expert_replicas`).
    """
    for module in model.modules():
        if isinstance(module, ParallelExperts):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / module.group.size)


def gather_experts(share: torch.Tensor, group: Group, *, stage: str = "experts.gather") -> torch.Tensor:
    """A tensor by local expert, [X, ...] -> [E, ...] by expert, on every rank: weights, moments. Collective."""
    return all_gather_rows(share.detach(), group, stage=stage)


def full_state_dict(model: nn.Module, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
    """The state dict as without expert parallelism: whole tensors under the same names, on every rank.

    Collective over the expert group. Each tensor moves to `device`, where one is given, before the next is gathered.
    """
    groups = _groups_by_name(model)
    full = {}
    for name, tensor in model.state_dict().items():
        whole = gather_experts(tensor, groups[name]) if name in groups else tensor.detach()
        full[name] = whole if device is None else whole.to(device)
    return full


def load_full_state_dict(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True, assign: bool = False
) -> None:
    """Load whole tensors; each rank keeps its own experts. The inverse of `full_state_dict`, without any exchange.

    strict and assign as `nn.Module.load_state_dict`. ValueError for experts that are not E.
    """
    shares = dict(state)
    for name, module in model.named_modules():
        if not isinstance(module, ParallelExperts):
            continue
        for own, _ in module.named_parameters(prefix=name):
            if own not in state:
                continue
            if state[own].shape[:1] != (module.num_experts,):
                raise ValueError(f"{own} is {list(state[own].shape)}, allowed: all {module.num_experts} experts")
            # A copy: a view would keep the whole tensor alive where it is assigned.
            shares[own] = state[own][module.own].clone()
    model.load_state_dict(shares, strict=strict, assign=assign)


def _groups_by_name(model: nn.Module) -> dict[str, Group]:
    return {
        own: module.group
        for name, module in model.named_modules()
        if isinstance(module, ParallelExperts)
        for own, _ in module.named_parameters(prefix=name)
    }
