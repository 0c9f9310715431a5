"""Named stages of a step, and a clock that adds up their time."""

import time

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

    def __call__(self, stage: str) -> "_Running":
        return _Running(self, stage)

    def add(self, stage: str, begin: float, end: float) -> None:
        """Count one run of a stage."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + end - begin
        if self._ledger.enabled:
            self._ledger.stages.append(StageSpan(stage, begin, end))

    def now(self) -> float:
        """Seconds, once the device has done what it was given."""
        if torch.device(self.device).type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


class _Running:
    """A stage from its beginning to its end. A plain class: a generator would cost as much as a small operation."""

    __slots__ = ("_begin", "_clock", "_outer", "_stage")

    def __init__(self, clock: StageClock, stage: str) -> None:
        self._clock, self._stage = clock, stage

    def __enter__(self) -> None:
        self._outer, self._clock.current = self._clock.current, self._stage
        self._begin = self._clock.now() if self._clock.enabled else 0.0

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an exception `current` names the stage that failed.
        if kind is None:
            self._clock.current = self._outer
            if self._clock.enabled:
                self._clock.add(self._stage, self._begin, self._clock.now())
