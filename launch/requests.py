"""Requests as every rank knows them: what was asked, where it sits, how far it is."""

from dataclasses import dataclass, field
from typing import Any

from ..layouts.rows import RequestRows

FINISH_REASONS = ("eos", "stop", "length", "cancelled", "error")
NO_TOKEN = -1
GOES_ON = -1
"""Values of an agreement record: no new token; the request is not finished."""


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. eos_id None never ends by token; top_k 0 takes all."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    eos_id: int | None = None
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, allowed: 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, allowed: 0 or more, finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, allowed: above 0 to 1")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k is {self.top_k}, allowed: 1 or more, or 0 for all")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, allowed: 0 to 1")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}, allowed: 0 to 2**63 - 1")


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


@dataclass
class Request:
    """One request. tokens: prompt and output; computed: positions whose rows have run.

    dp_rank and slot are its seat: the TP group that runs it and its place in that group's page tables. generation
    tells it from those who had the seat before.
    """

    request_id: int
    prompt: list[int]
    params: SamplingParams
    dp_rank: int
    slot: int
    generation: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def limit(self) -> int:
        """Positions that it may come to hold. The last token's own row never runs."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def waiting(self) -> int:
        """Positions whose rows have still to run."""
        return len(self.tokens) - self.computed

    @property
    def in_prompt(self) -> bool:
        """Whether rows of the prompt have still to run."""
        return self.computed < len(self.prompt)

    def next_rows(self, budget: int, owner: int) -> RequestRows | None:
        """The rows of its next step: one decode row, or up to `budget` rows of the prompt; None without budget."""
        waiting = self.waiting
        kind = "prefill" if self.in_prompt else "decode"
        count = min(waiting, budget)
        if count < 1:
            return None
        tokens = self.tokens[self.computed : self.computed + count]
        asked = (count - 1,) if count == waiting else ()
        return RequestRows(self.slot, self.computed, tokens, owner=owner, kind=kind, asked=asked)

    def finish_of(self, token: int) -> str | None:
        """Why the request would end with this new token."""
        if token < 0:
            return "error"
        if token == self.params.eos_id:
            return "eos"
        return "length" if self.num_generated + 1 >= self.params.max_new_tokens else None

    def to_message(self) -> list[Any]:
        p = self.params
        eos = NO_TOKEN if p.eos_id is None else p.eos_id
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
            eos,
            p.top_k,
            p.min_p,
        ]

    @classmethod
    def from_message(cls, message: list[Any]) -> "Request":
        request_id, dp_rank, slot, generation, prompt, max_new_tokens, temperature, top_p, seed, eos, *rest = message
        params = SamplingParams(max_new_tokens, temperature, top_p, seed, None if eos == NO_TOKEN else eos, *rest)
        return cls(request_id, list(prompt), params, dp_rank, slot, generation)
