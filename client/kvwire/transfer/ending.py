"""How an operation ends: the part of a `Future` that is needed here, at a tenth of its price.

A lease has dozens of operations, and they are made while a client waits for its ticket.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Ending:
    """Resolved once, with None or an error. For any threads."""

    __slots__ = ("_callbacks", "_error", "_is_done")

    def __init__(self) -> None:
        self._is_done = False
        self._error: BaseException | None = None
        self._callbacks: deque[Callable[[Ending], None]] = deque()

    def done(self) -> bool:
        return self._is_done

    def exception(self) -> BaseException | None:
        """Its error. Only for one that is done."""
        return self._error

    def result(self, timeout: float | None = None) -> None:
        """Wait for it. Raises its error, or TimeoutError."""
        if not self._is_done:
            ended = threading.Event()
            self.add_done_callback(lambda _: ended.set())
            if not ended.wait(timeout):
                raise TimeoutError
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[Ending], None]) -> None:
        """Call it once, when this has ended: on the thread that resolves it, or at once on this one."""
        self._callbacks.append(callback)
        if self._is_done:
            self._call()

    def resolve(self, error: BaseException | None = None) -> None:
        """The first call counts."""
        if self._is_done:
            return
        self._error = error
        self._is_done = True
        self._call()

    def _call(self) -> None:
        """Whoever takes a callback out calls it, so it does not matter who comes first."""
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return
            try:
                callback(self)
            except Exception:
                logger.exception("what was to happen at the end of an operation has failed")
