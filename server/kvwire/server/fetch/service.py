"""Where calls meet the prefetcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import DeadlineExceeded, KvwireError, ObjectNotFound, OutOfSpace
from kvwire.server import convert
from kvwire.server.fetch.planning import origins_of
from kvwire.server.fetch.source import Origin
from kvwire.server.pinning import selected_keys
from kvwire.v1 import admin_service_pb2 as admin

if TYPE_CHECKING:
    from kvwire.server.core import Core
    from kvwire.server.fetch.prefetcher import Brought
    from kvwire.server.lookups import Lacking

MARGIN_S: Final = 0.2
"""Kept of a call's deadline for the reply."""
PREFETCH_S: Final = 30.0
"""How long an operator's call waits that has no deadline."""


async def bring(core: Core, lacking: Lacking, context: Any) -> Brought:
    """Bring what a lookup lacks, for as long as it may wait. The caller releases what it gets."""
    prefetcher, guard = core.prefetcher, core.guard
    patience = _patience(context.time_remaining(), core.config.prefetch_deadline)
    if guard.waiting >= guard.max_in_flight:
        patience = 0.0
    with guard.aside():
        until = prefetcher.now() + patience
        brought = await prefetcher.bring(lacking.space, lacking.keys, lacking.tokens, until)
    lacking.came = brought.origins
    try:
        core.absorb()
    except BaseException:
        brought.release()
        raise
    return brought


async def prefetch(core: Core, request: admin.PrefetchRequest, context: Any) -> admin.PrefetchResponse:
    """Bring a prompt into memory. Nothing holds it there."""
    chunk_size = core.binding.require()
    keys = await selected_keys(request.selector, chunk_size, core.config)
    namespace = convert.namespace(request.selector.namespace)
    reply = admin.PrefetchResponse(header=core.header, asked_chunks=len(keys))
    core.absorb()
    space = core.engine.space_of(namespace)
    if space is None:
        reply.error.CopyFrom(convert.item_error(_unknown_layout()))
        return reply
    before = core.engine.store.find(space, keys).boundary
    if before == len(keys):
        reply.resident_chunks = before
        return reply
    seconds = _patience(context.time_remaining(), PREFETCH_S)
    prefetcher = core.prefetcher
    tokens = request.selector.tokens
    with core.guard.aside():
        brought = await prefetcher.bring(space, keys, tokens, prefetcher.now() + seconds)
    try:
        core.absorb()
        hit = core.engine.store.find(space, keys)
        origins = origins_of(hit, before, brought.origins)
    finally:
        brought.release()
    reply.resident_chunks = hit.boundary
    reply.l2_chunks, reply.peer_chunks = origins[Origin.L2], origins[Origin.PEER]
    if hit.boundary < len(keys):
        reply.error.CopyFrom(convert.item_error(_shortfall(core, brought, len(keys) - hit.boundary)))
    return reply


def _patience(remaining: float | None, limit: float) -> float:
    return limit if remaining is None else max(0.0, min(limit, remaining - MARGIN_S))


def _unknown_layout() -> KvwireError:
    return ObjectNotFound(
        "No engine has registered the KV layout of this namespace since the server started."
    )


def _shortfall(core: Core, brought: Brought, lacking: int) -> KvwireError:
    if brought.late:
        return DeadlineExceeded(f"{lacking} chunks were not there in time; what is under way goes on.")
    if brought.short_of_room:
        capacity = core.engine.store.allocator.capacity
        return OutOfSpace(f"{lacking} chunks more have no room in memory.", capacity=capacity)
    return ObjectNotFound(
        f"{lacking} chunks are neither here nor anywhere below, or cannot be had from there."
    )
