"""What drafting is worth: drafts proposed, verified and accepted, by position, and the time that they take."""

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

    def learned(self, told: Told, drafts: int) -> None:
        """News of a request that had so many drafts."""
        accepted = len(told.tokens) - 1
        self.turns += 1
        self.emitted += len(told.tokens) - (told.finish in ("eos", "error"))
        self.proposed += drafts
        self.rows += told.width
        for counts in (self._verified, self._reached, self._accepted):
            counts += [0] * (drafts - len(counts))
        # A request that ended within its drafts leaves open what would have become of those behind.
        judged = accepted if told.finish is not None else told.width - 1
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


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
