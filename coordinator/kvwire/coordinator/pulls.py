"""Fetches what the servers hold, wherever events were missed. Each pull is a task of its own."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvwire.client.channel import ChannelConfig, TlsConfig, parse_target
from kvwire.errors import ConfigError
from kvwire.telemetry import tracing
from kvwire.v1 import peer_service_pb2 as peer
from kvwire.v1 import peer_service_pb2_grpc

if TYPE_CHECKING:
    from kvwire.coordinator.config import CoordinatorConfig
    from kvwire.coordinator.core import Core
    from kvwire.coordinator.fleet import Pull

log = logging.getLogger("kvwire.coordinator")

PAGE_SIZE: Final = 1000
MAX_PAGES_S: Final = 60.0
"""Longest snapshot, in times of --snapshot-timeout."""
AT_ONCE: Final = 8


class Pulls:
    """Raises ConfigError for files that cannot be read."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._link = _Link(core.config)
        self._running: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(AT_ONCE)
        self._problems: dict[str, str] = {}

    def start_due(self) -> None:
        """Begin the pulls that are due now."""
        for pull in self._core.fleet.pulls(self._core.now()):
            task = asyncio.get_running_loop().create_task(
                self._run(pull), name=f"kvwire-pull-{pull.server_id}"
            )
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def stop(self) -> None:
        for task in tuple(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self, pull: Pull) -> None:
        core = self._core
        problems: list[str] = []
        async with self._places:
            for address in pull.addresses:
                try:
                    async with asyncio.timeout(core.config.snapshot_timeout * MAX_PAGES_S):
                        if await self._fetch(pull, address):
                            self._done(pull)
                            return
                    problems.append(f"{address}: its answer was of another run or position")
                except Exception as error:  # noqa: BLE001 - whatever a server or a wire does, others are not to suffer
                    problems.append(f"{address}: {_text(error)}")
        core.failed_pulls += 1
        core.fleet.fail_pull(pull, core.now())
        core.tell_changes()
        self._failed(pull, "; ".join(problems) or "it has no address")

    def _done(self, pull: Pull) -> None:
        self._core.tell_changes()
        if self._problems.pop(pull.server_id, ""):
            log.info("snapshot of %s is in", pull.server_id)

    def _failed(self, pull: Pull, problem: str) -> None:
        """It is tried again and again: each problem is told once."""
        members = self._core.fleet.members
        self._problems = {name: told for name, told in self._problems.items() if members.get(name)}
        if members.get(pull.server_id) and self._problems.get(pull.server_id) != problem:
            self._problems[pull.server_id] = problem
            log.warning("snapshot of %s failed, trying again: %s", pull.server_id, problem)

    async def _fetch(self, pull: Pull, address: str) -> bool:
        core = self._core
        channel = self._link.open(address)
        try:
            pages = peer_service_pb2_grpc.PeerServiceStub(channel).SnapshotPlacements(
                peer.SnapshotPlacementsRequest(
                    with_tokens=core.config.enable_blend_lookup, page_size=PAGE_SIZE
                )
            )
            while (page := await self._next(pages)) is not None:
                steps = core.fleet.pull_page_steps(
                    pull, page.incarnation, page.sequence, page.placements, core.now()
                )
                if not await core.intake.in_turn(steps):
                    return False
            return core.fleet.end_pull(pull, core.now())
        finally:
            await channel.close()

    async def _next(self, pages: Any) -> peer.SnapshotPlacementsResponse | None:
        async with asyncio.timeout(self._core.config.snapshot_timeout):
            page = await pages.read()
        return None if page is grpc.aio.EOF else page


class _Link:
    """How servers are reached."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self._tls: TlsConfig | None = None
        if config.server_ca or config.server_cert:
            self._tls = TlsConfig(config.server_ca, config.server_cert, config.server_key)
            self._tls.credentials()
        self._token = _token(config.server_token_file)

    def open(self, address: str) -> grpc.aio.Channel:
        """Raises ConfigError for what is no address."""
        target = parse_target(address)
        tls = None if target.text.startswith("unix:") else self._tls
        active = tracing.active()
        interceptors = active.aio_client_interceptors(target.text) if active is not None else []
        return ChannelConfig(target, tls, self._token).open_aio(interceptors)


def _token(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"--server-token-file {path}: {error.strerror}.", setting="server_token_file"
        ) from error


def _text(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {error}"
