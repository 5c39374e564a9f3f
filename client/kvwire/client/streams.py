"""The two streams that stay open, and what notices that one of them has gone quiet."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import grpc

from kvwire.client import calls
from kvwire.errors import DeadlineExceeded, KvwireError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from kvwire.client.state import ClientState
    from kvwire.client.types import AttachEvent, KvEvents

    ErrorOf = Callable[[grpc.RpcError, str, float | None], KvwireError]


class Watchdog:
    """Cancels a stream that says nothing for `seconds`, until it is stopped."""

    def __init__(self, stream: Any, seconds: float) -> None:
        self.bitten = False
        self._stream = stream
        self._seconds = seconds
        self._heard = time.monotonic()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._stopped = False
        self._arm(seconds)

    def heard(self) -> None:
        self._heard = time.monotonic()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._timer is not None:
                self._timer.cancel()

    def _arm(self, seconds: float) -> None:
        with self._lock:
            if self._stopped:
                return
            self._timer = threading.Timer(seconds, self._look)
            self._timer.daemon = True
            self._timer.start()

    def _look(self) -> None:
        left = self._heard + self._seconds - time.monotonic()
        if left > 0:
            self._arm(left)
        else:
            self.bitten = True
            self._stream.cancel()


class AttachStream:
    """An open Attach: iterate it on a thread of its own. It ends, with an error, when the server is gone.

    `seconds` is how long the first event may take. After it the heartbeats watch the server.
    """

    def __init__(self, stream: Any, state: ClientState, error_of: ErrorOf, seconds: float) -> None:
        self._stream = stream
        self._state = state
        self._error_of = error_of
        self._seconds = seconds
        self._cancelled = False

    def cancel(self) -> None:
        """End the stream from another thread; the iteration stops without an error."""
        self._cancelled = True
        self._stream.cancel()

    def __iter__(self) -> Iterator[AttachEvent]:
        watchdog = Watchdog(self._stream, self._seconds)
        try:
            for reply in self._stream:
                watchdog.stop()
                self._state.see(reply.header.incarnation)
                yield calls.attach_event(reply)
        except grpc.RpcError as exc:
            if watchdog.bitten:
                raise silent("Attach", self._seconds) from None
            if not self._cancelled:
                raise self._error_of(exc, "Attach", None) from None
        finally:
            watchdog.stop()
            self._stream.cancel()


def kv_events(stream: Any, state: ClientState, error_of: ErrorOf, seconds: float) -> Generator[KvEvents]:
    """What SubscribeKvEvents says. Raises DeadlineExceeded when it says nothing for `seconds`."""
    watchdog = Watchdog(stream, seconds)
    try:
        for reply in stream:
            watchdog.heard()
            state.see(reply.header.incarnation)
            yield calls.kv_events(reply)
            watchdog.heard()
    except grpc.RpcError as exc:
        if watchdog.bitten:
            raise silent("SubscribeKvEvents", seconds) from None
        raise error_of(exc, "SubscribeKvEvents", None) from None
    finally:
        watchdog.stop()
        stream.cancel()


def silent(method: str, seconds: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{method} said nothing for {seconds:g} s.", method=method, seconds=seconds)
