"""The coordinator put together, in reading order."""

from __future__ import annotations

import socket
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

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
from kvwire.serving.endpoint import Endpoint, problem
from kvwire.serving.guard import Guard
from kvwire.serving.http import HttpServer, Response, server_routes
from kvwire.serving.metrics import RpcMetrics
from kvwire.serving.supervisor import Supervisor
from kvwire.serving.version import server_version
from kvwire.v1 import admin_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

    from kvwire.coordinator.config import CoordinatorConfig
    from kvwire.coordinator.core import Part
    from kvwire.serving.http import Route

SERVICES: Final = ("kvwire.v1.CoordinatorService", "kvwire.v1.AdminService")


class Coordinator:
    """One coordinator: `start`, `run until told`, `stop`. Everything it opened is closed after `stop`."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self._endpoint = Endpoint(config, SERVICES)
        self._rpcs = RpcMetrics(OPEN_STREAMS)
        guard = Guard(config.max_in_flight, UNLIMITED, observe=self._rpcs)
        self.core = Core(config, guard, Supervisor(self._endpoint.on_task_death))
        self._pulls = Pulls(self.core)
        self._parts = [self.core.intentions, *optional_parts(self.core)]
        self._page = FleetPage(self.core, self.problem)
        self._http = HttpServer(self._routes())
        self.http_address = ""
        self._endpoint.make(self._add_services)

    async def start(self) -> None:
        """Listen and serve. Raises ConfigError for an address that cannot be had, and leaves nothing open."""
        core = self.core
        try:
            for part in self._parts:
                await part.start()
            await self._endpoint.start()
            core.addresses = self._endpoint.addresses
            if self.config.http:
                self.http_address = await self._http.start(self.config.http)
        except BaseException:
            await self.stop(0)
            raise
        core.supervisor.start("tick", upkeep.tick(core, self._pulls))
        core.supervisor.start("sweep", upkeep.sweep(core))
        if self.config.http:
            core.supervisor.start("page", self._page.watch())
        await self._endpoint.set_health(serving=True)

    async def stop(self, grace: float | None = None) -> None:
        """Refuse new work, let questions end within `grace` seconds, then end everything."""
        core = self.core
        core.guard.drain()
        await self._endpoint.set_health(serving=False)
        core.end_streams()
        await core.guard.drained(self.config.drain if grace is None else grace)
        await self._endpoint.stop()
        await core.supervisor.stop()
        await self._pulls.stop()
        for part in reversed(self._parts):
            await part.stop()
        await self._http.close()
        self._endpoint.remove_sockets()

    def problem(self) -> str:
        """Why it does not serve, or an empty string."""
        return problem(self.core.supervisor, self.core.guard)

    def _add_services(self, server: grpc.aio.Server) -> None:
        core = self.core
        core.guard.add(server, add_to_server, CoordinatorService(core))
        core.guard.add(
            server,
            admin_service_pb2_grpc.add_AdminServiceServicer_to_server,
            AdminService(core, core.intentions),
        )

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
