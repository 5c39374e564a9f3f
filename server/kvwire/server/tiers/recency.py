from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.server.tiers.entries import TierChunk

_ALL: Final = 1
_OWN: Final = 2
_SLACK: Final = 1024


class Recency:
    """Who goes next, of all and of each tenant with a quota."""

    def __init__(self) -> None:
        self._all = _Queue(_ALL)
        self._own: dict[str, _Queue] = {}

    def offer(self, chunk: TierChunk) -> None:
        """The chunk may be evictable now."""
        if chunk.evictable:
            self._all.push(chunk)
            own = self._own.get(chunk.space.tenant)
            if own is not None:
                own.push(chunk)

    def victim(self, before: int, tenant: str | None) -> TierChunk | None:
        """The least recent evictable chunk (of a tenant) below the stamp `before`; not offered any more."""
        queue = self._all if tenant is None else self._own[tenant]
        return queue.pop(before)

    def watch(self, tenants: Iterable[str], chunks: Iterable[TierChunk]) -> None:
        """Keep an order of their own for these tenants."""
        self._own = {tenant: _Queue(_OWN) for tenant in tenants}
        for chunk in chunks:
            chunk.queued &= ~_OWN
            self.offer(chunk)


class _Queue:
    """By stamp. Entries are corrected when they surface, so that refreshing a chunk costs nothing."""

    def __init__(self, flag: int) -> None:
        self._flag = flag
        self._heap: list[tuple[int, int, TierChunk]] = []
        self._compact_at = _SLACK

    def push(self, chunk: TierChunk) -> None:
        if chunk.queued & self._flag:
            return
        chunk.queued |= self._flag
        heappush(self._heap, (chunk.stamp, chunk.serial, chunk))
        if len(self._heap) >= self._compact_at:
            self._compact()

    def pop(self, before: int) -> TierChunk | None:
        heap = self._heap
        while heap:
            stamp, serial, chunk = heap[0]
            if not chunk.evictable:
                # It is offered again when it is.
                heappop(heap)
                chunk.queued &= ~self._flag
            elif chunk.stamp != stamp:
                heapreplace(heap, (chunk.stamp, serial, chunk))
            elif stamp >= before:
                return None
            else:
                heappop(heap)
                chunk.queued &= ~self._flag
                return chunk
        return None

    def _compact(self) -> None:
        """Forget what has gone by another way."""
        kept = []
        for entry in self._heap:
            if entry[2].evictable:
                kept.append(entry)
            else:
                entry[2].queued &= ~self._flag
        heapify(kept)
        self._heap = kept
        self._compact_at = 2 * len(kept) + _SLACK
