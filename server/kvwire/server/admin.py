"""AdminService: what operators see and change. Every change leaves a line in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import InvalidArgument
from kvwire.server import convert
from kvwire.server.fetch.service import prefetch
from kvwire.server.pinning import selected_keys
from kvwire.server.statusview import status_reply
from kvwire.serving.auditing import audit
from kvwire.serving.tenants import digest_wanted, tenant_name
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc, event_pb2

if TYPE_CHECKING:
    from kvwire.server.core import Core
    from kvwire.server.holdings import HeldChunk

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
MAX_PAGE_TOKEN: Final = 20
TIERS: Final[dict[int, event_pb2.StorageTier.ValueType]] = {
    event_pb2.STORAGE_TIER_L1: event_pb2.STORAGE_TIER_L1,
    event_pb2.STORAGE_TIER_L2: event_pb2.STORAGE_TIER_L2,
}
TIER_NAMES: Final = {0: "all", 1: "L1", 2: "L2"}


class AdminService(admin_service_pb2_grpc.AdminServiceServicer):
    def __init__(self, core: Core) -> None:
        self._core = core

    async def GetStatus(self, request: admin.GetStatusRequest, context: Any) -> admin.GetStatusResponse:
        self._core.absorb()
        return status_reply(self._core)

    async def ListSessions(
        self, request: admin.ListSessionsRequest, context: Any
    ) -> admin.ListSessionsResponse:
        start = _page_start(request.page_token)
        size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
        now = self._core.now()
        listed = self._core.engine.sessions(start, size + 1, now)
        more = len(listed) > size
        return admin.ListSessionsResponse(
            header=self._core.header,
            sessions=[
                admin.SessionStatus(
                    engine_id=each.engine_id,
                    session_id=each.session_id,
                    chunks=each.chunks,
                    tenant=each.tenant,
                    lease_id=each.lease_id,
                    leased_chunks=each.leased_chunks,
                    idle=convert.duration(each.idle),
                )
                for each in listed[:size]
            ],
            next_page_token=str(listed[size - 1].generation) if more else "",
        )

    async def ListObjects(self, request: admin.ListObjectsRequest, context: Any) -> admin.ListObjectsResponse:
        size = min(request.page_size or DEFAULT_PAGE, MAX_PAGE)
        tier, tenant = _tier(request.tier), digest_wanted(request.tenant)
        self._core.absorb()
        page = self._core.holdings.page(request.page_token, size, tier, tenant)
        return admin.ListObjectsResponse(
            header=self._core.header,
            chunks=[_chunk(held) for held in page.chunks],
            next_page_token=page.next,
        )

    async def Clear(self, request: admin.ClearRequest, context: Any) -> admin.ClearResponse:
        namespace = convert.namespace(request.namespace) if request.HasField("namespace") else None
        tier, tenant = _tier(request.tier), digest_wanted(request.tenant)
        self._core.absorb()
        cleared, kept = self._core.holdings.clear(tier, namespace, tenant)
        audit(
            context,
            "clear",
            tier=TIER_NAMES[tier],
            model=namespace.model if namespace else "all",
            tenant=request.tenant or "all",
            dropped=cleared,
            kept=kept,
        )
        return admin.ClearResponse(header=self._core.header, cleared_chunks=cleared, kept_chunks=kept)

    async def Evict(self, request: admin.EvictRequest, context: Any) -> admin.EvictResponse:
        tier, keys = _tier(request.tier), await self._selected(request.selector)
        self._core.absorb()
        evicted, kept = self._core.holdings.evict(keys, tier)
        audit(context, "evict", tier=TIER_NAMES[tier], keys=len(keys), dropped=evicted, kept=kept)
        return admin.EvictResponse(header=self._core.header, evicted_chunks=evicted, kept_chunks=kept)

    async def Pin(self, request: admin.PinRequest, context: Any) -> admin.PinResponse:
        core = self._core
        pinned = await core.pinning.pin(await self._selected(request.selector))
        audit(context, "pin", chunks=pinned)
        return admin.PinResponse(header=core.header, pinned_chunks=pinned)

    async def Unpin(self, request: admin.UnpinRequest, context: Any) -> admin.UnpinResponse:
        core = self._core
        unpinned = await core.pinning.unpin(await self._selected(request.selector))
        audit(context, "unpin", chunks=unpinned)
        return admin.UnpinResponse(header=core.header, unpinned_chunks=unpinned)

    async def SetQuota(self, request: admin.SetQuotaRequest, context: Any) -> admin.SetQuotaResponse:
        tenant, limit = tenant_name(request.salt, request.tenant), request.limit_bytes
        await self._core.quotas.set(tenant, request.tier, limit)
        audit(context, "quota", tier=TIER_NAMES[request.tier], tenant=tenant, limit=limit)
        return admin.SetQuotaResponse(header=self._core.header, tenant=tenant)

    async def GetQuota(self, request: admin.GetQuotaRequest, context: Any) -> admin.GetQuotaResponse:
        digest_wanted(request.tenant)
        self._core.absorb()
        return admin.GetQuotaResponse(
            header=self._core.header,
            quotas=[
                admin.TenantQuota(
                    tenant=each.tenant,
                    tier=TIERS[each.tier],
                    backend=each.backend,
                    limit_bytes=each.limit,
                    used_bytes=each.used,
                )
                for each in self._core.quotas.listed(request.tenant)
            ],
        )

    async def Prefetch(self, request: admin.PrefetchRequest, context: Any) -> admin.PrefetchResponse:
        reply = await prefetch(self._core, request, context)
        audit(context, "prefetch", chunks=reply.asked_chunks, resident=reply.resident_chunks)
        return reply

    async def _selected(self, selector: admin.PromptSelector) -> tuple[bytes, ...]:
        core = self._core
        # Keys need no chunk size.
        chunk_size = core.binding.require() if selector.WhichOneof("prompt") == "tokens" else 0
        return await selected_keys(selector, chunk_size, core.config)


def _page_start(token: str) -> int:
    if token and not (token.isdecimal() and len(token) <= MAX_PAGE_TOKEN):
        raise InvalidArgument("page_token", "is not one that this server gave")
    return int(token or 0)


def _chunk(held: HeldChunk) -> admin.ChunkStatus:
    return admin.ChunkStatus(
        chunk_key=held.key,
        tier=TIERS[held.tier],
        backend=held.backend,
        size_bytes=held.size,
        objects=held.objects,
        complete=held.complete,
        leases=held.leases,
        pinned=held.pinned,
        model=held.model,
        tenant=held.tenant,
    )


def _tier(tier: int) -> int:
    if tier not in TIER_NAMES:
        raise InvalidArgument("tier", f"{tier} is not known to this server")
    return tier
