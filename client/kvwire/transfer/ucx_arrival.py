"""A commit over UCX itself: the client says that a store is there, and the server answers what became of it.

The client's message is one byte under the store's own tags, behind the last piece; it needs no order, since
the server waits for the pieces as well. The answer is one byte under a tag of its own kind.
"""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Final

import numpy as np

from kvwire.errors import KvwireError
from kvwire.transfer import tags
from kvwire.transfer.tags import Kind

if TYPE_CHECKING:
    from kvwire.transfer.base import ByteArray
    from kvwire.transfer.ucx import Peer, UcxEngine

REFUSED: Final = 0
COMMITTED: Final = 1


def message() -> ByteArray:
    return np.zeros(1, dtype=np.uint8)


class Said:
    """The client's half: it has said that all is there, or will be soon. Raises KvwireError where it cannot.

    `wait` for the answer, or `forget` it.
    """

    def __init__(self, engine: UcxEngine, peer: Peer, lease_id: int, word: int) -> None:
        self._engine = engine
        self._tag = tags.encode(Kind.ARRIVAL, lease_id)
        self._answer = message()
        self._waiting = engine.recv(self._tag, self._answer, peer)
        try:
            peer.send(tags.encode(Kind.STORE, lease_id, word), message())
        except KvwireError:
            self.forget()
            raise

    def wait(self, seconds: float) -> bool:
        """False when the server has not told within `seconds` that all is committed."""
        try:
            self._waiting.wait(seconds)
        except (KvwireError, FutureTimeoutError):
            self.forget()
            return False
        return int(self._answer[0]) == COMMITTED

    def forget(self) -> None:
        self._waiting.cancel()
        self._engine.discard(self._tag)


def answer(peer: Peer, lease_id: int, *, committed: bool) -> None:
    """The server's half. A client that is gone need not know."""
    reply = message()
    reply[0] = COMMITTED if committed else REFUSED
    try:
        peer.send(tags.encode(Kind.ARRIVAL, lease_id), reply)
    except KvwireError:
        return
