"""One UCX worker and the thread that owns it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import DataPathUnavailable
from kvwire.transfer.ucx_state import UcxState, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.transfer.ucx_library import Library
    from kvwire.transfer.ucx_ops import Peer
    from kvwire.transfer.ucx_options import UcxOptions

logger = logging.getLogger(__name__)

START_SECONDS: Final = 20.0
WATCH_S: Final = 200e-6 if len(os.sched_getaffinity(0)) > 1 else 0.0
"""How long a thread watches what another server sends, when it has begun to come, before it sleeps.

Who sleeps is woken from the network, and the kernel runs it on the processor that serves the network: where
that is the sender's own, of two, both sides share one, and a tenth of the time goes. Within a host there is
nothing to watch: the receiver copies. A client that stores has other work for the processors: there watching
costs a tenth.
"""


class Lane:
    """Starts its thread at once. Commands are run on it, in order. Raises what starting raises."""

    def __init__(
        self, library: Library, options: UcxOptions, name: str, lost: Callable[[Peer], None]
    ) -> None:
        self.state: Final = UcxState(library, options, lost)
        self.address = b""
        self._watches = options.kind == "remote" and WATCH_S > 0
        self._library = library
        self._commands: deque[Callable[[], None]] = deque()
        self._door = threading.Lock()
        self._handle = 0
        self._is_open = True
        started: Future[None] = Future()
        self.thread: Final = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        self.thread.start()
        started.result(START_SECONDS)

    def submit(self, command: Callable[[], None]) -> None:
        """Raises DataPathUnavailable when the lane is closed."""
        with self._door:
            if not self._is_open:
                raise unavailable("the engine is closed")
            self._commands.append(command)
            self._library.signal(self._handle)

    def submit_if_open(self, command: Callable[[], None]) -> None:
        """For what closing does by itself."""
        with contextlib.suppress(DataPathUnavailable):
            self.submit(command)

    def _run(self, started: Future[None]) -> None:
        state = self.state
        try:
            self.address = state.open()
            self._handle = state.worker.handle
        except Exception as error:  # noqa: BLE001  raised again where the lane is made
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._loop(state)
        except Exception:
            logger.exception("The UCX thread has failed; what it had under way fails with it")
        finally:
            # From here on nobody may signal the worker any more.
            with self._door:
                self._is_open = False
            state.stop(0)
            self._obey()
            state.destroy()

    def _loop(self, state: UcxState) -> None:
        while True:
            self._obey()
            state.step()
            if state.is_stopped:
                return
            if not (self._watches and state.is_fetching and self._moves(state.worker)):
                # Returns at once while there is progress, else sleeps until an event or a signal.
                state.worker.progress_worker_event(state.wait_ms())

    def _moves(self, worker: Any) -> bool:
        """Look for a moment whether anything comes, or is to be done. Without sleeping: see WATCH_S."""
        until = time.perf_counter() + WATCH_S
        moved = False
        while time.perf_counter() < until and not self._commands:
            moved = bool(worker.progress_once()) or moved
        return moved or bool(self._commands)

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()
