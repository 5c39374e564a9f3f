"""Operations and peers of a UCX engine, as its callers see them. Who has the lane's turn does the work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import TransferFailed
from kvwire.transfer.ending import Ending

if TYPE_CHECKING:
    from kvwire.errors import KvwireError
    from kvwire.transfer.ucx import UcxEngine


class UcxOp:
    """One send or receive. `ending` is resolved by whoever drives the engine, with None or a KvwireError.

    The buffer is kept alive until UCX is done with it, whatever its ending says.
    """

    __slots__ = (
        "_engine",
        "array",
        "buffer",
        "cancelled",
        "ending",
        "give_up_at",
        "is_send",
        "peer",
        "request",
        "tag",
    )

    def __init__(
        self, engine: UcxEngine, tag: int, buffer: Any, array: Any, peer: Peer | None, *, is_send: bool
    ) -> None:
        self._engine = engine
        self.is_send: Final = is_send
        self.tag: Final = tag
        self.buffer: Any = buffer
        self.array: Any = array
        self.peer = peer
        self.request: Any = None
        self.cancelled = False
        self.give_up_at: float | None = None
        self.ending: Final = Ending()

    @property
    def nbytes(self) -> int:
        return int(self.array.nbytes)

    def wait(self, seconds: float) -> None:
        """Until it has ended. Raises its error, or TimeoutError."""
        self._engine.wait(self, seconds)

    def cancel(self) -> None:
        """Ask for an end. The operation has ended when the buffer is not touched any more, and not before.

        A receive that no message has come for ends at once. UCX cannot take back a send, nor a receive that
        has begun: they end when the other side has taken or dropped the message, or with the peer.
        """
        self._engine.cancel(self)

    def give_up_within(self, seconds: float) -> None:
        """For whoever has the lane's turn: fail it then, if UCX has not ended it by itself."""
        at = time.monotonic() + seconds
        self.give_up_at = at if self.give_up_at is None else min(at, self.give_up_at)

    def finish(self, error: KvwireError | None) -> None:
        """Resolve its ending, once."""
        self.ending.resolve(error)


class Peer:
    """A remote worker."""

    __slots__ = ("_engine", "lost", "name")

    def __init__(self, engine: UcxEngine, name: str) -> None:
        self._engine = engine
        self.name: Final = name
        self.lost = ""
        """Why nothing can be moved to or from this peer any more. Empty while it can."""

    def send(self, tag: int, buffer: Any) -> UcxOp:
        """Send a contiguous buffer. A large one is done when the peer has taken all of it."""
        return self._engine.send(self, tag, buffer)

    def close(self) -> None:
        """Fail what is under way and let go of the peer. Receives that have begun end when UCX ends them."""
        self._engine.drop_peer(self, "the connection was closed", gone=False)

    def give_up(self) -> None:
        """Fail all that is under way, within a second. Buffers are kept: the peer may still reach them."""
        self._engine.drop_peer(self, "it does not answer any more", gone=True)

    def mark_gone(self) -> None:
        """The peer's process is proven to be gone, so none of its transfers touches memory any more."""
        self._engine.drop_peer(self, "its process has ended", gone=True)


def lost_peer(peer: Peer) -> TransferFailed:
    return TransferFailed(f"The peer {peer.name} is lost: {peer.lost}.", path="ucx", cause="peer lost")
