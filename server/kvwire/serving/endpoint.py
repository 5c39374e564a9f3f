"""A program's gRPC server: where it listens, who may call, and its health."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvwire.serving import listen
from kvwire.serving.guard import BearerAuth
from kvwire.serving.reflection import add_reflection
from kvwire.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.serving.guard import Guard
    from kvwire.serving.supervisor import Supervisor


class EndpointSettings(listen.Exposure, Protocol):
    """Of a program that serves gRPC."""

    @property
    def listen(self) -> tuple[str, ...]: ...
    @property
    def max_message(self) -> int: ...
    @property
    def reflection(self) -> bool: ...


class Endpoint:
    """Makes nothing reachable before `start`. `addresses` are those that are bound."""

    def __init__(self, config: EndpointSettings, services: Sequence[str]) -> None:
        """Raises ConfigError for credentials that cannot be used."""
        self.addresses: tuple[str, ...] = ()
        self._config = config
        self._services = tuple(services)
        self._credentials = listen.server_credentials(config)
        self._token = listen.bearer_token(config)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    def make(self, add_services: Callable[[grpc.aio.Server], None]) -> None:
        """The server, with these services, health and reflection."""
        interceptors: list[grpc.aio.ServerInterceptor] = []
        active = tracing.active()
        if active is not None:
            interceptors += active.server_interceptors()
        if self._token:
            interceptors.append(BearerAuth(self._token))
        options = listen.grpc_options(self._config.max_message)
        self._server = server = grpc.aio.server(interceptors=interceptors, options=options)
        add_services(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._config.reflection:
            add_reflection(server, (*self._services, health.SERVICE_NAME))

    async def start(self) -> None:
        """Raises ConfigError for an address that cannot be had; `stop` is still to be called then."""
        wanted = [listen.parse_address(text) for text in self._config.listen]
        for address in wanted:
            listen.check_exposure(address, self._config)
        for address in wanted:
            bound = listen.bind(self._made(), address, self._credentials)
            self.addresses = (*self.addresses, bound.target)
        await self._made().start()

    async def stop(self) -> None:
        await self._made().stop(0.2)

    def remove_sockets(self) -> None:
        listen.remove_sockets(self.addresses)

    async def set_health(self, *, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse
        value = state.SERVING if serving else state.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, value)

    def on_task_death(self, _name: str) -> None:
        """The state is wrong from now on: say so, rather than serve on."""
        self._dying = asyncio.ensure_future(self.set_health(serving=False))

    def _made(self) -> grpc.aio.Server:
        if self._server is None:
            raise RuntimeError("make comes first")
        return self._server


def problem(supervisor: Supervisor, guard: Guard) -> str:
    """Why a program does not serve, or an empty string."""
    dead = [task.name for task in supervisor.states() if not task.running]
    if dead:
        return f"background tasks have died: {', '.join(dead)}"
    return "draining" if guard.draining else ""
