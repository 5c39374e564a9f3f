from __future__ import annotations

import asyncio
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvwire.server.tiers.backends.base import BackendError, Unavailable
from kvwire.server.tiers.problems import DELETE
from kvwire.server.tiers.retrying import Backoff

if TYPE_CHECKING:
    from kvwire.server.tiers.backends.base import Backend
    from kvwire.server.tiers.index import TierIndex
    from kvwire.server.tiers.problems import Problems

BATCH: Final = 500
FIRST_S: Final = 0.5
LONGEST_S: Final = 30.0


class Deleter:
    """Deletes what the index has doomed, until it is gone."""

    def __init__(self, index: TierIndex, backend: Backend, problems: Problems) -> None:
        self._index = index
        self._backend = backend
        self._problems = problems
        self._news = asyncio.Event()
        self._progress = asyncio.Event()
        index.on_doomed = self._news.set

    async def run(self) -> None:
        backoff = Backoff(FIRST_S, LONGEST_S)
        while True:
            await self._news.wait()
            self._news.clear()
            while self._index.doomed:
                if await self._batch():
                    backoff = Backoff(FIRST_S, LONGEST_S)
                else:
                    await asyncio.sleep(backoff.next())

    async def gone(self, name: str, size: int, seconds: float) -> None:
        """Wait until a name may be written, and `size` bytes have room. Raises Unavailable."""
        index = self._index
        deadline = asyncio.get_running_loop().time() + seconds
        while name in index.doomed or (index.doomed and index.used + size > index.capacity):
            self._progress.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._progress.wait()
            except TimeoutError:
                raise Unavailable("what makes room for it could not be deleted in time") from None

    async def finish(self) -> None:
        """What is left, once."""
        while self._index.doomed and await self._batch():
            pass

    async def _batch(self) -> bool:
        names = list(islice(self._index.doomed, BATCH))
        try:
            await self._backend.delete(names)
        except BackendError as error:
            self._problems.failed(DELETE, error)
            return False
        self._problems.works(DELETE)
        self._index.deleted(names)
        self._progress.set()
        return True
