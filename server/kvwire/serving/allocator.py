"""How a long-lived program handles memory: the C library for messages, and Python's collector."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LARGEST_MESSAGE: Final = 4 << 20
_KEPT: Final = 16 << 20
_COLLECT_AFTER: Final = 20_000


def keep_message_memory() -> None:
    """Take messages of up to 4 MiB from the heap, and keep 16 MiB of it free.

    By default glibc asks the system for every message above 128 KiB and gives it back afterwards: for half a
    megabyte of tokens the page faults cost more than hashing them. Other C libraries are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MESSAGE)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def calm_collector() -> None:
    """Call it when the program has started.

    What was made so far lives as long as the program, and need not be looked at again. A transfer of many
    pieces makes thousands of objects at once: by default it is looked through for garbage every 700.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
