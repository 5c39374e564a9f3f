"""How the C library hands out memory for messages."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_MESSAGE: Final = 4 << 20
_KEPT: Final = 16 << 20


def keep_message_memory() -> None:
    """Take messages of up to 4 MiB from the heap, and keep 16 MiB of it free.

    By default glibc asks the system for every message above 128 KiB and gives it back afterwards: for half a
    megabyte of tokens the page faults cost more than hashing them. Other C libraries are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MESSAGE)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
