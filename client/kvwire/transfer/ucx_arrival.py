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


def say(engine: UcxEngine, peer: Peer, lease_id: int, word: int, seconds: float) -> bool:
    """The client's half. False when the server has not said within `seconds` that all is committed."""
    tag = tags.encode(Kind.ARRIVAL, lease_id)
    answer = message()
    try:
        waiting = engine.recv(tag, answer, peer)
    except KvwireError:
        return False
    try:
        peer.send(tags.encode(Kind.STORE, lease_id, word), message())
        waiting.future.result(seconds)
    except (KvwireError, FutureTimeoutError):
        waiting.cancel()
        engine.discard(tag)
        return False
    return int(answer[0]) == COMMITTED


def answer(peer: Peer, lease_id: int, *, committed: bool) -> None:
    """The server's half. A client that is gone need not know."""
    reply = message()
    reply[0] = COMMITTED if committed else REFUSED
    try:
        peer.send(tags.encode(Kind.ARRIVAL, lease_id), reply)
    except KvwireError:
        return
