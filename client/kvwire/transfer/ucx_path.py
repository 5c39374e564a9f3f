"""The client's end of the UCX paths: pages are gathered into staging memory and sent from there, and the
other way.

Copying one piece overlaps with the transfer of the ones before it: pieces are few and large, because a
message costs about 100 us whatever its size, and the staging memory is small, so that it stays in the
processor's cache.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from kvwire.errors import DataPathUnavailable, KvwireError, TransferFailed
from kvwire.transfer.base import (
    FAULTS,
    PUBLISH_MARGIN_S,
    Mark,
    ReadCheck,
    SlotResult,
    expired,
    is_complete,
    pieces,
    seconds_left,
    slot_error,
    timed_out,
)
from kvwire.transfer.checksum import Checksum, mismatch
from kvwire.transfer.memory import anonymous
from kvwire.transfer.ucx_arrival import Said

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.transfer.base import ByteArray, Drain, Fill, Slot, Ticket
    from kvwire.transfer.ucx import Peer, UcxEngine, UcxOp

DEFAULT_PIECE_BYTES: Final = 2 << 20
STAGING_PIECES: Final = 2
LOCAL_CHECK_SHARE: Final = 1 / 32
MOST_SAID: Final = 64
ANSWER_S: Final = 5.0
"""How long a server may take to commit; one that hangs is found out sooner."""


class _Piece(NamedTuple):
    slot: Slot
    start: int
    stop: int
    tag: int


class _Moving(NamedTuple):
    piece: _Piece
    buffer: ByteArray
    op: UcxOp


class UcxPath:
    """One server over one engine. Safe to use from several threads: writes take turns, and so do reads."""

    def __init__(
        self,
        name: str,
        engine: UcxEngine,
        peer: Peer,
        *,
        check_share: float | None = None,
        staging_pieces: int = STAGING_PIECES,
    ) -> None:
        self.name: Final = name
        self._engine = engine
        self._peer = peer
        local = engine.options.kind == "local"
        self._check = ReadCheck((LOCAL_CHECK_SHARE if local else 1.0) if check_share is None else check_share)
        self._said: dict[int, Said] = {}
        self._out = _Staging(staging_pieces)
        self._in = _Staging(staging_pieces)

    def write(
        self, ticket: Ticket, fill: Fill, deadline: float, *, with_checksum: bool = False
    ) -> list[SlotResult]:
        self._raise_if_lost()
        with self._out as staging, self._engine.driven():
            run = _Write(self.name, ticket, deadline)
            hashes = {slot.index: Checksum() for slot in ticket.slots} if with_checksum else {}
            for piece in _pieces_of(ticket):
                if run.is_over(piece.slot):
                    continue
                buffer = run.free_buffer(staging, ticket.piece_bytes)
                if buffer is None:
                    run.fail(piece.slot, timed_out(self.name, piece.slot))
                    continue
                self._send(run, piece, fill, buffer, staging, hashes.get(piece.slot.index))
            if run.may_be_whole and time.monotonic() + PUBLISH_MARGIN_S < deadline and is_complete(fill):
                # It travels with the last piece: the server waits for both.
                self._say(ticket)
            run.finish(staging)
        results = run.results({index: each.digest() for index, each in hashes.items()})
        if any(result.error for result in results):
            self._forget(ticket)
        return results

    def read(self, ticket: Ticket, drain: Drain, deadline: float) -> list[SlotResult]:
        self._raise_if_lost()
        with self._in as staging, self._engine.driven():
            run = _Read(self.name, ticket, deadline, self._check)
            todo = _pieces_of(ticket)
            left_out = False
            while True:
                while (buffer := staging.take(ticket.piece_bytes)) is not None:
                    piece = next((each for each in todo if not run.is_over(each.slot)), None)
                    if piece is None:
                        staging.give(buffer)
                        break
                    self._expect(run, piece, buffer, staging)
                if not run.moving:
                    break
                run.take_in(drain, staging)
            left_out = any(result.error for result in run.results({}))
        if left_out:
            # The server may still be sending what nobody waits for any more.
            self._engine.discard(ticket.slots[0].first_tag)
        return run.results({})

    def mark(self) -> Mark:
        return Mark(time.monotonic())

    def publish(self, ticket: Ticket, mark: Mark) -> bool:
        """By a message, in good time, and only if the server answers that it has committed."""
        left = mark.asked_at + ticket.seconds - PUBLISH_MARGIN_S - time.monotonic()
        if left <= 0:
            self._forget(ticket)
            return False
        said = self._said.pop(ticket.lease_id, None) or self._say(ticket)
        self._said.pop(ticket.lease_id, None)
        # Asleep: the server's other threads have work, and the answer takes longer than a wake.
        return said is not None and said.wait(min(left, ANSWER_S))

    def _say(self, ticket: Ticket) -> Said | None:
        if not ticket.arrival_word:
            return None
        try:
            said = Said(self._engine, self._peer, ticket.lease_id, ticket.arrival_word)
        except KvwireError:
            return None
        self._said[ticket.lease_id] = said
        if len(self._said) > MOST_SAID:  # an exception elsewhere in their batch: nobody has asked for them
            self._said.pop(next(iter(self._said))).forget()
        return said

    def _forget(self, ticket: Ticket) -> None:
        """It is the server's to be asked by a call then."""
        said = self._said.pop(ticket.lease_id, None)
        if said is not None:
            said.forget()

    def proves(self, ticket: Ticket, mark: Mark) -> bool:
        """A message is whole only if the server held its bytes until the last was taken."""
        return True

    def give_up(self) -> None:
        """The server is gone or hangs, which UCX may never notice: what waits for it fails."""
        self._peer.give_up()

    def close(self) -> None:
        """Let go of the peer. The engine belongs to the process."""
        self._peer.close()

    def _send(
        self,
        run: _Write,
        piece: _Piece,
        fill: Fill,
        buffer: ByteArray,
        staging: _Staging,
        digest: Checksum | None,
    ) -> None:
        part = buffer[: piece.stop - piece.start]
        try:
            fill(piece.slot, piece.start, piece.stop, part)
            if digest is not None:
                digest.update(part)
            op = self._peer.send(piece.tag, part)
        except FAULTS as error:
            staging.give(buffer)
            run.fail(piece.slot, slot_error(error, self.name, f"Sending chunk {piece.slot.chunk_index}"))
            return
        run.moving.append(_Moving(piece, buffer, op))

    def _expect(self, run: _Read, piece: _Piece, buffer: ByteArray, staging: _Staging) -> None:
        try:
            op = self._engine.recv(piece.tag, buffer[: piece.stop - piece.start], self._peer)
        except FAULTS as error:
            staging.give(buffer)
            run.fail(piece.slot, slot_error(error, self.name, f"Receiving chunk {piece.slot.chunk_index}"))
            return
        run.moving.append(_Moving(piece, buffer, op))

    def _raise_if_lost(self) -> None:
        if self._peer.lost:
            raise DataPathUnavailable(
                f"The data path {self.name} is lost: {self._peer.lost}.",
                path=self.name,
                cause=self._peer.lost,
            )


class _Staging:
    """Buffers of one piece each, for one transfer at a time (hold it by `with`). Made on first use."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._size = 0
        self._free: list[ByteArray] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._free) != self._count:  # an exception has left some in use: they go with their operations
            self._size, self._free = 0, []
        self._lock.release()

    def take(self, size: int) -> ByteArray | None:
        """A free buffer of at least `size` bytes. None: all are in use."""
        if size > self._size:
            memory = anonymous(size * self._count)
            self._free = [memory[i * size : (i + 1) * size] for i in range(self._count)]
            self._size = size
        return self._free.pop() if self._free else None

    def give(self, buffer: ByteArray) -> None:
        """The last that was given back is taken next: it is in the cache."""
        self._free.append(buffer)

    def replace(self) -> None:
        """Instead of a buffer that UCX may still touch, whose operation keeps it."""
        self._free.append(anonymous(self._size))


class _Run:
    """The slots of one transfer: which have failed, and which pieces are under way."""

    def __init__(self, name: str, ticket: Ticket, deadline: float) -> None:
        self._name = name
        self._ticket = ticket
        self._deadline = deadline
        self._errors: dict[int, KvwireError] = {}
        self._left = {slot.index: slot.size_bytes for slot in ticket.slots}
        self.moving: deque[_Moving] = deque()

    def is_over(self, slot: Slot) -> bool:
        if slot.index not in self._errors and expired(self._deadline):
            self.fail(slot, timed_out(self._name, slot))
        return slot.index in self._errors

    def fail(self, slot: Slot, error: KvwireError) -> None:
        self._errors.setdefault(slot.index, error)

    @property
    def may_be_whole(self) -> bool:
        """Nothing has failed so far."""
        return not self._errors

    def moved(self, piece: _Piece) -> None:
        self._left[piece.slot.index] -= piece.stop - piece.start

    def results(self, checksums: dict[int, bytes]) -> list[SlotResult]:
        return [
            SlotResult(slot.index, self._error(slot), checksums.get(slot.index, b""))
            for slot in self._ticket.slots
        ]

    def _error(self, slot: Slot) -> KvwireError | None:
        left = self._left[slot.index]
        if left and slot.index not in self._errors:
            self.fail(
                slot, TransferFailed(f"{left} bytes were not moved.", path=self._name, cause="incomplete")
            )
        return self._errors.get(slot.index)

    def wait_oldest(self, staging: _Staging) -> _Moving | None:
        """The oldest piece, when it has moved. None when it has failed: its buffer is taken care of."""
        moving = self.moving.popleft()
        try:
            moving.op.wait(seconds_left(self._deadline))
        except FutureTimeoutError:
            self.fail(moving.piece.slot, timed_out(self._name, moving.piece.slot))
            moving.op.cancel()
            self._settle(moving, staging)
        except KvwireError as error:
            self.fail(moving.piece.slot, error)
            self._settle(moving, staging)
        else:
            return moving
        return None

    @staticmethod
    def _settle(moving: _Moving, staging: _Staging) -> None:
        # UCX may go on for a while with an operation that has failed here already.
        if moving.op.ending.done() and moving.op.request is None:
            staging.give(moving.buffer)
        else:
            staging.replace()


class _Write(_Run):
    def free_buffer(self, staging: _Staging, size: int) -> ByteArray | None:
        """A buffer, as soon as one has been sent. None at the deadline."""
        while (buffer := staging.take(size)) is None:
            if not self.moving or expired(self._deadline):
                return None
            self._let_go(staging)
        return buffer

    def finish(self, staging: _Staging) -> None:
        while self.moving:
            self._let_go(staging)

    def _let_go(self, staging: _Staging) -> None:
        sent = self.wait_oldest(staging)
        if sent is not None:
            self.moved(sent.piece)
            staging.give(sent.buffer)


class _Read(_Run):
    def __init__(self, name: str, ticket: Ticket, deadline: float, check: ReadCheck) -> None:
        super().__init__(name, ticket, deadline)
        self._hashes = {slot.index: Checksum() for slot in ticket.slots if check.wants(slot)}

    def take_in(self, drain: Drain, staging: _Staging) -> None:
        """Wait for the oldest piece and scatter it."""
        got = self.wait_oldest(staging)
        if got is None:
            return
        slot, start, stop, _ = got.piece
        part = got.buffer[: stop - start]
        try:
            digest = self._hashes.get(slot.index)
            if digest is not None:
                digest.update(part)
            if slot.index not in self._errors:
                drain(slot, start, stop, part)
                self.moved(got.piece)
            if digest is not None and stop == slot.size_bytes and digest.digest() != slot.checksum:
                self.fail(slot, mismatch(slot.chunk_index, slot.group_index, self._name))
        except FAULTS as error:
            self.fail(slot, slot_error(error, self._name, f"Writing the blocks of chunk {slot.chunk_index}"))
        staging.give(got.buffer)


def _pieces_of(ticket: Ticket) -> Iterator[_Piece]:
    for slot in ticket.slots:
        for number, (start, stop) in enumerate(pieces(slot.size_bytes, ticket.piece_bytes)):
            yield _Piece(slot, start, stop, slot.first_tag + number)
