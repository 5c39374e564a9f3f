"""The bytes that one source brings for one batch."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from kvwire import telemetry
from kvwire.errors import Internal, KvwireError, TransferTimeout
from kvwire.server.stores import CHECKSUM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.server.fetch.bringing import Bringing
    from kvwire.server.fetch.source import Found, Source, Target
    from kvwire.server.store import StoredObject

log = logging.getLogger("kvwire.server")


class Fetching:
    """Every target ends once: published, given back, or given up while the source may still write to it."""

    def __init__(
        self, bringing: Bringing, source: Source, found: Found, targets: Mapping[Target, StoredObject]
    ) -> None:
        self._bringing = bringing
        self._owner = bringing.owner
        self._source = source
        self._found = found
        self._targets = list(targets)
        self._open = {(target.index, target.shard): stored for target, stored in targets.items()}
        self._fetched = 0
        self._lost = 0

    async def run(self, until: float) -> None:
        size = sum(target.size for target in self._targets)
        chunks = len({target.index for target in self._targets})
        origin, name = self._source.origin.value, self._source.name
        with telemetry.span(
            "kvwire.fetch", origin=origin, source=name, size_bytes=size, chunks=chunks
        ) as span:
            fetch = asyncio.create_task(
                self._found.fetch(self._targets, self._done, until), name=f"kvwire-fetch from {name}"
            )
            try:
                patience = until - self._owner.now() + self._owner.limits.grace_s
                await asyncio.wait({fetch}, timeout=patience)
            finally:
                await self._close(fetch)
                span.set(fetched_bytes=self._fetched, failed_objects=self._lost)

    def _done(self, target: Target, checksum: bytes, error: KvwireError | None) -> None:
        stored = self._open.pop((target.index, target.shard), None)
        if stored is None:
            return
        if error is None and len(checksum) != CHECKSUM_BYTES:
            error = Internal(f"{self._source.name} gave no checksum")
        if error is not None:
            self._owner.fills.abort(stored)
            self._failed(target.index, stored, error.reason)
            return
        tokens = self._bringing.tokens_of(target.index)
        self._owner.fills.commit(stored, checksum, tokens, self._bringing.hold)
        self._bringing.origins[target.index] = self._source.origin
        self._fetched += stored.size
        counters, origin = self._owner.counters, self._source.origin.value
        counters.add(counters.objects, origin, 1)
        counters.add(counters.bytes, origin, stored.size)
        self._owner.tell(stored, self._source.origin)

    def _failed(self, index: int, stored: StoredObject, reason: str) -> None:
        log.debug("%s did not give an object: %s", self._source.name, reason)
        self._lost += 1
        counters = self._owner.counters
        counters.add(counters.failed_objects, self._source.origin.value, 1)
        self._bringing.failed(self._source, index, stored.shard)
        self._owner.tell(stored, None)

    async def _close(self, fetch: asyncio.Task[None]) -> None:
        """End what the source has not ended. What it may still write to stays taken until it lets go."""
        rest = dict(self._open)
        if fetch.done():
            self._open.clear()
            self._note(fetch)
            for (index, _), stored in rest.items():
                self._owner.fills.abort(stored)
                self._failed(index, stored, Internal.reason)
            return
        self._open.clear()
        for (index, _), stored in rest.items():
            self._owner.fills.quarantine(stored)
            self._failed(index, stored, TransferTimeout.reason)
        fetch.add_done_callback(lambda _: self._let_go(list(rest.values())))
        fetch.cancel()
        await asyncio.wait({fetch}, timeout=self._owner.limits.grace_s)

    def _let_go(self, objects: list[StoredObject]) -> None:
        for stored in objects:
            self._owner.fills.release(stored)

    def _note(self, fetch: asyncio.Task[None]) -> None:
        error = None if fetch.cancelled() else fetch.exception()
        if error is not None:
            self._owner.counters.faults += 1
            log.error("%s failed: %r", self._source.name, error, exc_info=error)
