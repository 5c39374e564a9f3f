"""Messages of one loan, straight into their targets, each piece hashed as soon as it is there.

From another host by the thread that has received it: it is in that processor's cache then, and on the others
the sender and the network are at work. Within a host receiving is copying, so another thread hashes.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import KvwireError, TransferFailed
from kvwire.transfer.base import pieces
from kvwire.transfer.checksum import Checksum, mismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from kvwire.transfer.ending import Ending
    from kvwire.transfer.ucx import Peer, UcxEngine, UcxOp


class Part:
    """One object: where it goes, the tag of its first piece, and the checksum that it must have.

    It is `over` when all of it has come, or the first piece has failed. `name` is chunk and KV group.
    """

    def __init__(self, name: tuple[int, int], view: memoryview, first_tag: int, checksum: bytes) -> None:
        self.name = name
        self.view = view
        self.first_tag = first_tag
        self.checksum = checksum
        self.ops: list[UcxOp] = []
        self.over = False
        self.error: KvwireError | None = None
        self._hash = Checksum()
        self._hashed = 0
        self._door = threading.Lock()

    @property
    def is_good(self) -> bool:
        return self.over and self.error is None

    def advance(self) -> bool:
        """Hash what has come, in order. Whether that was the last of it.

        One thread at a time: others leave it what they have received, and go on receiving.
        """
        last = False
        while self._has_come() and self._door.acquire(blocking=False):
            try:
                if self._has_come():
                    self._hash.update(self.ops[self._hashed].buffer)
                    self._hashed += 1
                    last = self._hashed == len(self.ops)
            finally:
                self._door.release()
        return last

    def _has_come(self) -> bool:
        """The next piece to be hashed. Another thread may go on to the one behind it meanwhile."""
        position = self._hashed
        if position == len(self.ops):
            return False
        ending = self.ops[position].ending
        return ending.done() and ending.exception() is None

    def verdict(self, path: str) -> KvwireError | None:
        """When all has been hashed."""
        return None if self._hash.digest() == self.checksum else mismatch(*self.name, path)


class Receiving:
    """Begins at once. `path` is the name of the data path, `news` is set when all parts are over.

    `moved` counts the messages that have come.
    """

    def __init__(
        self,
        engine: UcxEngine,
        peer: Peer,
        parts: Sequence[Part],
        piece_bytes: int,
        *,
        pool: ThreadPoolExecutor,
        path: str,
    ) -> None:
        self._engine = engine
        self._parts = parts
        self._pool = None if engine.options.kind == "remote" else pool
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._left = len(parts)
        self.moved = 0
        self.news = asyncio.Event()
        messages = []
        for part in parts:
            array = np.frombuffer(part.view, dtype=np.uint8)
            bounds = pieces(array.size, piece_bytes)
            messages.append(
                [(part.first_tag + i, array[start:stop]) for i, (start, stop) in enumerate(bounds)]
            )
        ops = iter(engine.recv_all([each for mine in messages for each in mine], peer))
        for part, mine in zip(parts, messages, strict=True):
            part.ops = [next(ops) for _ in mine]
        for part in parts:
            for op in part.ops:
                op.ending.add_done_callback(self._watcher(part))

    @property
    def first_tag(self) -> int:
        return self._parts[0].first_tag

    @property
    def is_complete(self) -> bool:
        return all(part.is_good for part in self._parts)

    @property
    def has_any(self) -> bool:
        return any(part.is_good for part in self._parts)

    @property
    def error(self) -> KvwireError | None:
        """The first one of any part."""
        return next((part.error for part in self._parts if part.error is not None), None)

    def stop(self) -> None:
        """Drop what has not come. What has begun may still go on, see `is_over`."""
        self._engine.discard(self.first_tag)
        for part in self._parts:
            if not part.is_good:
                for op in part.ops:
                    op.cancel()

    @property
    def is_over(self) -> bool:
        """Whether nothing touches the memory of any part any more."""
        return all(op.ending.done() and op.request is None for part in self._parts for op in part.ops)

    def _watcher(self, part: Part) -> Callable[[Ending], None]:
        def ended(ending: Ending) -> None:
            error = ending.exception()
            if error is not None:
                self._tell(part, _typed(error))
                return
            self.moved += 1
            if self._pool is None:
                self._hash(part)
                return
            try:
                self._pool.submit(self._hash, part)
            except RuntimeError:  # the server stops
                self._tell(part, TransferFailed("The server stops.", path=self._path, cause="stopping"))

        return ended

    def _hash(self, part: Part) -> None:
        if part.advance():
            self._tell(part, part.verdict(self._path))

    def _tell(self, part: Part, error: KvwireError | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self._ended, part, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits

    def _ended(self, part: Part, error: KvwireError | None) -> None:
        if part.over:
            return
        part.over = True
        part.error = error
        self._left -= 1
        if not self._left:
            self.news.set()


def _typed(error: BaseException) -> KvwireError:
    if isinstance(error, KvwireError):
        return error
    return TransferFailed(f"The transfer failed: {error}.", path="ucx", cause=type(error).__name__)
