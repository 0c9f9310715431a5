"""The same-host path: small rows ride on the doorbell, larger ones through the window or straight from memory.

Every function has the meaning of its namesake in `backend`, with the same bits.
"""

import ctypes
import struct
from collections.abc import Iterator, Sequence
from math import prod

import torch

from ..parallel.group import Call, Group
from .link import Heard, Link

INLINE_BYTES = 8 << 10
"""Up to here rows ride on the doorbell's message: as quick as the message alone."""

DIRECT_BYTES = 256 << 10
"""From here on a second message costs less than the second copy that it saves."""

SCRATCH_BYTES = 512 << 10
"""Others' rows are added in pieces that stay in the cache."""

ADDRESS = struct.Struct("<Q")


def gather(call: Call, out: torch.Tensor, rows: torch.Tensor) -> None:
    """Every rank's contiguous `rows` into `out`, by rank."""
    link, size, place = _link(call), rows.nbytes, out.data_ptr()
    if size <= INLINE_BYTES:
        for payload in link.meet(call, ctypes.string_at(rows.data_ptr(), size)).payloads:
            ctypes.memmove(place, payload, size)
            place += size
        return
    epoch = _publish(call, link, rows)
    ctypes.memmove(place, epoch, out.nbytes)


def gather_view(call: Call, rows: torch.Tensor) -> torch.Tensor:
    """As `gather` without the last copy: the window's own bytes, to be read only, until the group's next exchange."""
    link = _link(call)
    epoch = _publish(call, link, rows)
    window = link.window
    assert window is not None, "it has just been filled"
    flat = torch.frombuffer(window.memory, dtype=torch.uint8)
    start = epoch - window.start
    view = flat[start : start + rows.nbytes * call.group.size].view(rows.dtype)
    return view.view(call.group.size * rows.shape[0], *rows.shape[1:])


def _publish(call: Call, link: Link, rows: torch.Tensor) -> int:
    """All ranks' equal rows side by side in the window -> the address of the first."""
    size, place = rows.nbytes, call.group.rank * rows.nbytes

    def write(epoch: int) -> None:
        ctypes.memmove(epoch + place, rows.data_ptr(), size)

    epoch, _ = link.meet_in_window(call, b"", size * call.group.size, write)
    return epoch


def broadcast(call: Call, data: bytes, source: int, length: int) -> bytes:
    """The `length` bytes of group rank `source`; `data` is only read there."""
    link = _link(call)
    if length <= INLINE_BYTES:
        return link.meet(call, data if call.group.rank == source else b"").payloads[source]

    def write(epoch: int) -> None:
        if call.group.rank == source:
            ctypes.memmove(epoch, data, length)

    epoch, _ = link.meet_in_window(call, b"", length, write)
    return ctypes.string_at(epoch, length)


def exchange(call: Call, out: torch.Tensor, rows: torch.Tensor, sent: Sequence[int]) -> None:
    """Contiguous `rows`, cut into `sent` rows by destination, into `out`: by source rank."""
    link, width, start, total = _link(call), _width(rows), rows.data_ptr(), rows.nbytes
    payloads: bytes | list[bytes] = b""
    wanted = 0
    if max(sent) * width <= INLINE_BYTES:
        payloads = [ctypes.string_at(start + skip, size) for skip, size in _cuts(sent, width)]
    elif link.reads and total >= DIRECT_BYTES:
        payloads = ADDRESS.pack(start)
    else:
        wanted = call.group.size * link.slot_for(total)

    def write(epoch: int) -> None:
        ctypes.memmove(epoch + call.group.rank * link.slot, start, total)

    epoch, heard = link.meet_in_window(call, payloads, wanted, write)
    _take(call, link, out, rows, heard, epoch)
    far = [most for most, in_window in zip(map(max, heard.rows_SD), heard.wanted, strict=True) if not in_window]
    if any(most * width > INLINE_BYTES for most in far):
        # Some rank's memory was read directly: it is that rank's again only when all have read it.
        link.meet(call, round_number=2)


def _take(call: Call, link: Link, out: torch.Tensor, rows: torch.Tensor, heard: Heard, epoch: int) -> None:
    """Bring in what every source has for this rank, whichever way it took."""
    me, place, width = call.group.rank, out.data_ptr(), _width(rows)
    for source, counts in enumerate(heard.rows_SD):
        skip, size = sum(counts[:me]) * width, counts[me] * width
        if source == me:
            ctypes.memmove(place, rows.data_ptr() + skip, size)
        elif max(counts) * width <= INLINE_BYTES:
            ctypes.memmove(place, heard.payloads[source], size)
        elif heard.wanted[source]:
            ctypes.memmove(place, epoch + source * link.slot + skip, size)
        else:
            link.read(source, ADDRESS.unpack(heard.payloads[source])[0] + skip, place, size)
        place += size


def can_reduce(group: Group, rows: torch.Tensor) -> bool:
    """Whether `reduce` may take these rows."""
    return group.transport == "local" and group.control.reads and rows.nbytes >= DIRECT_BYTES


def reduce(call: Call, out: torch.Tensor, rows: torch.Tensor) -> None:
    """The sum over all ranks of their contiguous rows for this rank, [size * T, ...] -> [T, ...], in rank order.

    `out` has the dtype in which is added. Others' rows are read from their memory in pieces.
    """
    link, me = _link(call), call.group.rank
    heard = link.meet(call, ADDRESS.pack(rows.data_ptr()))
    mine, flat = rows.view(call.group.size, -1)[me], out.view(-1)
    piece = max(1, SCRATCH_BYTES // rows.element_size())
    scratch = torch.empty(min(piece, mine.numel()), dtype=rows.dtype)
    for start in range(0, mine.numel(), piece):
        target = flat[start : start + piece]
        for source in range(call.group.size):
            part = mine[start : start + piece]
            if source != me:
                part = scratch[: target.numel()]
                (address,) = ADDRESS.unpack(heard.payloads[source])
                skip = me * mine.nbytes + start * rows.element_size()
                link.read(source, address + skip, part.data_ptr(), part.nbytes)
            if source:
                target += part
            else:
                target.copy_(part)
    link.meet(call, round_number=2)


def _link(call: Call) -> Link:
    link = call.group.control
    assert isinstance(link, Link), "a local group has a link"
    return link


def _width(rows: torch.Tensor) -> int:
    """Bytes of one row."""
    return prod(rows.shape[1:]) * rows.element_size()


def _cuts(counts: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of each destination's rows."""
    start = 0
    for count in counts:
        yield start, count * width
        start += count * width
