"""The UCX data plane of one process: one thread that owns a UCX worker and waits for its events.

The thread sleeps in the kernel when nothing moves. Callers, from threads or an event loop, hand it commands
and get futures. It also matches messages to receives by their tags itself: so a receive that no message has
come for can end at once, a message of another length than agreed never touches the buffer, and what belongs
to an ended lease is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import DataPathUnavailable
from kvwire.transfer import tags, ucx_library
from kvwire.transfer.ucx_address import sealed, unsealed
from kvwire.transfer.ucx_ops import Peer, UcxOp
from kvwire.transfer.ucx_options import UcxOptions
from kvwire.transfer.ucx_state import UcxState, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Peer", "UcxEngine", "UcxOp", "UcxOptions"]

logger = logging.getLogger(__name__)

START_SECONDS: Final = 20.0
CONNECT_SECONDS: Final = 10.0


class UcxEngine:
    """Starts its thread at once. Raises MissingExtra, ConfigError or DataPathUnavailable.

    `address` is what peers connect to. Not usable in a forked child: that needs an engine of its own.
    """

    def __init__(self, options: UcxOptions) -> None:
        self.options: Final = options
        self.address = b""
        self._library = ucx_library.load()
        self._state = UcxState(self._library, options)
        self._pid = os.getpid()
        self._commands: deque[Callable[[], None]] = deque()
        self._door = threading.Lock()
        self._handle = 0
        self._is_open = True
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name=f"kvwire-ucx-{options.kind}", daemon=True
        )
        self._thread.start()
        started.result(START_SECONDS)

    def connect(self, address: bytes, name: str = "peer") -> Peer:
        """A peer by its engine's `address`. Raises DataPathUnavailable when this kind cannot reach it."""
        found: Future[Peer] = Future()
        raw = unsealed(address)
        self._submit(lambda: self._state.connect(Peer(self, name), raw, found))
        try:
            return found.result(CONNECT_SECONDS)
        except FutureTimeoutError:
            raise unavailable(f"connecting took more than {CONNECT_SECONDS:.0f} s") from None

    def send(self, peer: Peer, tag: int, buffer: Any) -> UcxOp:
        """Send a contiguous buffer. A large one is done when the peer has taken all of it."""
        op = UcxOp(self, tag, buffer, self._library.array(buffer), peer, is_send=True)
        self._submit(lambda: self._state.send(op, peer))
        return op

    def recv(self, tag: int, buffer: Any, peer: Peer | None = None) -> UcxOp:
        """Receive the message `tag`, of just the buffer's length. It fails when `peer` is lost."""
        op = UcxOp(self, tag, buffer, self._library.array(buffer), peer, is_send=False)
        self._submit(lambda: self._state.expect(op))
        return op

    def cancel(self, op: UcxOp) -> None:
        self._submit_if_open(lambda: self._state.cancel(op))

    def discard(self, tag: int) -> None:
        """Drop messages of this tag's lease from now on, so that their sender gets its memory back."""
        self._submit_if_open(lambda: self._state.discard(tags.lease_prefix(tag)))

    def drop_peer(self, peer: Peer, why: str, *, gone: bool) -> None:
        self._submit_if_open(lambda: self._state.drop_peer(peer, why, gone=gone))

    def close(self, timeout: float = 5.0) -> None:
        """Fail what is under way and stop the thread, within `timeout` seconds."""
        if self._pid != os.getpid() or not self._is_open:
            return
        self._submit_if_open(lambda: self._state.stop(0.6 * timeout))
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("UCX did not stop within %.0f s; its thread is left behind", timeout)

    def _submit(self, command: Callable[[], None]) -> None:
        if self._pid != os.getpid():
            raise unavailable("it was started before this process was forked")
        with self._door:
            if not self._is_open:
                raise unavailable("the engine is closed")
            self._commands.append(command)
            self._library.signal(self._handle)

    def _submit_if_open(self, command: Callable[[], None]) -> None:
        """For what a closed engine, or the parent's, has done already."""
        with contextlib.suppress(DataPathUnavailable):
            self._submit(command)

    def _run(self, started: Future[None]) -> None:
        state = self._state
        try:
            self.address = sealed(state.open())
            self._handle = state.worker.handle
        except Exception as error:  # noqa: BLE001  raised again where the engine is made
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

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _loop(self, state: UcxState) -> None:
        while True:
            self._obey()
            state.step()
            if state.is_stopped:
                return
            # Returns at once while there is progress, else sleeps until an event or a signal.
            state.worker.progress_worker_event(state.wait_ms())
