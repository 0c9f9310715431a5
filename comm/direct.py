"""Direct copies from the memory of another process of the same host and user, where the system allows them."""

import ctypes
import os
import secrets
from collections.abc import Callable

NONCE_BYTES = 32
MOST_AT_ONCE = 1 << 30


class _Span(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def find_read() -> Callable[[int, int, int, int], None] | None:
    """read(pid, source address, destination address, bytes), or None where the system has no such call."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if function is None:
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = [
        ctypes.c_int,
        ctypes.POINTER(_Span),
        ctypes.c_ulong,
        ctypes.POINTER(_Span),
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]

    def read(pid: int, source: int, destination: int, size: int) -> None:
        done = 0
        while done < size:
            length = min(size - done, MOST_AT_ONCE)
            here, there = _Span(destination + done, length), _Span(source + done, length)
            got = function(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if got <= 0:
                number = ctypes.get_errno()
                raise OSError(number, f"reading {length} bytes of process {pid}: {os.strerror(number)}")
            done += got

    return read


class Nonce:
    """Some bytes of this process that another one proves to have read."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(secrets.token_bytes(NONCE_BYTES), NONCE_BYTES)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._memory)

    @property
    def text(self) -> str:
        return self._memory.raw.hex()


def can_read(pid: int, address: int, text: str) -> bool:
    """Whether this process can read the other's nonce."""
    read = find_read()
    if read is None:
        return False
    found = ctypes.create_string_buffer(NONCE_BYTES)
    try:
        read(pid, address, ctypes.addressof(found), NONCE_BYTES)
    except OSError:
        return False
    return found.raw.hex() == text
