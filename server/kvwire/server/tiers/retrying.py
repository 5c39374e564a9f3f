from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Final

from kvwire.server.tiers.backends.base import Unavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FIRST_S: Final = 0.1
LONGEST_S: Final = 2.0


class Backoff:
    """Growing waits in seconds, each between a half and the whole of its step."""

    def __init__(self, first: float, longest: float) -> None:
        self._step = first
        self._longest = longest

    def next(self) -> float:
        step = self._step
        self._step = min(2 * step, self._longest)
        return step * random.uniform(0.5, 1.0)  # noqa: S311 - not a secret


async def retried(attempts: int, call: Callable[[], Awaitable[None]]) -> None:
    """Call until it works; what is not worth another attempt, and the last failure, is raised."""
    backoff = Backoff(FIRST_S, LONGEST_S)
    for _ in range(attempts - 1):
        try:
            return await call()
        except Unavailable:
            await asyncio.sleep(backoff.next())
    return await call()
