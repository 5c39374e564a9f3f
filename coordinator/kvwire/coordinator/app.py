"""The coordinator put together, in reading order."""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvwire.coordinator import upkeep
from kvwire.coordinator.admin import AdminService
from kvwire.coordinator.checkpoint import FILE_NAME
from kvwire.coordinator.core import Core
from kvwire.coordinator.keeping import Checkpoints
from kvwire.coordinator.metrics import coordinator_registry
from kvwire.coordinator.page import FleetPage
from kvwire.coordinator.pulls import Pulls
from kvwire.coordinator.service import (
    OPEN_STREAMS,
    UNLIMITED,
    CoordinatorService,
    add_to_server,
)
from kvwire.coordinator.sources.kafka import KafkaSource
from kvwire.serving import listen
from kvwire.serving.guard import BearerAuth, Guard
from kvwire.serving.http import HttpServer, Response, server_routes
from kvwire.serving.metrics import RpcMetrics
from kvwire.serving.reflection import add_reflection
from kvwire.serving.supervisor import Supervisor
from kvwire.serving.version import server_version
from kvwire.telemetry import tracing
from kvwire.v1 import admin_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.coordinator.config import CoordinatorConfig
    from kvwire.coordinator.core import Part
    from kvwire.serving.http import Route

SERVICES: Final = ("kvwire.v1.CoordinatorService", "kvwire.v1.AdminService")


class Coordinator:
    """One coordinator: `start`, `run until told`, `stop`. Everything it opened is closed after `stop`."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self._credentials = listen.server_credentials(config)
        self._token = listen.bearer_token(config)
        self._rpcs = RpcMetrics(OPEN_STREAMS)
        guard = Guard(config.max_in_flight, UNLIMITED, observe=self._rpcs)
        self.core = Core(config, guard, Supervisor(self._on_task_death))
        self._pulls = Pulls(self.core)
        self._parts = [self.core.intentions, *optional_parts(self.core)]
        self._health = health.aio.HealthServicer()
        self._page = FleetPage(self.core, self.problem)
        self._http = HttpServer(self._routes())
        self.http_address = ""
        self._grpc = self._make_grpc()

    async def start(self) -> None:
        """Listen and serve. Raises ConfigError for an address that cannot be had, and leaves nothing open."""
        core = self.core
        try:
            for part in self._parts:
                await part.start()
            await self._listen()
            if self.config.http:
                self.http_address = await self._http.start(self.config.http)
        except BaseException:
            await self.stop(0)
            raise
        core.supervisor.start("tick", upkeep.tick(core, self._pulls))
        core.supervisor.start("sweep", upkeep.sweep(core))
        if self.config.http:
            core.supervisor.start("page", self._page.watch())
        await self._set_health(serving=True)

    async def stop(self, grace: float | None = None) -> None:
        """Refuse new work, let questions end within `grace` seconds, then end everything."""
        core = self.core
        core.guard.drain()
        await self._set_health(serving=False)
        core.end_streams()
        await core.guard.drained(self.config.drain if grace is None else grace)
        await self._grpc.stop(0.2)
        await core.supervisor.stop()
        await self._pulls.stop()
        for part in reversed(self._parts):
            await part.stop()
        await self._http.close()
        listen.remove_sockets(core.addresses)

    def problem(self) -> str:
        """Why it does not serve, or an empty string."""
        dead = [task.name for task in self.core.supervisor.states() if not task.running]
        if dead:
            return f"background tasks have died: {', '.join(dead)}"
        return "draining" if self.core.guard.draining else ""

    async def _listen(self) -> None:
        addresses = [listen.parse_address(text) for text in self.config.listen]
        for address in addresses:
            listen.check_exposure(address, self.config)
        for address in addresses:
            bound = listen.bind(self._grpc, address, self._credentials)
            self.core.addresses = (*self.core.addresses, bound.target)
        await self._grpc.start()

    def _make_grpc(self) -> grpc.aio.Server:
        config, guard = self.config, self.core.guard
        interceptors: list[grpc.aio.ServerInterceptor] = []
        active = tracing.active()
        if active is not None:
            interceptors += active.server_interceptors()
        if self._token:
            interceptors.append(BearerAuth(self._token))
        server = grpc.aio.server(interceptors=interceptors, options=listen.grpc_options(config.max_message))
        guard.add(server, add_to_server, CoordinatorService(self.core))
        guard.add(
            server,
            admin_service_pb2_grpc.add_AdminServiceServicer_to_server,
            AdminService(self.core, self.core.intentions),
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if config.reflection:
            add_reflection(server, (*SERVICES, health.SERVICE_NAME))
        return server

    async def _set_health(self, *, serving: bool) -> None:
        state = health_pb2.HealthCheckResponse
        value = state.SERVING if serving else state.NOT_SERVING
        for name in ("", *SERVICES):
            await self._health.set(name, value)

    def _on_task_death(self, name: str) -> None:
        # The state is wrong from now on: say so, rather than serve on.
        self._dying = asyncio.ensure_future(self._set_health(serving=False))

    def _routes(self) -> dict[str, Route]:
        registry = coordinator_registry(
            self._rpcs, self.core, version=server_version(), name=socket.gethostname()
        )
        return {
            **server_routes(registry, self.problem),
            "/healthz": self._healthz,
            **self._page.routes(),
        }

    def _healthz(self, _headers: Mapping[str, str]) -> Response:
        """A silent member is no fault of the coordinator: it is well, and says so."""
        problem = self.problem()
        if problem:
            return Response(f"{problem}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
        silent = self.core.silent()
        note = f"events do not arrive from: {', '.join(silent)}\n" if silent else ""
        return Response(f"ok\n{note}".encode())


def optional_parts(core: Core) -> list[Part]:
    """By the settings, in the order of their start: what is kept, then where events come from."""
    config = core.config
    parts: list[Part] = []
    if config.state and config.checkpoint_interval:
        parts.append(Checkpoints(core, Path(config.state) / FILE_NAME, config.checkpoint_interval))
    if config.kafka:
        parts.append(KafkaSource(core))
    return parts
