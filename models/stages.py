"""Named stages of a step, and a clock that adds up their time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..parallel.ledger import Ledger, StageSpan


class StageClock:
    """Seconds per stage name; nested stages count in both. A disabled clock costs one branch.

    Other devices than the CPU work behind the program: an enabled clock waits for `device` at both ends of a stage,
    so that its time is its own. That makes the whole step slower than it is without a clock.
    An enabled `ledger` keeps every stage with its times.
    """

    def __init__(self, enabled: bool = False, device: str = "cpu", ledger: Ledger | None = None) -> None:
        self.enabled, self.device, self._ledger = enabled, device, Ledger() if ledger is None else ledger
        self.seconds: dict[str, float] = {}
        self.current: str | None = None

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        outer, self.current = self.current, stage
        begin = self._now() if self.enabled else 0.0
        yield
        # Not in a finally: after an exception `current` names the stage that failed.
        self.current = outer
        if self.enabled:
            end = self._now()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + end - begin
            if self._ledger.enabled:
                self._ledger.stages.append(StageSpan(stage, begin, end))

    def _now(self) -> float:
        if torch.device(self.device).type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()
