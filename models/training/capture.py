"""Features of token sequences from the target's own forward: captured layers, and the state that enters its LM head.

Letters: T local rows, R rows received, S positions of a sequence, F features, h streams, H hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from ...comm.collectives import exchange_rows
from ...layouts.rowplan import RowPlan
from ...layouts.rows import RequestRows
from ..v4.model import Model, Tap
from .feature_spec import FeatureSpec

_TAPS: Mapping[str, Literal["mean_out", "mean_in", "streams"]] = MappingProxyType(
    {"mean_out": "mean_out", "mean_in": "mean_in", "streams": "streams"}
)
"""Point of the features -> that of the target."""


@dataclass(frozen=True)
class Features:
    """What a draft reads of one sequence, BF16: hidden_states [S, F] and, if declared, last_hidden_states [S, H]."""

    hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor | None


class TargetCapture:
    """Runs sequences through a target, without gradients and caches, and brings each one's states to its owner."""

    def __init__(self, model: Model, spec: FeatureSpec) -> None:
        """ValueError where the target cannot give such features."""
        config = model.config
        spec.check_target(config.num_hidden_layers, config.hidden_size, config.vocab_size, config.hc_mult)
        self.model, self.spec = model, spec
        self._taps = tuple(Tap(layer, _TAPS[spec.point]) for layer in spec.layers)
        self._last = Tap(config.num_hidden_layers - 1, "streams")

    @torch.no_grad()
    def run(self, sequences: Sequence[Sequence[int]], owners: Sequence[int] | None = None) -> dict[int, Features]:
        """One forward of whole sequences, the same on all ranks of a TP group -> {place in `sequences`: features} of
        those that this tp_rank owns, on the model's device.

        owners: a tp_rank for each, by default 0. All ranks of the expert block call it as often as each other, with
        no sequences if they have none. States travel in BF16, a row to its owner alone.
        """
        owners = [0] * len(sequences) if owners is None else list(owners)
        plan = self.model.plan([RequestRows(i, 0, tokens) for i, tokens in enumerate(sequences)])
        taps = (*self._taps, self._last) if self.spec.teacher else self._taps
        taps = tuple(dict.fromkeys(taps))
        output = self.model.forward(plan, taps=taps, want="ids")
        # Streams [T, h, H] lie one after the other, as h * H columns.
        parts = [output.taps[tap].flatten(1) for tap in self._taps]
        if self.spec.teacher:
            parts.append(self.model.head_input(output.taps[self._last]))
        rows_TC = torch.cat([part.to(torch.bfloat16) for part in parts], dim=-1)
        return self._owned(rows_TC, plan, owners)

    def _owned(self, rows_TC: torch.Tensor, plan: RowPlan, owners: Sequence[int]) -> dict[int, Features]:
        group = self.model.groups.tp
        # Padding, request -1, belongs to nobody.
        owner_R = torch.tensor([*owners, -1])
        owner_G = owner_R[plan.rows.request_G]
        mine_T = owner_G[plan.rows.band(group.rank)]
        send = [(mine_T == rank).nonzero().flatten() for rank in range(group.size)]
        places = [
            (owner_G[plan.rows.band(rank)] == group.rank).nonzero().flatten() + rank * plan.local_t
            for rank in range(group.size)
        ]
        rows_RC = exchange_rows(
            rows_TC[torch.cat(send).to(rows_TC.device)],
            group,
            [len(each) for each in send],
            [len(each) for each in places],
            stage="features",
        )
        return self._by_sequence(rows_RC, torch.cat(places), plan, owners)

    def _by_sequence(
        self, rows_RC: torch.Tensor, place_R: torch.Tensor, plan: RowPlan, owners: Sequence[int]
    ) -> dict[int, Features]:
        request_R, position_R = plan.rows.request_G[place_R], plan.rows.position_G[place_R]
        found: dict[int, Features] = {}
        for sequence in (i for i, owner in enumerate(owners) if owner == self.model.groups.tp.rank):
            rows = (request_R == sequence).nonzero().flatten()
            rows = rows[position_R[rows].argsort()].to(rows_RC.device)
            states_SC = rows_RC[rows]
            hidden, last = states_SC[:, : self.spec.width], states_SC[:, self.spec.width :]
            found[sequence] = Features(hidden.contiguous(), last.contiguous() if self.spec.teacher else None)
        return found
