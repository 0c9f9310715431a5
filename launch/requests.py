"""Requests as every rank knows them: what was asked, where it sits, how far it is."""

from dataclasses import dataclass
from typing import Any

from ..models.request import RequestState, SamplingParams

NO_TOKEN = -1
"""No end token, in a message."""


@dataclass(frozen=True)
class Event:
    """News of one request on world rank 0: tokens since the last event, and why it ended if it did.

    rank: the world rank that owns the request, -1 where it never had a seat.
    """

    request_id: int
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    rank: int = -1


class RequestFailed(ValueError):
    """A request ended as 'error'."""


@dataclass(kw_only=True)
class Request(RequestState):
    """One request of the engine. dp_rank and slot are its seat: the TP group that runs it and its place in that group's
    page tables."""

    request_id: int
    dp_rank: int = -1
    finish_reason: str | None = None

    def to_message(self) -> list[Any]:
        """What the other ranks need to know of a request that has its seat."""
        p = self.params
        return [
            self.request_id,
            self.dp_rank,
            self.slot,
            self.generation,
            self.prompt,
            p.max_new_tokens,
            p.temperature,
            p.top_p,
            p.seed,
            NO_TOKEN if p.eos_id is None else p.eos_id,
            p.top_k,
            p.min_p,
            p.ignore_eos,
            p.draft,
        ]

    @classmethod
    def from_message(cls, message: list[Any]) -> "Request":
        """The request of such a message."""
        request_id, dp_rank, slot, generation, prompt, max_new_tokens, temperature, top_p, seed, eos, *rest = message
        params = SamplingParams(max_new_tokens, temperature, top_p, seed, None if eos == NO_TOKEN else eos, *rest)
        return cls(
            request_id=request_id, dp_rank=dp_rank, slot=slot, generation=generation, prompt=list(prompt), params=params
        )
