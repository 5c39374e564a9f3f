"""What this server shares with others, put together."""

from __future__ import annotations

import asyncio
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvwire.server import convert
from kvwire.server.lender import Lender
from kvwire.server.peers.directory import Directory
from kvwire.server.peers.hints import Hints
from kvwire.server.peers.links import Links
from kvwire.server.peers.loans import LoanTools
from kvwire.server.peers.members import Members, PeerInfo
from kvwire.server.peers.metrics import SharingFacts
from kvwire.server.peers.source import PeerSource, SharingCounters
from kvwire.server.peers.standing import Standing
from kvwire.transfer.hosts import host_id
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import coordinator_service_pb2 as coordinator

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from kvwire.server.core import Core
    from kvwire.server.peers.calls import Calls
    from kvwire.server.peers.members import Place

log = logging.getLogger("kvwire.server")

FEATURE: Final = "peer"
HASH_THREADS: Final = max(1, min(2, len(os.sched_getaffinity(0)) // 2))
"""Beside copies within this host. With two cores a second one takes the time of who copies."""
RETRY_S: Final = 0.5
STOP_S: Final = 1.0


class Sharing:
    """Both sides of it. Coordinators to ask come from the core's fleet."""

    def __init__(self, core: Core, calls: Calls) -> None:
        config = core.config
        self._core = core
        self.members = Members(core.server_id)
        self.standing = Standing()
        self.counters = SharingCounters()
        self.calls = calls
        self.links = Links(core.plane, host_id(), config.peer_connect)
        self.lender = Lender(core, self.links)
        self._pool = ThreadPoolExecutor(HASH_THREADS, "kvwire-peer-hash")
        self._tasks: set[asyncio.Task[Any]] = set()
        hints = Hints()
        self.directory = Directory(self._coordinators, self._knows, hints, config.peer_deadline)
        tools = LoanTools(
            core.server_id, self.calls, self.links, self._pool, self.background, core.stopping.is_set
        )
        self.source = PeerSource(tools, self.members, self.directory, hints, self.standing, self.counters)

    @property
    def features(self) -> list[str]:
        return [] if self.links.problem else [FEATURE]

    def background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Something that nobody waits for and that raises nothing."""
        task = asyncio.get_running_loop().create_task(work, name="kvwire-peers")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def watch(self, address: str, stub: Any) -> None:
        """Follow the members by one coordinator's word, for ever. What it has told stays when it goes."""
        while True:
            try:
                self.members.began(address)
                since = self.members.turn
                async for reply in stub.WatchServers(coordinator.WatchServersRequest()):
                    await self._told(address, reply, since)
            except grpc.RpcError as error:
                log.debug("%s does not tell of members: %r", address, error)
            except Exception:
                log.exception("what %s tells of members cannot be understood", address)
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """After the engine has ended its leases, before the data paths go."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)
        for task in self._tasks:
            task.cancel()
        await self.calls.close()
        self.links.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def status(self) -> admin.SharingStatus:
        asked, lending = self.directory.counters, self._core.engine.lending
        return admin.SharingStatus(
            peers=[self._peer(each) for each in self.members.latest()],
            asked_chunks=asked.asked_chunks,
            located_chunks=asked.located_chunks,
            directory_failures=asked.failures,
            fetched_chunks=sum(each.fetched_chunks for each in self.counters.peers.values()),
            fallback_chunks=self.counters.fallback_chunks,
            given_leases=lending.given_leases,
            given_bytes=lending.given_bytes,
        )

    def facts(self) -> SharingFacts:
        asked, lending = self.directory.counters, self._core.engine.lending
        others, each = self.members.latest(), self.counters.peers.values()
        apart = sum(bool(self._problem(info)) for info in others)
        return SharingFacts(
            sharing=len(others) - apart,
            apart=apart,
            fetched_chunks=sum(peer.fetched_chunks for peer in each),
            fetched_bytes=sum(peer.fetched_bytes for peer in each),
            failed_hints=sum(peer.failed_hints for peer in each),
            failed_transfers=sum(peer.failed_transfers for peer in each),
            fallback_chunks=self.counters.fallback_chunks,
            given_leases=lending.given_leases,
            given_bytes=lending.given_bytes,
            questions=asked.questions,
            failed_questions=asked.failures,
            question_seconds=asked.seconds,
            asked_chunks=asked.asked_chunks,
            located_chunks=asked.located_chunks,
        )

    def _peer(self, info: PeerInfo) -> admin.PeerStatus:
        counters = self.counters.of(info.server_id)
        return admin.PeerStatus(
            server_id=info.server_id,
            address=self.calls.address(info),
            incarnation=info.incarnation,
            path=convert.PATHS[counters.path],
            fetched_chunks=counters.fetched_chunks,
            fetched_bytes=counters.fetched_bytes,
            failed_hints=counters.failed_hints,
            failed_transfers=counters.failed_transfers,
            problem=self._problem(info),
        )

    def _problem(self, info: PeerInfo) -> str:
        if self.links.problem:
            return self.links.problem
        if not info.shares:
            return "it shares nothing"
        return self.standing.problem(info.place)

    async def _start_ucx(self) -> None:
        """The first lookup shall not wait for it. Where it does not work, nobody shall ask."""
        before = self.features
        await self.links.offers()
        if self.features != before:
            log.warning("%s: nothing is shared with other servers", self.links.problem)
            self._core.fleet.changed()

    def _coordinators(self) -> list[Any]:
        return self._core.fleet.stubs()

    def _knows(self, place: Place) -> bool:
        info = self.members.find(place)
        return info is not None and info.shares

    async def _told(self, address: str, reply: coordinator.WatchServersResponse, since: int) -> None:
        members = self.members
        event = reply.WhichOneof("event")
        if event == "joined":
            info = _info(reply.joined.server)
            former = members.find(info.place)
            if former is not None and former != info:
                # What did not fit may fit now: it has its chunk size, or another address.
                self.standing.forget(info.place)
            members.joined(address, info)
            if info.shares and info.server_id != self._core.server_id:
                self.background(self._start_ucx())
        elif event == "left":
            members.left(address, reply.left)
        elif event == "synced":
            members.synced(address, since, self._core.now())
        members.sweep(self._core.now())
        known = {each.place for each in members.latest()}
        for place in self.standing.places() - known:
            self.standing.forget(place)
        self.links.keep({name for name, _ in known})
        await self.calls.forget(known)


def _info(server: coordinator.ServerInfo) -> PeerInfo:
    return PeerInfo(
        server.server_id,
        server.incarnation,
        tuple(server.addresses),
        server.chunk_size,
        server.digest_function,
        FEATURE in server.features,
    )
