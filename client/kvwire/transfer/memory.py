"""Anonymous memory, and advice to the kernel that lets other threads run meanwhile."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from kvwire.transfer.base import ByteArray

MADV_HUGEPAGE: Final = 14
MADV_POPULATE_READ: Final = 22
MADV_POPULATE_WRITE: Final = 23
HUGE_PAGE: Final = 2 << 20


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


def advise(address: int, nbytes: int, advice: int) -> bool:
    """madvise without the interpreter lock. False where this kernel does not know or grant the advice."""
    return bool(_madvise()(address, nbytes, advice) == 0)


def anonymous(nbytes: int, *, huge_pages: bool = True) -> ByteArray:
    """Private memory, aligned to huge pages. It lives as long as a view of it."""
    room = nbytes + HUGE_PAGE
    mapping = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(mapping, dtype=np.uint8)
    skip = -whole.ctypes.data % HUGE_PAGE
    if huge_pages:
        # Copies between processes run at twice the speed out of huge pages: the kernel pins page by page.
        advise(whole.ctypes.data + skip, nbytes, MADV_HUGEPAGE)
    return whole[skip : skip + nbytes]
