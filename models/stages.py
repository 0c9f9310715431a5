"""Named stages of a step, and a clock that adds up their time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Seconds per stage name; nested stages count in both. A disabled clock costs one branch."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.seconds: dict[str, float] = {}
        self.current: str | None = None

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        outer, self.current = self.current, stage
        begin = time.perf_counter() if self.enabled else 0.0
        yield
        # Not in a finally: after an exception `current` names the stage that failed.
        self.current = outer
        if self.enabled:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begin
