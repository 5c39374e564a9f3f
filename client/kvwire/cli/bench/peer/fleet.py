"""A coordinator and cache servers of a fleet, as processes that can be killed and started again."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from kvwire.cli.bench.coordinator.target import coordinator, stub
from kvwire.cli.bench.echo import open_channel
from kvwire.cli.bench.peer.relay import Relay, relay
from kvwire.cli.bench.processes import LOG_TAIL_BYTES, BenchError, answers, stop
from kvwire.client import Client
from kvwire.errors import MissingExtra
from kvwire.v1 import admin_service_pb2 as admin_pb
from kvwire.v1 import admin_service_pb2_grpc
from kvwire.v1 import coordinator_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvwire.v1.admin_service_pb2 import GetStatusResponse, SharingStatus
    from kvwire.v1.namespace_pb2 import Namespace

PATIENCE_S: Final = 30.0
HEARTBEAT_S: Final = 0.05
EXPIRY_S: Final = 2.0
TERMS: Final = (f"--heartbeat={HEARTBEAT_S}", f"--expire-after={EXPIRY_S}")
DEADLINES: Final = {"Lookup": 60.0}
SHARING: Final = (
    *("--prefetch-deadline=60", "--peer-deadline=2", "--peer-connect=10", "--peer-timeout=10"),
    *("--watermark=1", "--log-level=warning"),
)
"""How fast it is shows in the time: what takes longer than by default is measured all the same."""


class Server:
    """A `kvwire server`."""

    def __init__(self, server_id: str, folder: Path, flags: Sequence[str]) -> None:
        self.server_id = server_id
        self.address = f"unix:{folder / server_id}.sock"
        self._argv = ["-m", "kvwire.cli", "server", "--listen", self.address, "--server-id", server_id]
        self._argv += flags
        self._log = folder / f"server-{server_id}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.client = Client(self.address, client_name="kvwire bench", deadlines=DEADLINES)

    def start(self, *, wait: bool = True) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        until(lambda: self._ended() or answers(self.address), f"the server {self.server_id} answers")
        if self._ended():
            tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
            raise BenchError(f"The server {self.server_id} did not get ready. Its log:\n{tail}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        self.client.close()
        if self._process is not None:
            stop(self._process)

    def status(self) -> GetStatusResponse:
        return self.client.status()

    def sharing(self) -> SharingStatus:
        return self.client.status().sharing

    def evict(self, namespace: Namespace, tokens: bytes) -> int:
        """The chunks of a prompt that it has dropped."""
        selector = admin_pb.PromptSelector(namespace=namespace, tokens=tokens)
        admin: Any = admin_service_pb2_grpc.AdminServiceStub(self.client.channel())
        reply = admin.Evict(admin_pb.EvictRequest(selector=selector), timeout=PATIENCE_S)
        return int(reply.evicted_chunks)

    def settle(self) -> None:
        """Until nothing is leased."""
        until(self._is_free, f"the server {self.server_id} has no lease left")

    def _is_free(self) -> bool:
        status = self.status()
        leases = status.leases
        return not leases.lookup + leases.read + leases.write + status.memory.reserved_bytes

    def _ended(self) -> bool:
        return self._process is None or self._process.poll() is not None


@dataclass(frozen=True, slots=True)
class Counts:
    """What one server has got from others so far, and what it could not get."""

    fetched_bytes: int
    fetched_chunks: int
    failed_hints: int
    failed_transfers: int
    fallback_chunks: int
    directory_failures: int

    @classmethod
    def of(cls, server: Server) -> Self:
        sharing = server.sharing()
        peers = sharing.peers
        return cls(
            fetched_bytes=sum(each.fetched_bytes for each in peers),
            fetched_chunks=sharing.fetched_chunks,
            failed_hints=sum(each.failed_hints for each in peers),
            failed_transfers=sum(each.failed_transfers for each in peers),
            fallback_chunks=sharing.fallback_chunks,
            directory_failures=sharing.directory_failures,
        )

    def since(self, before: Counts) -> dict[str, int]:
        return {name: getattr(self, name) - getattr(before, name) for name in self.__slots__}


class Fleet:
    """`a` has what `b` asks for."""

    def __init__(self, a: Server, b: Server, directory: Any, way: Relay) -> None:
        self.a, self.b, self.relay = a, b, way
        self._directory = directory

    def acquainted(self) -> None:
        """Until b knows a, and the coordinator has the events of both. Both must have a chunk size."""
        until(self._are_current, "the coordinator has the events of both servers")
        until(self._is_known, "the servers know each other")

    def located(self, namespace: Namespace, tokens: bytes, chunks: int) -> None:
        """Until the directory says that `a` has that many leading chunks."""
        request = pb.LocateChunksRequest(namespace=namespace, tokens=tokens)

        def told() -> bool:
            found = self._directory.LocateChunks(request, timeout=5).servers
            return any(each.server_id == self.a.server_id and each.prefix_chunks >= chunks for each in found)

        until(told, "the directory knows what was stored")

    def emptied(self, server: Server) -> None:
        """The server drops everything, and the directory knows."""
        server.settle()
        server.client.clear()
        until(lambda: not self.placements(server), "the directory knows that a server was emptied")

    def placements(self, server: Server) -> int:
        """What the directory has of it; 0 also for one that is no member."""
        found = self._directory.GetDirectoryStats(pb.GetDirectoryStatsRequest(), timeout=5)
        return sum(each.placements for each in found.holdings if each.server_id == server.server_id)

    def member(self, server: Server) -> pb.Member | None:
        listed = self._directory.ListServers(pb.ListServersRequest(), timeout=5)
        return next((each for each in listed.members if each.server.server_id == server.server_id), None)

    def _are_current(self) -> bool:
        members = (self.member(self.a), self.member(self.b))
        return all(each and each.sharing and each.reporting == pb.REPORTING_STATE_CURRENT for each in members)

    def _is_known(self) -> bool:
        return any(each.server_id == self.a.server_id and not each.problem for each in self.b.sharing().peers)


@contextlib.contextmanager
def fleet(folder: Path, flags: Sequence[str]) -> Iterator[Fleet]:
    """Two servers with the same flags. `a` is a member by the relay alone; `b` asks the directory itself, and
    gives life signs over the relay, too. Raises MissingExtra where servers have no UCX."""
    if importlib.util.find_spec("ucxx") is None:
        raise MissingExtra("kvwire bench peer", "ucx-cu12")
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(coordinator(folder, *TERMS))
        way = stack.enter_context(relay(target.address, f"unix:{folder / 'relay'}.sock"))
        channel = stack.enter_context(open_channel(target.address))
        relayed, direct = ("--coordinator", way.address), ("--coordinator", target.address)
        a = Server("a", folder, (*relayed, *SHARING, *flags))
        b = Server("b", folder, (*direct, *relayed, *SHARING, *flags))
        for server in (a, b):
            stack.callback(server.close)
            server.start()
        yield Fleet(a, b, stub(channel), way)


def until(holds: Callable[[], object], what: str, pause: float = 0.002) -> float:
    """Seconds until it holds. Raises BenchError after PATIENCE_S."""
    started = time.perf_counter()
    while not holds():
        if time.perf_counter() - started > PATIENCE_S:
            raise BenchError(f"Not within {PATIENCE_S:.0f} s: {what}.")
        time.sleep(pause)
    return time.perf_counter() - started
