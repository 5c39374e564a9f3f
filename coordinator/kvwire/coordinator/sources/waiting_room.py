"""Records of servers that are no members yet: an event may overtake the registration."""

from __future__ import annotations

from collections import deque


class WaitingRoom:
    """Per server in order, bounded in time, number and bytes. Seconds; the clock is passed in."""

    def __init__(self, patience: float = 10.0, max_records: int = 10_000, max_bytes: int = 64 << 20) -> None:
        self._patience = patience
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._waiting: dict[str, deque[tuple[float, bytes]]] = {}
        self._count = 0
        self.held_bytes = 0
        self.skipped = 0

    def __len__(self) -> int:
        return self._count

    def holds(self, server_id: str) -> bool:
        """Then its next record has to wait, too: a server's records stay in order."""
        return server_id in self._waiting

    def add(self, server_id: str, record: bytes, now: float) -> None:
        """Past a bound the record is skipped: the gap that this leaves heals by a snapshot."""
        if self._count >= self._max_records or self.held_bytes + len(record) > self._max_bytes:
            self.skipped += 1
            return
        self._waiting.setdefault(server_id, deque()).append((now, record))
        self._count += 1
        self.held_bytes += len(record)

    def servers(self) -> list[str]:
        return list(self._waiting)

    def first(self, server_id: str) -> bytes | None:
        records = self._waiting.get(server_id)
        return records[0][1] if records else None

    def remove_first(self, server_id: str) -> None:
        records = self._waiting[server_id]
        self._drop_first(records)
        if not records:
            del self._waiting[server_id]

    def expire(self, now: float) -> int:
        """Skip what has waited for too long; returns how many."""
        gone = 0
        for server_id, records in list(self._waiting.items()):
            while records and now - records[0][0] > self._patience:
                self._drop_first(records)
                gone += 1
            if not records:
                del self._waiting[server_id]
        self.skipped += gone
        return gone

    def _drop_first(self, records: deque[tuple[float, bytes]]) -> None:
        _, record = records.popleft()
        self._count -= 1
        self.held_bytes -= len(record)
