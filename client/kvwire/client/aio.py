"""The asynchronous client: the methods of `Client`, awaited."""

# ruff: noqa: ASYNC109 - the deadline travels with the call to the server

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc

from kvwire.client import calls, split, types
from kvwire.client.channel import ChannelConfig, TlsConfig, parse_target
from kvwire.client.connection import AioConnection
from kvwire.client.deadlines import Deadlines
from kvwire.client.state import ClientState
from kvwire.client.status import from_rpc_error, retry_delay
from kvwire.client.streams import silent
from kvwire.errors import KvwireError, Overloaded, Unavailable
from kvwire.v1 import admin_service_pb2 as admin_pb
from kvwire.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from kvwire.client.cache import AsyncKvCache, CacheOptions
    from kvwire.keys import ExtraInput, Namespace, Tokens

R = TypeVar("R")


class AsyncClient:
    """A client of one cache server for asyncio. Each event loop that uses it gets a channel of its own.

    Deadlines and errors are those of `Client`.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TlsConfig | None = None,
        token: str = "",
        client_name: str = "",
        deadlines: Mapping[str, float] | None = None,
    ) -> None:
        self.target = parse_target(address)
        self.client_name = client_name
        self.deadlines = Deadlines(deadlines)
        self.state = ClientState()
        self._connection = AioConnection(ChannelConfig(self.target, tls, token))
        self._farewells: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End calls in flight and the connection. Idempotent."""
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=1.0)
        await self._connection.close()

    def channel(self) -> grpc.aio.Channel:
        """The gRPC channel of the running loop, for other services on the same address."""
        return self._connection.channel()

    async def register_kv_caches(
        self, tensors: Any, *, model: str, block_size: int | Sequence[int], **options: Unpack[CacheOptions]
    ) -> AsyncKvCache:
        """As `Client.register_kv_caches`. The cache has a connection of its own."""
        from kvwire.client.cache import AsyncKvCache, register_kv_caches
        from kvwire.client.client import Client

        config = self._connection.config
        client = Client(
            str(self.target),
            tls=config.tls,
            token=config.token,
            client_name=self.client_name,
            deadlines=self.deadlines.as_dict(),
        )
        found = await asyncio.to_thread(register_kv_caches, client, tensors, model, block_size, options)
        return AsyncKvCache(found)

    # What follows is the contract, in its order.

    async def negotiate(
        self, required_alignment: int, *, expected: int = 0, timeout: float | None = None
    ) -> types.Negotiated:
        call = calls.negotiate(required_alignment, self.client_name, expected)
        return self.state.negotiated_with(await self._send(call, timeout))

    async def register(self, what: types.Registration, *, timeout: float | None = None) -> types.Registered:
        registered = await self._send(calls.register(what), timeout)
        self.state.num_groups = len(what.layout.groups)
        return registered

    async def unregister(self, registration_id: int, *, timeout: float | None = None) -> None:
        await self._send(calls.unregister(registration_id), timeout)

    async def attach(self, registration_id: int) -> AsyncIterator[types.AttachEvent]:
        """The stream that a registered client holds open for life. Only its first event has a deadline."""
        seconds = self.deadlines["Attach"]
        stream = self._stub().Attach(pb.AttachRequest(registration_id=registration_id))
        try:
            reply = await _read(stream, "Attach", seconds)
            while reply is not grpc.aio.EOF:
                self.state.see(reply.header.incarnation)
                yield calls.attach_event(reply)
                reply = await stream.read()
        except grpc.RpcError as exc:
            raise self._error(exc, "Attach", None) from None
        finally:
            stream.cancel()

    async def ping(self, registration_id: int = 0, *, timeout: float | None = None) -> types.Pong:
        return await self._send(calls.ping(registration_id), timeout)

    async def lookup(
        self,
        namespace: Namespace,
        tokens: Tokens | None = None,
        *,
        keys: Iterable[bytes] | None = None,
        registration_id: int = 0,
        session_id: str = "",
        extra_inputs: Iterable[ExtraInput] = (),
        timeout: float | None = None,
    ) -> types.LookupResult:
        call = self.state.lookup(
            namespace,
            tokens,
            keys,
            registration_id=registration_id,
            session_id=session_id,
            extra_inputs=extra_inputs,
        )
        return await self._send(call, timeout)

    async def release_lookup(
        self, registration_id: int, items: Sequence[types.ReleaseItem], *, timeout: float | None = None
    ) -> list[types.Released]:
        return await self._in_batches(
            items, lambda part: calls.release_lookup(registration_id, part), timeout
        )

    async def begin_store(
        self, registration_id: int, items: Sequence[types.TransferItem], *, timeout: float | None = None
    ) -> list[types.StoreGrant]:
        grants: list[types.StoreGrant] = []
        try:
            for part in split.transfer_batches(items, self.state.limits, self.state.num_groups):
                grants.extend(await self._send(calls.begin_store(registration_id, part), timeout))
        except (KvwireError, asyncio.CancelledError):
            # The caller will not hear of what earlier batches were granted.
            self.abort_quietly(registration_id, [grant.ticket.lease_id for grant in grants if grant.ticket])
            raise
        return grants

    async def commit_store(
        self, registration_id: int, items: Sequence[types.CommitItem], *, timeout: float | None = None
    ) -> list[types.Committed]:
        return await self._in_batches(items, lambda part: calls.commit_store(registration_id, part), timeout)

    async def abort_store(
        self, registration_id: int, lease_ids: Sequence[int], *, timeout: float | None = None
    ) -> list[int]:
        return await self._in_batches(
            lease_ids, lambda part: calls.abort_store(registration_id, part), timeout
        )

    async def begin_retrieve(
        self, registration_id: int, items: Sequence[types.TransferItem], *, timeout: float | None = None
    ) -> list[types.RetrieveGrant]:
        grants: list[types.RetrieveGrant] = []
        try:
            for part in split.transfer_batches(items, self.state.limits, self.state.num_groups):
                grants.extend(await self._send(calls.begin_retrieve(registration_id, part), timeout))
        except (KvwireError, asyncio.CancelledError):
            self.end_quietly(registration_id, [grant.ticket.lease_id for grant in grants if grant.ticket])
            raise
        return grants

    async def end_retrieve(
        self, registration_id: int, items: Sequence[types.EndRetrieveItem], *, timeout: float | None = None
    ) -> list[bool]:
        """Whether each lease was held all the time; only then may its bytes be used."""
        return await self._in_batches(items, lambda part: calls.end_retrieve(registration_id, part), timeout)

    async def write_chunks(
        self, pieces: AsyncIterable[pb.WriteChunksRequest], *, timeout: float | None = None
    ) -> int:
        """The inline path of a store. Returns the number of bytes that the server took."""
        seconds = timeout or self.deadlines["WriteChunks"]
        try:
            reply = await self._stub().WriteChunks(pieces, timeout=seconds)
        except grpc.RpcError as exc:
            raise self._error(exc, "WriteChunks", seconds) from None
        self.state.see(reply.header.incarnation)
        return int(reply.written_bytes)

    async def read_chunks(
        self, registration_id: int, lease_ids: Sequence[int], *, timeout: float | None = None
    ) -> AsyncIterator[pb.ReadChunksResponse]:
        """The inline path of a retrieve: pieces, in the order of leases and slots."""
        seconds = timeout or self.deadlines["ReadChunks"]
        request = pb.ReadChunksRequest(registration_id=registration_id, lease_ids=lease_ids)
        stream = self._stub().ReadChunks(request, timeout=seconds)
        try:
            async for reply in stream:
                yield reply
        except grpc.RpcError as exc:
            raise self._error(exc, "ReadChunks", seconds) from None
        finally:
            stream.cancel()

    async def end_sessions(
        self, registration_id: int, session_ids: Sequence[str], *, timeout: float | None = None
    ) -> int:
        """End sessions and their lookup leases. Returns how many were there."""
        ended = 0
        for part in split.batches(session_ids, self.state.limits):
            ended += await self._send(calls.end_sessions(registration_id, part), timeout)
        return ended

    async def subscribe_kv_events(
        self, namespace: Namespace | None = None, *, resume_after: int = 0, from_oldest: bool = False
    ) -> AsyncIterator[types.KvEvents]:
        """What is stored and removed, without an end: close the generator to stop."""
        request = pb.SubscribeKvEventsRequest(resume_after=resume_after, from_oldest=from_oldest)
        if namespace is not None:
            request.namespace.CopyFrom(calls.namespace_message(namespace))
        seconds = self.deadlines["SubscribeKvEvents"]
        stream = self._stub().SubscribeKvEvents(request)
        try:
            while (reply := await _read(stream, "SubscribeKvEvents", seconds)) is not grpc.aio.EOF:
                self.state.see(reply.header.incarnation)
                yield calls.kv_events(reply)
        except grpc.RpcError as exc:
            raise self._error(exc, "SubscribeKvEvents", None) from None
        finally:
            stream.cancel()

    async def status(self, *, timeout: float | None = None) -> admin_pb.GetStatusResponse:
        """The state of the server, as the message of the contract."""
        call = calls.admin("GetStatus", admin_pb.GetStatusRequest(), admin_pb.GetStatusResponse)
        return await self._send(call, timeout)

    async def list_sessions(self, *, page_size: int = 0) -> AsyncIterator[admin_pb.SessionStatus]:
        token = ""
        while True:
            request = admin_pb.ListSessionsRequest(page_size=page_size, page_token=token)
            reply = await self._send(calls.admin("ListSessions", request, admin_pb.ListSessionsResponse))
            for session in reply.sessions:
                yield session
            token = reply.next_page_token
            if not token:
                return

    async def list_objects(
        self, *, tenant: str = "", page_size: int = 0
    ) -> AsyncIterator[admin_pb.ChunkStatus]:
        token = ""
        while True:
            request = admin_pb.ListObjectsRequest(tenant=tenant, page_size=page_size, page_token=token)
            reply = await self._send(calls.admin("ListObjects", request, admin_pb.ListObjectsResponse))
            for chunk in reply.chunks:
                yield chunk
            token = reply.next_page_token
            if not token:
                return

    async def clear(
        self, namespace: Namespace | None = None, *, timeout: float | None = None
    ) -> admin_pb.ClearResponse:
        """Drop everything that is neither leased nor pinned, of one model if its namespace is given."""
        return await self._send(calls.clear(namespace), timeout)

    def abort_quietly(self, registration_id: int, lease_ids: Sequence[int]) -> None:
        """Give up write leases without waiting for the answer: the server's own deadline is behind it."""
        if lease_ids:
            self._send_quietly(calls.abort_store(registration_id, lease_ids))

    def end_quietly(self, registration_id: int, lease_ids: Sequence[int]) -> None:
        if lease_ids:
            items = [types.EndRetrieveItem(lease_id) for lease_id in lease_ids]
            self._send_quietly(calls.end_retrieve(registration_id, items))

    def _stub(self) -> Any:
        return self._connection.stub("CacheService")

    def _error(self, exc: grpc.RpcError, method: str, seconds: float | None) -> KvwireError:
        return from_rpc_error(exc, address=str(self.target), method=method, seconds=seconds)

    async def _send(self, call: calls.Call[R], timeout: float | None = None) -> R:
        seconds = timeout or self.deadlines[call.method]
        try:
            return await self._send_once(call, seconds)
        except (Unavailable, Overloaded) as error:
            delay = retry_delay(error)
            if not call.is_read or seconds <= delay:
                raise
        await asyncio.sleep(delay)
        return await self._send_once(call, seconds - delay)

    async def _send_once(self, call: calls.Call[R], seconds: float) -> R:
        method = getattr(self._connection.stub(call.service), call.method)
        sent = time.monotonic()
        try:
            reply = await method(call.request, timeout=seconds)
        except grpc.RpcError as exc:
            raise self._error(exc, call.method, seconds) from None
        except grpc.aio.UsageError:
            raise Unavailable(f"This client of {self.target} is closed: make a new one.") from None
        self.state.see(reply.header.incarnation)
        return call.parse(reply, sent)

    def _send_quietly(self, call: calls.Call[Any]) -> None:
        async def farewell() -> None:
            try:
                await self._send_once(call, self.deadlines[call.method])
            except KvwireError:
                return

        task = asyncio.get_running_loop().create_task(farewell())
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _in_batches(
        self,
        items: Sequence[Any],
        make: Callable[[Sequence[Any]], calls.Call[list[R]]],
        timeout: float | None,
    ) -> list[R]:
        results: list[R] = []
        for part in split.batches(items, self.state.limits):
            results.extend(await self._send(make(part), timeout))
        return results


async def _read(stream: Any, method: str, seconds: float) -> Any:
    try:
        return await asyncio.wait_for(stream.read(), seconds)
    except TimeoutError:
        raise silent(method, seconds) from None
