"""Mixture of experts: routers, routed experts over the EP group, the shared expert.

Legend: T local rows, H hidden, E routed experts, X experts of this rank, I expert width, k experts per row,
R rows received by this rank's experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...comm.experts import combine, dispatch, index_tensor
from ...parallel.groups import Group
from ..functions import ROW_MULTIPLE, SMALL_PRODUCT, cast, row_linear, segment_places
from ..int8.linear import Int8Weight, int8_grouped, int8_weight
from ..int8.quantise import QuantisedRows, quantise_rows
from ..kernels.calls import Kernels
from ..kernels.experts import mixture, route
from ..matrix import Operand, Watch, operand, product
from ..moe.scores import SUM_FLOOR, best_experts, clamped_swiglu, sqrt_softplus, weigh
from .config import V4Config

Routing = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""scores [T, E], indices [T, k] int64 (-1 for no expert), weights [T, k]."""

CALL_PRODUCTS = 400_000
"""Multiplications that take a CPU about as long as one more call of a small product."""


class Router(Protocol):
    def forward(self, x_TH: torch.Tensor, token_ids: torch.Tensor | None = None) -> Routing: ...


def gate_scores(x_TH: torch.Tensor, gate_EH: torch.Tensor) -> torch.Tensor:
    """sqrt(softplus(gate logits)) [T, E] in the gate's (wide) dtype."""
    return sqrt_softplus(row_linear(cast(x_TH, gate_EH.dtype), gate_EH))


@dataclass(frozen=True)
class LearnedRouter:
    """The k highest of score + bias (ties to the lowest expert), weighted by their scores without bias."""

    gate: torch.Tensor
    bias: torch.Tensor
    num_experts_per_tok: int
    routed_scaling_factor: float

    def forward(self, x_TH: torch.Tensor, token_ids: torch.Tensor | None = None) -> Routing:
        scores_TE = gate_scores(x_TH, self.gate)
        indices_Tk = best_experts(scores_TE + self.bias, self.num_experts_per_tok)
        return scores_TE, indices_Tk, weigh(scores_TE, indices_Tk, self.routed_scaling_factor)

    def chosen(self, token_T: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What kernels choose by, and how many."""
        return self.bias, self.num_experts_per_tok


@dataclass(frozen=True)
class HashRouter:
    """Experts from the token's row of a table [vocabulary, k]; their weights still come from the gate."""

    gate: torch.Tensor
    table: torch.Tensor
    routed_scaling_factor: float

    def forward(self, x_TH: torch.Tensor, token_ids: torch.Tensor | None = None) -> Routing:
        if token_ids is None:
            raise ValueError("a hash router needs token_ids")
        scores_TE = gate_scores(x_TH, self.gate)
        indices_Tk = self.table[token_ids]
        return scores_TE, indices_Tk, weigh(scores_TE, indices_Tk, self.routed_scaling_factor)

    def chosen(self, token_T: torch.Tensor) -> tuple[torch.Tensor, int]:
        """What kernels choose by, and how many."""
        return self.table[token_T], self.table.shape[1]


@dataclass(frozen=True)
class ExpertWeights:
    """w1 (gate) and w3 (up) [X, I, H], w2 (down) [X, H, I]; for one expert without the leading dim."""

    w1: torch.Tensor
    w3: torch.Tensor
    w2: torch.Tensor


@dataclass(frozen=True)
class Int8Experts:
    """The same matrices in INT8; one expert is a stack of one."""

    w1: Int8Weight
    w3: Int8Weight
    w2: Int8Weight


def grouped_linear(x_RI: torch.Tensor, weights_XOI: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Rows sorted by expert, each segment through its expert's matrix on its own -> [R, O]."""
    segments = x_RI.split(list(counts))
    outputs = [row_linear(segment, weights_XOI[e]) for e, segment in enumerate(segments) if len(segment)]
    # Without rows an empty product keeps the graph whole: backward runs the exchange on every rank.
    return torch.cat(outputs) if outputs else row_linear(x_RI, weights_XOI[0])


def batched_linear(x_XPI: torch.Tensor, weights_XOI: torch.Tensor) -> torch.Tensor:
    """P rows of each expert through its matrix -> [X, P, O]; a row's bits are those of `grouped_linear`.

    P is a multiple of ROW_MULTIPLE, and matrices have at least SMALL_PRODUCT numbers.
    """
    return torch.bmm(x_XPI, weights_XOI.mT)


def batch_rows(counts: Sequence[int], inputs: int, outputs: int) -> int:
    """Rows to which every expert's segment is padded where one batch is the faster form, 0 where segments are.

    A batch pays for idle rows, segments for calls. Both forms give the same bits.
    """
    if inputs * outputs < SMALL_PRODUCT or not any(counts):
        return 0
    padded = [-(-count // ROW_MULTIPLE) * ROW_MULTIPLE for count in counts]
    rows, active = max(padded), sum(count > 0 for count in counts)
    idle = rows * len(counts) - sum(padded)
    return rows if idle * inputs * outputs < (active - 1) * CALL_PRODUCTS else 0


def _batch_places(counts: Sequence[int], rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(sorted row behind each of X * rows places, place of each sorted row); idle places repeat some row."""
    place_R = segment_places(counts, rows)
    source = np.zeros(rows * len(counts), dtype=np.int64)
    source[place_R] = np.arange(len(place_R))
    return index_tensor(source, device), index_tensor(place_R, device)


def routed_experts(
    x_RH: torch.Tensor,
    weight_R: torch.Tensor,
    counts: Sequence[int],
    experts: ExpertWeights,
    limit: float,
) -> torch.Tensor:
    """Expert outputs [R, H], already multiplied by their routing weight (before w2, in weight_R's wide dtype)."""
    rows = batch_rows(counts, *experts.w1.shape[1:])
    if rows:
        return _batched_experts(x_RH, weight_R, counts, rows, experts, limit)
    gate_RI = cast(grouped_linear(x_RH, experts.w1, counts), weight_R.dtype)
    up_RI = cast(grouped_linear(x_RH, experts.w3, counts), weight_R.dtype)
    hidden_RI = clamped_swiglu(gate_RI, up_RI, limit).mul_(weight_R.unsqueeze(1))
    return grouped_linear(cast(hidden_RI, x_RH.dtype), experts.w2, counts)


def _batched_experts(
    x_RH: torch.Tensor, weight_R: torch.Tensor, counts: Sequence[int], rows: int, experts: ExpertWeights, limit: float
) -> torch.Tensor:
    source, place_R = _batch_places(counts, rows, x_RH.device)
    x_XPH = x_RH.index_select(0, source).view(len(counts), rows, -1)
    weight_XP1 = weight_R.index_select(0, source).view(len(counts), rows, 1)
    gate_XPI = cast(batched_linear(x_XPH, experts.w1), weight_R.dtype)
    up_XPI = cast(batched_linear(x_XPH, experts.w3), weight_R.dtype)
    hidden_XPI = clamped_swiglu(gate_XPI, up_XPI, limit).mul_(weight_XP1)
    return batched_linear(cast(hidden_XPI, x_RH.dtype), experts.w2).flatten(0, 1).index_select(0, place_R)


def int8_experts(
    rows: QuantisedRows,
    weight_R: torch.Tensor,
    counts: Sequence[int],
    experts: Int8Experts,
    limit: float,
    watch: Watch | None = None,
) -> torch.Tensor:
    """`routed_experts` in INT8, FP32 [R, H]: the routing weight is folded into the second scale. model.md 9.2."""
    gate_RI, up_RI = int8_grouped(rows, counts, experts.w1), int8_grouped(rows, counts, experts.w3)
    hidden = quantise_rows(clamped_swiglu(gate_RI, up_RI, limit))
    if watch is not None:
        watch("experts", hidden.scale_T)
    return int8_grouped(QuantisedRows(hidden.codes_TI, hidden.scale_T * weight_R), counts, experts.w2)


def shared_expert(
    x_TH: Operand,
    expert: ExpertWeights | Int8Experts,
    limit: float,
    wide: torch.dtype,
    act: torch.dtype,
    watch: Watch | None = None,
) -> torch.Tensor:
    """The expert that every row passes, [T, H]; what comes before w2 is rounded to `act` or quantised."""
    gate_TI, up_TI = cast(product(x_TH, expert.w1), wide), cast(product(x_TH, expert.w3), wide)
    hidden_TI = operand(clamped_swiglu(gate_TI, up_TI, limit), expert.w2, act, "shared", watch)
    return product(hidden_TI, expert.w2)


@dataclass(frozen=True)
class MoELayer:
    """Any router, this rank's routed experts, and the shared one."""

    router: Router
    experts: ExpertWeights | Int8Experts
    shared: ExpertWeights | Int8Experts
    num_experts: int
    swiglu_limit: float
    activation: torch.dtype

    def forward(
        self,
        x_TH: torch.Tensor,
        token_T: torch.Tensor,
        valid_T: torch.Tensor | None,
        group: Group,
        watch: Watch | None = None,
        kernels: Kernels | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(y [T, H] in the activation dtype, rows sent to each expert [E] int64). x is not rounded to that dtype yet.

        Rows that are not valid (None: all are) reach no routed expert. Expert outputs are added to the shared one's
        in route order, in the router's wide dtype, so the result does not depend on where experts live.
        """
        act, limit = self.activation, self.swiglu_limit
        if kernels is not None and group.size == 1:
            own = self._in_kernels(x_TH, token_T, valid_T, kernels)
            if own is not None:
                return own
        _, indices_Tk, weights_Tk = self.router.forward(cast(x_TH, act), token_T)
        rows = operand(x_TH, self.shared.w1, act, "gate", watch)
        codes, scale_T = (rows.codes_TI, rows.scale_T) if isinstance(rows, QuantisedRows) else (rows, None)
        sent = dispatch(codes, indices_Tk, weights_Tk, valid_T, group, self.num_experts, scale_T, stage="dispatch")
        if isinstance(self.experts, Int8Experts):
            assert sent.scale_R is not None
            arrived = QuantisedRows(sent.x_RD, sent.scale_R)
            y_RH = int8_experts(arrived, sent.weights_R, sent.expert_counts, self.experts, limit, watch)
        else:
            y_RH = routed_experts(sent.x_RD, sent.weights_R, sent.expert_counts, self.experts, limit)
        routed_TkH = combine(cast(y_RH, act), sent.handle, stage="combine")
        wide = weights_Tk.dtype
        sum_TH = cast(shared_expert(rows, self.shared, limit, wide, act, watch), wide)
        for route_TH in cast(routed_TkH, wide).unbind(1):
            sum_TH = sum_TH + route_TH
        return cast(sum_TH, act), sent.handle.sent_E

    def _in_kernels(
        self, x_TH: torch.Tensor, token_T: torch.Tensor, valid_T: torch.Tensor | None, kernels: Kernels
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`forward` where all experts are here; None where a kernel does not take them."""
        experts, shared, router = self.experts, self.shared, self.router
        if not isinstance(experts, ExpertWeights) or not isinstance(shared, ExpertWeights):
            return None
        if not kernels.takes(x_TH.shape[0], experts.w1, experts.w2) or experts.w1.shape[1:] != shared.w1.shape:
            return None
        if kernels.routes and isinstance(router, LearnedRouter | HashRouter):
            chosen, routes = router.chosen(token_T)
            factor = router.routed_scaling_factor
            _, indices_Tk, weights_Tk = route(kernels, x_TH, router.gate, chosen, routes, SUM_FLOOR, factor)
        else:
            _, indices_Tk, weights_Tk = router.forward(x_TH, token_T)
        indices_Tk, weights_Tk = indices_Tk.contiguous(), weights_Tk.contiguous()
        own, common = (experts.w1, experts.w3, experts.w2), (shared.w1, shared.w3, shared.w2)
        return mixture(kernels, x_TH, indices_Tk, weights_Tk, valid_T, own, common, self.swiglu_limit)


def make_moe(
    weights: Mapping[str, torch.Tensor], prefix: str, config: V4Config, hash_layer: bool, activation: torch.dtype
) -> MoELayer:
    """The MoE of the block whose tensor names start with prefix."""

    def expert(name: str) -> ExpertWeights | Int8Experts:
        names = [f"{prefix}ffn.{name}.{w}" for w in ("w1", "w3", "w2")]
        if weights[f"{names[0]}.weight"].dtype != torch.int8:
            return ExpertWeights(*(weights[f"{each}.weight"] for each in names))
        return Int8Experts(*(int8_weight(weights[f"{each}.weight"], weights[f"{each}.scale"]) for each in names))

    gate = weights[f"{prefix}ffn.gate.weight"]
    router: Router
    if hash_layer:
        router = HashRouter(gate, weights[f"{prefix}ffn.gate.tid2eid"], config.routed_scaling_factor)
    else:
        bias = weights[f"{prefix}ffn.gate.bias"]
        router = LearnedRouter(gate, bias, config.num_experts_per_tok, config.routed_scaling_factor)
    experts, shared = expert("experts"), expert("shared_experts")
    return MoELayer(router, experts, shared, config.n_routed_experts, config.swiglu_limit, activation)
