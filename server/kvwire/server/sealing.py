"""Checksums for objects that were committed without one, made in the background by one thread.

Hashing takes memory bandwidth that clients copy with, so it waits for a pause between transfers, for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from kvwire.transfer.checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvwire.server.store import ObjectRef

    View = Callable[[int, int], memoryview]


PAUSE_S: Final = 0.25
"""Without a transfer for so long, hashing begins."""
PATIENCE_S: Final = 2.0
"""After so long it begins all the same."""


class Sealer:
    """`set_checksum` refuses an object that has gone meanwhile: a hash over reused memory is never kept."""

    def __init__(self, view: View, set_checksum: Callable[[ObjectRef, bytes], bool]) -> None:
        self._view = view
        self._set_checksum = set_checksum
        self._queue: deque[ObjectRef] = deque()
        self._news = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, "kvwire-seal")
        self._hurry = False
        self._busy = False
        self._last_transfer = 0.0

    def transfer_seen(self) -> None:
        """A client begins or ends a transfer now."""
        self._last_transfer = 0.0 if self._hurry else time.monotonic()

    def add(self, refs: Iterable[ObjectRef]) -> None:
        self._queue.extend(refs)
        self._news.set()

    async def run(self) -> None:
        """Seal for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._news.wait()
            self._news.clear()
            patience = time.monotonic() + PATIENCE_S
            while self._queue:
                await self.quiet(patience)
                ref = self._queue.popleft()
                self._busy = True
                digest = await loop.run_in_executor(self._pool, checksum, self._view(ref.offset, ref.size))
                self._set_checksum(ref, digest)
                self._busy = False

    async def seal(self, refs: Sequence[ObjectRef]) -> None:
        """Make these checksums now. The objects must be held meanwhile."""
        views = [self._view(ref.offset, ref.size) for ref in refs]
        loop = asyncio.get_running_loop()
        digests = await loop.run_in_executor(self._pool, lambda: [checksum(view) for view in views])
        for ref, digest in zip(refs, digests, strict=True):
            self._set_checksum(ref, digest)

    @property
    def waiting(self) -> bool:
        """Whether something waits for its checksum, or is getting it."""
        return bool(self._queue) or self._busy

    def hurry(self) -> None:
        """Wait for no pause any more."""
        self._hurry = True
        self._last_transfer = 0.0

    async def quiet(self, patience: float) -> None:
        """Until there is a pause between transfers, or until then (monotonic seconds)."""
        while (left := min(self._last_transfer + PAUSE_S, patience) - time.monotonic()) > 0:  # noqa: ASYNC110 - a pause is no event
            await asyncio.sleep(left)

    async def intact(self, ref: ObjectRef) -> bool:
        """Whether the bytes still match the checksum; True while there is none."""
        return not ref.checksum or not await self.unlike({0: (ref, ref.checksum)})

    async def unlike(self, claims: Mapping[int, tuple[ObjectRef, bytes]]) -> list[int]:
        """Names of those whose bytes do not have the checksum that is claimed."""
        views = {name: self._view(ref.offset, ref.size) for name, (ref, _) in claims.items()}

        def compare() -> list[int]:
            return [name for name, (_, expected) in claims.items() if checksum(views[name]) != expected]

        return await asyncio.get_running_loop().run_in_executor(self._pool, compare)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
