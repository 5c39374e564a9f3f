"""One transfer over UCX: its pieces under way, its staging memory, and what has failed."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Self

from kvwire.errors import KvwireError, TransferFailed
from kvwire.transfer.base import (
    FAULTS,
    SlotResult,
    expired,
    pieces,
    seconds_left,
    slot_error,
    timed_out,
)
from kvwire.transfer.checksum import Checksum, mismatch
from kvwire.transfer.memory import anonymous

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.transfer.base import ByteArray, Drain, ReadCheck, Slot, Ticket
    from kvwire.transfer.ucx import UcxOp


class Piece(NamedTuple):
    slot: Slot
    start: int
    stop: int
    tag: int


class Moving(NamedTuple):
    piece: Piece
    buffer: ByteArray
    op: UcxOp


class Staging:
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


class Run:
    """The slots of one transfer: which have failed, and which pieces are under way."""

    def __init__(self, name: str, ticket: Ticket, deadline: float) -> None:
        self._name = name
        self._ticket = ticket
        self._deadline = deadline
        self._errors: dict[int, KvwireError] = {}
        self._left = {slot.index: slot.size_bytes for slot in ticket.slots}
        self.moving: deque[Moving] = deque()

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

    def moved(self, piece: Piece) -> None:
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

    def wait_oldest(self, staging: Staging) -> Moving | None:
        """The oldest piece, when it has moved. None when it has failed: its buffer is taken care of."""
        moving = self.moving.popleft()
        try:
            moving.op.wait(seconds_left(self._deadline))
        except TimeoutError:
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
    def _settle(moving: Moving, staging: Staging) -> None:
        # UCX may go on for a while with an operation that has failed here already.
        if moving.op.ending.done() and moving.op.request is None:
            staging.give(moving.buffer)
        else:
            staging.replace()


class WriteRun(Run):
    def free_buffer(self, staging: Staging, size: int) -> ByteArray | None:
        """A buffer, as soon as one has been sent. None at the deadline."""
        while (buffer := staging.take(size)) is None:
            if not self.moving or expired(self._deadline):
                return None
            self._let_go(staging)
        return buffer

    def finish(self, staging: Staging) -> None:
        while self.moving:
            self._let_go(staging)

    def _let_go(self, staging: Staging) -> None:
        sent = self.wait_oldest(staging)
        if sent is not None:
            self.moved(sent.piece)
            staging.give(sent.buffer)


class ReadRun(Run):
    def __init__(self, name: str, ticket: Ticket, deadline: float, check: ReadCheck) -> None:
        super().__init__(name, ticket, deadline)
        self._hashes = {slot.index: Checksum() for slot in ticket.slots if check.wants(slot)}

    def take_in(self, drain: Drain, staging: Staging) -> None:
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


def pieces_of(ticket: Ticket) -> Iterator[Piece]:
    for slot in ticket.slots:
        for number, (start, stop) in enumerate(pieces(slot.size_bytes, ticket.piece_bytes)):
            yield Piece(slot, start, stop, slot.first_tag + number)
