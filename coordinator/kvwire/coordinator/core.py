"""What every part of the coordinator shares: the fleet, the intake, the watchers, the tasks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol

from kvwire.coordinator import convert
from kvwire.coordinator.admin import Intentions
from kvwire.coordinator.fleet import Fleet, FleetConfig
from kvwire.coordinator.intake import Intake
from kvwire.coordinator.messages import Reporting
from kvwire.coordinator.watching import EventWatchers, ServerWatchers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.coordinator.config import CoordinatorConfig
    from kvwire.serving.guard import Guard
    from kvwire.serving.supervisor import Supervisor
    from kvwire.v1 import coordinator_service_pb2 as pb

log = logging.getLogger("kvwire.coordinator")


class Part(Protocol):
    """An optional part: a state folder, a source of events. Started before anything is served."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...


class Core:
    """One coordinator's parts. All of it lives on the event loop.

    Optional parts fill in what they bring: `sources`, `checkpoint`, `intent_revision`.
    """

    def __init__(self, config: CoordinatorConfig, guard: Guard, supervisor: Supervisor) -> None:
        self.config = config
        self.guard = guard
        self.supervisor = supervisor
        self.incarnation = secrets.token_bytes(16)
        self.started_at = time.time()
        self.addresses: tuple[str, ...] = ()
        self.stopping = asyncio.Event()
        self.fleet = Fleet(_fleet_config(config))
        self.events = EventWatchers(config.max_watchers)
        self.pulls_due = asyncio.Event()
        self.failed_pulls = 0
        self.intake = Intake(self.fleet, self.events.tell, self.pulls_due.set)
        self.servers = ServerWatchers(self.member, config.max_watchers)
        self.sources: tuple[str, ...] = ("rpc",)
        self.kafka_lag = 0
        self.checkpoint = "off"
        # What a source of events keeps with the checkpoint, by its name, and what it has kept.
        self.kept: dict[str, Callable[[], Any]] = {}
        self.restored_extra: dict[str, Any] = {}
        self.intent_revision = 0
        self.intentions = Intentions(self)
        self._reporting: set[asyncio.Task[Any]] = set()

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def member(self, server_id: str) -> pb.Member | None:
        view = self.fleet.view(server_id, self.now())
        return convert.member(view, self.intake.lag(server_id)) if view else None

    def members(self) -> list[pb.Member]:
        """By server id."""
        views = self.fleet.views(self.now())
        return [convert.member(view, self.intake.lag(view.info.server_id)) for view in views]

    def tell_changes(self) -> None:
        """After anything that may change who is a member, or what is shown of one."""
        changes = self.fleet.take_changes()
        for server_id in changes.left:
            self.intake.forget(server_id)
            log.info("member %s is gone", server_id)
        self.servers.tell(changes)

    @contextlib.contextmanager
    def ending_at_stop(self) -> Iterator[None]:
        """The current task is cancelled by `end_streams`."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("not in a task")
        self._reporting.add(task)
        try:
            yield
        finally:
            self._reporting.discard(task)

    def end_streams(self) -> None:
        self.stopping.set()
        self.servers.close()
        self.events.close()
        for task in self._reporting:
            task.cancel()

    def silent(self) -> list[str]:
        """Members that are alive and whose events do not arrive."""
        views = self.fleet.views(self.now())
        return [view.info.server_id for view in views if view.reporting is Reporting.SILENT]


def _fleet_config(config: CoordinatorConfig) -> FleetConfig:
    return FleetConfig(
        expires_after=config.expire_after,
        silent_after=config.silent_after,
        retry_after=min(2.0, config.snapshot_timeout),
        repeat_silent=5 * config.silent_after,
        keep_l2=config.keep_l2,
        max_keys=config.max_keys,
        blend_bytes=config.blend_memory if config.enable_blend_lookup else 0,
    )
