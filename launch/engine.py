"""The engine: requests in, tokens out, one step of the mesh at a time.

World rank 0 is the front: it owns the queue and names each request's seat (dp group, slot, tp_rank). Every rank
holds the same table of requests, kept equal by one agreement per step and the control message that follows it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..comm.agreement import agree, encode_control, share_control, sleep, wake
from ..layouts.rows import RequestRows, band_length
from ..models.dspark.proposer import Proposer, Room
from ..models.dspark.schedule import VERIFY_ALL, History, Proposal, Verification, searched, widths
from ..models.dspark.step import Decoder, Judged, StepSeconds, Told, learn, speculative_step
from ..models.processors import IgnoreEos, Processor
from ..models.request import FINISH_REASONS, RequestState, SamplingParams
from ..models.v4.model import Model
from ..models.v4.pools import engine_shape
from ..models.v4.projection_choice import WEIGHTS, agree_costs, projection_costs
from ..parallel.ownership import request_owner
from .metrics import Metrics
from .requests import Event, Request
from .schedule import pick_rows, prompt_shares
from .seats import Seat, Seats
from .step_costs import policy_costs
from .telling import decode_told, encode_told, told_length

HEADER = ("control_length", "rows", "free_slots", "free_pages", "prefix_hits", "prefix_tokens", "may_draft")
"""Leading fields of a rank's agreement record; what is told of each slot that it owns follows."""


class Engine:
    """Runs requests on a model and its groups; every rank of the world makes one with the same arguments.

    requests: how many a TP group runs at once; max_context: positions of one request; prefill_rows: prompt rows that
    a group takes into one step; block_size: positions of a page of the window. cache_bytes: what a rank's pools may
    take, None for every request at full length. prefix_points: prefixes of earlier sequences that are kept for
    others to start from, by default as many as requests; 0 for none. projection: which form of the output projection
    steps take, "activations", "weights", or "auto" for the cheaper by the number of rows; world rank 0's counts.
    proposer: drafts the tokens that steps verify, None for plain decoding; point_drafts: it proposes its likeliest
    tokens also where the target samples. verify: which drafts a step verifies; for those that weigh rows against time,
    steps are timed here. temperatures: of the drafter's confidences, as calibrated. processors: what may change logits,
    in their order. judge: is told of every verified block of drafts that this rank owns.
    """

    def __init__(
        self,
        model: Model,
        *,
        requests: int = 8,
        max_context: int = 4096,
        prefill_rows: int = 512,
        block_size: int = 32,
        cache_bytes: int | None = None,
        prefix_points: int | None = None,
        projection: str = "auto",
        proposer: Proposer | None = None,
        point_drafts: bool = False,
        verify: Verification = VERIFY_ALL,
        temperatures: Sequence[float] | None = None,
        processors: Sequence[Processor] = (IgnoreEos(),),
        judge: Callable[[Judged], None] | None = None,
    ) -> None:
        for name, value in (("requests", requests), ("prefill_rows", prefill_rows)):
            if value < 1:
                raise ValueError(f"{name} is {value}, allowed: 1 or more")
        self.model, self.groups = model, model.groups
        self.topology = model.groups.topology
        self.place = self.topology.coordinates(self.groups.rank)
        self.slots_per_rank = -(-requests // self.topology.tp)
        self.max_context, self.prefill_rows = max_context, prefill_rows
        self.caches = model.make_caches(
            engine_shape(
                model.config,
                model.numerics,
                requests=self.topology.tp * self.slots_per_rank,
                max_context=max_context,
                prefill_rows=prefill_rows,
                verify_rows=1 if proposer is None else 1 + proposer.gamma,
                draft_stages=0 if proposer is None else proposer.stages,
                block_size=block_size,
                cache_bytes=cache_bytes,
                prefix_points=requests if prefix_points is None else prefix_points,
            )
        )
        heat = None if temperatures is None else tuple(temperatures)
        self.decoder = Decoder(model, self.caches, proposer, tuple(processors), point_drafts, heat, judge)
        self.verify, self._history = verify, History()
        self.table = policy_costs(verify, self.decoder, requests, self.slots_per_rank)
        costs = projection_costs(model.config, model.numerics, self.topology.tp, projection)
        self.costs = agree_costs(costs, self.groups)
        pages = {name: pool.count for name, pool in self.caches.pages.items()}
        self.seats = Seats(self.topology, self.slots_per_rank, requests, pages, self.caches.pages_needed)
        self.requests: dict[int, Request] = {}
        self.counters = Metrics()
        self.closed = False
        self._by_seat: dict[Seat, Request] = {}
        self._news: dict[int, Told] = {}
        self._control: dict[str, Any] = {}
        self._prefix = [0, 0]
        self._heard: list[list[int]] = []
        self._may_draft: list[int] = []
        self._next_id = 0
        self._idle = True

    @property
    def is_front(self) -> bool:
        return self.groups.rank == 0

    @property
    def active(self) -> bool:
        """Whether a step would have anything to do."""
        return bool(self.requests or len(self.seats) or self._control)

    def add_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request on world rank 0 and return its number; ValueError names what cannot be run."""
        self._usable("add_request")
        vocab, prompt = self.model.config.vocab_size, list(prompt_ids)
        bad = [token for token in prompt if type(token) is not int or not 0 <= token < vocab]
        if not prompt or bad:
            raise ValueError(f"prompt has {len(prompt)} ids, not allowed: {bad[:3]}; allowed: some, 0 to {vocab - 1}")
        request = Request(request_id=self._next_id, prompt=prompt, params=params)
        if request.limit > self.max_context:
            raise ValueError(
                f"prompt of {len(prompt)} and max_new_tokens {params.max_new_tokens} are {request.limit} "
                f"positions, allowed: max_context {self.max_context}"
            )
        self.seats.check_fits(request.limit)
        self._next_id += 1
        self.seats.queue(request)
        self.counters.added(request.request_id)
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
        begin, seconds = time.perf_counter(), StepSeconds()
        message = self._control_message() if self.is_front else None
        length, events = self._agree(0 if message is None else len(message))
        if length:
            events += self._take(share_control(message, length, self.groups))
        picked = self._rows()
        self._idle = not self.requests and not self.closed
        if self.requests:
            self._run(picked, seconds)
            self.counters.ran([rows for _, rows in picked], time.perf_counter() - begin, seconds)
        self.counters.told(events)
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
        """Counters since the start; seconds per stage while the model's clock is enabled.

        pools: pages of this rank by family, those in use and the most that ever were. prefix: prompts of all groups
        that started from a published prefix, and the rows that this saved, as of the last step. kernels: which of the
        compiled forms this rank's small steps use, [] for none.
        """
        pools = {
            name: {"pages": pool.count, "used": pool.used, "peak": pool.peak}
            for name, pool in self.caches.pages.items()
        }
        leaders = [self._heard[ranks[0]] for ranks in self.topology.tp_groups()] if self._heard else []
        places = [HEADER.index(name) for name in ("prefix_hits", "prefix_tokens")]
        hits, tokens = (sum(record[place] for record in leaders) for place in places)
        return {
            **self.counters.report(),
            "stages": dict(self.model.clock.seconds),
            "pools": pools,
            "prefix": {"hits": hits, "tokens": tokens},
            "kernels": [] if self.model.kernels is None else self.model.kernels.parts(),
        }

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
        seated = self.seats.seat()
        if seated:
            self._control["add"] = [request.to_message() for request in seated]
        message, self._control = self._control, {}
        return encode_control(message) if message else None

    def _owner(self, slot: int) -> int:
        return request_owner(slot, self.topology.tp, self.slots_per_rank)

    def _rank_of(self, request: Request) -> int:
        return self.topology.tp_groups()[request.dp_rank][self._owner(request.slot)]

    def _agree(self, control_length: int) -> tuple[int, list[Event]]:
        """Exchange the records and apply everyone's new tokens -> (rank 0's control length, events)."""
        gamma, mine = self.decoder.gamma, self._mine()
        own = range(self.place.tp_rank * self.slots_per_rank, (self.place.tp_rank + 1) * self.slots_per_rank)
        rows = sum(r.waiting for r in mine)
        free_slots = self.slots_per_rank - sum(r.slot in own for r in mine)
        may_draft = sum(r.slot in own and self._may_draft_next(r) for r in mine)
        record = [control_length, rows, free_slots, min(self.caches.free_pages().values()), *self._prefix, may_draft]
        for slot in own:
            record += encode_told(self._news.get(slot), gamma)
        self._news = {}
        self._heard = agree(record, self.groups, stage="agreement")
        self._may_draft = [theirs[HEADER.index("may_draft")] for theirs in self._heard]
        events, length = [], told_length(gamma)
        for rank, theirs in enumerate(self._heard):
            place = self.topology.coordinates(rank)
            for i in range(self.slots_per_rank):
                first, slot = len(HEADER) + i * length, place.tp_rank * self.slots_per_rank + i
                told = decode_told(theirs[first : first + length], slot, gamma)
                if told is not None:
                    events += self._apply((place.dp_rank, slot), told)
        return self._heard[0][0], events

    def _may_draft_next(self, request: Request) -> bool:
        """Whether it may draft in the step that begins: what is yet to be heard of it only makes that less likely."""
        ends_prompt = request.prefill_end - request.computed <= self.prefill_rows
        return self.decoder.gamma > 0 and ends_prompt and request.can_draft(1)

    def _apply(self, seat: Seat, told: Told) -> list[Event]:
        request = self._by_seat.get(seat)
        if request is None or request.generation != told.generation:
            return []
        before = None if request.num_generated == 0 else request.drafts
        shown = learn(request, told, self.caches if request.dp_rank == self.place.dp_rank else None)
        if before is not None:
            self.counters.learned(told, before)
        if told.finish is not None:
            self._end(request, told.finish)
        return [Event(request.request_id, shown, told.finish, self._rank_of(request))]

    def _end(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        del self.requests[request.request_id], self._by_seat[request.dp_rank, request.slot]
        if self.is_front:
            self.seats.leave(request)
        if request.dp_rank == self.place.dp_rank:
            self.caches.release(request.slot)

    def _take(self, message: dict[str, Any]) -> list[Event]:
        for packed in message.get("add", ()):
            self._admit(Request.from_message(packed))
        events = [
            event for request_id, reason in message.get("cancel", ()) for event in self._cancel(request_id, reason)
        ]
        self.closed = self.closed or bool(message.get("close"))
        if self.closed:
            self.seats.clear()
            for request in list(self.requests.values()):
                self._end(request, "cancelled")
        return events

    def _admit(self, new: Request) -> None:
        self.requests[new.request_id] = new
        self._by_seat[new.dp_rank, new.slot] = new
        new.owner = self._owner(new.slot)
        if self.decoder.proposer is not None:
            new.prefill_end -= self.decoder.proposer.pins_prompt_end
            self._may_draft[self._rank_of(new)] += new.params.draft and self.decoder.gamma > 0
        if new.dp_rank == self.place.dp_rank:
            new.computed = self.caches.admit(new.slot, new.limit, new.prompt)
            self._prefix[0] += new.computed > 0
            self._prefix[1] += new.computed

    def _cancel(self, request_id: int, reason: str) -> list[Event]:
        request = self.requests.get(request_id)
        if request is not None:
            self._end(request, reason)
            return [Event(request_id, (), reason, self._rank_of(request))]
        return [Event(request_id, (), reason) for _ in self.seats.drop_waiting([request_id])]

    def _mine(self) -> list[Request]:
        """Requests of this rank's TP group, in order of arrival."""
        return [r for r in self.requests.values() if r.dp_rank == self.place.dp_rank]

    def _rows(self) -> list[tuple[RequestState, RequestRows]]:
        """The group's rows of this step: every decoding request's, then prompts up to the budget."""
        mine = self._mine()
        shares = prompt_shares(mine, self.prefill_rows)
        return pick_rows(mine, shares, self._widths(mine, sum(shares.values())))

    def _widths(self, mine: Sequence[Request], prompt_rows: int) -> dict[int, int]:
        """Rows of each decoding request: the same on all ranks of the group, whose inputs are the same."""
        decoding = [r for r in mine if not r.in_prompt]
        offers = [Proposal(r.slot, r.generation, r.survivals, r.widest) for r in decoding]
        table = searched(self.verify, self.table, max(1, prompt_rows + len(offers)))
        chosen = widths(self.verify, offers, table, other_rows=prompt_rows, history=self._history)
        self._history = self._history.after(offers)
        return {offer.slot: width for offer, width in zip(offers, chosen, strict=True)}

    def _room(self) -> Room | None:
        """Blocks that ranks may draft in this step, from what all have said and who was admitted since."""
        if self.decoder.proposer is None:
            return None
        group, block = self.topology.tp_groups()[self.place.dp_rank], self.groups.ep.ranks
        return Room(tuple(self._may_draft[rank] for rank in group), max(self._may_draft[rank] for rank in block))

    @torch.inference_mode()
    def _run(self, picked: list[tuple[RequestState, RequestRows]], seconds: StepSeconds) -> None:
        """Run the rows and keep what is decided about owned requests. All ranks enter, rows or not."""
        states, rows = [state for state, _ in picked], [each for _, each in picked]
        gather = self.costs.choose(band_length(rows, self.topology.tp)) == WEIGHTS
        told = speculative_step(rows, states, self.decoder, self._room(), gather_weights=gather, seconds=seconds)
        self._news = {news.slot: news for news in told}


__all__ = ["Engine", "Event", "SamplingParams"]
