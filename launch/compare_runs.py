"""What drafting is worth: the same prompts with it and without, in turn, in one run of all ranks."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .writing import Writing, decoded_tokens, rate

ROUNDS = 3
"""Measured runs of each way, after one of each to warm up."""

TIE_ULPS = 2.0
"""Logits that are at most so many units of the last place apart may change places by rounding alone."""


@dataclass(frozen=True)
class Run:
    """All prompts once: what was written, and the engine's metrics at the end."""

    writings: tuple[Writing, ...]
    metrics: dict[str, Any]

    @property
    def rate(self) -> float:
        """Tokens per second of decoding, 0 where there is none."""
        return rate(decoded_tokens(self.writings), self.metrics["decode_seconds"])


@dataclass(frozen=True)
class Divergence:
    """Where the ids of a prompt (from 1) part: position among the new tokens, from 0; None where one had ended.

    common: the ids before, prompt included. ulps: how far apart the two highest logits behind them are in FP64, where
    that was asked (`with_ties`, ties.py).
    """

    prompt: int
    position: int
    plain: int | None
    drafted: int | None
    common: tuple[int, ...] = ()
    ulps: float | None = None

    @property
    def tied(self) -> bool | None:
        """Whether rounding alone may have chosen; None where nobody asked."""
        return None if self.ulps is None else self.ulps <= TIE_ULPS

    def report(self) -> dict[str, Any]:
        """For --json."""
        told = {name: value for name, value in asdict(self).items() if name != "common"}
        return {**told, "tied": self.tied}

    def __str__(self) -> str:
        apart = "" if self.ulps is None else f" ({'a tie' if self.tied else 'no tie'}: {self.ulps:.3g} ulps apart)"
        return f"prompt {self.prompt}, new token {self.position}: {self.plain} plain, {self.drafted} drafted{apart}"


@dataclass(frozen=True)
class Comparison:
    """Tokens per second of each round (without drafting, with it), and where ids differed in any of them."""

    rounds: tuple[tuple[float, float], ...]
    divergences: tuple[Divergence, ...]

    @property
    def speedup(self) -> float | None:
        """Median of the rounds' ratios of seconds per decoded token; None where nothing was decoded."""
        ratios = [drafted / plain for plain, drafted in self.rounds if plain > 0 and drafted > 0]
        return statistics.median(ratios) if ratios else None

    def report(self) -> dict[str, Any]:
        """For --json."""
        return {
            "rounds": [{"plain_tokens_per_s": p, "drafted_tokens_per_s": d} for p, d in self.rounds],
            "same_ids": not self.divergences,
            "divergences": [each.report() for each in self.divergences],
        }


def turns() -> list[bool]:
    """Whether each run of a comparison drafts: the warm-up, then rounds that begin with the one and the other in turn.
    The last run does."""
    rounds = [(False, True) if number % 2 == 0 else (True, False) for number in range(ROUNDS)]
    return [False, True, *(drafts for pair in rounds for drafts in pair)]


def compare(runs: Sequence[tuple[bool, Run]]) -> Comparison:
    """The comparison of runs that went as `turns` says, the warm-up left out of times but not of ids."""
    plain, drafted = ([run for drafts, run in runs if drafts == way] for way in (False, True))
    found = {part for a, b in zip(plain, drafted, strict=True) for part in divergences(a.writings, b.writings)}
    rounds = tuple((a.rate, b.rate) for a, b in zip(plain[1:], drafted[1:], strict=True))
    return Comparison(rounds, tuple(sorted(found, key=lambda each: (each.prompt, each.position))))


def divergences(plain: Sequence[Writing], drafted: Sequence[Writing]) -> list[Divergence]:
    """The first place at which each prompt's ids part."""
    found = []
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True), 1):
        a, b = one.output_ids, other.output_ids
        if a != b:
            short = min(len(a), len(b))
            at = next((place for place in range(short) if a[place] != b[place]), short)
            plain_id, drafted_id = (ids[at] if at < len(ids) else None for ids in (a, b))
            found.append(Divergence(number, at, plain_id, drafted_id, (*one.prompt_ids, *a[:at])))
    return found
