"""The server's end of the UCX paths: messages go straight into and out of the leased slots of the arena."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from kvwire.errors import KvwireError
from kvwire.transfer import tags, ucx_arrival
from kvwire.transfer.base import pieces
from kvwire.transfer.tags import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.transfer.base import ByteArray
    from kvwire.transfer.ending import Ending
    from kvwire.transfer.ucx import Peer, UcxEngine, UcxOp


class Opened:
    """The transfers of one lease. `slots` has a future per slot, resolved on the engine's thread.

    `word` is the piece under which the client can say that all have arrived, 0 where it cannot.
    """

    def __init__(
        self, first_tags: tuple[int, ...], slots: tuple[Future[None], ...], ops: list[UcxOp], word: int = 0
    ) -> None:
        self.first_tags: Final = first_tags
        self.slots: Final = slots
        self.word: Final = word
        self.arrival = ops.pop() if word else None
        self.ops: Final = ops

    @property
    def awaits_arrival(self) -> bool:
        return self.arrival is not None and not self.arrival.ending.done()

    def expect_no_arrival(self) -> None:
        """The client has called, or its lease is over."""
        arrival, self.arrival = self.arrival, None
        if arrival is not None:
            arrival.cancel()


class UcxServerPlane:
    """One engine's leases. Methods may be called on an event loop: none of them waits."""

    def __init__(self, engine: UcxEngine) -> None:
        self.engine: Final = engine
        self._leases: dict[int, Opened] = {}

    def expect_store(
        self,
        peer: Peer,
        lease_id: int,
        slots: Sequence[ByteArray],
        piece_bytes: int,
        arrived: Callable[[bool], None] | None = None,
    ) -> Opened:
        """Receive a write lease into `slots`, its places in the arena. Before the client is told of it.

        `arrived` is called on the engine's thread, when all has come or failed and the client has said that
        it has sent all of it: with whether all is good.
        """
        begin = partial(self.engine.recv_all, peer=peer)
        opened = self._open(Kind.STORE, lease_id, slots, piece_bytes, begin, with_word=arrived is not None)
        if opened.arrival is not None and arrived is not None:
            said = opened.arrival.ending

            def ended(errors: list[KvwireError]) -> None:
                if said.exception() is None:
                    arrived(not errors)

            _when_all([said, *opened.slots], ended)
        return opened

    def send_retrieve(
        self, peer: Peer, lease_id: int, slots: Sequence[ByteArray], piece_bytes: int
    ) -> Opened:
        """Send a read lease out of the arena. The client takes the messages in the order of its ticket."""
        begin = partial(self.engine.send_all, peer)
        return self._open(Kind.RETRIEVE, lease_id, slots, piece_bytes, begin)

    def send_peer(
        self, peer: Peer, lease_id: int, transfer_id: int, slots: Sequence[ByteArray], piece_bytes: int
    ) -> Opened:
        """Send another server's read lease out of the arena, under tags with that server's own number."""
        begin = partial(self.engine.send_all, peer)
        return self._open(Kind.PEER, lease_id, slots, piece_bytes, begin, number=transfer_id)

    def opened(self, lease_id: int) -> Opened | None:
        return self._leases.get(lease_id)

    def forget(self, lease_id: int) -> None:
        """The lease has ended and all its slots are done."""
        self._leases.pop(lease_id, None)

    def cancel(self, lease_id: int) -> Future[None]:
        """End a lease's transfers. The future is resolved when nothing touches its slots any more.

        That is at once for what has not begun, and soon for what has. It may be never for a peer of this host
        that is alive and does not go on: its slots stay taken until `peer.mark_gone` or `peer.close`.
        """
        done: Future[None] = Future()
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            done.set_result(None)
            return done
        still = not all(op.ending.done() for op in lease.ops)
        if not lease.ops[0].is_send and (still or lease.awaits_arrival):
            self.engine.discard(lease.ops[0].tag)
        lease.expect_no_arrival()
        if not still:
            done.set_result(None)
            return done
        _when_all([op.ending for op in lease.ops], lambda _: done.set_result(None))
        for op in lease.ops:
            op.cancel()
        return done

    def _open(
        self,
        kind: Kind,
        lease_id: int,
        slots: Sequence[ByteArray],
        piece_bytes: int,
        begin: Callable[[list[tuple[int, ByteArray]]], list[UcxOp]],
        *,
        number: int = 0,
        with_word: bool = False,
    ) -> Opened:
        """`number` stands in the tags; 0: the lease's own. `with_word`: an arrival is expected, too."""
        first = tags.first_tags(kind, number or lease_id, [slot.size for slot in slots], piece_bytes)
        parts = [
            [(tag + i, slot[start:stop]) for i, (start, stop) in enumerate(pieces(slot.size, piece_bytes))]
            for tag, slot in zip(first, slots, strict=True)
        ]
        messages = list(chain.from_iterable(parts))
        word = len(messages) if with_word and len(messages) <= tags.MAX_PIECE else 0
        if word:
            messages.append((tags.encode(kind, number or lease_id, word), ucx_arrival.message()))
        ops = begin(messages)
        todo = iter(ops)
        futures = [_first_error([op.ending for op in islice(todo, len(mine))]) for mine in parts]
        self._leases[lease_id] = opened = Opened(first, tuple(futures), ops, word)
        return opened


def _first_error(endings: Sequence[Ending]) -> Future[None]:
    """Resolved when all are, with the error of the first in order that has failed."""
    whole: Future[None] = Future()

    def resolve(errors: list[KvwireError]) -> None:
        if errors:
            whole.set_exception(errors[0])
        else:
            whole.set_result(None)

    _when_all(endings, resolve)
    return whole


def _when_all(endings: Sequence[Ending | Future[None]], then: Callable[[list[KvwireError]], None]) -> None:
    """Call `then` once, when all have ended."""
    left = len(endings)
    lock = threading.Lock()  # those that have ended already count here, the others on the engine's thread

    def one_done(_: Ending | Future[None]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            failures = [each.exception() for each in endings]
            then([error for error in failures if isinstance(error, KvwireError)])

    for each in endings:
        each.add_done_callback(one_done)
