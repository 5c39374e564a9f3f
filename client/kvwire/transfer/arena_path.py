"""The paths on which a client copies straight between pages and slots: shared memory, and one process."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from kvwire.errors import DataPathUnavailable
from kvwire.transfer.base import (
    FAULTS,
    PUBLISH_MARGIN_S,
    Mark,
    ReadCheck,
    SlotResult,
    expired,
    pieces,
    slot_error,
    threads_of,
    timed_out,
)
from kvwire.transfer.checksum import HOT_BYTES, Checksum, mismatch
from kvwire.transfer.crew import SPLIT_BYTES, crew
from kvwire.transfer.shm import LivenessLock, MappedArena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.transfer.arena import Arena
    from kvwire.transfer.base import ByteArray, Drain, Fill, Slot, Ticket
    from kvwire.transfer.cuda import PageLock
    from kvwire.transfer.liveness import HeldLock

DEFAULT_CHECK_SHARE: Final = 1 / 32
"""Nothing but a fault of this host's memory can change bytes here, so reads are checked by sample."""


class ArenaPath:
    """One copy per object, no message and no staging. Safe to use from several threads."""

    def __init__(self, name: str, arena: Arena, check_share: float) -> None:
        self.name: Final = name
        self._arena: Arena | None = arena
        self._check = ReadCheck(check_share)

    def write(
        self, ticket: Ticket, fill: Fill, deadline: float, *, with_checksum: bool = False
    ) -> list[SlotResult]:
        arena = self._open()
        move = _fill_hashed if with_checksum else _fill_whole

        def write(slot: Slot) -> SlotResult:
            if expired(deadline):
                return SlotResult(slot.index, timed_out(self.name, slot))
            try:
                return SlotResult(slot.index, checksum=move(slot, fill, self._place(arena, slot)))
            except FAULTS as error:
                return SlotResult(slot.index, slot_error(error, self.name, _what("Writing", slot)))

        return _side_by_side(write, ticket.slots, threads_of(fill))

    def read(self, ticket: Ticket, drain: Drain, deadline: float) -> list[SlotResult]:
        arena = self._open()

        def read(slot: Slot) -> SlotResult:
            if expired(deadline):
                return SlotResult(slot.index, timed_out(self.name, slot))
            try:
                place = self._place(arena, slot)
                if not self._check.wants(slot):
                    drain(slot, 0, slot.size_bytes, place)
                elif _drain_hashed(slot, drain, place) != slot.checksum:
                    raise mismatch(slot.chunk_index, slot.group_index, self.name)
                return SlotResult(slot.index)
            except FAULTS as error:
                return SlotResult(slot.index, slot_error(error, self.name, _what("Reading", slot)))

        return _side_by_side(read, ticket.slots, threads_of(drain))

    def mark(self) -> Mark:
        return Mark(time.monotonic())

    def publish(self, ticket: Ticket, mark: Mark) -> bool:
        return False

    def proves(self, ticket: Ticket, mark: Mark) -> bool:
        return False

    def close(self) -> None:
        """Forget the arena. Its owner closes it."""
        self._arena = None

    def _open(self) -> Arena:
        if self._arena is None:
            raise DataPathUnavailable(f"The data path {self.name} is closed.", path=self.name)
        return self._arena

    def _place(self, arena: Arena, slot: Slot) -> ByteArray:
        place = arena.array(slot.arena_offset, slot.size_bytes)
        arena.prefault(slot.arena_offset, slot.size_bytes)
        return place


class InprocPath(ArenaPath):
    """Server and client in one process: for tests and tools."""

    def __init__(self, arena: Arena, check_share: float = 1.0) -> None:
        super().__init__("inproc", arena, check_share)


class ShmPath(ArenaPath):
    """A client's mapping of the server's arena, and the lock that says that this client may touch it."""

    def __init__(self, arena: MappedArena, held: HeldLock, check_share: float = DEFAULT_CHECK_SHARE) -> None:
        super().__init__("shm", arena, check_share)
        self._mapped = arena
        self._held = held
        self._page_lock: PageLock | None = None

    @classmethod
    def open(
        cls, arena_name: str, nonce: bytes, liveness_name: str, *, check_share: float = DEFAULT_CHECK_SHARE
    ) -> ShmPath:
        """Map the arena that a registration's reply names. Raises DataPathUnavailable."""
        held = LivenessLock.open(liveness_name)
        try:
            return cls(MappedArena.open(arena_name, nonce), held, check_share)
        except BaseException:
            held.close()
            raise

    @property
    def arena(self) -> MappedArena:
        return self._mapped

    def mark(self) -> Mark:
        board = self._held.board
        return Mark(time.monotonic(), board.doubts if board is not None else 0)

    def publish(self, ticket: Ticket, mark: Mark) -> bool:
        """On the board, in good time: the server looks there before it ends a lease."""
        board = self._held.board
        if board is None or not ticket.arrival_word:
            return False
        if time.monotonic() + PUBLISH_MARGIN_S > mark.asked_at + ticket.seconds:
            return False
        board.arrive(ticket.arrival_word, ticket.lease_id)
        return board.doubts == mark.doubts

    def proves(self, ticket: Ticket, mark: Mark) -> bool:
        """The lease's time is not up, and the server has had no doubts since it was asked for."""
        board = self._held.board
        in_time = time.monotonic() < mark.asked_at + ticket.seconds
        return board is not None and in_time and board.doubts == mark.doubts

    def keep_page_locked(self, page_lock: PageLock) -> None:
        """For a worker whose pages are on a device. Before the first transfer."""
        self._page_lock = page_lock

    def _place(self, arena: Arena, slot: Slot) -> ByteArray:
        if self._page_lock is not None:
            self._page_lock.cover()
        return super()._place(arena, slot)

    def close(self) -> None:
        """To be called when no thread copies any more: the server takes this for the end of the process."""
        super().close()
        if self._page_lock is not None:
            self._page_lock.close()
        self._mapped.close()
        self._held.close()


def _side_by_side(
    move: Callable[[Slot], SlotResult], slots: Sequence[Slot], threads: int
) -> list[SlotResult]:
    """Slots in several threads, as long as each has one; what is left over is split by its mover."""
    if sum(slot.size_bytes for slot in slots) < threads * SPLIT_BYTES:
        threads = 1
    shared = len(slots) // threads * threads if threads > 1 else 0
    results: dict[int, SlotResult] = {}
    todo = deque(slots[:shared])

    def work() -> None:
        with contextlib.suppress(IndexError):
            while True:
                slot = todo.popleft()
                results[slot.index] = move(slot)

    if shared:
        crew.run([work] * threads)
    for slot in slots[shared:]:
        results[slot.index] = move(slot)
    return [results[slot.index] for slot in slots]


def _fill_whole(slot: Slot, fill: Fill, place: ByteArray) -> bytes:
    fill(slot, 0, slot.size_bytes, place)
    return b""


def _fill_hashed(slot: Slot, fill: Fill, place: ByteArray) -> bytes:
    digest = Checksum()
    for start, stop in pieces(slot.size_bytes, HOT_BYTES):
        fill(slot, start, stop, place[start:stop])
        digest.update(place[start:stop])
    return digest.digest()


def _drain_hashed(slot: Slot, drain: Drain, place: ByteArray) -> bytes:
    digest = Checksum()
    for start, stop in pieces(slot.size_bytes, HOT_BYTES):
        digest.update(place[start:stop])
        drain(slot, start, stop, place[start:stop])
    return digest.digest()


def _what(doing: str, slot: Slot) -> str:
    return f"{doing} chunk {slot.chunk_index} of KV group {slot.group_index}"
