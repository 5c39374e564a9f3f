"""A second event loop, in a thread of its own, for a library that works on the loop that calls it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine

Result = TypeVar("Result")


class Aside:
    """Starts with the first call. Cancelling a call cancels it there."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None

    async def run(self, call: Coroutine[Any, Any, Result]) -> Result:
        """Runs it there; its result, or what it raises."""
        if self._loop is None:
            self._start()
        assert self._loop is not None  # noqa: S101 - _start has set it
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def close(self) -> None:
        """Cancels what is under way."""
        if self._thread is not None and self._loop is not None and self._over is not None:
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
            self._thread = self._loop = None

    def _start(self) -> None:
        started: Future[None] = Future()

        async def serve() -> None:
            self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
            started.set_result(None)
            await self._over.wait()

        self._thread = threading.Thread(target=asyncio.run, args=(serve(),), name=self._name, daemon=True)
        self._thread.start()
        started.result()
