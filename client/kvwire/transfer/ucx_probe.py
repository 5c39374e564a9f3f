"""A transfer that proves a UCX path both ways before it is used.

CMA and shared memory may be there and still not be permitted (containers, another user, ptrace_scope), and an
address may be out of reach. The message is large enough to go the way that large messages go.
"""

from __future__ import annotations

import secrets
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Final

import numpy as np

from kvwire.errors import KvwireError, TransferFailed
from kvwire.transfer.memory import anonymous
from kvwire.transfer.ucx_state import unavailable

if TYPE_CHECKING:
    from kvwire.transfer.ending import Ending
    from kvwire.transfer.ucx import Peer, UcxEngine, UcxOp

PROBE_BYTES: Final = 1 << 20


class ProbeServer:
    """Sends a random message under `tag` and expects the same back under `tag` + 1.

    `future` is resolved on the engine's thread: None when the path works, else a KvwireError.
    """

    def __init__(self, engine: UcxEngine, peer: Peer, tag: int, nbytes: int = PROBE_BYTES) -> None:
        self.future: Future[None] = Future()
        self._engine = engine
        self._sent = np.frombuffer(bytearray(secrets.token_bytes(nbytes)), dtype=np.uint8)
        self._back = np.zeros(nbytes, dtype=np.uint8)
        self._tag = tag
        self._echo: UcxOp = engine.recv(tag + 1, self._back, peer)
        self._probe: UcxOp = peer.send(tag, self._sent)
        self._probe.ending.add_done_callback(self._probe_sent)
        self._echo.ending.add_done_callback(self._echo_came)

    def cancel(self) -> None:
        """Give it up: no answer in time, or the client has gone."""
        self._engine.discard(self._tag)
        self._probe.cancel()
        self._echo.cancel()

    def _probe_sent(self, sent: Ending) -> None:
        if sent.exception() is not None:
            self._end(sent.exception())
            self._echo.cancel()

    def _echo_came(self, echo: Ending) -> None:
        error = echo.exception()
        if error is None and not np.array_equal(self._sent, self._back):
            error = TransferFailed("The probe came back with other bytes.", path="ucx", cause="probe")
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


def probe_client(engine: UcxEngine, peer: Peer, tag: int, nbytes: int, timeout: float) -> None:
    """The client's half: receive the probe and send it back. Raises DataPathUnavailable."""
    # Huge pages as in the staging memory: what is proven is what is used.
    buffer = anonymous(nbytes)
    try:
        _wait(engine.recv(tag, buffer, peer), timeout)
        _wait(peer.send(tag + 1, buffer), timeout)
    except FutureTimeoutError:
        engine.discard(tag)
        raise unavailable(f"the probe did not come through within {timeout:g} s") from None
    except KvwireError as error:
        engine.discard(tag)
        raise unavailable(f"the probe failed: {error}") from error


def _wait(op: UcxOp, timeout: float) -> None:
    try:
        op.wait(timeout)
    except FutureTimeoutError:
        op.cancel()
        raise
