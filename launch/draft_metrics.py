"""What drafting is worth: drafts proposed, verified and accepted, by position, and the time that they take."""

from collections.abc import Sequence
from typing import Any

from ..models.dspark.step import StepSeconds, Told


class DraftMetrics:
    """Counters over the turns of decoding requests: one turn is one request in one step. Requests are those of all
    groups, seconds those of this rank's steps without prompt rows."""

    def __init__(self) -> None:
        self.turns = 0
        self.emitted = 0
        self.proposed = 0
        self.rows = 0
        self.verify_seconds = 0.0
        self.draft_seconds = 0.0
        self._verified: list[int] = []
        self._reached: list[int] = []
        self._accepted: list[int] = []

    def learned(self, told: Told, drafts: Sequence[int]) -> None:
        """News of a request that had these drafts."""
        accepted, judged = _judged(told, drafts)
        self.turns += 1
        self.emitted += len(told.tokens) - (told.finish in ("eos", "error"))
        self.proposed += len(drafts)
        self.rows += told.width
        for counts in (self._verified, self._reached, self._accepted):
            counts += [0] * (len(drafts) - len(counts))
        for position in range(judged):
            self._verified[position] += 1
            self._reached[position] += position <= accepted
        for position in range(accepted):
            self._accepted[position] += 1

    def ran(self, seconds: StepSeconds) -> None:
        """A step without prompt rows ran."""
        self.verify_seconds += seconds.verify
        self.draft_seconds += seconds.draft

    def report(self) -> dict[str, Any]:
        """The counters by name. tokens_per_step: emitted tokens of a turn, the target's own included. acceptance: by
        position of the draft, `cumulative` the share of the blocks verified so far whose drafts up to there were all
        accepted, `conditional` their share of those that were accepted up to the draft before; None of none."""
        return {
            "tokens_per_step": self.emitted / self.turns if self.turns else None,
            "acceptance": {
                "conditional": [_share(a, b) for a, b in zip(self._accepted, self._reached, strict=True)],
                "cumulative": [_share(a, v) for a, v in zip(self._accepted, self._verified, strict=True)],
            },
            "drafts": {
                "proposed": self.proposed,
                "verified": self.rows - self.turns,
                "accepted": sum(self._accepted),
                "wasted_rows": self.rows - self.emitted,
                "verify_seconds": self.verify_seconds,
                "draft_seconds": self.draft_seconds,
            },
        }


def _judged(told: Told, drafts: Sequence[int]) -> tuple[int, int]:
    """(drafts that were accepted, drafts of which this step says whether they and all before them are accepted).

    A rejected draft never comes back as the token in its place, so that a token that is the draft was accepted. A
    request that ended with a draft, or with a row that is not finite, leaves open what would have become of those
    behind; one that ended with another token rejected them.
    """
    verified = drafts[: told.width - 1]
    matches = [token == draft for token, draft in zip(told.tokens, verified, strict=False)]
    accepted = matches.index(False) if False in matches else len(matches)
    is_open = accepted == len(told.tokens) or told.tokens[-1] < 0
    return accepted, accepted if is_open else len(verified)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
