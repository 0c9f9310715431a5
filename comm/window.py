"""Window: memory that the ranks of a group share, in two epochs; it has no name, so a crash leaves nothing behind."""

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

EPOCHS = 2
LEAST_BYTES = 1 << 20
SHARED_FOLDER = Path("/dev/shm")


class NoRoom(OSError):
    """There is not enough shared memory."""


class Window:
    """Two epochs of `capacity` bytes each, mapped by every rank of a group; unmapped when nobody holds it any more.

    A rank writes an epoch again only after a later call has shown that all have read it: then everybody has entered
    the call between.
    """

    def __init__(self, descriptor: int, capacity: int) -> None:
        """Map the memory behind a descriptor, which is closed."""
        self.capacity, self.uses = capacity, 0
        try:
            self.memory = mmap.mmap(descriptor, EPOCHS * capacity)
        finally:
            os.close(descriptor)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def next_epoch(self) -> int:
        """The address of the epoch that the next use takes; `capacity` bytes from there are its own."""
        return self.start + self.uses % EPOCHS * self.capacity


def capacity_for(wanted: int) -> int:
    """The capacity that a window grows to, a power of two."""
    return max(LEAST_BYTES, 1 << max(0, wanted - 1).bit_length())


def make_memory(capacity: int) -> int:
    """A descriptor of new shared memory, with its pages reserved. NoRoom if they cannot be.

    An anonymous file where the system has them, else one in SHARED_FOLDER that has lost its name.
    """
    size = EPOCHS * capacity
    descriptor = -1
    try:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("meshspark", os.MFD_CLOEXEC)
        else:
            descriptor, name = tempfile.mkstemp(prefix="meshspark-", dir=SHARED_FOLDER)
            Path(name).unlink()
        # Unreserved, a full memory would be a bus error in the middle of a copy.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as problem:
        if descriptor >= 0:
            os.close(descriptor)
        raise NoRoom(problem.errno, f"{size} bytes of shared memory: {problem.strerror}") from problem
    return descriptor
