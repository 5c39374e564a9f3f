"""Write leases that a client commits without a call: on its board, or by a message over UCX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvwire.server.engine import CacheEngine
    from kvwire.server.sealing import Sealer

REMEMBERED: Final = 1024


class Arrivals:
    """Publishes them, and remembers the last: a client that missed the answer asks again by CommitStore."""

    def __init__(self, engine: CacheEngine, sealer: Sealer) -> None:
        self._engine = engine
        self._sealer = sealer
        self._published: dict[tuple[int, int], int] = {}

    def publish(self, registration_id: int, lease_id: int, now: float) -> bool:
        """Whether the lease was live and is committed now."""
        self._sealer.transfer_seen()
        published = self._engine.commit_arrived(registration_id, lease_id, now)
        self._sealer.add(published)
        if published:
            self._published[registration_id, lease_id] = len(published)
            if len(self._published) > REMEMBERED:
                del self._published[next(iter(self._published))]
        return bool(published)

    def published(self, registration_id: int, lease_id: int) -> int:
        """The slots of a lease that has been published so; 0 for any other."""
        return self._published.get((registration_id, lease_id), 0)
