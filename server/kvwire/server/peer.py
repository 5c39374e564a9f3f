"""PeerService: what other servers and coordinators ask of this one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import NotImplementedYet
from kvwire.server import convert
from kvwire.v1 import event_pb2, peer_service_pb2_grpc
from kvwire.v1 import peer_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvwire.server.core import Core
    from kvwire.server.lender import Lender
    from kvwire.server.tiers.tier import Tier

    Held = tuple[Tier | None, bytes]
    """A chunk's key, in a lower tier or in memory."""

DEFAULT_PAGE: Final = 1000
MAX_PAGE: Final = 5000
PAGE_BYTES: Final = 1 << 20
"""Of tokens in a page, which must stay far below the largest message."""
MEMORY: Final = "memory"
"""The backend's name of the memory tier."""


class PeerService(peer_service_pb2_grpc.PeerServiceServicer):
    def __init__(self, core: Core) -> None:
        self._core = core

    async def LookupAndLease(
        self, request: pb.LookupAndLeaseRequest, context: Any
    ) -> pb.LookupAndLeaseResponse:
        return await self._lender().lookup_and_lease(request)

    async def ReleaseLease(self, request: pb.ReleaseLeaseRequest, context: Any) -> pb.ReleaseLeaseResponse:
        return self._lender().release(request)

    async def SnapshotPlacements(
        self, request: pb.SnapshotPlacementsRequest, context: Any
    ) -> AsyncIterator[pb.SnapshotPlacementsResponse]:
        core, taken = self._core, time.monotonic()
        core.absorb()
        if core.journal is not None:
            core.journal.close()
        sequence = core.journal.closed_sequence if core.journal is not None else 0
        # One moment: what goes afterwards is told by events behind `sequence`, and so is what comes.
        held: deque[Held] = deque((None, each.key) for each in core.engine.store.chunks() if each.announced)
        held.extend(core.tiers.announced())
        size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
        while True:
            page = self._page(held, size, with_tokens=request.with_tokens)
            yield pb.SnapshotPlacementsResponse(
                server_id=core.server_id,
                incarnation=core.incarnation,
                sequence=sequence,
                placements=page,
                age=convert.duration(time.monotonic() - taken),
            )
            if not held:
                return
            await asyncio.sleep(0)

    def _lender(self) -> Lender:
        """Raises NotImplementedYet."""
        if self._core.sharing is None:
            raise NotImplementedYet("This server shares nothing (--no-peers, or no --coordinator).")
        return self._core.sharing.lender

    def _page(self, held: deque[Held], size: int, *, with_tokens: bool) -> list[event_pb2.CacheEvent]:
        """The next ones that are still there, taken from `held`; those with many tokens make it shorter."""
        page: list[event_pb2.CacheEvent] = []
        tokens = 0
        while held and len(page) < size and tokens < PAGE_BYTES:
            tier, key = held.popleft()
            event = self._in_memory(key) if tier is None else _in_tier(tier, key)
            if event is not None:
                event.tokens = self._tokens_of(key) if with_tokens else b""
                page.append(event)
                tokens += len(event.tokens)
        return page

    def _in_memory(self, key: bytes) -> event_pb2.CacheEvent | None:
        chunk = self._core.engine.store.get(key)
        if chunk is None or not chunk.announced:
            return None
        return event_pb2.CacheEvent(
            kind=event_pb2.CACHE_EVENT_KIND_STORE,
            chunk_key=chunk.key,
            tier=event_pb2.STORAGE_TIER_L1,
            backend=MEMORY,
            size_bytes=chunk.size,
            parent_key=chunk.parent_key,
            namespace_root=chunk.space.root,
        )

    def _tokens_of(self, key: bytes) -> bytes:
        """Kept by the blend index alone: without one nobody knows them any more."""
        matcher = self._core.matcher if self._core.config.report_tokens else None
        return matcher.tokens_of(key) if matcher is not None else b""


def _in_tier(tier: Tier, key: bytes) -> event_pb2.CacheEvent | None:
    chunk = tier.index.get(key)
    if chunk is None or not chunk.announced:
        return None
    return event_pb2.CacheEvent(
        kind=event_pb2.CACHE_EVENT_KIND_STORE,
        chunk_key=chunk.key,
        tier=event_pb2.STORAGE_TIER_L2,
        backend=tier.name,
        size_bytes=chunk.size,
        parent_key=chunk.parent,
        namespace_root=chunk.space.manifest.root,
    )
