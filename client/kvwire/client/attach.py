"""The stream whose end tells a client that the server is gone, and the server that the client is."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import grpc

from kvwire.client import calls
from kvwire.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.client.state import ClientState
    from kvwire.client.types import AttachEvent
    from kvwire.errors import KvwireError


class AttachStream:
    """An open Attach: iterate it on a thread of its own. It ends, with an error, when the server is gone.

    `seconds` is how long the first event may take.
    """

    def __init__(
        self,
        stream: Any,
        state: ClientState,
        error_of: Callable[[grpc.RpcError, str, float | None], KvwireError],
        seconds: float,
    ) -> None:
        self._stream = stream
        self._state = state
        self._error_of = error_of
        self._seconds = seconds
        self._cancelled = False
        self._late = False

    def cancel(self) -> None:
        """End the stream from another thread; the iteration stops without an error."""
        self._cancelled = True
        self._stream.cancel()

    def __iter__(self) -> Iterator[AttachEvent]:
        watchdog = threading.Timer(self._seconds, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            for reply in self._stream:
                watchdog.cancel()
                self._state.see(reply.header.incarnation)
                yield calls.attach_event(reply)
        except grpc.RpcError as exc:
            if self._late:
                message = f"Attach was not answered within {self._seconds:g} s."
                raise DeadlineExceeded(message, method="Attach", seconds=self._seconds) from None
            if not self._cancelled:
                raise self._error_of(exc, "Attach", None) from None
        finally:
            watchdog.cancel()
            self._stream.cancel()

    def _give_up(self) -> None:
        self._late = True
        self._stream.cancel()
