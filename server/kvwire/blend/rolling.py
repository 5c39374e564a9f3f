"""Fingerprints of every window of a prompt at once: a polynomial hash modulo 2^64, by numpy.

With t' a token mixed to 64 bits and b odd, a window of n tokens from i on has the fingerprint
t'[i] + t'[i+1]*b + ... + t'[i+n-1]*b^(n-1), made from running sums and the inverse powers of b. Equal windows
have equal fingerprints; the reverse is likely and nothing more, so the tokens are compared afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words: TypeAlias = "NDArray[np.uint64]"

_BASE: Final = 0x9E3779B97F4A7C15
_MIX: Final = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT: Final = np.uint64(31)
_BLOCK_BYTES: Final = 32 << 10


class RollingHash:
    """For windows of `window` tokens. Tokens are packed little-endian uint32."""

    def __init__(self, window: int) -> None:
        if window < 1:
            raise ValueError("a window has at least one token")
        self.window = window
        self._powers = _powers(_BASE, window)
        self._inverse = _powers(pow(_BASE, -1, 2**64), window)

    def of_chunks(self, packed: bytes) -> list[int]:
        """The fingerprint of every whole window, one behind the other."""
        chunk = 4 * self.window
        # As many at a time as stay in the processor's cache.
        step = max(1, _BLOCK_BYTES // chunk) * chunk
        end = len(packed) // chunk * chunk
        powers = self._powers[: self.window]
        fingerprints: list[int] = []
        for start in range(0, end, step):
            words = _mixed(packed[start : min(start + step, end)]).reshape(-1, self.window)
            words *= powers
            fingerprints += words.sum(axis=1, dtype=np.uint64).tolist()
        return fingerprints

    def of_windows(self, packed: bytes) -> Words:
        """The fingerprint of the window at every position; empty when there is none."""
        words = _mixed(packed)
        positions = len(words) - self.window + 1
        if positions < 1:
            return words[:0]
        self._reach(len(words))
        sums = np.empty(len(words) + 1, dtype=np.uint64)
        sums[0] = 0
        np.cumsum(words * self._powers[: len(words)], out=sums[1:])
        windows: Words = (sums[self.window :] - sums[:positions]) * self._inverse[:positions]
        return windows

    def _reach(self, length: int) -> None:
        if length > len(self._powers):
            length = 1 << length.bit_length()
            self._powers = _powers(_BASE, length)
            self._inverse = _powers(pow(_BASE, -1, 2**64), length)


def _powers(base: int, count: int) -> Words:
    factors = np.full(count, np.uint64(base), dtype=np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mixed(packed: bytes) -> Words:
    # Small token ids would leave the upper bits of short sums empty, and patterns collide modulo 2^64.
    words = np.frombuffer(packed, dtype="<u4").astype(np.uint64)
    words += np.uint64(1)
    words *= _MIX
    words ^= words >> _SHIFT
    words *= np.uint64(_BASE)
    return words
