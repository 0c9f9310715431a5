"""What the engine counts: rows and seconds, waiting times of requests, use of the pools."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from ..layouts.rows import RequestRows
from ..models.dspark.step import StepSeconds, Told
from .draft_metrics import DraftMetrics
from .requests import Event

KEPT = 4096
"""Waiting times of which the quantiles are told: the newest."""


class Metrics:
    """Counters since the start. Rows are those of this rank's group, times and events those of world rank 0."""

    def __init__(self) -> None:
        self.steps = 0
        self.prefill_rows = 0
        self.prefill_seconds = 0.0
        self.decode_rows = 0
        self.drafts = DraftMetrics()
        self.decode_seconds = 0.0
        self.most_rows = 0
        self._asked: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._first_token: deque[float] = deque(maxlen=KEPT)
        self._between_tokens: deque[float] = deque(maxlen=KEPT)

    def added(self, request_id: int) -> None:
        """A request came."""
        self._asked[request_id] = time.perf_counter()

    def told(self, events: Iterable[Event]) -> None:
        """News went out: times to the first token and between tokens."""
        now = time.perf_counter()
        for event in events:
            if event.token_ids:
                asked = self._asked.pop(event.request_id, None)
                if asked is not None:
                    self._first_token.append(now - asked)
                else:
                    waited = now - self._last.get(event.request_id, now)
                    # Tokens of one step come together: each has its part of the wait.
                    self._between_tokens.extend([waited / len(event.token_ids)] * len(event.token_ids))
                self._last[event.request_id] = now
            if event.finish_reason is not None:
                self._asked.pop(event.request_id, None)
                self._last.pop(event.request_id, None)

    def learned(self, told: Told, drafts: Sequence[int]) -> None:
        """News of a request that had these drafts, of any group."""
        self.drafts.learned(told, drafts)

    def ran(self, rows: Sequence[RequestRows], seconds: float, parts: StepSeconds) -> None:
        """A step ran. Steps with prompt rows count as prefill, the others as decode."""
        prefill = sum(len(r.tokens) for r in rows if r.kind == "prefill")
        others = sum(len(r.tokens) for r in rows if r.kind != "prefill")
        self.steps += 1
        self.prefill_rows += prefill
        self.decode_rows += others
        self.most_rows = max(self.most_rows, prefill + others)
        if prefill:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
            self.drafts.ran(parts)

    def report(self) -> dict[str, Any]:
        """All counters; waiting times in seconds as p50, p99 and mean of the newest, None where there are none."""
        counters = {name: value for name, value in vars(self).items() if not name.startswith("_") and name != "drafts"}
        rows = self.prefill_rows + self.decode_rows
        return {
            **counters,
            **self.drafts.report(),
            "rows_per_step": rows / self.steps if self.steps else 0.0,
            "time_to_first_token": _quantiles(self._first_token),
            "time_between_tokens": _quantiles(self._between_tokens),
        }


def _quantiles(values: Iterable[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"count": len(ordered), "p50": at(0.5), "p99": at(0.99), "mean": sum(ordered) / len(ordered)}
