"""What operators want of every server: pins and quotas, kept here and told to the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire.coordinator import convert
from kvwire.coordinator.steps import in_slices
from kvwire.errors import InvalidArgument
from kvwire.serving.auditing import audit
from kvwire.serving.intents import IntentStore
from kvwire.serving.requests import refusing
from kvwire.serving.state import StateFolder, no_state
from kvwire.serving.tenants import digest_wanted, tenant_name
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc, cache_service_pb2, event_pb2
from kvwire.v1 import coordinator_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvwire.coordinator.core import Core

TIERS = (event_pb2.STORAGE_TIER_L1, event_pb2.STORAGE_TIER_L2)


class Intentions:
    """A part of the coordinator: the state folder and what is in it. Without --state it only refuses."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.folder: StateFolder | None = None
        self._store: IntentStore | None = None

    async def start(self) -> None:
        """Raises ConfigError."""
        if not self._core.config.state:
            return
        self.folder = StateFolder(self._core.config.state)
        try:
            self._store = IntentStore(self.folder)
        except BaseException:
            self.folder.close()
            raise
        self._core.intent_revision = self._store.revision

    async def stop(self) -> None:
        if self._store is not None:
            await self._store.close()
        if self.folder is not None:
            self.folder.close()

    def store(self) -> IntentStore:
        """Raises StateUnavailable."""
        if self._store is None:
            raise no_state()
        return self._store

    async def pin(self, keys: list[bytes]) -> int:
        """Returns how many distinct keys. Raises as `IntentStore.pin`."""
        await self.store().pin(keys)
        self._tell()
        return len(set(keys))

    async def unpin(self, keys: list[bytes]) -> int:
        unpinned = await self.store().unpin(keys)
        self._tell()
        return unpinned

    async def set_quota(self, tenant: str, tier: int, limit: int) -> None:
        await self.store().set_quota(tenant, tier, limit)
        self._tell()

    def all(self) -> pb.GetIntentsResponse:
        if self._store is None:
            return pb.GetIntentsResponse()
        intents = self._store.intents
        return pb.GetIntentsResponse(
            revision=intents.revision,
            pinned_keys=intents.pins,
            quotas=[
                pb.QuotaIntent(tenant=tenant, tier=tier_number(tier), limit_bytes=limit)
                for (tenant, tier), limit in sorted(intents.quotas.items())
            ],
        )

    def _tell(self) -> None:
        # Servers see another revision in the answer to their next heartbeat.
        self._core.intent_revision = self.store().revision


def tier_number(tier: int) -> Any:
    return tier


def not_served(method: str) -> Callable[[Any, Any, Any], Awaitable[Any]]:
    text = f"A coordinator does not serve {method}: ask a cache server; `kvwire members` lists them."
    return refusing(method, text)


class AdminService(admin_service_pb2_grpc.AdminServiceServicer):
    """Pins and quotas of the fleet. The rest of the service is a cache server's."""

    def __init__(self, core: Core, intentions: Intentions) -> None:
        self._core = core
        self._intentions = intentions
        self._header = cache_service_pb2.ResponseHeader(incarnation=core.incarnation)

    async def Pin(self, request: admin.PinRequest, context: Any) -> admin.PinResponse:
        self._intentions.store()
        pinned = await self._intentions.pin(await self._keys(request.selector))
        audit(context, "pin", chunks=pinned)
        return admin.PinResponse(header=self._header, pinned_chunks=pinned)

    async def Unpin(self, request: admin.UnpinRequest, context: Any) -> admin.UnpinResponse:
        self._intentions.store()
        unpinned = await self._intentions.unpin(await self._keys(request.selector))
        audit(context, "unpin", chunks=unpinned)
        return admin.UnpinResponse(header=self._header, unpinned_chunks=unpinned)

    async def SetQuota(self, request: admin.SetQuotaRequest, context: Any) -> admin.SetQuotaResponse:
        tenant = tenant_name(request.salt, request.tenant)
        if request.tier not in TIERS:
            raise InvalidArgument("tier", "is not set, or not known to this coordinator")
        await self._intentions.set_quota(tenant, request.tier, request.limit_bytes)
        audit(context, "quota", tier=f"L{request.tier}", tenant=tenant, limit=request.limit_bytes)
        return admin.SetQuotaResponse(header=self._header, tenant=tenant)

    async def GetQuota(self, request: admin.GetQuotaRequest, context: Any) -> admin.GetQuotaResponse:
        digest_wanted(request.tenant)
        quotas = self._intentions.store().intents.quotas
        return admin.GetQuotaResponse(
            header=self._header,
            quotas=[
                admin.TenantQuota(tenant=tenant, tier=tier_number(tier), limit_bytes=limit)
                for (tenant, tier), limit in sorted(quotas.items())
                if request.tenant in {"", tenant}
            ],
        )

    GetStatus: Any = not_served("GetStatus")
    ListSessions: Any = not_served("ListSessions")
    ListObjects: Any = not_served("ListObjects")
    Clear: Any = not_served("Clear")
    Prefetch: Any = not_served("Prefetch")
    Evict: Any = not_served("Evict")

    async def _keys(self, selector: admin.PromptSelector) -> list[bytes]:
        """By the fleet's chunk size. Raises InvalidArgument, TooManyItems, ChunkSizeNotNegotiated."""
        fleet, limit = self._core.fleet, self._core.config.max_keys
        which = selector.WhichOneof("prompt")
        if which is None:
            raise InvalidArgument("selector.prompt", "is not set: give tokens or chunk_keys")
        if which == "chunk_keys":
            convert.check_count("chunk_keys", len(selector.chunk_keys.keys), limit)
            return list(selector.chunk_keys.keys)
        chunks = len(selector.tokens) // 4 // max(fleet.members.chunk_size, 1)
        convert.check_count("chunks of tokens", chunks, limit)
        return await in_slices(fleet.keys_steps(convert.namespace(selector.namespace), selector.tokens))
