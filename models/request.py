"""A request as the ranks of its group know it: how its tokens are chosen, how far it is, what is drafted for it."""

from dataclasses import dataclass, field

import torch

FINISH_REASONS = ("eos", "stop", "length", "cancelled", "error")


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. eos_id None never ends by token; top_k 0 takes all.

    ignore_eos: the end token is never chosen. draft: whether the request takes part in drafting, where there is any.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    eos_id: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    ignore_eos: bool = False
    draft: bool = True

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


@dataclass(kw_only=True)
class RequestState:
    """Where a request stands between two steps; equal on all ranks of its group but for what only its owner has.

    slot: its place in the page tables; generation tells it from those who had the slot before; owner: the tp_rank that
    decides about it. tokens: prompt and output so far; the newest, whose row has not run, is the anchor. computed:
    positions whose rows are final. prefill_end: rows from there on stand in the owner's band, the anchor's always.
    drafts: guesses of the tokens behind the anchor, and survivals, fixed-point chances that each and all before it are
    right. Of the owner only: drawn_YV, weights from which the drafts were drawn, None where each is its only choice,
    and confidences, the logits of what the drafter holds of each.
    """

    prompt: list[int]
    params: SamplingParams
    slot: int = -1
    generation: int = 0
    owner: int = 0
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    prefill_end: int = -1
    drafts: tuple[int, ...] = ()
    survivals: tuple[int, ...] = ()
    drawn_YV: torch.Tensor | None = None
    confidences: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        if self.prefill_end < 0:
            self.prefill_end = len(self.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def limit(self) -> int:
        """Positions that it may come to hold. The last token's own row never runs."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def waiting(self) -> int:
        """Positions of known tokens whose rows have still to run."""
        return len(self.tokens) - self.computed

    @property
    def in_prompt(self) -> bool:
        """Whether rows that may stand in any band have still to run."""
        return self.computed < self.prefill_end

    @property
    def widest(self) -> int:
        """Rows of its next step at most: the anchor and as many drafts as can still become tokens."""
        return min(1 + len(self.drafts), self.limit - len(self.tokens))

    def can_draft(self, new: int) -> bool:
        """Whether a draft behind that many more tokens could still become one: the token before it must fit too."""
        return self.params.draft and self.limit - len(self.tokens) - new >= 2

    def finish_of(self, token: int, number: int = 1) -> str | None:
        """Why the request would end with this token, the number-th new one."""
        if token < 0:
            return "error"
        if token == self.params.eos_id:
            return "eos"
        return "length" if self.num_generated + number >= self.params.max_new_tokens else None
