"""Routed experts in two forms that give the same: grouped products, and a loop over experts. training.md 2.1, 2.3.

Legend: T tokens, H hidden, E experts, X experts whose weights are at hand, I expert width, K experts of a token,
R = T * K rows sorted by expert, O outputs of a product.
"""

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from .router import INITIAL_STD
from .scores import clamped_swiglu, wide_dtype

Backend = Literal["grouped", "loop"]

ALIGNMENT = 16
"""Bytes of which a row that torch's grouped product takes is a multiple."""


class _TakeRows(torch.autograd.Function):
    """x[index] where each row of x is taken `copies` times; the backward adds the copies in one fixed order.

    The backward of plain indexing adds with atomics on CUDA, so its sums change from run to run.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grads[0].index_select(0, inverse)
        return (grad if ctx.copies == 1 else grad.unflatten(0, (-1, ctx.copies)).sum(1)), None, None, None


def sort_routes(indices_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order [R], inverse [R], counts [E]) int64: route order[r] = t * K + k is sorted row r. No host sync.

    Rows are by expert, then by token, then by pick.
    """
    flat_R = indices_TK.reshape(-1)
    order_R = torch.sort(flat_R, stable=True).indices
    place_R = torch.arange(len(flat_R), device=flat_R.device)
    inverse_R = torch.empty_like(order_R).scatter_(0, order_R, place_R)
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat_R.device)
    return order_R, inverse_R, counts_E.scatter_add_(0, flat_R, torch.ones_like(flat_R))


def sort_tokens(x_TH: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """Each token's row once per route, sorted: [R, H]."""
    return _TakeRows.apply(x_TH, order_R // top_k, inverse_R, top_k)


def unsort_routes(y_RH: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor, top_k: int) -> torch.Tensor:
    """Sorted rows back to [T, K, H]."""
    return _TakeRows.apply(y_RH, inverse_R, order_R, 1).unflatten(0, (-1, top_k))


def sum_routes(y_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Outputs of a token's experts times their weights, added in the order of its picks, in a wide dtype: [T, H]."""
    wide = torch.promote_types(weights_TK.dtype, wide_dtype(y_TKH.dtype))
    return (y_TKH.to(wide) * weights_TK.unsqueeze(2)).sum(1).to(y_TKH.dtype)


def loop_linear(x_RI: torch.Tensor, weight_XOI: torch.Tensor, counts_X: torch.Tensor) -> torch.Tensor:
    """Sorted rows, each segment through its expert's matrix on its own: [R, O]. One host sync."""
    matrices = weight_XOI.unbind(0)
    segments = x_RI.split(counts_X.tolist())
    outputs = [F.linear(rows, matrices[x]) for x, rows in enumerate(segments) if len(rows)]
    # Without rows an empty product keeps the graph whole: every weight has a gradient, of zeros.
    return torch.cat(outputs) if outputs else F.linear(x_RI, matrices[0])


def grouped_linear(x_RI: torch.Tensor, weight_XOI: torch.Tensor, counts_X: torch.Tensor) -> torch.Tensor:
    """`loop_linear` as one product, without host sync where torch's grouped product takes the operands.

    It does not take FP64, nor rows that are not a multiple of 16 bytes; those are padded to one length and batched.
    """
    x_RI, weight_XOI = _as_autocast(x_RI), _as_autocast(weight_XOI)
    if not len(x_RI):
        return F.linear(x_RI, weight_XOI[0])
    width = x_RI.element_size()
    aligned = all(size * width % ALIGNMENT == 0 for size in weight_XOI.shape[1:])
    if x_RI.dtype == torch.float64 or not aligned:
        return _padded_linear(x_RI, weight_XOI, counts_X)
    return F.grouped_mm(x_RI, weight_XOI.mT, offs=counts_X.cumsum(0).to(torch.int32))


def _as_autocast(x: torch.Tensor) -> torch.Tensor:
    """x as autocast would hand it to a product; torch's grouped product is not among those that it knows."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _padded_linear(x_RI: torch.Tensor, weight_XOI: torch.Tensor, counts_X: torch.Tensor) -> torch.Tensor:
    longest, ends_X = int(counts_X.max()), counts_X.cumsum(0)
    row_R = torch.arange(len(x_RI), device=x_RI.device)
    expert_R = torch.searchsorted(ends_X, row_R, right=True)
    place_R = expert_R * longest + row_R - (ends_X - counts_X)[expert_R]
    padded_PI = x_RI.new_zeros(len(counts_X) * longest, x_RI.shape[1]).index_copy(0, place_R, x_RI)
    return torch.bmm(padded_PI.unflatten(0, (-1, longest)), weight_XOI.mT).flatten(0, 1).index_select(0, place_R)


def expert_rows(
    x_RH: torch.Tensor,
    counts_X: torch.Tensor,
    gate_up_XOH: torch.Tensor,
    down_XHI: torch.Tensor,
    limit: float | None,
    backend: Backend,
) -> torch.Tensor:
    """Rows sorted by expert, counts [X] int64 of them each, through their experts: [R, H], no routing weight yet."""
    linear = grouped_linear if backend == "grouped" else loop_linear
    gate_RI, up_RI = linear(x_RH, gate_up_XOH, counts_X).to(wide_dtype(x_RH.dtype)).chunk(2, dim=1)
    return linear(clamped_swiglu(gate_RI, up_RI, limit).to(x_RH.dtype), down_XHI, counts_X)


class Experts(nn.Module):
    """`gate_up_proj` [E, 2I, H] (gate rows first) and `down_proj` [E, H, I].

    backend: "grouped", or "loop", the plain form. Both give the same bits in every run, and gradients of zeros, not
    None, to experts without tokens.
    """

    def __init__(
        self, num_experts: int, hidden: int, width: int, limit: float | None = None, backend: Backend = "grouped"
    ) -> None:
        super().__init__()
        for name, size in (("num_experts", num_experts), ("hidden", hidden), ("width", width)):
            if size < 1:
                raise ValueError(f"{name} is {size}, allowed: 1 or more")
        if backend not in get_args(Backend):
            raise ValueError(f"backend is {backend!r}, allowed: {', '.join(map(repr, get_args(Backend)))}")
        self.num_experts, self.limit, self.backend = num_experts, limit, backend
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.reset_parameters()

    def forward(self, x_TH: torch.Tensor, indices_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """sum_k weights[t, k] * expert(indices[t, k])(x[t]), [T, H] in x's dtype, added in a wide one."""
        order_R, inverse_R, counts_E = sort_routes(indices_TK, self.num_experts)
        x_RH = sort_tokens(x_TH, order_R, inverse_R, indices_TK.shape[1])
        y_RH = expert_rows(x_RH, counts_E, self.gate_up_proj, self.down_proj, self.limit, self.backend)
        return sum_routes(unsort_routes(y_RH, order_R, inverse_R, indices_TK.shape[1]), weights_TK)

    @torch.no_grad()
    def reset_parameters(self, std: float = INITIAL_STD) -> None:
        """Draw both stacks from normal(0, std). Leaves tensors on the meta device alone."""
        self.gate_up_proj.normal_(0, std)
        self.down_proj.normal_(0, std)
