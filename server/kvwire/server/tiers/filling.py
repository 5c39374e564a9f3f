from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.server.tiers.backends.base import Full
    from kvwire.server.tiers.index import TierIndex
    from kvwire.server.tiers.problems import Problems

AGAIN_S: Final = 300.0
"""After so long a storage that was full is tried up to its size again."""


class Fill:
    """A storage that is full before the tier has its size: what it holds is all there is room for, for a
    while. So a tier on a disk that others fill goes on taking what is new, and gives way.
    """

    def __init__(
        self, index: TierIndex, size: int, problems: Problems, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._index = index
        self._size = size
        self._problems = problems
        self._now = now
        self._until = 0.0

    def full(self, error: Full) -> None:
        """An object had no room, and is not counted any more."""
        if not self._until:
            self._problems.note(f"is full with {self._index.kept} of {self._size} bytes: {error}")
        self._index.capacity = min(self._index.capacity, self._index.kept)
        self._until = self._now() + AGAIN_S

    def look(self) -> None:
        """Whether it is time to try again."""
        if self._until and self._now() >= self._until:
            self._until = 0.0
            self._index.capacity = self._size
