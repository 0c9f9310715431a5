"""The engine: requests in, tokens out, one step of the mesh at a time.

World rank 0 is the front: it owns the queue and names each request's seat (dp group, slot, tp_rank). Every rank
holds the same table of requests, kept equal by one agreement per step and the control message that follows it.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.agreement import agree, encode_control, share_control, sleep, wake
from ..layouts.rows import RequestRows
from ..models.sampling import sample, uniform
from ..models.v4.caches import CacheShape
from ..models.v4.model import Model, StepOutput
from ..parallel.ownership import request_owner
from .requests import FINISH_REASONS, GOES_ON, NO_TOKEN, Event, Request, SamplingParams

HEADER = ("control_length", "rows", "free_slots")
"""Leading fields of a rank's agreement record; (token, finish) of each slot that it owns follow."""


@dataclass
class Metrics:
    """Rows and seconds of steps with prefill rows in them, tokens and seconds of those without."""

    prefill_rows: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    steps: int = 0


class Engine:
    """Runs requests on a model and its groups; every rank of the world makes one with the same arguments.

    slots_per_rank: requests pinned to one tp_rank at once; max_context: positions of one request;
    prefill_rows: prompt rows that a group takes into one step.
    """

    def __init__(
        self, model: Model, *, slots_per_rank: int = 8, max_context: int = 4096, prefill_rows: int = 512
    ) -> None:
        for name, value in (("slots_per_rank", slots_per_rank), ("prefill_rows", prefill_rows)):
            if value < 1:
                raise ValueError(f"{name} is {value}, allowed: 1 or more")
        self.model, self.groups = model, model.groups
        self.topology = model.groups.topology
        self.place = self.topology.coordinates(self.groups.rank)
        self.slots_per_rank, self.max_context, self.prefill_rows = slots_per_rank, max_context, prefill_rows
        self.caches = model.make_caches(CacheShape(self.topology.tp * slots_per_rank, max_context, prefill_rows))
        self.requests: dict[int, Request] = {}
        self.counters = Metrics()
        self.closed = False
        self._seats: dict[tuple[int, int], int] = {}
        self._news: dict[int, tuple[int, int]] = {}
        self._waiting: deque[Request] = deque()
        self._control: dict[str, Any] = {}
        self._next_id = 0
        self._idle = True

    @property
    def is_front(self) -> bool:
        return self.groups.rank == 0

    @property
    def active(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self.requests or self._waiting or self._control)

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request on world rank 0 and return its number; ValueError names what cannot be run."""
        self._usable("add_request")
        vocab, prompt = self.model.config.vocab_size, list(prompt_ids)
        bad = [token for token in prompt if type(token) is not int or not 0 <= token < vocab]
        if not prompt or bad:
            raise ValueError(f"prompt has {len(prompt)} ids, not allowed: {bad[:3]}; allowed: some, 0 to {vocab - 1}")
        request = Request(self._next_id, prompt, params, -1, -1)
        if request.limit > self.max_context:
            raise ValueError(
                f"prompt of {len(prompt)} and max_new_tokens {params.max_new_tokens} are {request.limit} "
                f"positions, allowed: max_context {self.max_context}"
            )
        self._next_id += 1
        self._waiting.append(request)
        return request.request_id

    def cancel(self, request_id: int, reason: str = "cancelled") -> None:
        """End a request on world rank 0; its last event comes with the next step. Unknown or ended ones are ignored."""
        self._usable("cancel")
        if reason not in FINISH_REASONS:
            raise ValueError(f"reason is {reason!r}, allowed: {FINISH_REASONS}")
        self._control.setdefault("cancel", []).append([request_id, reason])

    def step(self) -> list[Event]:
        """One step of all ranks: agree, take control messages, run rows. Events on world rank 0, [] elsewhere.

        A token is sampled by the owner of its request and reaches the others with the next step's agreement, so
        an event is one step behind the row that made it. ValueError after the end.
        """
        if self.closed:
            raise ValueError("step is for an engine that runs, this one is closed")
        if self._idle:
            self._wake()
        begin = time.perf_counter()
        message = self._control_message() if self.is_front else None
        length, events = self._agree(0 if message is None else len(message))
        if length:
            events += self._take(share_control(message, length, self.groups))
        rows = self._rows()
        self._idle = not self.requests and not self.closed
        if self.requests:
            self._run(rows)
            self._count(rows, time.perf_counter() - begin)
        return events if self.is_front else []

    def serve(self) -> None:
        """Follow world rank 0 until it closes; the life of every other rank."""
        while not self.closed:
            self.step()

    def close(self) -> None:
        """End the other ranks' serve(), from world rank 0; requests still waiting or running are dropped."""
        if not self.closed:
            self._usable("close")
            self._control["close"] = True
            self.step()

    def metrics(self) -> dict[str, Any]:
        """Counters since the start, and seconds per stage while the model's clock is enabled."""
        return {**vars(self.counters), "stages": dict(self.model.clock.seconds)}

    def _usable(self, what: str) -> None:
        if self.closed:
            raise ValueError(f"{what} is for an engine that runs, this one is closed")
        if not self.is_front:
            raise ValueError(f"{what} is for world rank 0, this is rank {self.groups.rank}")

    def _wake(self) -> None:
        """Idle ranks wait here for rank 0, for as long as it lives."""
        if self.is_front:
            wake(self.groups)
        else:
            sleep(self.groups)
        self._idle = False

    def _control_message(self) -> bytes | None:
        while self._waiting:
            seat = self._free_seat()
            if seat is None:
                break
            request = self._waiting.popleft()
            request.dp_rank, request.slot = seat
            self._seats[seat] = request.request_id
            self._control.setdefault("add", []).append(request.to_message())
        message, self._control = self._control, {}
        return encode_control(message) if message else None

    def _free_seat(self) -> tuple[int, int] | None:
        """The seat on the least loaded dp group and tp_rank, ties to the lowest."""
        load_dp = [0] * self.topology.dp
        load_tp: dict[tuple[int, int], int] = {}
        for dp_rank, slot in self._seats:
            load_dp[dp_rank] += 1
            owner = (dp_rank, self._owner(slot))
            load_tp[owner] = load_tp.get(owner, 0) + 1
        slots = range(self.topology.tp * self.slots_per_rank)
        free = [(dp, slot) for dp in range(self.topology.dp) for slot in slots if (dp, slot) not in self._seats]
        return min(free, key=lambda s: (load_dp[s[0]], load_tp.get((s[0], self._owner(s[1])), 0), s), default=None)

    def _owner(self, slot: int) -> int:
        return request_owner(slot, self.topology.tp, self.slots_per_rank)

    def _rank_of(self, request: Request) -> int:
        return self.topology.tp_groups()[request.dp_rank][self._owner(request.slot)]

    def _agree(self, control_length: int) -> tuple[int, list[Event]]:
        """Exchange the records and apply everyone's new tokens -> (rank 0's control length, events)."""
        own = range(self.place.tp_rank * self.slots_per_rank, (self.place.tp_rank + 1) * self.slots_per_rank)
        rows = sum(len(r.tokens) - r.computed for r in self._mine())
        record = [control_length, rows, self.slots_per_rank - sum(r.slot in own for r in self._mine())]
        for slot in own:
            record += self._news.get(slot, (NO_TOKEN, GOES_ON))
        self._news = {}
        records = agree(record, self.groups, stage="agreement")
        events = []
        for rank, theirs in enumerate(records):
            place = self.topology.coordinates(rank)
            pairs = theirs[len(HEADER) :]
            for i in range(self.slots_per_rank):
                seat = (place.dp_rank, place.tp_rank * self.slots_per_rank + i)
                events += self._apply(seat, pairs[2 * i], pairs[2 * i + 1])
        return records[0][0], events

    def _apply(self, seat: tuple[int, int], token: int, finish: int) -> list[Event]:
        request = self.requests.get(self._seats.get(seat, -1))
        if request is None or (token == NO_TOKEN and finish == GOES_ON):
            return []
        reason = None if finish == GOES_ON else FINISH_REASONS[finish]
        shown = () if reason in ("eos", "error") else (token,)
        request.tokens.extend(shown)
        if reason is not None:
            self._end(request, reason)
        return [Event(request.request_id, shown, reason, self._rank_of(request))]

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        del self.requests[request.request_id], self._seats[request.dp_rank, request.slot]
        if request.dp_rank == self.place.dp_rank:
            self.caches.release(request.slot)

    def _take(self, message: dict[str, Any]) -> list[Event]:
        events = []
        for packed in message.get("add", ()):
            new = Request.from_message(packed)
            self.requests[new.request_id] = new
            self._seats[new.dp_rank, new.slot] = new.request_id
            if new.dp_rank == self.place.dp_rank:
                self.caches.admit(new.slot, new.limit)
        for request_id, reason in message.get("cancel", ()):
            request = self.requests.get(request_id)
            if request is not None:
                self._end(request, reason)
                events.append(Event(request_id, (), reason, self._rank_of(request)))
            elif self.is_front:
                events += self._cancel_waiting(request_id, reason)
        self.closed = self.closed or bool(message.get("close"))
        if self.closed:
            self._waiting.clear()
            for request in list(self.requests.values()):
                self._end(request, "cancelled")
        return events

    def _cancel_waiting(self, request_id: int, reason: str) -> list[Event]:
        kept = [r for r in self._waiting if r.request_id != request_id]
        found = len(kept) < len(self._waiting)
        self._waiting = deque(kept)
        return [Event(request_id, (), reason)] if found else []

    def _mine(self) -> list[Request]:
        """Requests of this rank's TP group, in order of arrival."""
        return [r for r in self.requests.values() if r.dp_rank == self.place.dp_rank]

    def _rows(self) -> list[RequestRows]:
        """The group's rows of this step: every decoding request's, then prompts up to the budget."""
        budget, picked = self.prefill_rows, []
        for request in self._mine():
            rows = request.next_rows(budget, self._owner(request.slot))
            if rows is None:
                continue
            if rows.kind == "prefill":
                budget -= len(rows.tokens)
            picked.append(rows)
        return picked

    @torch.no_grad()
    def _run(self, rows: list[RequestRows]) -> None:
        """Run the rows and keep what the owned requests' new tokens are. All ranks enter, rows or not."""
        plan = self.model.plan(rows, self.caches)
        by_slot = {r.slot: r for r in self._mine()}
        asked = [by_slot[r.slot] for r in rows if r.asked]
        greedy_only = all(r.params.temperature == 0 for r in asked)
        output = self.model.forward(plan, self.caches, want="ids" if greedy_only else "logits")
        for r in rows:
            by_slot[r.slot].computed += len(r.tokens)
        owned = [by_slot[rows[index].slot] for index, _ in output.owned]
        for request, token in zip(owned, self._tokens(owned, output), strict=True):
            reason = request.finish_of(token)
            self._news[request.slot] = (token, GOES_ON if reason is None else FINISH_REASONS.index(reason))

    def _tokens(self, owned: list[Request], output: StepOutput) -> list[int]:
        if output.ids is not None:
            return output.ids.tolist()
        assert output.logits is not None
        temperature = torch.tensor([r.params.temperature for r in owned], dtype=torch.float64)
        top_p = torch.tensor([r.params.top_p for r in owned], dtype=torch.float64)
        draws = torch.tensor([uniform(r.params.seed, len(r.tokens)) for r in owned], dtype=torch.float64)
        device = output.logits.device
        return sample(output.logits, temperature.to(device), top_p.to(device), draws.to(device)).tolist()

    def _count(self, rows: list[RequestRows], seconds: float) -> None:
        self.counters.steps += 1
        prefill = sum(len(r.tokens) for r in rows if r.kind == "prefill")
        if prefill:
            self.counters.prefill_rows += prefill
            self.counters.prefill_seconds += seconds
        else:
            self.counters.decode_tokens += len(rows)
            self.counters.decode_seconds += seconds


__all__ = ["Engine", "Event", "SamplingParams"]
