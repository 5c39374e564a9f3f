"""The synchronous client: one method per call of the contract."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

import grpc

from kvwire.client import calls, split, streams, types
from kvwire.client.channel import ChannelConfig, TlsConfig, parse_target
from kvwire.client.connection import Connection
from kvwire.client.deadlines import Deadlines
from kvwire.client.state import ClientState
from kvwire.client.status import from_rpc_error, retry_delay, stuck
from kvwire.errors import KvwireError, Overloaded, Unavailable
from kvwire.v1 import admin_service_pb2 as admin_pb
from kvwire.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from kvwire.client.cache import CacheOptions, KvCache
    from kvwire.keys import ExtraInput, Namespace, Tokens

R = TypeVar("R")

_STUCK_S: Final = 0.5
"""gRPC ends a call whose time is up when its connection has taken what was written: never, where the other
side does not read. So long it is waited for, and then left alone."""


class Client:
    """A client of one cache server. Safe to use from several threads, and in a process that forks.

    Every call has a deadline, from one table (`DEADLINES`) unless `timeout` says otherwise, and raises a
    `KvwireError`. Batches above the server's limits go out as several calls.
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
        config = ChannelConfig(self.target, tls, token)
        self._connection = Connection(config)
        # A connection that takes no more bytes holds up all calls on it, beyond their deadlines.
        self._bulk = Connection(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End calls in flight and the connection. Idempotent."""
        self._connection.close()
        self._bulk.close()

    def reset(self) -> None:
        """End calls in flight and connect anew at the next call."""
        self._connection.reset()
        self._bulk.reset()

    def clone(self) -> Client:
        """Another client of the same server, with a connection of its own."""
        config = self._connection.config
        return Client(
            str(self.target),
            tls=config.tls,
            token=config.token,
            client_name=self.client_name,
            deadlines=self.deadlines.as_dict(),
        )

    def channel(self) -> grpc.Channel:
        """The gRPC channel, for other services on the same address."""
        return self._connection.channel()

    def register_kv_caches(
        self, tensors: Any, *, model: str, block_size: int | Sequence[int], **options: Unpack[CacheOptions]
    ) -> KvCache:
        """Connect an engine's KV caches: negotiate, register, prove a data path. Raises what went wrong.

        `tensors` (torch or numpy) have blocks of `block_size` tokens as their first dimension: a mapping or a
        sequence by layer, or a sequence of such, one for each KV group.
        """
        from kvwire.client.cache import register_kv_caches

        return register_kv_caches(self, tensors, model, block_size, options)

    # What follows is the contract, in its order.

    def negotiate(
        self, required_alignment: int, *, expected: int = 0, timeout: float | None = None
    ) -> types.Negotiated:
        """The server's chunk size, fixed by the first client for the life of the server.

        `expected` is the only size that the caller can use, 0 for any: a server with another one refuses and
        binds nothing. One of an older version answers with its size.
        """
        call = calls.negotiate(required_alignment, self.client_name, expected)
        return self.state.negotiated_with(self._send(call, timeout))

    def register(self, what: types.Registration, *, timeout: float | None = None) -> types.Registered:
        registered = self._send(calls.register(what), timeout)
        self.state.num_groups = len(what.layout.groups)
        return registered

    def unregister(self, registration_id: int, *, timeout: float | None = None) -> None:
        self._send(calls.unregister(registration_id), timeout)

    def attach(self, registration_id: int) -> streams.AttachStream:
        """The stream that a registered client holds open for life. Only its first event has a deadline."""
        request = pb.AttachRequest(registration_id=registration_id)
        stream = self._stub().Attach(request)
        return streams.AttachStream(stream, self.state, self._error, self.deadlines["Attach"])

    def ping(self, registration_id: int = 0, *, timeout: float | None = None) -> types.Pong:
        return self._send(calls.ping(registration_id), timeout)

    def lookup(
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
        """How much of a prompt the server has. With a registration it is leased for the session."""
        call = self.state.lookup(
            namespace,
            tokens,
            keys,
            registration_id=registration_id,
            session_id=session_id,
            extra_inputs=extra_inputs,
        )
        return self._send(call, timeout)

    def lookup_future(
        self,
        namespace: Namespace,
        tokens: Tokens | None = None,
        *,
        keys: Iterable[bytes] | None = None,
        registration_id: int = 0,
        session_id: str = "",
        extra_inputs: Iterable[ExtraInput] = (),
        timeout: float | None = None,
    ) -> Future[types.LookupResult]:
        """As `lookup`, without waiting. Cancelling the future cancels the call."""
        call = self.state.lookup(
            namespace,
            tokens,
            keys,
            registration_id=registration_id,
            session_id=session_id,
            extra_inputs=extra_inputs,
        )
        return self._send_later(call, timeout)

    def release_lookup(
        self, registration_id: int, items: Sequence[types.ReleaseItem], *, timeout: float | None = None
    ) -> list[types.Released]:
        return self._in_batches(items, lambda part: calls.release_lookup(registration_id, part), timeout)

    def begin_store(
        self, registration_id: int, items: Sequence[types.TransferItem], *, timeout: float | None = None
    ) -> list[types.StoreGrant]:
        grants: list[types.StoreGrant] = []
        try:
            for part in split.transfer_batches(items, self.state.limits, self.state.num_groups):
                grants.extend(self._send(calls.begin_store(registration_id, part), timeout))
        except KvwireError:
            # The caller will not hear of what earlier batches were granted.
            self.abort_quietly(registration_id, [grant.ticket.lease_id for grant in grants if grant.ticket])
            raise
        return grants

    def commit_store(
        self, registration_id: int, items: Sequence[types.CommitItem], *, timeout: float | None = None
    ) -> list[types.Committed]:
        return self._in_batches(items, lambda part: calls.commit_store(registration_id, part), timeout)

    def abort_store(
        self, registration_id: int, lease_ids: Sequence[int], *, timeout: float | None = None
    ) -> list[int]:
        return self._in_batches(lease_ids, lambda part: calls.abort_store(registration_id, part), timeout)

    def begin_retrieve(
        self, registration_id: int, items: Sequence[types.TransferItem], *, timeout: float | None = None
    ) -> list[types.RetrieveGrant]:
        grants: list[types.RetrieveGrant] = []
        try:
            for part in split.transfer_batches(items, self.state.limits, self.state.num_groups):
                grants.extend(self._send(calls.begin_retrieve(registration_id, part), timeout))
        except KvwireError:
            self.end_quietly(registration_id, [grant.ticket.lease_id for grant in grants if grant.ticket])
            raise
        return grants

    def end_retrieve(
        self, registration_id: int, items: Sequence[types.EndRetrieveItem], *, timeout: float | None = None
    ) -> list[bool]:
        """Whether each lease was held all the time; only then may its bytes be used."""
        return self._in_batches(items, lambda part: calls.end_retrieve(registration_id, part), timeout)

    def write_chunks(self, pieces: Iterator[pb.WriteChunksRequest], *, timeout: float | None = None) -> int:
        """The inline path of a store. Returns the number of bytes that the server took."""
        seconds = timeout or self.deadlines["WriteChunks"]
        call = self._bulk.stub("CacheService").WriteChunks.future(pieces, timeout=seconds)
        try:
            reply = call.result(seconds + _STUCK_S)
        except (grpc.RpcError, grpc.FutureCancelledError) as exc:
            raise self._late_error(exc, "WriteChunks", seconds) from None
        except grpc.FutureTimeoutError:
            call.cancel()
            self._bulk.reset()
            raise stuck(str(self.target), "WriteChunks", seconds) from None
        self.state.see(reply.header.incarnation)
        return int(reply.written_bytes)

    def read_chunks(
        self, registration_id: int, lease_ids: Sequence[int], *, timeout: float | None = None
    ) -> Generator[pb.ReadChunksResponse]:
        """The inline path of a retrieve: pieces, in the order of leases and slots."""
        seconds = timeout or self.deadlines["ReadChunks"]
        request = pb.ReadChunksRequest(registration_id=registration_id, lease_ids=lease_ids)
        stream = self._bulk.stub("CacheService").ReadChunks(request, timeout=seconds)
        try:
            yield from stream
        except grpc.RpcError as exc:
            raise self._error(exc, "ReadChunks", seconds) from None
        finally:
            stream.cancel()

    def end_sessions(
        self, registration_id: int, session_ids: Sequence[str], *, timeout: float | None = None
    ) -> int:
        """End sessions and their lookup leases. Returns how many were there."""
        parts = split.batches(session_ids, self.state.limits)
        return sum(self._send(calls.end_sessions(registration_id, part), timeout) for part in parts)

    def subscribe_kv_events(
        self, namespace: Namespace | None = None, *, resume_after: int = 0, from_oldest: bool = False
    ) -> Generator[types.KvEvents]:
        """What is stored and removed, without an end: close the generator to stop. It begins after
        `resume_after`, with the oldest event that the server remembers, or with the next one.

        Its deadline is for the time between two messages; a server that has no news sends signs of life.
        """
        request = pb.SubscribeKvEventsRequest(resume_after=resume_after, from_oldest=from_oldest)
        if namespace is not None:
            request.namespace.CopyFrom(calls.namespace_message(namespace))
        stream = self._stub().SubscribeKvEvents(request)
        return streams.kv_events(stream, self.state, self._error, self.deadlines["SubscribeKvEvents"])

    def status(self, *, timeout: float | None = None) -> admin_pb.GetStatusResponse:
        """The state of the server, as the message of the contract."""
        call = calls.admin("GetStatus", admin_pb.GetStatusRequest(), admin_pb.GetStatusResponse)
        return self._send(call, timeout)

    def list_sessions(self, *, page_size: int = 0) -> Iterator[admin_pb.SessionStatus]:
        token = ""
        while True:
            request = admin_pb.ListSessionsRequest(page_size=page_size, page_token=token)
            reply = self._send(calls.admin("ListSessions", request, admin_pb.ListSessionsResponse))
            yield from reply.sessions
            token = reply.next_page_token
            if not token:
                return

    def list_objects(self, *, tenant: str = "", page_size: int = 0) -> Iterator[admin_pb.ChunkStatus]:
        token = ""
        while True:
            request = admin_pb.ListObjectsRequest(tenant=tenant, page_size=page_size, page_token=token)
            reply = self._send(calls.admin("ListObjects", request, admin_pb.ListObjectsResponse))
            yield from reply.chunks
            token = reply.next_page_token
            if not token:
                return

    def clear(
        self, namespace: Namespace | None = None, *, timeout: float | None = None
    ) -> admin_pb.ClearResponse:
        """Drop everything that is neither leased nor pinned, of one model if its namespace is given."""
        return self._send(calls.clear(namespace), timeout)

    def abort_quietly(self, registration_id: int, lease_ids: Sequence[int]) -> None:
        """Give up write leases without waiting for the answer: the server's own deadline is behind it."""
        if lease_ids:
            self._send_quietly(calls.abort_store(registration_id, lease_ids))

    def end_quietly(self, registration_id: int, lease_ids: Sequence[int]) -> None:
        if lease_ids:
            items = [types.EndRetrieveItem(lease_id) for lease_id in lease_ids]
            self._send_quietly(calls.end_retrieve(registration_id, items))

    def release_quietly(self, registration_id: int, items: Sequence[types.ReleaseItem]) -> None:
        self._send_quietly(calls.release_lookup(registration_id, items))

    def end_sessions_quietly(self, registration_id: int, session_ids: Sequence[str]) -> None:
        self._send_quietly(calls.end_sessions(registration_id, session_ids))

    def _stub(self) -> Any:
        return self._connection.stub("CacheService")

    def _error(self, exc: grpc.RpcError, method: str, seconds: float | None) -> KvwireError:
        return from_rpc_error(exc, address=str(self.target), method=method, seconds=seconds)

    def _send(self, call: calls.Call[R], timeout: float | None = None) -> R:
        seconds = timeout or self.deadlines[call.method]
        try:
            return self._send_once(call, seconds)
        except (Unavailable, Overloaded) as error:
            delay = retry_delay(error)
            if not call.is_read or seconds <= delay:
                raise
        time.sleep(delay)
        return self._send_once(call, seconds - delay)

    def _send_once(self, call: calls.Call[R], seconds: float) -> R:
        method = getattr(self._connection.stub(call.service), call.method)
        sent = time.monotonic()
        try:
            reply = method(call.request, timeout=seconds)
        except grpc.RpcError as exc:
            raise self._error(exc, call.method, seconds) from None
        except ValueError:
            # What a channel says that was closed in the meantime.
            raise Unavailable(f"The connection to {self.target} was closed.") from None
        self.state.see(reply.header.incarnation)
        return call.parse(reply, sent)

    def _send_later(self, call: calls.Call[R], timeout: float | None) -> Future[R]:
        seconds = timeout or self.deadlines[call.method]
        sent = time.monotonic()
        rpc = getattr(self._connection.stub(call.service), call.method).future(call.request, timeout=seconds)
        future: Future[R] = Future()

        def finish(done: Any) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                reply = done.result()
                self.state.see(reply.header.incarnation)
                future.set_result(call.parse(reply, sent))
            except (grpc.RpcError, grpc.FutureCancelledError) as exc:
                future.set_exception(self._late_error(exc, call.method, seconds))
            except Exception as exc:  # noqa: BLE001 - a future that is never done would park its request for ever
                future.set_exception(exc)

        rpc.add_done_callback(finish)
        future.add_done_callback(lambda done: rpc.cancel() if done.cancelled() else None)
        return future

    def _late_error(self, exc: Exception, method: str, seconds: float) -> KvwireError:
        if isinstance(exc, grpc.RpcError):
            return self._error(exc, method, seconds)
        return Unavailable(f"{method} at {self.target} was cancelled: the client was closed.")

    def _send_quietly(self, call: calls.Call[Any]) -> None:
        with contextlib.suppress(KvwireError, grpc.RpcError, ValueError):
            self._send_later(call, None)

    def _in_batches(
        self,
        items: Sequence[Any],
        make: Callable[[Sequence[Any]], calls.Call[list[R]]],
        timeout: float | None,
    ) -> list[R]:
        results: list[R] = []
        for part in split.batches(items, self.state.limits):
            results.extend(self._send(make(part), timeout))
        return results
