"""The calls that stream: Attach, the inline path, KV events."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Self, cast

from kvwire.errors import DataPathUnavailable, Draining, InvalidArgument, NotRegistered, TransferTimeout
from kvwire.keys import Namespace, root
from kvwire.server import convert
from kvwire.server.limits import check_batch
from kvwire.v1 import cache_service_pb2 as cache
from kvwire.v1 import event_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvwire.server.core import Core
    from kvwire.server.dataplane.inline import InlinePath
    from kvwire.server.eventlog import LoggedEvent

IDLE_S: Final = 15.0
"""Between signs of life on a stream of KV events that has no news."""

_EVENT_KINDS: Final = {
    "store": event_pb2.CACHE_EVENT_KIND_STORE,
    "delete": event_pb2.CACHE_EVENT_KIND_DELETE,
    "clear": event_pb2.CACHE_EVENT_KIND_CLEAR,
}


class Streams:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._engine = core.engine

    async def attach(self, request: cache.AttachRequest) -> AsyncIterator[cache.AttachResponse]:
        """Open for the client's life. Its end, from either side, is the end of the registration."""
        core, registration_id = self._core, request.registration_id
        client = core.clients.get(registration_id)
        if client is None or not self._engine.ping(registration_id, core.now()):
            raise _not_registered(registration_id)
        client.streams += 1
        try:
            yield cache.AttachResponse(header=core.header, attached=cache.Attached())
            if await self._until_news(client.gone):
                raise _not_registered(registration_id)
            yield cache.AttachResponse(
                header=core.header,
                draining=cache.ServerDraining(stops_in=convert.duration(core.config.drain)),
            )
            await client.gone.wait()
        finally:
            client.streams -= 1
            core.absorb()
            if not client.attached and self._engine.disconnect(registration_id, core.now()):
                core.left(registration_id)
                core.settle()

    async def write_chunks(
        self, pieces: AsyncIterator[cache.WriteChunksRequest]
    ) -> cache.WriteChunksResponse:
        core = self._core
        path, registration_id, written = self._inline(), 0, 0
        checked: set[int] = set()
        async for piece in _prompt(pieces, core.config.write_lease):
            registration_id = registration_id or piece.registration_id
            if piece.lease_id not in checked:
                self._engine.live_lease(registration_id, piece.lease_id, core.now())
                checked.add(piece.lease_id)
            written += path.write(piece.lease_id, piece.slot, piece.offset, piece.data)
        if not registration_id:
            raise InvalidArgument("registration_id", "is not set in the first message")
        return cache.WriteChunksResponse(header=core.header, written_bytes=written)

    async def read_chunks(self, request: cache.ReadChunksRequest) -> AsyncIterator[cache.ReadChunksResponse]:
        core = self._core
        path = self._inline()
        check_batch("lease_ids", request.lease_ids, core.config)
        if not self._engine.ping(request.registration_id, core.now()):
            raise _not_registered(request.registration_id)
        header: Any = core.header
        with _Patience(core.config.read_lease) as patience:
            for lease_id in request.lease_ids:
                self._engine.live_lease(request.registration_id, lease_id, core.now())
                for slot, offset, data in path.read(lease_id):
                    yield cache.ReadChunksResponse(
                        header=header, lease_id=lease_id, slot=slot, offset=offset, data=data
                    )
                    header = None
                    patience.renew()

    async def kv_events(
        self, request: cache.SubscribeKvEventsRequest
    ) -> AsyncIterator[cache.SubscribeKvEventsResponse]:
        core = self._core
        wanted = b""
        if request.HasField("namespace"):
            wanted = _base_root(convert.namespace(request.namespace), core.binding.require())
        start = 0 if request.from_oldest else request.resume_after or core.events.sequence
        async for page in core.events.follow(start, IDLE_S):
            events = [
                _event(each) for each in page.events if not wanted or each.namespace_id in (wanted, b"")
            ]
            yield cache.SubscribeKvEventsResponse(
                header=core.header, sequence=page.sequence, lost=page.lost, events=events
            )
        raise Draining("The server is shutting down: subscribe again when it is back.")

    async def _until_news(self, gone: asyncio.Event) -> bool:
        """Wait until the registration is gone (True) or the server begins to stop (False)."""
        stopping = self._core.stopping
        waiting = [asyncio.ensure_future(event.wait()) for event in (gone, stopping)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        return not stopping.is_set()

    def _inline(self) -> InlinePath:
        path = self._core.plane.paths.get("inline")
        if path is None:
            raise DataPathUnavailable(
                "The inline path is switched off here (--data-paths).", offered="inline"
            )
        return cast("InlinePath", path)


class _Patience:
    """Ends the call that it was made in when `renew` is not called in time: nobody takes its messages.

    A status would have to queue behind them, so the client meets its own deadline.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self.renew()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def renew(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._task.cancel)


async def _prompt(
    pieces: AsyncIterator[cache.WriteChunksRequest], seconds: float
) -> AsyncIterator[cache.WriteChunksRequest]:
    """The pieces, each in time: a stream on which none comes would take a call's place for ever."""
    try:
        while True:
            yield await asyncio.wait_for(anext(pieces), seconds)
    except StopAsyncIteration:
        return
    except TimeoutError:
        raise TransferTimeout(
            f"No piece has come for {seconds:g} s.", path="inline", seconds=f"{seconds:g}"
        ) from None


def _event(event: LoggedEvent) -> event_pb2.CacheEvent:
    return event_pb2.CacheEvent(
        kind=_EVENT_KINDS[event.kind],
        chunk_key=event.key,
        tier=event_pb2.STORAGE_TIER_L1,
        backend="memory",
        size_bytes=event.size_bytes,
        parent_key=event.parent,
        namespace_root=event.root,
    )


def _base_root(namespace: Namespace, chunk_size: int) -> bytes:
    base = Namespace(
        model=namespace.model,
        revision=namespace.revision,
        kv_dtype=namespace.kv_dtype,
        layout_fingerprint=namespace.layout_fingerprint,
    )
    return root(base, chunk_size)


def _not_registered(registration_id: int) -> NotRegistered:
    return NotRegistered(
        f"Registration {registration_id} is not known to this server any more: negotiate and register again.",
        registration_id=registration_id,
    )
