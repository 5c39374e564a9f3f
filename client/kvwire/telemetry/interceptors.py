"""RPC spans by OpenTelemetry's current conventions, for both sides of gRPC. Imported while tracing is on.

Attributes: rpc.system.name, rpc.method (full name), rpc.response.status_code (the code's name), error.type,
and on the client server.address and server.port. Requests and replies are never looked at.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import grpc
from opentelemetry import context as otel_context
from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

PROPAGATOR: Final = TraceContextTextMapPropagator()

UNTRACED: Final = (
    "/kvwire.v1.CacheService/Ping",
    "/kvwire.v1.CacheService/Attach",
    "/kvwire.v1.CoordinatorService/Heartbeat",
    "/kvwire.v1.CoordinatorService/ReportEvents",
    "/kvwire.v1.CoordinatorService/WatchServers",
    "/kvwire.v1.CoordinatorService/WatchEvents",
    "/grpc.",
)
"""Life signs, streams that stay open for a client's life, health, reflection: their spans tell nothing."""
SERVER_ERRORS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Codes that blame the server; on a client every code but OK is an error."""

Metadata = tuple[tuple[str, str | bytes], ...]


def traced(method: str) -> bool:
    return not method.startswith(UNTRACED) and not method.endswith("/SubscribeKvEvents")


def finish(span: Span, code: str, details: str = "", *, server: bool) -> None:
    """Record how a call ended and end its span."""
    span.set_attribute("rpc.response.status_code", code)
    if code in SERVER_ERRORS or (not server and code != "OK"):
        span.set_attribute("error.type", code)
        span.set_status(StatusCode.ERROR, details or None)
    span.end()


def call_attributes(method: str) -> dict[str, AttributeValue]:
    return {"rpc.system.name": "grpc", "rpc.method": method.lstrip("/")}


class ServerTracing(grpc.aio.ServerInterceptor):
    """A server span around every handler, the child of the caller's span where the metadata names one."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._wrapped: dict[str, tuple[Any, grpc.RpcMethodHandler[Any, Any]]] = {}

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        method = handler_call_details.method
        handler: grpc.RpcMethodHandler[Any, Any] | None = await continuation(handler_call_details)
        if handler is None or not traced(method):
            return handler
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = (handler, self.wrap(method, handler))
        return known[1]

    def wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """The same handler with a span around it. `method` is "/package.Service/Method"."""
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        inner = getattr(handler, kind)
        around = self._generator if inspect.isasyncgenfunction(inner) else self._coroutine
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(around(method, inner), handler.request_deserializer, handler.response_serializer)  # type: ignore[no-any-return]

    def _start(self, method: str, context: Any) -> Span:
        parent = PROPAGATOR.extract(_carrier(context.invocation_metadata()), otel_context.get_current())
        return self._tracer.start_span(
            method.lstrip("/"), parent, SpanKind.SERVER, attributes=call_attributes(method)
        )

    def _coroutine(self, method: str, inner: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            span = self._start(method, context)
            token = otel_context.attach(set_span_in_context(span))
            raised: BaseException | None = None
            try:
                return await inner(request, context)
            except BaseException as error:
                raised = error
                raise
            finally:
                otel_context.detach(token)
                finish(span, *_outcome(context, raised), server=True)

        return call

    def _generator(self, method: str, inner: Any) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            span = self._start(method, context)
            here = set_span_in_context(span)
            raised: BaseException | None = None
            replies = inner(request, context)
            try:
                while True:
                    # Attached step by step: another task may close the generator, with a context of its own.
                    token = otel_context.attach(here)
                    try:
                        reply = await anext(replies)
                    except StopAsyncIteration:
                        break
                    finally:
                        otel_context.detach(token)
                    yield reply
            except BaseException as error:
                raised = error
                raise
            finally:
                finish(span, *_outcome(context, raised), server=True)

        return call


class ClientTracing(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """A client span around every call of a synchronous channel; the metadata names it to the server."""

    def __init__(self, tracer: Tracer, address: str = "") -> None:
        self._tracer = tracer
        self._peer = peer_attributes(address)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._intercept(continuation, client_call_details, request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._intercept(continuation, client_call_details, request)

    def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return self._intercept(continuation, client_call_details, request_iterator)

    def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return self._intercept(continuation, client_call_details, request_iterator)

    def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        if not traced(details.method):
            return continuation(details, request)
        span, metadata = start_call(self._tracer, self._peer, details)
        try:
            call = continuation(_Details.of(details, metadata), request)
        except BaseException as error:
            finish(span, "UNKNOWN", type(error).__qualname__, server=False)
            raise
        call.add_done_callback(lambda done: _finish_call(span, done))
        return call


class _AioTracing:
    """What the four kinds of asynchronous calls have in common."""

    def __init__(self, tracer: Tracer, peer: Mapping[str, AttributeValue]) -> None:
        self._tracer = tracer
        self._peer = peer
        self._ending: set[asyncio.Task[None]] = set()

    async def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        if not traced(_text(details.method)):
            return await continuation(details, request)
        span, metadata = start_call(self._tracer, self._peer, details)
        told = grpc.aio.ClientCallDetails(
            details.method,
            details.timeout,
            grpc.aio.Metadata(*metadata),
            details.credentials,
            details.wait_for_ready,
        )
        try:
            call = await continuation(told, request)
        except BaseException as error:
            code = "CANCELLED" if isinstance(error, asyncio.CancelledError) else "UNKNOWN"
            finish(span, code, type(error).__qualname__, server=False)
            raise
        call.add_done_callback(lambda done: self._end(span, done))
        return call

    def _end(self, span: Span, call: Any) -> None:
        async def end() -> None:
            finish(span, (await call.code()).name, await call.details() or "", server=False)

        ending = asyncio.get_running_loop().create_task(end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


class _AioUnaryUnary(_AioTracing, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._intercept(continuation, client_call_details, request)


class _AioUnaryStream(_AioTracing, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self._intercept(continuation, client_call_details, request)


class _AioStreamUnary(_AioTracing, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await self._intercept(continuation, client_call_details, request_iterator)


class _AioStreamStream(_AioTracing, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(
        self, continuation: Any, client_call_details: Any, request_iterator: Any
    ) -> Any:
        return await self._intercept(continuation, client_call_details, request_iterator)


def aio_client_tracing(tracer: Tracer, address: str = "") -> list[grpc.aio.ClientInterceptor]:
    """One per kind of call: grpc.aio takes an object that is several kinds for the first of them only."""
    peer = peer_attributes(address)
    return [
        _AioUnaryUnary(tracer, peer),
        _AioUnaryStream(tracer, peer),
        _AioStreamUnary(tracer, peer),
        _AioStreamStream(tracer, peer),
    ]


def start_call(tracer: Tracer, peer: Mapping[str, AttributeValue], details: Any) -> tuple[Span, Metadata]:
    """The client span, and the call's metadata with the span named in it."""
    method = _text(details.method)
    span = tracer.start_span(
        method.lstrip("/"), kind=SpanKind.CLIENT, attributes={**call_attributes(method), **peer}
    )
    headers: dict[str, str] = {}
    PROPAGATOR.inject(headers, set_span_in_context(span))
    return span, (*_pairs(details.metadata), *headers.items())


def peer_attributes(address: str) -> dict[str, AttributeValue]:
    """server.address and server.port of a target: `unix:PATH`, `HOST:PORT`, or empty when not known."""
    if not address:
        return {}
    if address.startswith("unix:"):
        path = address.removeprefix("unix:").removeprefix("//")
        return {"server.address": path, "network.transport": "unix"}
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return {"server.address": address}
    return {"server.address": host.strip("[]"), "server.port": int(port)}


class _Details(NamedTuple):
    """Stands for grpc.ClientCallDetails, which has no constructor."""

    method: str
    timeout: float | None
    metadata: Metadata
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: Any

    @classmethod
    def of(cls, details: Any, metadata: Metadata) -> _Details:
        return cls(
            details.method,
            details.timeout,
            metadata,
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )


def _finish_call(span: Span, call: Any) -> None:
    finish(span, call.code().name, call.details() or "", server=False)


def _outcome(context: Any, raised: BaseException | None) -> tuple[str, str]:
    """The code's name and the details of a handler that has ended."""
    code = context.code()
    if code is not None and code != 0:
        name = code.name if isinstance(code, grpc.StatusCode) else _CODES.get(code, "UNKNOWN")
        return name, context.details() or ""
    if raised is None:
        return "OK", ""
    if isinstance(raised, (asyncio.CancelledError, GeneratorExit)):
        return "CANCELLED", ""
    return "UNKNOWN", type(raised).__qualname__


_CODES: Final[dict[int, str]] = {code.value[0]: code.name for code in grpc.StatusCode}


def _carrier(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _pairs(metadata: Any) -> Iterable[tuple[str, str | bytes]]:
    return tuple(metadata) if metadata is not None else ()


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _text(method: str | bytes) -> str:
    return method.decode() if isinstance(method, bytes) else method
