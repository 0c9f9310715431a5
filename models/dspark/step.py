"""The speculative step: prepare, target, accept, draft, commit. Plain decoding is the same with nothing proposed.

All ranks of a group call it with equal states; each decides for the requests that it owns. What it decided, `Told`,
reaches the others with the next agreement, where all `learn` it. dspark.md 4, deployment.md 9.

Letters: T rows of this rank's band, R owned requests that were asked, N their rows, Y drafts (gamma), S = Y + 1,
B blocks, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from ...layouts.rowplan import RowPlan
from ...layouts.rows import RequestRows
from ..processors import IgnoreEos, Processor
from ..request import RequestState
from ..v4.caches import Caches
from ..v4.model import Model, StepOutput
from .choice import DraftChoice, decide
from .draft import Drafts
from .plan import DraftBlock
from .proposer import Anchors, KeptRows, Proposer, Room
from .schedule import to_fixed


@dataclass(frozen=True)
class Judged:
    """A block of drafts that was verified: the logits of their confidences, how many the acceptance rule took, and the
    rows that were run for them."""

    confidences: tuple[float, ...]
    accepted: int
    width: int


@dataclass(frozen=True)
class Decoder:
    """What every step of an engine runs with. proposer None drafts nothing. point: drafts are the drafter's likeliest
    tokens also where the target samples; the output's distribution is the same, fewer of them are accepted.
    temperatures: of the confidences, one a draft, None for 1 (dspark.md 6.2). judge: told of every block of drafts of
    this rank's requests that was verified."""

    model: Model
    caches: Caches
    proposer: Proposer | None = None
    processors: tuple[Processor, ...] = (IgnoreEos(),)
    point: bool = False
    temperatures: tuple[float, ...] | None = None
    judge: Callable[[Judged], None] | None = None

    @property
    def gamma(self) -> int:
        return 0 if self.proposer is None else self.proposer.gamma


@dataclass(frozen=True)
class Told:
    """An owner's decisions about one request in one step.

    tokens: those emitted, the end token included, -1 last where its logits were not finite; none where a verification
    has to be made again without drafts. finish: why the request ended with the last of them. width: rows that were
    verified for them. drafts: of the tokens behind the last one, and their survivals in fixed point.
    """

    slot: int
    generation: int
    width: int
    tokens: tuple[int, ...]
    finish: str | None = None
    drafts: tuple[int, ...] = ()
    survivals: tuple[int, ...] = ()


@dataclass
class StepSeconds:
    """Seconds of one step on this rank: of the target with acceptance, and of context rows with drafts."""

    verify: float = 0.0
    draft: float = 0.0


@dataclass(frozen=True)
class _Turn:
    """An owned request whose rows were asked: its state, its rows, and what comes of them. spoiled: its last token was
    not decided, for a row was not finite."""

    state: RequestState
    rows: RequestRows
    index: int
    tokens: tuple[int, ...]
    finish: str | None
    spoiled: bool = False
    drafts: tuple[int, ...] = ()
    survivals: tuple[int, ...] = ()


def prepare(state: RequestState, budget: int, width: int = 1) -> RequestRows | None:
    """The rows of a request's next step: the anchor and its first width - 1 drafts, or up to `budget` rows of the
    prompt; None where that is 0. Near its limit the window shrinks to the rows that fit."""
    start, tokens = state.computed, state.tokens
    if state.in_prompt:
        count = min(state.prefill_end - start, budget)
        if count < 1:
            return None
        asked = (count - 1,) if start + count == len(tokens) else ()
        return RequestRows(state.slot, start, tokens[start : start + count], state.owner, "prefill", asked)
    width = max(1, min(width, state.widest))
    rows = (tokens[start], *state.drafts[: width - 1])
    return RequestRows(state.slot, start, rows, state.owner, "decode" if width == 1 else "verify", range(width))


def speculative_step(
    rows: Sequence[RequestRows],
    states: Sequence[RequestState],
    decoder: Decoder,
    room: Room | None = None,
    *,
    gather_weights: bool = False,
    seconds: StepSeconds | None = None,
) -> list[Told]:
    """Run the rows, which `prepare` made of these states, in their order -> decisions about owned requests.

    room: blocks that the ranks agreed on, None without a proposer. Mutates the caches, the states' `computed` where
    prompt rows ran, and `drawn_YV` of the owned. All ranks of all groups call it, rows or not.
    """
    begin = time.perf_counter()
    plan, output = target(rows, states, decoder, gather_weights)
    turns = accept(rows, states, output, decoder)
    middle = time.perf_counter()
    if decoder.proposer is not None:
        assert room is not None, "ranks agree on room before a step that may draft"
        decoder.proposer.keep(kept_rows(plan, states, turns, decoder.caches), output.taps, decoder.caches)
        turns = draft(plan, turns, output, decoder, decoder.proposer, room)
    told = commit(rows, states, turns, decoder.caches)
    if seconds is not None:
        seconds.verify, seconds.draft = middle - begin, time.perf_counter() - middle
    return told


def target(
    rows: Sequence[RequestRows], states: Sequence[RequestState], decoder: Decoder, gather_weights: bool
) -> tuple[RowPlan, StepOutput]:
    """The target's forward over all rows, with the proposer's taps: whole logits only where somebody needs them."""
    asked = [state.params for state, each in zip(states, rows, strict=True) if each.asked]
    plain = all(p.temperature == 0 and not any(q.wanted(p) for q in decoder.processors) for p in asked)
    want: Literal["ids", "logits"] = "ids" if plain else "logits"
    plan = decoder.model.plan(rows, decoder.caches)
    taps = () if decoder.proposer is None else decoder.proposer.taps
    return plan, decoder.model.forward(plan, decoder.caches, taps, want=want, gather_weights=gather_weights)


def accept(
    rows: Sequence[RequestRows], states: Sequence[RequestState], output: StepOutput, decoder: Decoder
) -> list[_Turn]:
    """What the owned requests emit: accepted drafts and the token after them, up to the first that ends the request."""
    order = sorted(range(len(output.owned)), key=output.owned.__getitem__)
    owned = list(dict.fromkeys(output.owned[place][0] for place in order))
    if not owned:
        return []
    found = output.ids if output.ids is not None else output.logits
    assert found is not None
    if order != list(range(len(order))):
        found = found[torch.tensor(order, device=found.device)]
    chosen = decide(found, [states[index] for index in owned], [rows[index] for index in owned], decoder.processors)
    turns = []
    for index, tokens in zip(owned, chosen, strict=True):
        verified = rows[index].kind == "verify"
        # Rows of a tile share products: a draft's row that is not finite spoils those before it. So the newest token
        # runs once more, alone, and that tells.
        spoiled = verified and tokens[-1] < 0
        shown, finish = emit(states[index], tokens[:-1] if spoiled else tokens)
        if decoder.judge is not None and verified and not spoiled:
            decoder.judge(Judged(states[index].confidences, len(tokens) - 1, len(rows[index].tokens)))
        turns.append(_Turn(states[index], rows[index], index, shown, finish, spoiled))
    return turns


def emit(state: RequestState, tokens: Sequence[int]) -> tuple[tuple[int, ...], str | None]:
    """The tokens up to the first that ends the request, and why it does."""
    for number, token in enumerate(tokens, 1):
        finish = state.finish_of(token, number)
        if finish is not None:
            return tuple(tokens[:number]), finish
    return tuple(tokens), None


def kept_rows(plan: RowPlan, states: Sequence[RequestState], turns: Sequence[_Turn], caches: Caches) -> KeptRows:
    """Which rows of this rank's band are final: those of prompts, the anchors, and accepted drafts."""
    rows, first = plan.rows, plan.rows.band(plan.tp_rank).start
    emitted = {turn.index: turn.tokens for turn in turns}
    kept_T, next_T = (np.full(plan.local_t, -1, dtype=np.int64) for _ in range(2))
    for index, (request, offset) in enumerate(zip(plan.requests, rows.fresh_offset_R.tolist(), strict=True)):
        # Rows that verify stand in the band of their owner, who alone knows how many stay.
        new = emitted.get(index, ())
        count = len(request.tokens) if request.kind == "prefill" else len(new)
        position_X = np.arange(request.start, request.start + count)
        behind = [*states[index].tokens[request.start + 1 : request.start + count + 1], *new, -1][:count]
        row_X = rows.fresh_rows_N[offset : offset + count].numpy() - first
        mine_X = (row_X >= 0) & (row_X < plan.local_t)
        kept_T[row_X[mine_X]] = position_X[mine_X]
        next_T[row_X[mine_X]] = np.array(behind, dtype=np.int64)[mine_X]
    slot_T = plan.local(rows.slot_G).numpy()
    return KeptRows(slot_T, caches.generation_Q[slot_T.clip(0)], kept_T, next_T)


def draft(
    plan: RowPlan, turns: Sequence[_Turn], output: StepOutput, decoder: Decoder, proposer: Proposer, room: Room
) -> list[_Turn]:
    """Drafts for owned requests that go on and can still use one. Every rank enters, as many slabs as were agreed."""
    going = [turn for turn in turns if _may_draft(turn)] if proposer.gamma else []
    blocks, last = [], []
    for turn in going:
        anchor = len(turn.state.tokens) + len(turn.tokens) - 1
        blocks.append(DraftBlock(turn.state.slot, anchor, turn.tokens[-1]))
        last.append(_band_row(plan, turn.index, anchor - 1))
    if not room.most:
        assert not blocks, "room was agreed for less than there is"
        return list(turns)
    choose = DraftChoice([(turn.state, turn.tokens) for turn in going], decoder.processors, decoder.point)
    drafts = proposer.propose(Anchors(blocks, last, output.taps, room), decoder.caches, choose=choose)
    return _with_drafts(turns, going, drafts, choose, decoder)


def _may_draft(turn: _Turn) -> bool:
    return turn.finish is None and not turn.spoiled and turn.state.can_draft(len(turn.tokens))


def _band_row(plan: RowPlan, index: int, position: int) -> int:
    """Where a request's row at that position stands in this rank's band, -1 where it is another rank's."""
    place = int(plan.rows.fresh_offset_R[index]) + position - plan.requests[index].start
    row = int(plan.rows.fresh_rows_N[place]) - plan.rows.band(plan.tp_rank).start
    return row if 0 <= row < plan.local_t else -1


def _with_drafts(
    turns: Sequence[_Turn], going: Sequence[_Turn], drafts: Drafts, choose: DraftChoice, decoder: Decoder
) -> list[_Turn]:
    """Every turn with its drafts, cut before the first that had no finite logits."""
    found = {}
    survivals = to_fixed(drafts.confidence, decoder.temperatures).tolist()
    for number, turn in enumerate(going):
        ids = drafts.ids[number].tolist()
        sound = ids.index(-1) if -1 in ids else len(ids)
        turn.state.drawn_YV = choose.drawn(number)
        turn.state.confidences = tuple(drafts.confidence[number].tolist()[:sound])
        found[turn.index] = replace(turn, drafts=tuple(ids[:sound]), survivals=tuple(survivals[number][:sound]))
    return [found.get(turn.index, turn) for turn in turns]


def commit(
    rows: Sequence[RequestRows], states: Sequence[RequestState], turns: Sequence[_Turn], caches: Caches
) -> list[Told]:
    """Prompt rows are final at once, on all ranks; everything else when the others have been told of it."""
    for state, each in zip(states, rows, strict=True):
        if each.kind == "prefill":
            state.computed += len(each.tokens)
            caches.commit(state.slot, state.tokens, state.computed)
    told = []
    for turn in turns:
        if not turn.drafts:
            turn.state.drawn_YV = None
        width = len(turn.rows.asked)
        place = (turn.state.slot, turn.state.generation, width)
        told.append(Told(*place, turn.tokens, turn.finish, turn.drafts, turn.survivals))
    return told


def learn(state: RequestState, told: Told, caches: Caches | None) -> tuple[int, ...]:
    """Take what an owner decided, as every rank does with the next agreement -> the tokens to be shown.

    Mutates the state, and the caches of its group (None in others): its rows up to the last token are final. An end
    token is not shown; of a request that failed nothing more is published.
    """
    state.computed = len(state.tokens) - 1 + len(told.tokens)
    shown = told.tokens[:-1] if told.finish in ("eos", "error") else told.tokens
    state.tokens.extend(shown)
    state.drafts, state.survivals = told.drafts, told.survivals
    if caches is not None and told.finish != "error":
        caches.commit(state.slot, state.tokens, state.computed)
    return shown
