"""The inline path: pieces of slots on the gRPC connection itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.errors import LeaseLost, RangeInvalid, TransferFailed
from kvwire.server.dataplane.base import Admission, Opened, Received

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.server.dataplane.base import PathOffer, SlotMemory
    from kvwire.transfer.arena import Arena

PIECE_BYTES: Final = 1 << 20


class InlinePath:
    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._writes: dict[int, _Writes] = {}
        self._reads: dict[int, tuple[SlotMemory, ...]] = {}

    async def admit(self, offer: PathOffer) -> Admission | str:
        return Admission("inline", "the slow path, over gRPC: nothing better is in common", None)

    def bind(self, registration_id: int, admission: Admission) -> None:
        """Nothing to keep."""

    def withdraw(self, admission: Admission) -> None:
        """Nothing to give back."""

    def leave(self, registration_id: int) -> None:
        """Leases are cancelled one by one."""

    def open_store(self, registration_id: int, lease_id: int, slots: Sequence[SlotMemory]) -> Opened:
        self._writes[lease_id] = _Writes(tuple(slots))
        return Opened(PIECE_BYTES)

    def open_retrieve(self, registration_id: int, lease_id: int, slots: Sequence[SlotMemory]) -> Opened:
        self._reads[lease_id] = tuple(slots)
        return Opened(PIECE_BYTES)

    def write(self, lease_id: int, slot: int, offset: int, data: bytes) -> int:
        """Take one piece. Raises LeaseLost and RangeInvalid; the bytes of a slot come in ascending order."""
        writes = self._writes.get(lease_id)
        if writes is None:
            raise LeaseLost(f"Lease {lease_id} has ended, or is none for writing inline.", lease_id=lease_id)
        start = writes.take(slot, offset, len(data))
        self._arena.view(start, len(data))[:] = data
        return len(data)

    def read(self, lease_id: int) -> Iterator[tuple[int, int, bytes]]:
        """Pieces of a read lease as (slot, offset, bytes). Raises LeaseLost when the lease ends meanwhile."""
        if lease_id not in self._reads:
            raise LeaseLost(f"Lease {lease_id} has ended, or is none for reading inline.", lease_id=lease_id)
        for slot, memory in enumerate(self._reads[lease_id]):
            for offset in range(0, memory.size, PIECE_BYTES):
                if lease_id not in self._reads:
                    raise LeaseLost(f"Lease {lease_id} has ended.", lease_id=lease_id)
                size = min(PIECE_BYTES, memory.size - offset)
                yield slot, offset, bytes(self._arena.view(memory.offset + offset, size))

    async def received(self, lease_id: int, slots: Sequence[int], seconds: float) -> Received:
        writes = self._writes.get(lease_id)
        if writes is None:
            lost = LeaseLost(f"Lease {lease_id} has ended.", lease_id=lease_id)
            return Received(dict.fromkeys(slots, lost))
        return Received(writes.incomplete(slots))

    async def cancel(self, lease_id: int) -> None:
        # Pieces are copied on the event loop, so none is on the way here.
        self._writes.pop(lease_id, None)
        self._reads.pop(lease_id, None)

    async def close(self) -> None:
        self._writes.clear()
        self._reads.clear()


class _Writes:
    """How far each slot of a write lease has come."""

    def __init__(self, slots: tuple[SlotMemory, ...]) -> None:
        self._slots = slots
        self._done = [0] * len(slots)

    def take(self, slot: int, offset: int, size: int) -> int:
        if slot >= len(self._slots):
            raise RangeInvalid(
                f"Slot {slot} is not in the ticket.", first=slot, count=1, limit=len(self._slots)
            )
        memory = self._slots[slot]
        if size < 1 or size > PIECE_BYTES or offset + size > memory.size:
            raise RangeInvalid(
                f"A piece of {size} bytes at {offset} does not fit slot {slot} of {memory.size} bytes,"
                f" or is not of 1 to {PIECE_BYTES} bytes.",
                first=offset,
                count=size,
                limit=memory.size,
            )
        if offset != self._done[slot]:
            raise RangeInvalid(
                f"Slot {slot} goes on at {self._done[slot]}, not at {offset}: its pieces come in order.",
                first=offset,
                count=size,
                limit=self._done[slot],
            )
        self._done[slot] += size
        return memory.offset + offset

    def incomplete(self, slots: Sequence[int]) -> dict[int, TransferFailed]:
        return {
            slot: TransferFailed(
                f"Slot {slot} has {self._done[slot]} of {self._slots[slot].size} bytes.",
                path="inline",
                cause="incomplete",
            )
            for slot in slots
            if slot < len(self._slots) and self._done[slot] != self._slots[slot].size
        }
