"""The choice of tokens by request: of the target's rows with the drafts that they judge, and of drafts.

Letters: R requests, N their rows, Y drafts (gamma), S = Y + 1, B blocks, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ...layouts.rows import RequestRows
from ..processors import Processor, RowHistory, process
from ..request import RequestState, SamplingParams
from ..sampling import draw, greedy, kept_probability
from ..uniforms import DRAFT, TARGET, TEST, uniforms
from .accept import Accepted, accept_greedy, accept_sampled, step_uniforms


def decide(
    found_N: torch.Tensor,
    states: Sequence[RequestState],
    rows: Sequence[RequestRows],
    processors: Sequence[Processor],
) -> list[list[int]]:
    """Accepted drafts of each request and the token after them, -1 where its logits are not finite.

    found_N: ids int64 [N], or logits [N, V], by request, then by position.
    """
    widths = [len(each.asked) for each in rows]
    if found_N.dim() == 1 and max(widths) == 1:
        return [[token] for token in found_N.tolist()]
    # What a request of one row has for drafts is not judged, be it the end of a prompt or an anchor alone.
    drafts = [list(each.tokens[1:]) if each.kind == "verify" else [] for each in rows]
    most = max(map(len, drafts))
    draft_RY = torch.tensor([each + [-1] * (most - len(each)) for each in drafts], dtype=torch.int64)
    draft_RY, width_R = draft_RY.view(len(rows), most).to(found_N.device), torch.tensor(widths, device=found_N.device)
    if found_N.dim() == 1:
        got = accept_greedy(found_N, width_R, draft_RY)
    else:
        histories = [
            RowHistory(state.params, state.tokens, tuple(own[:offset]))
            for state, own, width in zip(states, drafts, widths, strict=True)
            for offset in range(width)
        ]
        got = _judge(process(found_N, histories, processors), histories, states, width_R, draft_RY)
    counts, last = got.count_R.tolist(), got.token_R.tolist()
    return [[*own[:count], token] for own, count, token in zip(drafts, counts, last, strict=True)]


def _judge(
    logits_NV: torch.Tensor,
    histories: Sequence[RowHistory],
    states: Sequence[RequestState],
    width_R: torch.Tensor,
    draft_RY: torch.Tensor,
) -> Accepted:
    if all(state.params.temperature == 0 for state in states):
        return accept_greedy(greedy(logits_NV), width_R, draft_RY)
    target_NV = kept(logits_NV, [history.params for history in histories])
    seed_R = np.array([state.params.seed for state in states], dtype=np.int64)
    anchor_R = np.array([len(state.tokens) - 1 for state in states], dtype=np.int64)
    drafts = draft_RY.shape[1]
    numbers = [step_uniforms(seed_R, anchor_R, *each) for each in ((drafts, TEST), (drafts + 1, TARGET))]
    test_RY, final_RS = (each.to(logits_NV.device) for each in numbers)
    return accept_sampled(target_NV, width_R, draft_RY, _drawn(states, draft_RY, target_NV), test_RY, final_RS)


def _drawn(states: Sequence[RequestState], draft_RY: torch.Tensor, target_NV: torch.Tensor) -> torch.Tensor | None:
    """What all drafts were drawn from [R, Y, V]; None if each was its request's only choice."""
    kept = [state.drawn_YV for state in states]
    if not draft_RY.shape[1] or all(weights_YV is None for weights_YV in kept):
        return None
    drafts, vocab = draft_RY.shape[1], target_NV.shape[1]
    drawn_RYV = target_NV.new_zeros((len(states), drafts, vocab))
    drawn_RYV.scatter_(2, draft_RY.clamp(min=0)[:, :, None], 1.0)
    for number, weights_YV in enumerate(kept):
        if weights_YV is not None:
            drawn_RYV[number, : len(weights_YV)] = weights_YV[:drafts]
    return drawn_RYV


def kept(logits_NV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Weights FP64 [N, V] that tokens are drawn from, each row by its request's parameters."""
    device = logits_NV.device

    def on_device(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)

    return kept_probability(
        logits_NV,
        on_device([p.temperature for p in params]),
        on_device([p.top_p for p in params]),
        top_k=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
        min_p=on_device([p.min_p for p in params]),
    )


class DraftChoice:
    """How the drafts of blocks are chosen, one after the other: as their requests choose tokens, from the drafter's
    logits. Draft b of an anchor at position a is drawn with the number of position a + 1 + b and its own stream.

    going: the state of each block's request, and the tokens that this step emits for it. point: the likeliest always.
    """

    def __init__(
        self,
        going: Sequence[tuple[RequestState, tuple[int, ...]]],
        processors: Sequence[Processor],
        point: bool,
    ) -> None:
        self._going, self._processors = going, processors
        self._sampled = not point and any(state.params.temperature > 0 for state, _ in going)
        self._chosen: list[list[int]] = [[] for _ in going]
        self._weights: list[list[torch.Tensor]] = [[] for _ in going]

    def __call__(self, logits_BV: torch.Tensor, draft: int, blocks: range) -> torch.Tensor:
        """Ids int64 [B] of the blocks' next draft; what they were drawn from is kept."""
        going = [self._going[number] for number in blocks]
        histories = [
            RowHistory(state.params, state.tokens, (*new, *self._chosen[number]))
            for number, (state, new) in zip(blocks, going, strict=True)
        ]
        logits_BV = process(logits_BV, histories, self._processors)
        if not self._sampled or not going:
            ids_B = greedy(logits_BV)
        else:
            ids_B = self._draw(logits_BV, draft, blocks)
        for number, token in zip(blocks, ids_B.tolist(), strict=True):
            self._chosen[number].append(token)
        return ids_B

    def _draw(self, logits_BV: torch.Tensor, draft: int, blocks: range) -> torch.Tensor:
        going = [self._going[number] for number in blocks]
        weight_BV = kept(logits_BV, [state.params for state, _ in going])
        seed_B = np.array([state.params.seed for state, _ in going], dtype=np.int64)
        position_B = np.array([len(state.tokens) + len(new) + draft for state, new in going], dtype=np.int64)
        number_B = torch.from_numpy(uniforms(seed_B, position_B, DRAFT + draft)).to(logits_BV.device)
        for number, weight_V in zip(blocks, weight_BV, strict=True):
            self._weights[number].append(weight_V)
        return draw(weight_BV, number_B)

    def drawn(self, number: int) -> torch.Tensor | None:
        """Weights [Y, V] that a block's drafts were drawn from; None where each was the only choice."""
        weights = self._weights[number]
        return torch.stack(weights) if weights and self._going[number][0].params.temperature > 0 else None
