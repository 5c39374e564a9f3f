from __future__ import annotations

import asyncio
from collections import deque


class Budget:
    """Bytes that may be in flight at once, handed out in the order of asking. On the event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, size: int) -> int:
        """Wait for `size` bytes, or for all that there are. Returns what `give` has to be told."""
        size = min(size, self.limit)
        if not self._waiting and self.used + size <= self.limit:
            self.used += size
            return size
        turn = asyncio.get_running_loop().create_future()
        entry = (size, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(size)
            else:
                self._waiting.remove(entry)
                self._wake()
            raise
        return size

    def give(self, size: int) -> None:
        self.used -= size
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.limit:
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.used += size
                turn.set_result(None)
