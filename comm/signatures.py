"""Signatures on their way: a call's head as bytes, and what ranks disagree about."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from ..parallel.group import Call
from ..parallel.preflight import Fact, mismatch_table
from ..parallel.signature import FIELDS
from .doorbell import RING

HEAD = struct.Struct("<cBHHHQ")
"""Kind, round, bytes of the compared signature, bytes of the stage, ranks in the splits, window bytes wanted."""

STAGE_BYTES = 64
MOST_PAIRS = 8


def ring_head(call: Call, round_number: int = 0, wanted: int = 0) -> bytes:
    """What a rank says of a call before any payload."""
    signature = call.signature
    compared = signature.compared(call.group.number, call.sequence)
    stage = signature.stage.encode()[:STAGE_BYTES]
    size = len(signature.send)
    splits = struct.pack(f"<{2 * size}q", *signature.send, *signature.received) if size else b""
    return HEAD.pack(RING, round_number, len(compared), len(stage), size, wanted) + compared + stage + splits


class Ring(NamedTuple):
    """A ring taken apart. send and received: the rank's rows by destination and by source, empty without splits."""

    round_number: int
    compared: bytes
    stage: bytes
    send: tuple[int, ...]
    received: tuple[int, ...]
    wanted: int
    payload: bytes

    @classmethod
    def parse(cls, message: bytes) -> "Ring":
        """Inverse of `ring_head`, with what follows as payload."""
        _, round_number, compared, stage, size, wanted = HEAD.unpack_from(message)
        first = HEAD.size + compared
        second = first + stage
        splits = struct.unpack_from(f"<{2 * size}q", message, second)
        own, payload = message[HEAD.size : first], message[second + 16 * size :]
        return cls(round_number, own, message[first:second], splits[:size], splits[size:], wanted, payload)


def disagreement(rings: Sequence[Ring], ranks: Sequence[int]) -> str:
    """What the ranks of a call disagree about, as a table of field x rank or a list of pairs; empty if nothing.

    `ranks` are the world ranks of the rings. Every rank that has all rings comes to the same text.
    """
    if len({(ring.compared, ring.round_number, len(ring.send)) for ring in rings}) > 1:
        return f"ranks differ\n{mismatch_table([_fields(ring) for ring in rings], ranks)}"
    pairs = [
        f"rank {ranks[s]} sends rank {ranks[d]} {ring.send[d]} rows, which awaits {rings[d].received[s]}"
        for s, ring in enumerate(rings)
        for d in range(len(ring.send))
        if ring.send[d] != rings[d].received[s]
    ]
    return "splits differ\n" + "\n".join(pairs[:MOST_PAIRS]) if pairs else ""


def _fields(ring: Ring) -> dict[str, Fact]:
    values: list[Fact] = list(ring.compared.decode(errors="replace").split("|"))
    rest: dict[str, Fact] = {"round": ring.round_number, "stage": ring.stage.decode(errors="replace")}
    return {**dict(zip(FIELDS, values, strict=False)), **rest}
