"""How text and values out of a file may stand in a message: ASCII, without control characters, not too long."""

import reprlib
from typing import Any

SHOWN_LIMIT = 200


def shown(text: str) -> str:
    """Text, escaped and clipped."""
    clipped = text if len(text) <= SHOWN_LIMIT else f"{text[:SHOWN_LIMIT]}..."
    return clipped.encode("unicode_escape").decode()


def shown_value(value: Any) -> str:
    """repr of a parsed value, escaped and clipped; however deep or long the value, this is quick and never raises."""
    return _Short().repr(value).encode("ascii", "backslashreplace").decode()


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = 80

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write integers of thousands of digits.
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"an integer of {x.bit_length()} bits"
