"""Blocking work off the event loop that is over when its caller goes on, also a cancelled one."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")


class Stopped(Exception):
    """The work has seen that nobody wants it any more."""


class Wanted:
    """Whether work is still wanted. Work that is long asks now and then."""

    __slots__ = ("_gone",)

    def __init__(self) -> None:
        self._gone = False

    def no_more(self) -> None:
        self._gone = True

    def check(self) -> None:
        """Raises Stopped when the caller has been cancelled."""
        if self._gone:
            raise Stopped


class Threads:
    """A few threads for one kind of work; they start with the first of it."""

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, name)

    async def run(self, work: Callable[[Wanted], Result]) -> Result:
        """The work's result. A cancelled call ends when the work has: it touches no buffer afterwards."""
        wanted = Wanted()
        job = self._pool.submit(work, wanted)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            wanted.no_more()
            if not job.cancel():
                await _ended(future)
            raise

    def close(self) -> None:
        """Takes no more work and waits for what is under way."""
        self._pool.shutdown(cancel_futures=True)


async def _ended(future: asyncio.Future[Result]) -> None:
    while not future.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([future])
    if not future.cancelled():
        future.exception()
