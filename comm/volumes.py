"""What the shared windows of the local transport come to cost. Pure arithmetic over sizes of exchanges."""

from .link import Link
from .local import DIRECT_BYTES, INLINE_BYTES
from .window import EPOCHS, capacity_for


def gather_window(own_bytes: int, size: int) -> int:
    """Window bytes that an all-gather of own_bytes a rank wants of a group of `size`; 0 if the doorbell carries it."""
    return 0 if own_bytes <= INLINE_BYTES else own_bytes * size


def exchange_window(most_bytes: int, size: int, *, reads: bool) -> int:
    """The largest window that exchanges of up to most_bytes a rank want; reads: ranks read each other's memory.

    Direct reads take over at DIRECT_BYTES, so that the largest exchange is then not the one that wants most.
    """
    if most_bytes <= INLINE_BYTES:
        return 0
    return size * Link.slot_for(min(most_bytes, DIRECT_BYTES - 1) if reads else most_bytes)


def broadcast_window(length: int) -> int:
    """Window bytes that a broadcast of `length` bytes wants."""
    return 0 if length <= INLINE_BYTES else length


def window_bytes(wanted: int) -> int:
    """Shared memory of a group whose largest exchange wants so much, for all its ranks together."""
    return EPOCHS * capacity_for(wanted) if wanted else 0
