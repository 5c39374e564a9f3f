"""AdminService: what operators see. Methods that come with tiers and quotas answer NOT_SERVED."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import InvalidArgument
from kvwire.server import convert
from kvwire.server.pinning import selected_keys
from kvwire.server.statusview import status_reply
from kvwire.server.unserved import not_served
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc, event_pb2

if TYPE_CHECKING:
    from kvwire.server.core import Core

log = logging.getLogger("kvwire.server")

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
MAX_PAGE_TOKEN: Final = 20
MEMORY_TIERS: Final = (event_pb2.STORAGE_TIER_UNSPECIFIED, event_pb2.STORAGE_TIER_L1)


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

    async def Clear(self, request: admin.ClearRequest, context: Any) -> admin.ClearResponse:
        namespace = convert.namespace(request.namespace) if request.HasField("namespace") else None
        core = self._core
        core.absorb()
        # What is asked of a tier that this server does not have is done.
        cleared, kept = core.engine.clear(namespace) if request.tier in MEMORY_TIERS else (0, 0)
        log.info("cleared %d chunks, kept %d", cleared, kept)
        return admin.ClearResponse(header=core.header, cleared_chunks=cleared, kept_chunks=kept)

    async def Pin(self, request: admin.PinRequest, context: Any) -> admin.PinResponse:
        core = self._core
        pinned = await core.pinning.pin(await self._selected(request.selector))
        log.info("pinned %d chunks", pinned)
        return admin.PinResponse(header=core.header, pinned_chunks=pinned)

    async def Unpin(self, request: admin.UnpinRequest, context: Any) -> admin.UnpinResponse:
        core = self._core
        unpinned = await core.pinning.unpin(await self._selected(request.selector))
        log.info("unpinned %d chunks", unpinned)
        return admin.UnpinResponse(header=core.header, unpinned_chunks=unpinned)

    ListObjects: Any = not_served("ListObjects")
    SetQuota: Any = not_served("SetQuota")
    GetQuota: Any = not_served("GetQuota")
    Prefetch: Any = not_served("Prefetch")
    Evict: Any = not_served("Evict")

    async def _selected(self, selector: admin.PromptSelector) -> tuple[bytes, ...]:
        core = self._core
        # Keys need no chunk size.
        chunk_size = core.binding.require() if selector.WhichOneof("prompt") == "tokens" else 0
        return await selected_keys(selector, chunk_size, core.config)


def _page_start(token: str) -> int:
    if token and not (token.isdecimal() and len(token) <= MAX_PAGE_TOKEN):
        raise InvalidArgument("page_token", "is not one that this server gave")
    return int(token or 0)
