"""CacheService: every method checks its request, calls the engine once, and builds the reply."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvwire.errors import DigestUnsupported, VersionUnsupported
from kvwire.server import convert
from kvwire.server.blending import ask_fleet, merge, not_enabled
from kvwire.server.core import Client
from kvwire.server.dataplane import ShmGrant, UcxGrant
from kvwire.server.fetch.service import bring
from kvwire.server.limits import MAX_OFFERED, check_batch
from kvwire.server.streams import Streams
from kvwire.server.transfers import Transfers
from kvwire.serving.requests import check_count
from kvwire.serving.version import PROTOCOL_VERSIONS, server_version
from kvwire.v1 import cache_service_pb2 as cache
from kvwire.v1 import cache_service_pb2_grpc, namespace_pb2, transfer_pb2
from kvwire.v1 import coordinator_service_pb2 as coordinator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvwire.server.core import Core
    from kvwire.server.dataplane import Admission
    from kvwire.server.fetch.prefetcher import Brought
    from kvwire.server.lookups import Steps
    from kvwire.server.messages import LookupResult


class CacheService(cache_service_pb2_grpc.CacheServiceServicer):
    def __init__(self, core: Core) -> None:
        self._core = core
        self._engine = core.engine
        self._transfers = Transfers(core)
        self._streams = Streams(core)

    async def NegotiateChunkSize(
        self, request: cache.NegotiateChunkSizeRequest, context: Any
    ) -> cache.NegotiateChunkSizeResponse:
        core, config = self._core, self._core.config
        version = _common_version(request.protocol_versions)
        _check_digest(request.digest_functions)
        who = convert.identifier("client_name", request.client_name, empty=True) or "an unnamed client"
        with core.refusals.noting(request.client_name):
            bound = core.binding.negotiate(request.required_alignment, who, request.expected_chunk_size)
        return cache.NegotiateChunkSizeResponse(
            header=core.header,
            chunk_size=bound.chunk_size,
            minimum_chunk_size=config.chunk_size,
            digest_function=namespace_pb2.DIGEST_FUNCTION_SHA256,
            protocol_version=version,
            limits=cache.ServerLimits(
                max_message_bytes=config.max_message,
                max_items=config.max_items,
                max_chunks=config.max_chunks,
                max_slots=config.max_slots,
            ),
            server_version=server_version(),
        )

    async def RegisterKvCache(
        self, request: cache.RegisterKvCacheRequest, context: Any
    ) -> cache.RegisterKvCacheResponse:
        refusals = self._core.refusals
        with refusals.noting(request.client_name):
            reply = await self._register(request)
        refusals.forget(request.client_name)
        return reply

    async def _register(self, request: cache.RegisterKvCacheRequest) -> cache.RegisterKvCacheResponse:
        core = self._core
        core.binding.require()
        client = convert.client_info(request)
        space, layout = convert.namespace(request.namespace), convert.layout(request.layout)
        offers = convert.offers(request.offers)
        admission = None if client.role == "scheduler" else await core.plane.admit(offers)
        path = admission.path if admission else ""
        core.absorb()
        try:
            done = self._engine.register(client, space, layout, request.chunk_size, path, now=core.now())
        except BaseException:
            if admission:
                core.plane.path(path).withdraw(admission)
            raise
        if done.replaced:
            core.left(done.replaced)
        core.settle()
        reason = admission.reason if admission else "moves no bytes"
        core.clients.join(done.registration_id, Client(path, reason, len(layout.groups)))
        if admission:
            core.plane.path(path).bind(done.registration_id, admission)
        return cache.RegisterKvCacheResponse(
            header=core.header,
            registration_id=done.registration_id,
            path=convert.PATHS[path],
            path_reason=reason,
            expires_after=convert.duration(done.expires_after),
            **_access(admission),
        )

    async def UnregisterKvCache(
        self, request: cache.UnregisterKvCacheRequest, context: Any
    ) -> cache.UnregisterKvCacheResponse:
        self._core.absorb()
        self._engine.unregister(request.registration_id, self._core.now())
        self._core.left(request.registration_id)
        self._core.settle()
        return cache.UnregisterKvCacheResponse(header=self._core.header)

    async def Ping(self, request: cache.PingRequest, context: Any) -> cache.PingResponse:
        state = cache.REGISTRATION_STATE_UNSPECIFIED
        if request.registration_id:
            known = self._engine.ping(request.registration_id, self._core.now())
            state = cache.REGISTRATION_STATE_KNOWN if known else cache.REGISTRATION_STATE_UNKNOWN
        bound = self._core.binding.bound
        return cache.PingResponse(
            header=self._core.header,
            chunk_size=bound.chunk_size if bound else 0,
            registration=state,
            draining=self._core.guard.draining,
        )

    async def Lookup(self, request: cache.LookupRequest, context: Any) -> cache.LookupResponse:
        core = self._core
        prompt = convert.prompt(request, core.binding.require(), core.config)
        if request.registration_id:
            convert.identifier("session_id", request.session_id)
        core.absorb()
        fetch = core.prefetcher.active and core.config.prefetch_deadline > 0
        steps = self._engine.lookup_steps(
            request.registration_id or None, request.session_id, prompt, core.now(), fetch=fetch
        )
        found = await _in_slices(steps, core, context)
        core.settle()
        return cache.LookupResponse(
            header=core.header,
            asked_chunks=found.asked_chunks,
            hit_chunks=found.hit_chunks,
            hit_tokens=found.hit_tokens,
            lease_id=found.lease_id,
            expires_in=convert.duration(found.lease_ttl),
            l2_chunks=found.l2_chunks,
            peer_chunks=found.peer_chunks,
        )

    async def ReleaseLookup(
        self, request: cache.ReleaseLookupRequest, context: Any
    ) -> cache.ReleaseLookupResponse:
        core = self._core
        check_batch("items", request.items, core.config)
        items = [convert.release_item(item) for item in request.items]
        results = self._engine.release_lookup(request.registration_id, items, core.now())
        return cache.ReleaseLookupResponse(
            header=core.header,
            results=[
                cache.ReleaseLookupResult(released_chunks=each.released, not_held_chunks=each.not_held)
                for each in results
            ],
        )

    async def EndSession(self, request: cache.EndSessionRequest, context: Any) -> cache.EndSessionResponse:
        core = self._core
        check_batch("session_ids", request.session_ids, core.config)
        ended = self._engine.end_session(request.registration_id, request.session_ids, core.now())
        return cache.EndSessionResponse(header=core.header, ended=ended)

    async def BeginStore(self, request: cache.BeginStoreRequest, context: Any) -> cache.BeginStoreResponse:
        return await self._transfers.begin_store(request, context.time_remaining())

    async def CommitStore(self, request: cache.CommitStoreRequest, context: Any) -> cache.CommitStoreResponse:
        return await self._transfers.commit_store(request, context.time_remaining())

    async def AbortStore(self, request: cache.AbortStoreRequest, context: Any) -> cache.AbortStoreResponse:
        return self._transfers.abort_store(request)

    async def BeginRetrieve(
        self, request: cache.BeginRetrieveRequest, context: Any
    ) -> cache.BeginRetrieveResponse:
        return self._transfers.begin_retrieve(request)

    async def EndRetrieve(self, request: cache.EndRetrieveRequest, context: Any) -> cache.EndRetrieveResponse:
        return await self._transfers.end_retrieve(request)

    async def MatchBlend(
        self, request: cache.CacheServiceMatchBlendRequest, context: Any
    ) -> cache.CacheServiceMatchBlendResponse:
        core = self._core
        if core.blending is None:
            raise not_enabled()
        namespace = convert.namespace(request.namespace)
        core.absorb()
        local = core.blending.local(namespace, request.tokens, core.binding.require())
        seconds = min(convert.seconds(request.fleet_deadline), core.config.blend_deadline)
        question = coordinator.MatchBlendRequest(namespace=request.namespace, tokens=request.tokens)
        fleet, answer = await ask_fleet(core.fleet.stubs(), question, seconds)
        return cache.CacheServiceMatchBlendResponse(
            header=core.header,
            matches=merge(local, fleet, core.server_id),
            fleet=answer,  # type: ignore[arg-type]
        )

    async def WriteChunks(
        self, request_iterator: AsyncIterator[cache.WriteChunksRequest], context: Any
    ) -> cache.WriteChunksResponse:
        return await self._streams.write_chunks(request_iterator)

    def ReadChunks(
        self, request: cache.ReadChunksRequest, context: Any
    ) -> AsyncIterator[cache.ReadChunksResponse]:
        return self._streams.read_chunks(request)

    def Attach(self, request: cache.AttachRequest, context: Any) -> AsyncIterator[cache.AttachResponse]:
        return self._streams.attach(request)

    def SubscribeKvEvents(
        self, request: cache.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[cache.SubscribeKvEventsResponse]:
        return self._streams.kv_events(request)


async def _in_slices(steps: Steps, core: Core, context: Any) -> LookupResult:
    """Run a lookup, letting pings and others in between its slices, and bring what it lacks."""
    brought: Brought | None = None
    try:
        lacking = next(steps)
        while True:
            if lacking is None:
                await asyncio.sleep(0)
            else:
                brought = await bring(core, lacking, context)
            lacking = steps.send(core.now())
    except StopIteration as stop:
        found: LookupResult = stop.value
        return found
    finally:
        steps.close()
        if brought is not None:
            brought.release()


def _common_version(offered: Any) -> int:
    check_count("protocol_versions", len(offered), MAX_OFFERED)
    common: set[int] = set(offered or (1,)) & set(PROTOCOL_VERSIONS)
    if common:
        return max(common)
    theirs, ours = sorted(offered), sorted(PROTOCOL_VERSIONS)
    raise VersionUnsupported(
        f"The client speaks kvwire.v1 {theirs}, this server {ours}: upgrade the older of the two.",
        offered=theirs,
        supported=ours,
    )


def _check_digest(offered: Any) -> None:
    check_count("digest_functions", len(offered), MAX_OFFERED)
    if offered and namespace_pb2.DIGEST_FUNCTION_SHA256 not in offered:
        raise DigestUnsupported(
            "This server makes chunk keys with SHA-256, which the client does not offer.",
            offered=list(offered),
            supported="sha256",
        )


def _access(admission: Admission | None) -> dict[str, Any]:
    grant = admission.grant if admission else None
    if isinstance(grant, ShmGrant):
        return {
            "shm": transfer_pb2.ShmAccess(
                arena_name=grant.arena_name,
                nonce=grant.nonce,
                arena_bytes=grant.arena_bytes,
                liveness_name=grant.liveness_name,
            )
        }
    if isinstance(grant, UcxGrant):
        return {
            "ucx": transfer_pb2.UcxAccess(
                address=grant.address, probe_tag=grant.probe_tag, probe_bytes=grant.probe_bytes
            )
        }
    return {}
