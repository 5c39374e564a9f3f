"""Shared memory: the client copies; the server names the arena and watches whether the process lives.

Each client has a board, on which it says what has arrived, and the server when what it reads is in doubt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.server.dataplane.base import Admission, Opened, Received, ShmGrant
from kvwire.transfer.shm import LivenessLock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.server.dataplane.base import PathOffer, SlotMemory
    from kvwire.transfer.shm import SharedArena


class ShmPath:
    def __init__(self, arena: SharedArena, host_id: str) -> None:
        self._arena = arena
        self._host_id = host_id
        self._locks: dict[int, LivenessLock] = {}

    async def admit(self, offer: PathOffer) -> Admission | str:
        if offer.host_id != self._host_id:
            return "the client is on another host"
        lock = LivenessLock.create(self._arena.name)
        grant = ShmGrant(self._arena.name, self._arena.nonce, self._arena.size, lock.name)
        return Admission("shm", "one copy, between processes of one host", grant, lock)

    def bind(self, registration_id: int, admission: Admission) -> None:
        if isinstance(admission.token, LivenessLock):
            self._locks[registration_id] = admission.token

    def withdraw(self, admission: Admission) -> None:
        if isinstance(admission.token, LivenessLock):
            admission.token.close()

    def leave(self, registration_id: int) -> None:
        """The lock is kept as long as the process may live: `reap` closes it."""
        lock = self._locks.get(registration_id)
        if lock is not None:
            lock.board.doubt()

    def doubt_all(self) -> None:
        """An object was found damaged: whoever reads it now has to ask."""
        for lock in self._locks.values():
            lock.board.doubt()

    @property
    def awaits_arrivals(self) -> bool:
        return any(len(lock.board) for lock in self._locks.values())

    def arrivals(self) -> Iterator[tuple[int, int]]:
        """Registration and lease of what has arrived since the last call."""
        for registration_id, lock in self._locks.items():
            if len(lock.board):
                for lease_id in lock.board.arrived():
                    yield registration_id, lease_id

    def is_dead(self, registration_id: int) -> bool:
        """Proof that the client's process is gone. False while that is not known."""
        lock = self._locks.get(registration_id)
        return lock is None or not lock.is_held()

    def reap(self, live: set[int]) -> None:
        """Close the locks of registrations that are not in `live`."""
        for registration_id in [each for each in self._locks if each not in live]:
            self._locks.pop(registration_id).close()

    def open_store(self, registration_id: int, lease_id: int, slots: Sequence[SlotMemory]) -> Opened:
        lock = self._locks.get(registration_id)
        return Opened(arrival_word=lock.board.give(lease_id) if lock is not None else 0)

    def close_store(self, registration_id: int, lease_id: int) -> None:
        """The client has said by a call that it is done with the lease."""
        lock = self._locks.get(registration_id)
        if lock is not None:
            lock.board.take_back(lease_id)

    def open_retrieve(self, registration_id: int, lease_id: int, slots: Sequence[SlotMemory]) -> Opened:
        return Opened()

    async def received(self, lease_id: int, slots: Sequence[int], seconds: float) -> Received:
        # The client's own copy has returned before it commits.
        return Received()

    async def cancel(self, lease_id: int) -> None:
        """The server moves nothing here."""

    async def close(self) -> None:
        self.reap(set())
