"""Routing and experts in compiled kernels, where all experts of the model are on this rank.

Legend: T rows, k routes of a row, H hidden, W expert width, X experts.
"""

import ctypes
from typing import Any

import torch

from .calls import Kernels, block_of
from .library import LANES, MOST_INPUTS, address

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""w1, w3 and w2 of experts."""


def route(
    kernels: Kernels,
    x_TH: torch.Tensor,
    gate_EH: torch.Tensor,
    chosen: torch.Tensor,
    routes: int,
    floor: float,
    factor: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A router's scores [T, E], experts [T, routes] and their weights. chosen: the bias [E] of a learned router, or
    the experts themselves, int64."""
    scores_TE = kernels.product(x_TH, gate_EH)
    positive_TE = torch.empty_like(scores_TE)
    learned = chosen.dtype == torch.float32
    T, E = scores_TE.shape
    assert chosen.shape == ((E,) if learned else (T, routes)) and routes <= E
    indices_Tk = torch.empty(T, routes, dtype=torch.int64) if learned else chosen.contiguous()
    weights_Tk = x_TH.new_empty(T, routes)
    scores = scores_TE.data_ptr()
    kernels.library.ms_softplus_parts(scores, positive_TE.data_ptr(), T * E)
    # Of torch's own, whose last bits these have.
    scores_TE.exp_().log1p_().add_(positive_TE).sqrt_()
    wrong = kernels.library.ms_route(
        scores,
        address(chosen) if learned else None,
        T,
        E,
        routes,
        floor,
        factor,
        address(indices_Tk, torch.int64),
        address(weights_Tk),
    )
    if wrong:
        raise ValueError(f"a row's experts are not among the {E}")
    return scores_TE, indices_Tk, weights_Tk


def mixture(
    kernels: Kernels,
    x_TH: torch.Tensor,
    indices_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    valid_T: torch.Tensor | None,
    experts: Matrices,
    shared: Matrices,
    limit: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of each row's experts added to the shared one's, [T, H], and the rows sent to each expert.

    experts: w1, w3 [X, W, H] and w2 [X, H, W], all experts of the model; shared: those of one expert.
    """
    (T, k), (X, W, H) = indices_Tk.shape, experts[0].shape
    assert x_TH.shape == (T, H) and indices_Tk.shape == weights_Tk.shape
    assert max(W, H) <= MOST_INPUTS and min(W, H) >= LANES
    places = torch.empty(2, T * k, dtype=torch.int64)
    counts_X = torch.empty(X, dtype=torch.int64)
    weight_R = weights_Tk.new_empty(T * k)
    order, counts = places.data_ptr(), counts_X.data_ptr()
    sent = kernels.library.ms_sort_routes(
        address(indices_Tk, torch.int64),
        address(weights_Tk),
        None if valid_T is None else address(valid_T, torch.bool),
        T,
        k,
        X,
        order,
        order + 8 * T * k,
        weight_R.data_ptr(),
        counts,
    )
    if sent < 0:
        raise ValueError(f"indices reach {int(indices_Tk.max())}, allowed: below the {X} experts")
    # The shared expert's rows stand before the routed ones: what is done to all of them is one call.
    hidden = x_TH.new_empty(3, T + sent, W)
    y_RH, sum_TH = x_TH.new_empty(T + sent, H), torch.empty_like(x_TH)
    alone = (ctypes.c_int64 * 1)(T)
    _experts_in(kernels, x_TH, None, alone, 1, shared, hidden, 0, limit)
    _experts_in(kernels, x_TH, order + 8 * T * k, counts, X, experts, hidden, T, limit)
    hidden[1].exp_()
    _experts_out(kernels, hidden, 0, None, alone, 1, shared, y_RH)
    _experts_out(kernels, hidden, T, weight_R.data_ptr(), counts, X, experts, y_RH)
    y = y_RH.data_ptr()
    kernels.library.ms_add_routes(y, y + 4 * T * H, order, sent, sum_TH.data_ptr(), T, k, H)
    return sum_TH, counts_X


def _experts_in(
    kernels: Kernels,
    x_TH: torch.Tensor,
    picked: int | None,
    counts: Any,
    X: int,
    matrices: Matrices,
    hidden: torch.Tensor,
    first: int,
    limit: float,
) -> None:
    _, R, W = hidden.shape
    H = x_TH.shape[1]
    assert matrices[0].numel() == matrices[1].numel() == X * W * H
    gate = hidden.data_ptr() + 4 * first * W
    kernels.library.ms_experts_in(
        address(x_TH),
        picked,
        counts,
        X,
        address(matrices[0]),
        address(matrices[1]),
        gate,
        gate + 4 * R * W,
        gate + 8 * R * W,
        H,
        W,
        block_of(H),
        limit,
    )


def _experts_out(
    kernels: Kernels,
    hidden: torch.Tensor,
    first: int,
    weight: int | None,
    counts: Any,
    X: int,
    matrices: Matrices,
    y_RH: torch.Tensor,
) -> None:
    _, R, W = hidden.shape
    H = y_RH.shape[1]
    assert matrices[2].numel() == X * W * H
    gate = hidden.data_ptr() + 4 * first * W
    kernels.library.ms_experts_out(
        gate,
        gate + 4 * R * W,
        gate + 8 * R * W,
        weight,
        counts,
        X,
        address(matrices[2]),
        y_RH.data_ptr() + 4 * first * H,
        H,
        W,
        block_of(W),
    )
