"""What surrounds every RPC: typed errors to rich statuses, the limit on calls in flight, call metrics.

Handlers are wrapped once, when they are added to the server, so a call pays for a function and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol, cast

import grpc

from kvwire.client.status import rpc_status
from kvwire.errors import Draining, Internal, InvalidArgument, KvwireError, Overloaded, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    Handler = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Any]

log = logging.getLogger("kvwire.serving")


class CallObserver(Protocol):
    """Is told of every finished call: method, gRPC code name, seconds."""

    def __call__(self, method: str, code: str, seconds: float) -> None: ...


class Guard:
    """Adds generated services to a server with every handler wrapped."""

    def __init__(
        self,
        max_in_flight: int,
        unlimited: frozenset[str],
        open_while_draining: frozenset[str] = frozenset(),
        observe: CallObserver | None = None,
    ) -> None:
        """Methods that are `unlimited` are never refused for load, and like those others not by a drain."""
        self.max_in_flight = max_in_flight
        self._unlimited = unlimited
        self._open_while_draining = unlimited | open_while_draining
        self.in_flight = 0
        self.waiting = 0
        self.rejected = 0
        self.draining = False
        self._idle = asyncio.Event()
        self.observe = observe

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """While a call only waits, it counts as `waiting`, and not against the limit."""
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1

    def drain(self) -> None:
        """Refuse new work from now on."""
        self.draining = True

    async def drained(self, seconds: float) -> None:
        """Wait until no call is in flight, at most so long."""
        if self.in_flight:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

    def add(self, server: grpc.aio.Server, register: Callable[[Any, Any], None], servicer: object) -> None:
        """`register` is a generated add_...Servicer_to_server function."""
        register(servicer, _Registrar(server, self))

    def wrap(self, method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
        kind = (
            ("stream" if handler.request_streaming else "unary")
            + "_"
            + ("stream" if handler.response_streaming else "unary")
        )
        behaviour = _parsing(cast("Handler", getattr(handler, kind)), handler)
        wrapped = (
            self._streaming(method, behaviour)
            if handler.response_streaming
            else self._unary(method, behaviour)
        )
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return cast("grpc.RpcMethodHandler[Any, Any]", make(wrapped, None, handler.response_serializer))

    def _unary(self, method: str, behaviour: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
        limited = method not in self._unlimited

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            started = time.perf_counter()
            code = "OK"
            self.in_flight += limited
            try:
                self._admit(method, limited)
                return await behaviour(request, context)
            except BaseException as error:
                failure = _failure(method, error)
                code = failure.code if failure else "CANCELLED"
                if failure is None:
                    raise
                await context.abort_with_status(rpc_status(failure))
            finally:
                self._left(limited)
                if self.observe is not None:
                    self.observe(method, code, time.perf_counter() - started)

        return call

    def _streaming(self, method: str, behaviour: Handler) -> Callable[[Any, Any], AsyncIterator[Any]]:
        limited = method not in self._unlimited

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            started = time.perf_counter()
            code = "OK"
            self.in_flight += limited
            try:
                self._admit(method, limited)
                async with contextlib.aclosing(behaviour(request, context)) as replies:
                    async for reply in replies:
                        yield reply
            except BaseException as error:
                failure = _failure(method, error)
                code = failure.code if failure else "CANCELLED"
                if failure is None:
                    raise
                await context.abort_with_status(rpc_status(failure))
            finally:
                self._left(limited)
                if self.observe is not None:
                    self.observe(method, code, time.perf_counter() - started)

        return call

    def _left(self, limited: bool) -> None:
        self.in_flight -= limited
        if self.draining and not self.in_flight:
            self._idle.set()

    def _admit(self, method: str, limited: bool) -> None:
        if self.draining and method not in self._open_while_draining:
            raise Draining("The server is shutting down and takes no new work.")
        in_flight = self.in_flight - self.waiting
        if limited and in_flight > self.max_in_flight:
            self.rejected += 1
            raise Overloaded(
                f"{in_flight} calls are in flight, {self.max_in_flight} are allowed: repeat it soon.",
                in_flight=in_flight,
                allowed=self.max_in_flight,
            )


def _parsing(behaviour: Handler, handler: grpc.RpcMethodHandler[Any, Any]) -> Handler:
    """Parse requests here rather than in gRPC, which would answer UNKNOWN to bytes that are no message."""

    def parse(raw: bytes) -> Any:
        try:
            return cast("Callable[[bytes], Any]", handler.request_deserializer)(raw)
        except Exception as error:
            raise InvalidArgument("request", "is not a message of this method") from error

    async def parse_all(stream: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in stream:
            yield parse(raw)

    if handler.request_streaming:
        return lambda stream, context: behaviour(parse_all(stream), context)
    return lambda raw, context: behaviour(parse(raw), context)


class _Registrar:
    """Stands where generated code expects a server, and wraps what it adds."""

    def __init__(self, server: grpc.aio.Server, guard: Guard) -> None:
        self._server = server
        self._guard = guard

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        """The generated code calls this too; `add_registered_method_handlers` has what is needed."""

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        wrapped = {method: self._guard.wrap(method, handler) for method, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))


class BearerAuth(grpc.aio.ServerInterceptor):
    """Asks every call but health checks for the token. Installed only when there is one."""

    def __init__(self, token: bytes) -> None:
        self._expected = b"Bearer " + token
        error = Unauthenticated(
            "The bearer token is missing or wrong: give the client the server's --token-file."
        )

        async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort_with_status(rpc_status(error))

        # It fits every kind of call, and does not wait for a request.
        self._refuse: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        if handler_call_details.method.startswith("/grpc.health.v1.Health/") or self._valid(
            handler_call_details
        ):
            return await continuation(handler_call_details)
        return self._refuse

    def _valid(self, details: grpc.HandlerCallDetails) -> bool:
        for name, value in details.invocation_metadata or ():
            if name == "authorization":
                given = value if isinstance(value, bytes) else value.encode()
                return hmac.compare_digest(given, self._expected)
        return False


def _failure(method: str, error: BaseException) -> KvwireError | None:
    """What the caller is told of an error; None when nobody listens any more and it must go on its way."""
    if isinstance(error, KvwireError):
        return error
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        # A handler may also meet the cancellation of something that it waited for: its caller still listens.
        if task is None or task.cancelling():
            return None
    elif not isinstance(error, Exception):
        return None
    log.error("%s failed: %r", method, error, exc_info=error)
    return Internal(f"{method} failed inside the server; its log tells more.")
