"""Between the caller's buffers and those of a library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from .base import WrongSize, total

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .base import Buffer

SLOWEST: Final = 1 << 20
"""Bytes per second that a call may move at least, on top of its timeout."""


def limit(timeout: float, size: int) -> float:
    """Seconds for a call that moves so many bytes and cannot tell how far it is."""
    return timeout + size / SLOWEST


def joined(parts: Sequence[Buffer]) -> memoryview:
    """A copy of all parts: a call that was given up may still be read from for a moment."""
    whole = np.empty(total(parts), np.uint8)
    at = 0
    for part in parts:
        piece = np.frombuffer(part, np.uint8)
        whole[at : at + piece.size] = piece
        at += piece.size
    return whole.data


class Filling:
    """Writable parts that are filled from front to back; `lacking` bytes are still to come."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = [part.cast("B") for part in parts if part.nbytes]
        self.lacking = sum(part.nbytes for part in self._parts)

    def take(self, piece: memoryview) -> None:
        """Raises WrongSize when there is no place for all of it."""
        if piece.nbytes > self.lacking:
            raise WrongSize(f"{piece.nbytes - self.lacking} bytes more than were asked for")
        while piece.nbytes:
            part = self._parts[0]
            count = min(part.nbytes, piece.nbytes)
            np.frombuffer(part, np.uint8)[:count] = np.frombuffer(piece, np.uint8, count)
            piece, self.lacking = piece[count:], self.lacking - count
            self._parts[0] = part[count:]
            if count == part.nbytes:
                self._parts.pop(0)
