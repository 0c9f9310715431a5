"""How many rows of each request a step verifies. dspark.md 6.3, 6.4.

Widths are a function of whole numbers that all ranks of a tensor group hold alike: the survivals that travelled in the
agreement, and world rank 0's cost table. So every rank evaluates it, and nobody has to be told.

No rule looks ahead: whether a draft is verified depends on nothing that was known only after it was drawn, which is
what keeps the target's distribution. Letters: B blocks, Y drafts of a block (gamma).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..functions import sigmoid
from .costs import CostTable

ONE = 1 << 30
"""A survival of 1 in fixed point: two of them fit into 64 bits."""

KINDS = ("all", "threshold", "scheduled", "lagged")
ALLOWED = "all, threshold:NUMBER from 0 to 1, scheduled, lagged"

LAG = 2
"""Steps between the survivals that set a lagged capacity and the drafts that it is for."""


@dataclass(frozen=True)
class Verification:
    """Which drafts are verified.

    all: every one. threshold: those before the first whose own confidence is below theta (fixed point; only here).
    scheduled: as many as pay by the confidences of this step, the search stopping at the first that does not pay.
    lagged: as many as pay by the confidences of two steps earlier, the best of this step.
    """

    kind: str = "all"
    theta: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or not 0 <= self.theta <= (ONE if self.kind == "threshold" else 0):
            raise ValueError(f"verification is {self.kind!r} with theta {self.theta} / 2^30, allowed: {ALLOWED}")

    @property
    def uses_confidence(self) -> bool:
        """Whether survivals matter at all."""
        return self.kind != "all"

    @property
    def uses_costs(self) -> bool:
        """Whether a cost table matters."""
        return self.kind in ("scheduled", "lagged")


VERIFY_ALL = Verification()


def parse_verify(text: str) -> Verification:
    """The policy that `--verify` names: all, threshold:0.4, scheduled, lagged. ValueError naming these otherwise."""
    kind, colon, value = text.partition(":")
    try:
        theta = float(value) if colon else 0.0
    except ValueError:
        theta = math.nan
    if kind not in KINDS or bool(colon) != (kind == "threshold") or not 0 <= theta <= 1:
        raise ValueError(f"verify is {text!r}, allowed: {ALLOWED}")
    return Verification(kind, int(theta * ONE))


@dataclass(frozen=True)
class Proposal:
    """A request that decodes in this step, and the drafts that it has.

    slot and generation name it; no two requests of a group have one slot. survivals: of each of its drafts in order,
    fixed point, as `to_fixed` makes them; none where it has no drafts. most_rows: rows that fit before its limit, 1 or
    more. ValueError for others.
    """

    slot: int
    generation: int
    survivals: tuple[int, ...]
    most_rows: int

    def __post_init__(self) -> None:
        before = ONE
        for survival in self.survivals:
            if not 0 <= survival <= before:
                raise ValueError(f"survivals of slot {self.slot} are {self.survivals}, allowed: 2^30 to 0, not rising")
            before = survival
        if self.most_rows < 1:
            raise ValueError(f"most_rows of slot {self.slot} is {self.most_rows}, allowed: 1 or more")

    @property
    def drafts(self) -> int:
        """Drafts that may be verified."""
        return min(len(self.survivals), self.most_rows - 1)


@dataclass(frozen=True)
class History:
    """The survivals of the last two steps, by slot and generation; a value that `after` makes from the one before."""

    newer: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    older: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)

    def after(self, requests: Sequence[Proposal]) -> "History":
        """The history for the next step, after a step of these requests (all of its group that decode)."""
        return History({(each.slot, each.generation): each.survivals for each in requests}, self.newer)

    def expected(self, request: Proposal) -> list[int]:
        """Survivals of two steps earlier for the drafts that the request has now.

        One that was not there, or had no drafts, counts as sure; one that had fewer, as before for those that it had.
        """
        known = self.older.get((request.slot, request.generation), ()) or (ONE,)
        return [known[min(draft, len(known) - 1)] for draft in range(request.drafts)]


def survival(logits_BY: torch.Tensor, temperatures: Sequence[float] | None = None) -> torch.Tensor:
    """FP64 on the host, of the shape of the confidence logits [..., Y]: how likely a draft and all before it are
    accepted.

    The product of 1 / (1 + exp(-z / T)) over the drafts so far. NaN is no confidence. temperatures: one a draft, None
    for 1. ValueError for another number of them, or for one that is not finite and above 0.
    """
    drafts = logits_BY.shape[-1]
    scale = [1.0] * drafts if temperatures is None else [float(value) for value in temperatures]
    if len(scale) != drafts or not all(math.isfinite(value) and value > 0 for value in scale):
        raise ValueError(f"temperatures are {scale}, allowed: {drafts} finite numbers above 0, one for each draft")
    wide_BY = logits_BY.detach().to("cpu", torch.float64)
    return sigmoid(wide_BY / torch.tensor(scale, dtype=torch.float64)).nan_to_num(nan=0.0).cumprod(-1)


def to_fixed(logits_BY: torch.Tensor, temperatures: Sequence[float] | None = None) -> torch.Tensor:
    """int64 on the host, of the shape of the confidence logits [..., Y]: `survival` times ONE, rounded down.

    Never rising along Y: a factor of at most 1 never makes a product larger, rounded or not.
    """
    return (survival(logits_BY, temperatures) * ONE).long()


def widths(
    policy: Verification,
    requests: Sequence[Proposal],
    table: CostTable | None = None,
    *,
    other_rows: int = 0,
    other_nanoseconds: int = 0,
    history: History | None = None,
) -> list[int]:
    """Rows that each request has in this step, in the order of `requests`: its anchor's, and one for each of its first
    drafts that is verified. At least 1, at most 1 + drafts and most_rows.

    table: rows of the group against time; without one all drafts are verified. other_rows: rows of this step that are
    there whatever the widths (prompts). other_nanoseconds: time of it that the table does not hold (the drafter).
    history: for `lagged`, what `History.after` gave for the steps before; all count as sure without. Whatever the
    order of requests, each gets the same; of equal survivals the smaller position comes first, then the smaller slot.
    """
    if len({each.slot for each in requests}) != len(requests):
        raise ValueError(f"slots are {[each.slot for each in requests]}, allowed: one for each request")
    if policy.kind == "threshold":
        return verify_threshold(requests, policy.theta)
    if policy.kind == "all" or table is None or not requests:
        return verify_all(requests)
    known, rows = table, other_rows + len(requests)

    def cost(drafts: int) -> int:
        return known.cost(rows + drafts) + other_nanoseconds

    if policy.kind == "scheduled":
        return verify_scheduled(requests, cost)
    return verify_lagged(requests, cost, History() if history is None else history)


def searched(policy: Verification, table: CostTable | None, least_rows: int) -> CostTable | None:
    """The table to give to `widths` in a step of least_rows rows and more.

    Measured times jump, and a search that stops at the first row that does not pay would stop before a jump that later
    rows pay for. So it walks the convex part of the table from the step's least rows on; of the others it is the whole.
    """
    return table if table is None or policy.kind != "scheduled" else table.convex(least_rows)


def verify_all(requests: Sequence[Proposal]) -> list[int]:
    """Every draft that fits."""
    return [1 + each.drafts for each in requests]


def verify_threshold(requests: Sequence[Proposal], theta: int) -> list[int]:
    """The drafts before the first whose own confidence, its survival by that of the draft before, is below theta."""
    return [1 + _confident(each.survivals[: each.drafts], theta) for each in requests]


def verify_scheduled(requests: Sequence[Proposal], cost: Callable[[int], int]) -> list[int]:
    """Algorithm 1: drafts by survival, until the first that does not raise tokens by time. cost: nanoseconds by number
    of verified drafts.

    The stop is what makes it right with confidences of this very step: a draft that was admitted already stays, so no
    later one, which depends on what was drawn for it, has a say.
    """
    ranked = _ranked(requests)
    tokens, time, count = ONE * len(requests), cost(0), 0
    for minus_survival, *_ in ranked:
        more, later = tokens - minus_survival, cost(count + 1)
        if more * time <= tokens * later:
            break
        tokens, time, count = more, later, count + 1
    return _widths(requests, ranked[:count])


def verify_lagged(requests: Sequence[Proposal], cost: Callable[[int], int], history: History) -> list[int]:
    """The best of this step's drafts, as many as the survivals of two steps earlier make worth it. cost: as above.

    The number is the smallest of those that give the most tokens by time, out of all. How the current survivals are
    ordered does not look ahead, for a draft never comes after one that depends on it.
    """
    return _widths(requests, _ranked(requests)[: _capacity(requests, cost, history)])


def _capacity(requests: Sequence[Proposal], cost: Callable[[int], int], history: History) -> int:
    expected = sorted((value for each in requests for value in history.expected(each)), reverse=True)
    tokens = best = ONE * len(requests)
    time, capacity = cost(0), 0
    for count, value in enumerate(expected, 1):
        tokens += value
        later = cost(count)
        if tokens * time > best * later:
            best, time, capacity = tokens, later, count
    return capacity


def _ranked(requests: Sequence[Proposal]) -> list[tuple[int, int, int, int]]:
    """(-survival, position, slot, number of the request) of all drafts that may be accepted, the best first."""
    return sorted(
        (-survival, position, each.slot, number)
        for number, each in enumerate(requests)
        for position, survival in enumerate(each.survivals[: each.drafts])
        if survival
    )


def _widths(requests: Sequence[Proposal], admitted: Sequence[tuple[int, int, int, int]]) -> list[int]:
    rows = [1] * len(requests)
    for *_, number in admitted:
        rows[number] += 1
    return rows


def _confident(survivals: Sequence[int], theta: int) -> int:
    before = ONE
    for count, value in enumerate(survivals):
        # Behind a survival of 0 there is nothing to divide by, and no confidence.
        if value * ONE < theta * max(before, 1):
            return count
        before = value
    return len(survivals)
