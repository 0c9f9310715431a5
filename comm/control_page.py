"""Control pages: a small file per rank in which it notes every call, readable from outside while it is stuck.

Layout, little-endian: a head of HEAD.size bytes (magic, rank, process id, calls so far, whether inside one, time of
the last change), then a ring of RECORDS notes of NOTE_BYTES: time, then UTF-8 text filled up with zeros.
"""

import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"meshctl1"
HEAD = struct.Struct("<8sIIQQd")
STATE = struct.Struct("<QQd")
STATE_AT = 16
STAMP = struct.Struct("<d")
RECORDS = 256
NOTE_BYTES = 160
PAGE_BYTES = HEAD.size + RECORDS * NOTE_BYTES
SUFFIX = ".control"

STATES = {"R": "runs", "S": "waits", "D": "waits for a device", "T": "stopped", "t": "stopped", "Z": "ended"}
ENDED, GONE = STATES["Z"], "gone"


@dataclass(frozen=True)
class Standing:
    """Where a rank stands. time: of the last change, seconds since the epoch; notes: its latest calls, oldest first."""

    rank: int
    pid: int
    calls: int
    inside: bool
    time: float
    notes: tuple[str, ...]

    def told(self, now: float | None = None) -> str:
        """One line for people."""
        if not self.notes:
            return f"rank {self.rank} (process {self.pid}) has not begun a call"
        age = (time.time() if now is None else now) - self.time
        where = "inside" if self.inside else "after"
        return f"rank {self.rank} (process {self.pid}) stands {where} {self.notes[-1]}, for {max(0.0, age):.1f} s"


class ControlPage:
    """A rank's own page. Only its rank writes it; readers may see a note half written, never a wrong length."""

    def __init__(self, path: Path, rank: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            self._page = mmap.mmap(descriptor, PAGE_BYTES)
        finally:
            os.close(descriptor)
        self.path, self._calls = path, 0
        self._page[: HEAD.size] = HEAD.pack(MAGIC, rank, os.getpid(), 0, 0, time.time())

    def enter(self, note: str) -> None:
        """A call begins."""
        now = time.time()
        at = HEAD.size + self._calls % RECORDS * NOTE_BYTES
        self._page[at : at + NOTE_BYTES] = (STAMP.pack(now) + note.encode()[: NOTE_BYTES - 8]).ljust(NOTE_BYTES, b"\0")
        self._calls += 1
        STATE.pack_into(self._page, STATE_AT, self._calls, 1, now)

    def leave(self) -> None:
        """The call is over."""
        STATE.pack_into(self._page, STATE_AT, self._calls, 0, time.time())

    def standing(self, latest: int = 1) -> Standing:
        """Where this rank stands, also when the file is gone."""
        return _standing(self._page[:], latest)

    def close(self) -> None:
        """Give the page up; the file stays where it is."""
        self._page.close()


def read_page(path: Path, latest: int = 16) -> Standing:
    """Where the rank of this page stands, with its latest calls. ValueError if the file is no control page."""
    try:
        with path.open("rb") as file:
            data = file.read(PAGE_BYTES + 1)
    except OSError as problem:
        raise ValueError(f"{path}: {problem.strerror}") from problem
    if len(data) != PAGE_BYTES or data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path} is no control page of {PAGE_BYTES} bytes")
    return _standing(data, latest)


def _standing(data: bytes, latest: int) -> Standing:
    _, rank, pid, calls, inside, changed = HEAD.unpack_from(data)
    numbers = range(max(0, calls - min(latest, RECORDS)), calls)
    return Standing(rank, pid, calls, bool(inside), changed, tuple(_note(data, number) for number in numbers))


def _note(data: bytes, number: int) -> str:
    at = HEAD.size + number % RECORDS * NOTE_BYTES
    return data[at + STAMP.size : at + NOTE_BYTES].rstrip(b"\0").decode(errors="replace")


def read_folder(folder: Path, latest: int = 16) -> list[Standing]:
    """All pages of a folder, by rank. ValueError if there is none."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise ValueError(f"{folder} holds no control pages (*{SUFFIX})")
    return sorted((read_page(path, latest) for path in paths), key=lambda standing: standing.rank)


def page_path(folder: Path, rank: int) -> Path:
    """The page of a world rank."""
    return folder / f"rank-{rank}{SUFFIX}"


def standings(folder: Path, ranks: Sequence[int], latest: int = 16) -> dict[int, Standing]:
    """The pages of these ranks that can be read now."""
    found = {}
    for rank in ranks:
        try:
            found[rank] = read_page(page_path(folder, rank), latest)
        except ValueError:
            continue
    return found


def process_state(pid: int) -> str:
    """What the system says of a process: runs, waits, stopped, ended, or gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return GONE
    return STATES.get(text.rpartition(") ")[2][:1], "unknown")
