"""Cache servers that know what they hold and tell it as events, for tests of the coordinator's domain."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256

from kvwire.coordinator.fleet import Fleet, FleetConfig, Pull, Reported
from kvwire.coordinator.messages import ServerInfo
from kvwire.errors import ServerNotRegistered

STORE, ACCESS, DELETE, CLEAR = 1, 2, 3, 4
L1, L2 = 1, 2


def chunk(name: object) -> bytes:
    return sha256(repr(name).encode()).digest()


@dataclass(frozen=True)
class FakeEvent:
    kind: int
    chunk_key: bytes = b""
    tier: int = L1
    backend: str = "memory"
    size_bytes: int = 0
    tokens: bytes = b""
    parent_key: bytes = b""
    namespace_root: bytes = b""
    access_count: int = 0


@dataclass(frozen=True)
class FakeBatch:
    server_id: str
    incarnation: bytes
    sequence: int
    events: tuple[FakeEvent, ...]
    lost: int = 0


def store(key: bytes, size: int = 100, tier: int = L1, **more: object) -> FakeEvent:
    return FakeEvent(STORE, key, tier, size_bytes=size, **more)


def delete(key: bytes, tier: int = L1) -> FakeEvent:
    return FakeEvent(DELETE, key, tier)


def access(key: bytes, count: int = 1, tier: int = L1) -> FakeEvent:
    return FakeEvent(ACCESS, key, tier, access_count=count)


def clear(tier: int = L1, backend: str = "") -> FakeEvent:
    return FakeEvent(CLEAR, tier=tier, backend=backend)


@dataclass
class Snapshot:
    incarnation: bytes
    sequence: int
    placements: list[FakeEvent]


@dataclass
class FakeServer:
    """`held`: (tier, key) to size. `closed` batches are what it would send; `events` is the open one."""

    server_id: str
    chunk_size: int = 4
    run: int = 1
    sequence: int = 0
    held: dict[tuple[int, bytes], int] = field(default_factory=dict)
    events: list[FakeEvent] = field(default_factory=list)
    lost: int = 0

    @property
    def incarnation(self) -> bytes:
        return sha256(f"{self.server_id}/{self.run}".encode()).digest()[:16]

    @property
    def info(self) -> ServerInfo:
        return ServerInfo(
            self.server_id, self.incarnation, (f"{self.server_id}:1",), self.chunk_size, "sha256"
        )

    def store(self, key: bytes, size: int = 100, tier: int = L1) -> None:
        self.held[tier, key] = size
        self.events.append(store(key, size, tier))

    def delete(self, key: bytes, tier: int = L1) -> None:
        self.held.pop((tier, key), None)
        self.events.append(delete(key, tier))

    def clear(self, tier: int = L1) -> None:
        self.held = {place: size for place, size in self.held.items() if place[0] != tier}
        self.events.append(clear(tier))

    def close(self) -> FakeBatch:
        self.sequence += 1
        batch = FakeBatch(self.server_id, self.incarnation, self.sequence, tuple(self.events), self.lost)
        self.events = []
        self.lost = 0
        return batch

    def restart(self) -> None:
        self.run += 1
        self.sequence = 0
        self.events = []
        self.lost = 0
        self.held = {place: size for place, size in self.held.items() if place[0] == L2}

    def snapshot(self) -> Snapshot:
        """As of the last closed batch: an open one has to be closed, and sent, before."""
        assert not self.events
        placements = [store(key, size, tier) for (tier, key), size in self.held.items()]
        return Snapshot(self.incarnation, self.sequence, placements)


class FleetRun:
    """A coordinator's domain with a clock, and servers by name."""

    def __init__(self, *names: str, config: FleetConfig | None = None) -> None:
        self.fleet = Fleet(config)
        self.now = 1000.0
        self.servers = {name: FakeServer(name) for name in names}
        for server in self.servers.values():
            self.join(server)

    def join(self, server: FakeServer) -> None:
        """Registered, and whole."""
        self.fleet.register(server.info, self.now)
        self.heal()

    def heal(self) -> int:
        pulls = self.fleet.pulls(self.now)
        for pull in pulls:
            self.answer(pull, self.servers[pull.server_id])
        return len(pulls)

    def answer(self, pull: Pull, server: FakeServer) -> None:
        taken = server.snapshot()
        assert self.fleet.pull_page(pull, taken.incarnation, taken.sequence, taken.placements, self.now)
        assert self.fleet.end_pull(pull, self.now)

    def tell(self, name: str, *events: FakeEvent, sequence: int = 0, lost: int = 0) -> Reported:
        """The next batch of this server, or one with another sequence."""
        server = self.servers[name]
        server.sequence = sequence or server.sequence + 1
        batch = FakeBatch(name, server.incarnation, server.sequence, events, lost)
        return self.fleet.report(batch, self.now)

    def beat(self, name: str, last_sequence: int | None = None) -> None:
        server = self.servers[name]
        last = server.sequence if last_sequence is None else last_sequence
        self.fleet.heartbeat(name, server.incarnation, self.now, 0, last)

    def holders(self, key: bytes) -> set[tuple[str, int]]:
        return {(placement.server_id, placement.tier) for placement in self.fleet.directory.placements(key)}

    def held(self) -> dict[str, dict[tuple[int, bytes], int]]:
        """What the directory says, per server."""
        found: dict[str, dict[tuple[int, bytes], int]] = {}
        for key, placements in self.fleet.directory.page(limit=10**9):
            for placement in placements:
                found.setdefault(placement.server_id, {})[placement.tier, key] = placement.size_bytes
        return found

    def reporting(self, name: str) -> str:
        view = self.fleet.view(name, self.now)
        assert view is not None
        return view.reporting

    def deliver(self, batch: FakeBatch) -> Reported | None:
        """None: refused."""
        try:
            return self.fleet.report(batch, self.now)
        except ServerNotRegistered:
            return None
