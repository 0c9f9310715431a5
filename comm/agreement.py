"""The small exchanges of a step over the world: the agreement, the control message, the wake-up."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import torch

from ..parallel.errors import TransportError
from ..parallel.groups import Groups
from .collectives import all_gather_rows, broadcast_bytes

CONTROL_LIMIT = 64 << 20


def agree(
    record: Sequence[int], groups: Groups, *, stage: str = "agreement", length: int | None = None
) -> list[list[int]]:
    """Every rank's record, by world rank. The record has the same length, `length` if given, on all ranks."""
    assert length is None or len(record) == length, f"the record has {len(record)} numbers, fixed are {length}"
    own = torch.tensor(list(record), dtype=torch.int64).unsqueeze(0)
    table: list[list[int]] = all_gather_rows(own, groups.control, stage=stage).tolist()
    return table


def encode_control(message: Mapping[str, Any]) -> bytes:
    """A control message as it travels; its length belongs into the agreement before it. ValueError if too large."""
    data: bytes = msgpack.packb(dict(message))
    if len(data) > CONTROL_LIMIT:
        raise ValueError(f"the control message has {len(data)} bytes, allowed: at most {CONTROL_LIMIT}")
    return data


def share_control(
    message: Mapping[str, Any] | bytes | None, length: int, groups: Groups, *, stage: str = "control"
) -> dict[str, Any]:
    """The control message of world rank 0 on all ranks; `message` (plain or encoded) is only read there.

    `length` is that of the encoded message and known to all. TransportError if what comes is not a map.
    """
    if not 0 < length <= CONTROL_LIMIT:
        raise ValueError(f"the control message has {length} bytes, allowed: 1 to {CONTROL_LIMIT}")
    data = message if isinstance(message, bytes) or message is None else encode_control(message)
    received = broadcast_bytes(data, groups.control, 0, length=length, stage=stage)
    try:
        decoded = msgpack.unpackb(received)
    except (ValueError, msgpack.exceptions.UnpackException) as problem:
        raise groups.control.error(TransportError, f"unreadable message: {problem}", "control", stage) from problem
    if not isinstance(decoded, dict):
        raise groups.control.error(TransportError, "the message is not a map", "control", stage)
    return decoded


def wake(groups: Groups, *, stage: str = "wake") -> None:
    """World rank 0 ends the wait of all others in `sleep`."""
    broadcast_bytes(b"\x01", groups.front, 0, length=1, stage=stage)


def sleep(groups: Groups, *, stage: str = "sleep") -> None:
    """Wait until world rank 0 calls `wake`, for any time; RankDied as soon as it is gone."""
    broadcast_bytes(None, groups.front, 0, length=1, stage=stage)
