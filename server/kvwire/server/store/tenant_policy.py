from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Final

from kvwire.server.store.policy import Clock, LeafQueue, ensure, ensure_offered

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvwire.server.store.objects import Chunk

_NEVER: Final = 1 << 62


class TenantPolicy(Clock):
    """Least recently used prompt first, of one tenant or of all: each has a queue of its own.

    `_order` has a bound below the first stamp of each queue that is not empty, `_listed` says which entry of
    a tenant is the valid one. Bounds are corrected when they surface, as the entries of a queue are.
    """

    name = "tenant"

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, LeafQueue] = {}
        self._order: list[tuple[int, str]] = []
        self._listed: dict[str, int] = {}

    def hit(self, chunks: Sequence[Chunk]) -> None:
        """Stamps are all that counts."""

    def inserted(self, chunk: Chunk) -> None:
        """Bytes of tenants are the store's business."""

    def resized(self, chunk: Chunk, change: int) -> None:
        """Bytes of tenants are the store's business."""

    def removed(self, chunk: Chunk, *, evicted: bool) -> None:
        """Its entry is dropped when it surfaces."""

    def offer(self, chunk: Chunk) -> None:
        if chunk.queued:
            return
        tenant = chunk.space.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = LeafQueue()
        queue.push(chunk)
        if chunk.stamp < self._listed.get(tenant, _NEVER):
            self._listed[tenant] = chunk.stamp
            heappush(self._order, (chunk.stamp, tenant))

    def victim(self, protect: int) -> Chunk | None:
        order = self._order
        while order:
            bound, tenant = order[0]
            if self._listed.get(tenant) != bound:
                heappop(order)
                continue
            first = self._queues[tenant].first()
            if first is None:
                heappop(order)
                del self._listed[tenant], self._queues[tenant]
            elif first.stamp != bound:
                self._listed[tenant] = first.stamp
                heapreplace(order, (first.stamp, tenant))
            else:
                return self._queues[tenant].pop(protect)
        return None

    def victim_of(self, tenant: str, protect: int) -> Chunk | None:
        """As `victim`, of one tenant."""
        queue = self._queues.get(tenant)
        return queue.pop(protect) if queue is not None else None

    def check_integrity(self, chunks: Iterable[Chunk]) -> None:
        ensure_offered(chunks)
        for tenant, queue in self._queues.items():
            first = queue.first()
            if first is not None:
                ensure(self._listed.get(tenant, _NEVER) <= first.stamp, "a tenant is listed too late")
        valid = {(bound, tenant) for tenant, bound in self._listed.items()}
        ensure(valid <= set(self._order), "a tenant is not listed")
