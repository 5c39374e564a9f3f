"""What a lane knows: endpoints, receives that wait for a message, operations under way."""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvwire.errors import DataPathUnavailable, KvwireError, TransferFailed
from kvwire.transfer import forked, tags
from kvwire.transfer.ucx_ops import Peer, UcxOp, lost_peer
from kvwire.transfer.ucx_turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from kvwire.transfer.ucx_library import Library
    from kvwire.transfer.ucx_options import UcxOptions

logger = logging.getLogger(__name__)

GONE_GRACE_SECONDS: Final = 1.0
"""How long an operation may outlive its peer: time enough to take in all that the peer had sent."""
LEASE_BYTES: Final = {"local": 64 << 20, "remote": 16 << 20}
"""Of one lease under way. Several threads copy within a host; a network moves them all at once."""
MAX_DISCARDS: Final = 4096
SWEEP_SECONDS: Final = 0.05


class UcxState:
    """Used by whoever has the lane's turn: its own thread, or one that drives it."""

    def __init__(self, library: Library, options: UcxOptions, lost: Callable[[Peer], None]) -> None:
        """`lost` is told of peers whose connection has ended."""
        self._lost = lost
        self._lib = library
        self._options = options
        self._errors = (library.api.UCXError, RuntimeError, OSError, ValueError, MemoryError)
        self.worker: Any = None
        self._context: Any = None
        self._kept: list[Any] = []
        self._endpoints: dict[Peer, list[Any]] = {}
        self._wanted: defaultdict[int, dict[int, UcxOp]] = defaultdict(dict)
        self._active: list[UcxOp] = []
        self._turns = Turns(LEASE_BYTES[options.kind])
        self._orphans: list[UcxOp] = []
        self._drops: list[Any] = []
        self._ended: list[Peer] = []
        self._discards: dict[int, None] = {}
        self._sweep_at: float | None = None
        self._stopping = False
        self._stuck = False
        self._scratch = library.array(np.empty(1, dtype=np.uint8))
        self._one_lease = library.api.UCXXTagMask(tags.LEASE_MASK)
        self._any = library.api.UCXXTagMask(0)
        self._exact = library.api.UCXXTagMaskFull

    def open(self) -> bytes:
        """Make context and worker; returns the worker's address. Raises DataPathUnavailable."""
        api = self._lib.api
        config = self._options.ucx_config(with_cma=self._lib.survives_copy_errors)
        try:
            self._context = api.UCXContext(config, (api.Feature.TAG, api.Feature.WAKEUP))
            self.worker = api.UCXWorker(self._context)
            self.worker.init_blocking_progress_mode()
            address = bytes(memoryview(self.worker.address))
        except self._errors as error:
            raise unavailable(f"UCX cannot start: {error}") from error
        self._kept += [self.worker, self._context]
        kept, endpoints = self._kept, self._endpoints
        forked.never_destroy_in_children(self, lambda: [*kept, *chain.from_iterable(endpoints.values())])
        return address

    def connect(self, peer: Peer, addresses: list[bytes], found: Future[None]) -> None:
        """Make an endpoint for each of the peer's workers."""
        api, watches = self._lib.api, self._options.handles_peer_errors
        if self._stopping:
            found.set_exception(unavailable("the engine is closed"))
            return
        endpoints = self._endpoints[peer] = []
        try:
            for address in addresses:
                remote = api.UCXAddress.create_from_buffer(address)
                endpoint = api.UCXEndpoint.create_from_worker_address(self.worker, remote, watches)
                endpoints.append(endpoint)
                if watches:
                    endpoint.set_close_callback(self._ended.append, cb_args=(peer,))
        except self._errors as error:
            found.set_exception(unavailable(f"the peer cannot be reached: {error}"))
            return
        found.set_result(None)

    def send(self, op: UcxOp, peer: Peer) -> None:
        if peer.lost or peer not in self._endpoints:
            op.finish(lost_peer(peer))
        elif self._turns.take(op, peer) and not self._send_now(op, peer):
            self._send_next(op)

    def expect(self, op: UcxOp) -> None:
        if op.peer is not None and op.peer.lost:
            op.finish(lost_peer(op.peer))
        elif self._stopping:
            op.finish(closed())
        else:
            self._wanted[tags.lease_prefix(op.tag)][op.tag] = op

    def cancel(self, op: UcxOp) -> None:
        op.cancelled = True
        self._forget(op, cancelled())

    def discard(self, prefix: int) -> None:
        self._discards[prefix] = None
        if len(self._discards) > MAX_DISCARDS:
            del self._discards[next(iter(self._discards))]

    def drop_peer(self, peer: Peer, why: str, *, gone: bool) -> None:
        """Fail what has not begun. What has begun may end by itself; a send, or anything of a dead peer, is
        given up.

        `gone`: it is certain that nothing more will come from the peer.
        """
        peer.lost = peer.lost or why
        error = lost_peer(peer)
        waiting = [op for ops in self._wanted.values() for op in ops.values() if op.peer is peer]
        for op in [*waiting, *self._turns.drop(peer)]:
            self._forget(op, error)
        mine = [op for op in self._active if op.peer is peer]
        for endpoint in self._endpoints.pop(peer, ()):
            self._close_endpoint(endpoint, busy=bool(mine))
        for op in mine:
            if gone or op.is_send:
                op.give_up_within(GONE_GRACE_SECONDS)

    def stop(self, seconds: float) -> None:
        self._stopping = True
        self._drop_all()
        for op in [op for ops in self._wanted.values() for op in ops.values()]:
            self._forget(op, closed())
        for peer in list(self._endpoints):
            self.drop_peer(peer, "the engine is closed", gone=False)
        for op in self._active:
            op.give_up_within(seconds)

    @property
    def is_receiving(self) -> bool:
        """Some message is on its way to here."""
        return any(not op.is_send for op in self._active)

    @property
    def is_stopped(self) -> bool:
        return self._stopping and not self._active

    def step(self) -> None:
        """Take in what has come, and resolve what has ended."""
        while self._ended:
            self._lost(self._ended.pop())
        self._match()
        if self._active:
            self._reap()
        if self._orphans or self._drops:
            self._orphans = [op for op in self._orphans if not self._has_ended(op)]
            self._drops = [request for request in self._drops if not request.completed]

    def wait_ms(self) -> int:
        """How long the thread may sleep without an event; -1 is for ever."""
        times = [op.give_up_at for op in self._active if op.give_up_at is not None]
        if self._sweep_at is not None:
            times.append(self._sweep_at)
        return max(1, int((min(times) - time.monotonic()) * 1000) + 1) if times else -1

    def destroy(self) -> None:
        """Give everything back. What a peer may still touch is kept for good instead."""
        self._drop_all()
        for op in [*self._active, *(op for ops in self._wanted.values() for op in ops.values())]:
            op.finish(closed())
        if self._active or self._orphans or self._stuck:
            forked.never_destroy([self.worker, self._context, *self._active, *self._orphans])
            self._lib.tear_down(self.worker, self._context)
        self._active, self._orphans, self._drops = [], [], []
        self._kept.clear()
        self.worker = self._context = None

    def _drop_all(self) -> None:
        """UCX's own end would receive what nobody wanted, and wait for peers that may never answer."""
        while found := self._look(0, self._any):
            self._drop(found[0])

    def _look(self, tag: int, mask: Any) -> tuple[int, int] | None:
        """Tag and length of the first message that has come and matches."""
        found = self.worker.tag_probe(self._lib.api.UCXXTag(tag), mask)
        return (int(found.sender_tag.value), int(found.length)) if found.matched else None

    def _match(self) -> None:
        """Give the messages that have come to those who want them, and drop what belongs to ended leases."""
        self._sweep_at = None
        while True:
            found = self._look(0, self._any)
            if found is None:
                return
            tag, length = found
            prefix = tags.lease_prefix(tag)
            op = self._wanted[prefix].get(tag) if prefix in self._wanted else None
            if op is not None:
                self._accept(op, length)
            elif prefix in self._discards:
                self._drop(tag)
            else:
                break
        # The first message waits for a receive that comes later: look for the others one by one.
        for prefix in list(self._wanted):
            while self._take(prefix):
                pass
        self._sweep()

    def _take(self, prefix: int) -> bool:
        """Begin to receive one message of a lease, if one has come that is wanted."""
        ops = self._wanted.get(prefix)
        if not ops:
            return False
        found = self._look(prefix, self._one_lease)
        if found is not None and found[0] not in ops:
            if prefix in self._discards:
                self._drop(found[0])
                return True
            found = next((each for tag in ops if (each := self._look(tag, self._exact))), None)
        if found is None:
            return False
        tag, length = found
        self._accept(ops[tag], length)
        return True

    def _accept(self, op: UcxOp, length: int) -> None:
        self._unwant(op)
        if length != op.nbytes:
            self._drop(op.tag)
            op.finish(wrong_length(length, op.nbytes))
            return
        self._post(op, lambda: self.worker.tag_recv(op.array, self._lib.api.UCXXTag(op.tag)))

    def _drop(self, tag: int) -> None:
        """Take a message in as a truncated one: for a large one no byte moves, and its sender is told."""
        self._drops.append(self.worker.tag_recv(self._scratch, self._lib.api.UCXXTag(tag)))

    def _sweep(self) -> None:
        """Drop messages of ended leases behind one that nobody wants yet. Now and then is enough."""
        if not self._discards:
            return
        for prefix in self._discards:
            wanted = self._wanted.get(prefix, {})
            while (found := self._look(prefix, self._one_lease)) and found[0] not in wanted:
                self._drop(found[0])
        self._sweep_at = time.monotonic() + SWEEP_SECONDS

    def _send_now(self, op: UcxOp, peer: Peer) -> bool:
        """It has its turn. False: it has failed, and the next one has it."""
        endpoints = self._endpoints.get(peer)
        if not endpoints:
            op.finish(lost_peer(peer))
            return False
        endpoint = endpoints[tags.lane(op.tag, len(endpoints))]
        return self._post(op, lambda: endpoint.tag_send(op.array, self._lib.api.UCXXTag(op.tag)))

    def _send_next(self, ended: UcxOp) -> None:
        peer = ended.peer
        if peer is None:
            return
        todo = deque(self._turns.ended(ended, peer))
        while todo:
            op = todo.popleft()
            if not self._send_now(op, peer):
                todo.extend(self._turns.ended(op, peer))

    def _post(self, op: UcxOp, call: Callable[[], Any]) -> bool:
        try:
            op.request = call()
        except self._errors as error:
            op.finish(failed(error))
            return False
        self._active.append(op)
        return True

    def _reap(self) -> None:
        now = time.monotonic()
        still: list[UcxOp] = []
        sent: list[UcxOp] = []
        for op in self._active:
            if op.request.completed:
                outcome = self._outcome(op)
                op.request = None  # it holds the worker
                op.finish(outcome)
            elif op.give_up_at is not None and now >= op.give_up_at:
                op.finish(lost_peer(op.peer) if op.peer is not None and op.peer.lost else closed())
                self._orphans.append(op)
            else:
                still.append(op)
                continue
            if op.is_send:
                sent.append(op)
        self._active = still
        for op in sent:
            self._send_next(op)

    @staticmethod
    def _has_ended(op: UcxOp) -> bool:
        if op.request.completed:
            op.request = None
        return op.request is None

    def _outcome(self, op: UcxOp) -> KvwireError | None:
        try:
            op.request.check_error()
        except self._errors as error:
            return failed(error)
        return cancelled() if op.cancelled else None

    def _close_endpoint(self, endpoint: Any, *, busy: bool) -> None:
        """With error handling this ends what is under way. Without, UCX might wait for it for ever."""
        # ucxx's objects of what was under way refer to each other for good, and to the worker.
        self._stuck = self._stuck or busy
        if busy and not self._options.handles_peer_errors:
            forked.never_destroy([endpoint])
            return
        try:
            endpoint.close_blocking()
        except self._errors as error:
            logger.debug("closing a connection: %s", error)

    def _forget(self, op: UcxOp, error: KvwireError) -> None:
        """End an operation that UCX does not know yet. Nothing happens to others."""
        if op.request is not None:
            return
        self._unwant(op)
        self._turns.forget(op)
        op.finish(error)

    def _unwant(self, op: UcxOp) -> None:
        prefix = tags.lease_prefix(op.tag)
        ops = self._wanted.get(prefix)
        if ops and ops.get(op.tag) is op:
            del ops[op.tag]
            if not ops:
                del self._wanted[prefix]


def unavailable(cause: str) -> DataPathUnavailable:
    return DataPathUnavailable(f"The UCX data path cannot be used: {cause}.", path="ucx", cause=cause)


def closed() -> TransferFailed:
    return TransferFailed("The UCX engine was closed.", path="ucx", cause="closed")


def cancelled() -> TransferFailed:
    return TransferFailed("The transfer was cancelled.", path="ucx", cause="cancelled")


def failed(error: BaseException) -> TransferFailed:
    return TransferFailed(f"UCX could not move the message: {error}.", path="ucx", cause=type(error).__name__)


def wrong_length(got: int, agreed: int) -> TransferFailed:
    return TransferFailed(
        f"A message of {got} bytes came where {agreed} were agreed.",
        path="ucx",
        cause="length",
        got=got,
        agreed=agreed,
    )
