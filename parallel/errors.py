"""The ways in which an exchange between ranks fails."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType


class CommError(RuntimeError):
    """Base of all exchange failures: says which call failed and which world ranks it concerned.

    signatures: the latest calls of every rank whose control page could be read, oldest first.
    """

    signatures: Mapping[int, tuple[str, ...]] = MappingProxyType({})

    def __init__(
        self,
        message: str,
        *,
        group: str = "",
        sequence: int = -1,
        op: str = "",
        stage: str = "",
        ranks: Iterable[int] = (),
    ) -> None:
        self.message, self.group, self.sequence, self.op, self.stage = message, group, sequence, op, stage
        self.ranks = tuple(ranks)
        where = f"{op or 'exchange'} number {sequence} of group {group or '?'} (ranks {list(self.ranks)})"
        super().__init__(f"{where}, stage {stage or '?'}: {message}")


class RankDied(CommError):
    """A peer's connection closed. `ranks`: the one that died where that is known, else the group's ranks."""


class CollectiveTimeout(CommError):
    """A peer did not arrive within the group's time. `ranks`: those missing where that is known, else the group's."""


class CollectiveMismatch(CommError):
    """Ranks disagree on what they are about to do; nothing was moved."""


class TransportError(CommError):
    """The backend failed for another reason."""


_TIMEOUT_SIGNS = ("timed out", "timeout", "did not complete")
_DEATH_SIGNS = (
    "closed by peer",
    "connection reset",
    "connection refused",
    "connection closed",
    "broken pipe",
    "remote process exited",
    "socket closed",
)


def error_kind(text: str) -> type[CommError]:
    """The class that fits a backend's message. Backends raise plain RuntimeErrors, so the text is all there is."""
    lowered = text.lower()
    if any(sign in lowered for sign in _DEATH_SIGNS):
        return RankDied
    if any(sign in lowered for sign in _TIMEOUT_SIGNS):
        return CollectiveTimeout
    return TransportError


def first_line(problem: BaseException) -> str:
    """What a backend said, without its stack."""
    text = str(problem).strip().splitlines()
    return text[0] if text else type(problem).__name__
