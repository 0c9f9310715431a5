"""Which form of the output projection a step takes: rows travel, or weights do. Decided alike on all ranks.

Both forms give the same bits and compute as much; they differ in what leaves a rank. Rows cost bytes per row, weights
cost the same for any number of rows. World rank 0's figures hold on all ranks, whatever the others would say.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...comm.collectives import broadcast_bytes
from ...comm.projection import sends_sums
from ...parallel.errors import TransportError
from ...parallel.groups import Groups
from ..numerics import Numerics
from .config import V4Config
from .weight_prefetch import BUFFERS

ACTIVATIONS, WEIGHTS = "activations", "weights"
MODES = ("auto", ACTIVATIONS, WEIGHTS)

CALL_BYTES = 64 << 10
"""What a link moves in the time that a call takes before its first byte."""

ACTIVATION_CALLS, WEIGHT_CALLS = 2, 4
"""Heads out and partials back; two weights, each with a start and a wait."""

ROW_COUNTS = (1, 8, 64, 256, 512, 1024, 2048, 8192)

_WIRE = struct.Struct("<B3q")


@dataclass(frozen=True)
class ProjectionCosts:
    """What leaves a rank in one layer.

    row_bytes: in the form of activations, for each row of the rank's band; weight_bytes: in the form of weights;
    call_bytes: what a call costs beside its bytes, in bytes. mode: one of MODES; other than auto it is the choice.
    """

    row_bytes: int
    weight_bytes: int
    call_bytes: int = CALL_BYTES
    mode: str = "auto"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"projection is {self.mode!r}, allowed: {', '.join(MODES)}")
        for name in ("row_bytes", "weight_bytes", "call_bytes"):
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise ValueError(f"{name} is {value!r}, allowed: a whole number from 0")

    def activations(self, rows: int) -> int:
        """Cost of a step of `rows` rows in each band, in bytes, when rows travel."""
        return rows * self.row_bytes + ACTIVATION_CALLS * self.call_bytes

    def weights(self) -> int:
        """Cost when weights travel."""
        return self.weight_bytes + WEIGHT_CALLS * self.call_bytes

    def choose(self, rows: int) -> Literal["activations", "weights"]:
        """The form for a step of `rows` rows in each band (`RowPlan.local_t`), the same on all ranks of the group.

        The cheaper one, activations where both cost the same, unless mode says which. Without rows: activations.
        """
        cheaper = self.weights() < self.activations(rows)
        return "weights" if rows and (self.mode == WEIGHTS or (self.mode == "auto" and cheaper)) else "activations"

    @property
    def break_even(self) -> int | None:
        """The fewest rows in each band for which weights cost less; None if there are no such (a rank alone)."""
        if not self.row_bytes:
            return None
        return max(0, self.weights() - ACTIVATION_CALLS * self.call_bytes) // self.row_bytes + 1


@dataclass(frozen=True)
class CostRow:
    """One line of the cost model: bytes that leave a rank in one layer, and the choice."""

    rows: int
    activation_bytes: int
    weight_bytes: int
    choice: str


def projection_costs(config: V4Config, numerics: Numerics, tp: int, mode: str = "auto") -> ProjectionCosts:
    """The figures of a model on tensor groups of `tp` ranks; pure arithmetic. ValueError for a wrong mode.

    Heads and weights travel in the activation dtype, wo_b in INT8 where weights are quantised, partials in the
    accumulation dtype: one per row if a rank's output groups are a branch of the tree, else one per group.
    """
    own = config.o_groups // tp
    heads = own * config.group_columns * numerics.activation.itemsize
    partials = (1 if sends_sums(config.o_groups, tp) else own) * config.hidden_size * numerics.accumulation.itemsize
    return ProjectionCosts((tp - 1) * (heads + partials), (tp - 1) * _shard_bytes(config, numerics, tp), mode=mode)


def prefetch_bytes(config: V4Config, numerics: Numerics, tp: int) -> int:
    """Bytes of the buffers that a rank makes when weights first travel, 0 for a rank alone."""
    return BUFFERS * tp * _shard_bytes(config, numerics, tp) if tp > 1 else 0


def cost_rows(costs: ProjectionCosts, row_counts: Sequence[int] = ROW_COUNTS) -> tuple[CostRow, ...]:
    """The cost model as a table, by rows of a band in the order given."""
    return tuple(CostRow(rows, rows * costs.row_bytes, costs.weight_bytes, costs.choose(rows)) for rows in row_counts)


def agree_costs(costs: ProjectionCosts, groups: Groups, *, stage: str = "projection_costs") -> ProjectionCosts:
    """World rank 0's figures and mode on all ranks, whatever they bring. All ranks call it once, at the start."""
    own = (MODES.index(costs.mode), costs.row_bytes, costs.weight_bytes, costs.call_bytes)
    said = broadcast_bytes(_WIRE.pack(*own), groups.control, 0, length=_WIRE.size, stage=stage)
    mode, row_bytes, weight_bytes, call_bytes = _WIRE.unpack(said)
    try:
        return ProjectionCosts(row_bytes, weight_bytes, call_bytes, MODES[mode])
    except (ValueError, IndexError) as problem:
        text = f"unreadable costs: {problem}"
        raise groups.control.error(TransportError, text, "broadcast_bytes", stage) from problem


def _shard_bytes(config: V4Config, numerics: Numerics, tp: int) -> int:
    """Bytes of one layer's wo_a and wo_b on one rank."""
    outputs = config.o_groups // tp * config.o_lora_rank
    wo_b = 1 if numerics.quantisation is not None else numerics.activation.itemsize
    return outputs * (config.group_columns * numerics.activation.itemsize + config.hidden_size * wo_b)
