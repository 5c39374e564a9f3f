"""The demo with a fleet: A stores at its server, and B finds it at another one, which gets it from there."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from kvwire.cli.demo.scenario import Shared
from kvwire.cli.demo.server import Traffic, path_name, running, serving, status_of, traffic
from kvwire.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvwire.cli.demo.scenario import Cast, EngineRun
    from kvwire.v1 import admin_service_pb2

NEWS_S = 10.0
PATIENT = ("--peer-deadline=1", "--peer-connect=5", "--peer-timeout=5", "--prefetch-deadline=10")
"""There is one try, and five programs share what processors there are: nothing shall be given up for that."""


@dataclass(frozen=True)
class Fleet:
    """Addresses."""

    coordinator: str
    a: str
    b: str

    def members(self, timeout_s: float = 10.0) -> dict[str, coordinator_service_pb2.Member]:
        with grpc.insecure_channel(self.coordinator) as channel:
            stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
            reply = stub.ListServers(coordinator_service_pb2.ListServersRequest(), timeout=timeout_s)
        return {member.server.server_id: member for member in reply.members}

    def is_complete(self) -> bool:
        """Whether both servers are members, and each knows of the other."""
        return len(self.members()) == 2 and all(status_of(each).sharing.peers for each in (self.a, self.b))

    def knows_what_a_holds(self) -> bool:
        return self.members()["a"].placements >= status_of(self.a).memory.chunks


def play(cast: Cast) -> tuple[EngineRun, EngineRun, Traffic, Shared]:
    with forming(cast) as fleet:
        a = cast.run("engine A at server a, which stores", "engine-a.log", fleet.a)
        with cast.steps.step("the coordinator, which learns what server a holds"):
            wait_for(fleet.knows_what_a_holds, "the coordinator has not learnt what server a holds")
        b = cast.run("engine B at server b, which finds it", "engine-b.log", fleet.b)
        return a, b, *moved(fleet)


@contextmanager
def forming(cast: Cast) -> Iterator[Fleet]:
    """A coordinator and two servers that know each other."""
    work = cast.work
    fleet = Fleet(*(f"unix:{work / name}.sock" for name in ("coordinator", "a", "b")))
    with ExitStack() as stack:
        with cast.steps.step("a coordinator, server a and server b") as update:
            update("starting", None)
            stack.enter_context(coordinating(fleet, work))
            for name in ("a", "b"):
                stack.enter_context(serving(work, cast.options.l1_size, name, joins(fleet, name)))
            wait_for(fleet.is_complete, "the servers have not found each other")
        yield fleet


@contextmanager
def coordinating(fleet: Fleet, work: Path) -> Iterator[None]:
    command = ("coordinator", "--listen", fleet.coordinator)
    with running(command, work / "coordinator.log", lambda: fleet.members(timeout_s=1.0)):
        yield


def joins(fleet: Fleet, name: str) -> tuple[str, ...]:
    return ("--server-id", name, "--coordinator", fleet.coordinator, *PATIENT)


def moved(fleet: Fleet) -> tuple[Traffic, Shared]:
    status = status_of(fleet.b)
    paths = {path_name(peer.path): peer.fetched_bytes for peer in status.sharing.peers if peer.fetched_bytes}
    own = Traffic(traffic(fleet.a).stored, traffic(fleet.b).retrieved)
    return own, Shared(status.counters.peer_hit_tokens, paths, why_not(status.sharing))


def why_not(sharing: admin_service_pb2.SharingStatus) -> str:
    """What kept B's server from getting something; empty when nothing is known of it."""
    if sharing.directory_failures:
        return "the coordinator did not answer in time"
    return next((f"{peer.server_id}: {peer.problem}" for peer in sharing.peers if peer.problem), "")


def wait_for(condition: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + NEWS_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{problem} after {NEWS_S:.0f} s")
        time.sleep(0.05)
