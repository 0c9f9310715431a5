"""Signature: what a rank is about to exchange, in the form that ranks compare and that people read."""

from typing import NamedTuple

ANY = "*"
"""Stands for a number that may differ between ranks."""

FIELDS = ("group", "sequence", "op", "dtype", "rows", "columns")


class Signature(NamedTuple):
    """One exchange as its ranks must see it alike.

    `rows` counts those that this rank gives; it is compared unless the exchange has splits. `send` and `received`
    are rows by destination and by source: what one rank sends another must be what that one awaits. `moved` are bytes
    that leave this rank; they are recorded, not compared.
    """

    op: str
    stage: str
    dtype: str = ""
    rows: int = 0
    columns: int = 0
    send: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    moved: int = 0

    def compared(self, group: int, sequence: int) -> bytes:
        """The part that must be equal on all ranks of a call: FIELDS, joined by bars."""
        rows = ANY if self.send else self.rows
        return f"{group}|{sequence}|{self.op}|{self.dtype}|{rows}|{self.columns}".encode()

    def told(self, group: str, sequence: int) -> str:
        """One line for people: where a rank stands."""
        shape = f"{self.dtype} [{self.rows}, {self.columns}]" if self.dtype else "-"
        return f"{self.op} number {sequence} of group {group}, {shape}, stage {self.stage}"
