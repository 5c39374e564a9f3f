"""The UCX data plane of one process: threads that each look after a UCX worker and wait for its events.

The threads sleep in the kernel when nothing moves. Callers, from threads or an event loop, hand them commands
and get operations that end; a thread that waits for what it has begun may do their work itself meanwhile
(`UcxEngine.driven`). Messages are matched to receives by their tags here and not by UCX: so a receive that no
message has come for can end at once, a message of another length than agreed never touches the buffer, and
what belongs to an ended lease is dropped.

An engine has one lane or several. A message takes the lane of either side that its tag says (`tags.lane`):
so both sides know where it goes, and copies run beside each other.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvwire.transfer import tags, ucx_library
from kvwire.transfer.ucx_address import sealed, unsealed
from kvwire.transfer.ucx_lane import Lane
from kvwire.transfer.ucx_ops import Peer, UcxOp
from kvwire.transfer.ucx_options import UcxOptions
from kvwire.transfer.ucx_state import unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

__all__ = ["Peer", "UcxEngine", "UcxOp", "UcxOptions"]

logger = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 10.0


class UcxEngine:
    """Starts its threads at once. Raises MissingExtra, ConfigError or DataPathUnavailable.

    `address` is what peers connect to. Not usable in a forked child: that needs an engine of its own.
    """

    def __init__(self, options: UcxOptions) -> None:
        self.options: Final = options
        self._library = ucx_library.load()
        self._pid = os.getpid()
        self._lanes: list[Lane] = []
        try:
            for number in range(options.lanes):
                name = f"kvwire-ucx-{options.kind}-{number}"
                self._lanes.append(Lane(self._library, options, name, self._connection_ended))
        except BaseException:
            self.close()
            raise
        self.address: Final = sealed([lane.address for lane in self._lanes])

    def connect(self, address: bytes, name: str = "peer") -> Peer:
        """A peer by its engine's `address`. Raises DataPathUnavailable when this kind cannot reach it."""
        remote = unsealed(address)
        peer = Peer(self, name)
        found: list[Future[None]] = []
        for lane in self._lanes:
            done: Future[None] = Future()
            self._submit(lane, lambda lane=lane, done=done: lane.state.connect(peer, remote, done))  # type: ignore[misc]
            found.append(done)
        deadline = time.monotonic() + CONNECT_SECONDS
        try:
            for done in found:
                done.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError:
            raise unavailable(f"connecting took more than {CONNECT_SECONDS:.0f} s") from None
        except BaseException:
            peer.close()
            raise
        return peer

    def send(self, peer: Peer, tag: int, buffer: Any) -> UcxOp:
        """Send a contiguous buffer. A large one is done when the peer has taken all of it."""
        return self.send_all(peer, [(tag, buffer)])[0]

    def send_all(self, peer: Peer, messages: Iterable[tuple[int, Any]]) -> list[UcxOp]:
        """Several at once, in order; much cheaper than one by one."""
        ops = [UcxOp(self, tag, buf, self._library.array(buf), peer, is_send=True) for tag, buf in messages]
        self._begin(ops, lambda lane, op: lane.state.send(op, peer))
        return ops

    def recv(self, tag: int, buffer: Any, peer: Peer | None = None) -> UcxOp:
        """Receive the message `tag`, of just the buffer's length. It fails when `peer` is lost."""
        return self.recv_all([(tag, buffer)], peer)[0]

    def recv_all(self, messages: Iterable[tuple[int, Any]], peer: Peer | None = None) -> list[UcxOp]:
        """Several at once."""
        ops = [UcxOp(self, tag, buf, self._library.array(buf), peer, is_send=False) for tag, buf in messages]
        self._begin(ops, lambda lane, op: lane.state.expect(op))
        return ops

    def driven(self) -> AbstractContextManager[None]:
        """For a thread that sends and receives, and waits for what it has begun: see `Lane.driven`."""
        mine = len(self._lanes) == 1 and self._pid == os.getpid()
        return self._lanes[0].driven() if mine else contextlib.nullcontext()

    def wait(self, op: UcxOp, seconds: float) -> None:
        """Until the operation has ended. Raises its error, or TimeoutError."""
        self._lane(op.tag).wait(op.ending, seconds)

    def cancel(self, op: UcxOp) -> None:
        lane = self._lane(op.tag)
        lane.submit_if_open(lambda: lane.state.cancel(op))

    def discard(self, tag: int) -> None:
        """Drop messages of this tag's lease from now on, but those that a receive waits for.

        Their sender gets its memory back.
        """
        self._tell_all(lambda lane: lane.state.discard(tags.lease_prefix(tag)))

    def drop_peer(self, peer: Peer, why: str, *, gone: bool) -> None:
        self._tell_all(lambda lane: lane.state.drop_peer(peer, why, gone=gone))

    def close(self, timeout: float = 5.0) -> None:
        """Fail what is under way and stop the threads, within `timeout` seconds."""
        if self._pid != os.getpid():
            return
        self._tell_all(lambda lane: lane.state.stop(0.6 * timeout))
        deadline = time.monotonic() + timeout
        for lane in self._lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
            if lane.thread.is_alive():
                logger.warning("UCX did not stop within %.0f s; a thread is left behind", timeout)

    def _begin(self, ops: Sequence[UcxOp], begin: Callable[[Lane, UcxOp], None]) -> None:
        """One command for each lane."""
        for lane in self._lanes:
            mine = [op for op in ops if self._lane(op.tag) is lane]
            if mine:
                self._submit(lane, partial(_begin_all, lane, mine, begin))

    def _lane(self, tag: int) -> Lane:
        return self._lanes[tags.lane(tag, len(self._lanes))]

    def _submit(self, lane: Lane, command: Callable[[], None]) -> None:
        if self._pid != os.getpid():
            raise unavailable("it was started before this process was forked")
        lane.submit(command)

    def _tell_all(self, command: Callable[[Lane], None]) -> None:
        """For what a closed engine, or the parent's, has done already."""
        if self._pid == os.getpid():
            for lane in self._lanes:
                lane.submit_if_open(lambda lane=lane: command(lane))  # type: ignore[misc]

    def _connection_ended(self, peer: Peer) -> None:
        """On the thread of the lane that has seen it."""
        self.drop_peer(peer, "the connection has ended", gone=True)


def _begin_all(lane: Lane, ops: Sequence[UcxOp], begin: Callable[[Lane, UcxOp], None]) -> None:
    for op in ops:
        begin(lane, op)
