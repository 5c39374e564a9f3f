"""A coordinator and several real servers in the test's process: a test can look inside, and break them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvwire.coordinator.app import Coordinator
from kvwire.coordinator.config import CoordinatorConfig
from kvwire.server.messages import LeaseKind
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import coordinator_service_pb2_grpc, namespace_pb2
from support.local_server import LocalServer
from support.raw_client import MODEL, RawClient
from support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

FAST = {
    "event_interval": 0.005,
    "peer_deadline": 2.0,
    "peer_timeout": 2.0,
    "peer_connect": 5.0,
    "ucx_net_devices": "lo",
}
"""A slow machine shall not make a test fail; tests of deadlines set their own."""


class LocalCoordinator(LocalServer):
    def __init__(self, folder: Path, **settings) -> None:
        super().__init__(folder)
        self.address = f"unix:{folder / 'coordinator.sock'}"
        defaults = {"heartbeat": 0.2, "expire_after": 5.0, "drain": 1.0}
        self.config = CoordinatorConfig(**{**defaults, "listen": (self.address,), **settings})

    def _make(self):
        return Coordinator(self.config)

    def stub(self):
        return coordinator_service_pb2_grpc.CoordinatorServiceStub(self.channel())


class Fleet:
    """Servers by name, each with a socket file of its own. `settings` are of all of them."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, coordinator=None, **settings) -> None:
        self.folder = folder
        self.servers: dict[str, LocalServer] = {}
        self.coordinator = coordinator or stack.enter_context(LocalCoordinator(folder))
        self._stub = self.coordinator.stub()
        self._stack = stack
        self._settings = settings
        self._clients: dict[str, RawClient] = {}

    def start(self, name: str, *, wait: bool = True, **settings) -> LocalServer:
        """Start a server, or another run of one that has stopped, and wait until all know each other."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        every = {"server_id": name, "coordinator": (self.coordinator.address,), **FAST, **self._settings}
        self.servers[name] = self._stack.enter_context(LocalServer(folder, **{**every, **settings}))
        if wait:
            self.acquainted()
        return self.servers[name]

    def stop(self, name: str) -> None:
        self._clients.pop(name).let_go() if name in self._clients else None
        self.servers.pop(name).__exit__()

    def acquainted(self) -> None:
        eventually(self._acquainted)

    def client(self, name: str, path: str = "shm", **fields) -> RawClient:
        """Registered; one for each server."""
        if name not in self._clients:
            client = RawClient(self.servers[name].channel()).register(path, **fields)
            self._stack.callback(client.let_go)
            self._clients[name] = client
        return self._clients[name]

    def store(self, name: str, prompt: bytes, salt: str = "") -> None:
        """Store a prompt at a server, and wait until the coordinator knows."""
        self.client(name).store(f"store {len(prompt)}", prompt, salt=salt)
        chunks = len(prompt) // 4 // self.client(name).chunk_size
        eventually(lambda: self.located(prompt, salt).get(name, 0) >= chunks, within=20)

    def located(self, prompt: bytes, salt: str = "") -> dict[str, int]:
        """{server: chunks in a row} by the coordinator's word."""
        space = namespace_pb2.Namespace(model=MODEL, salt=salt)
        reply = self._stub.LocateChunks(pb.LocateChunksRequest(namespace=space, tokens=prompt), timeout=10)
        return {each.server_id: each.prefix_chunks for each in reply.servers}

    def sharing(self, name: str):
        return self.servers[name].core.sharing

    def peer(self, name: str, other: str):
        """What one server's status tells of another."""
        peers = self.servers[name].run(self.sharing(name).status).peers
        return next(each for each in peers if each.server_id == other)

    def calls(self, name: str, method: str) -> int:
        """How often a server was asked this, in vain or not."""
        counted = self.servers[name].server._rpcs._calls
        return sum(count for (called, _), count in counted.items() if called.endswith(method))

    def check(self) -> None:
        for server in self.servers.values():
            server.sweep()
            server.check()

    def _acquainted(self) -> bool:
        """Whether each server knows the runs of all others that are up."""
        runs = {name: server.core.incarnation for name, server in self.servers.items()}
        return all(
            server.core.sharing is None
            or all(
                name == other or server.core.sharing.members.find((name, run)) is not None
                for name, run in runs.items()
            )
            for other, server in self.servers.items()
        )


def untouched(server) -> bool:
    """Whether nothing is under way or taken for good."""
    server.sweep()
    status = server.status()
    leased = status.waiting_leases or status.leases[LeaseKind.READ]
    return not (status.l1.reserved_bytes or status.l1.quarantined_bytes or leased)


@contextlib.contextmanager
def fleet(folder: Path, *names: str, coordinator=None, **settings):
    """`coordinator` is one that is there already, in a process of its own."""
    with contextlib.ExitStack() as stack:
        made = Fleet(folder, stack, coordinator, **settings)
        for name in names:
            made.start(name)
        yield made
