"""When somebody else ends a rank: its launcher's SIGTERM, or a launcher that has gone without a word."""

import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

LOOK_SECONDS = 0.5
"""How often a rank looks whether its launcher is still there."""
FINISH_SECONDS = 5.0
"""How long a rank that ends of itself may take for it once it is told to; launchers kill later (torchrun: 30 s)."""
GONE = "its launcher has gone"


class ToldToEnd(Exception):
    """This rank was ended from outside."""


class Ending:
    """What a rank still does when it is told to end, also while it waits inside a backend: it says so and tidies up.

    report: tells the failure. folder: removed if the launcher has gone, whose it was. A thread watches from `watch` on;
    Python's own handlers would run only once the backend returns.
    """

    def __init__(self, report: Callable[[ToldToEnd], None], folder: Path | None = None) -> None:
        self._report, self._folder = report, folder
        self._connections: Any = None
        self._itself = threading.Event()

    def knows(self, connections: Any) -> None:
        """The connections whose private folder is to be removed, and whose page tells where the rank stands."""
        self._connections = connections

    def ends_itself(self) -> None:
        """From now on the rank ends of its own accord: it is left some seconds for that, and nothing more is told."""
        self._itself.set()

    def watch(self, *, parent: bool, signals: bool) -> None:
        """Start to watch for the parent's end, and for SIGTERM and SIGINT. From the main thread, once in a process."""
        reads = None
        if signals and threading.current_thread() is threading.main_thread():
            reads, writes = os.pipe()
            os.set_blocking(writes, False)
            signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
            signal.signal(signal.SIGTERM, _nothing)
        if parent or reads is not None:
            launcher = os.getppid() if parent else None
            threading.Thread(target=self._watch, args=(launcher, reads), daemon=True).start()

    def _watch(self, launcher: int | None, reads: int | None) -> None:
        while launcher is None or os.getppid() == launcher:
            if reads is None:
                time.sleep(LOOK_SECONDS)
            elif select.select([reads], [], [], LOOK_SECONDS)[0]:
                self._take(os.read(reads, 64))
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._end(GONE, 1)

    def _take(self, numbers: bytes) -> None:
        """Signals that came. Who has set a handler since takes them for himself."""
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _nothing:
            self._end("it was told to by SIGTERM", 128 + signal.SIGTERM)
        if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Python raises KeyboardInterrupt, but only once a backend that waits returns.
            self.ends_itself()
            self._end("", 128 + signal.SIGINT)

    def _end(self, why: str, code: int) -> None:
        """Does not return."""
        try:
            if self._itself.is_set():
                time.sleep(FINISH_SECONDS)
            else:
                self._report(ToldToEnd(f"{why}{self._standing()}"))
            if self._connections is not None:
                self._connections.abandon()
        finally:
            os._exit(code)

    def _standing(self) -> str:
        told = "" if self._connections is None else self._connections.standing()
        return f"; {told}" if told else ""


def _nothing(number: int, frame: FrameType | None) -> None:
    """Python passes a signal to the wake-up descriptor only if it has a handler."""
