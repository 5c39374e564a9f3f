"""What clients of a cache engine were told, and what must therefore hold. The arena is real memory."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import dataclass, field

from kvwire.keys import chunk_keys
from kvwire.keys import root as root_of
from kvwire.server.messages import (
    LeaseKind,
    LookupResult,
    ObjectRange,
    SessionRange,
    SlotState,
)
from kvwire.server.state import EngineConfig
from support.domain import BASE, CHUNK, FULL, NAMESPACE, OBJECT_BYTES, Domain, layout, tokens, window_group

POOL = 20
MAX_CHUNKS = 5
WORLD = 2
GROUPS = 2
TTL = 10.0
SESSION_TTL = 40.0
REGISTRATION_TTL = 60.0
CONFIG = EngineConfig(
    slice_chunks=2,
    lookup_ttl=TTL,
    read_ttl=TTL,
    write_ttl=TTL,
    session_ttl=SESSION_TTL,
    registration_ttl=REGISTRATION_TTL,
)

Name = tuple[bytes, int, int]  # key, rank, group


def pattern(name: Name, lease_id: int) -> bytes:
    seed = hashlib.sha256(name[0] + bytes(name[1:]) + lease_id.to_bytes(8, "big")).digest()
    return (seed * (OBJECT_BYTES // len(seed)))[:OBJECT_BYTES]


@dataclass(eq=False)
class Client:
    client_id: bytes
    engine_id: str
    role: str
    rank: int
    path: str
    registration: int = 0
    alive: bool = True

    @property
    def server_moves_bytes(self) -> bool:
        return self.path != "shm"


@dataclass(eq=False)
class Slot:
    name: Name
    offset: int


@dataclass(eq=False)
class Write:
    client: Client
    registration: int
    lease_id: int
    slots: list[Slot]
    deadline: float
    live: bool = True
    # Somebody may still write into the slots.
    writing: bool = True
    # The owner has said that it does not.
    done: bool = False


@dataclass(eq=False)
class Read:
    client: Client
    registration: int
    lease_id: int
    slots: list[Slot]
    expected: list[bytes]
    deadline: float
    live: bool = True
    sending: bool = False


@dataclass(eq=False)
class Hold:
    client: Client
    registration: int
    session: str
    lease_id: int
    keys: list[bytes]
    deadline: float
    released: set[int] = field(default_factory=set)
    live: bool = True


# Client, its registration, session, keys, the lookup, the version of the session that it was asked for.
PendingLookup = tuple[Client, int, str, list[bytes], Generator[None, float | None, LookupResult], int]


def step(steps: Generator[None, float | None, LookupResult], now: float | None) -> LookupResult | None:
    try:
        steps.send(now)
    except StopIteration as stop:
        return stop.value
    return None


class EngineModel:
    """Clients of two engines, one that copies itself and one whose bytes the server moves; two ranks each."""

    def begin_with(self, policy: str) -> None:
        self.domain = Domain(POOL, policy, layout(WORLD, FULL, window_group(5)), CONFIG)
        self.arena = bytearray(BASE + POOL * OBJECT_BYTES)
        self.clients: list[Client] = []
        self.dead: list[tuple[int, Client]] = []
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        self.holds: list[Hold] = []
        self.committed: dict[Name, bytes] = {}
        self.sessions: dict[tuple[str, str], list[bytes]] = {}
        self.versions: dict[tuple[str, str], int] = {}
        self.lookups: list[PendingLookup] = []
        self.pinned: set[bytes] = set()
        # Objects that a pin was seen to hold.
        self.kept: set[tuple[bytes, int]] = set()
        self.root = root_of(NAMESPACE, CHUNK)
        for engine_id, path in (("a", "shm"), ("b", "ucx-local")):
            self.join(engine_id, "scheduler", 0, path)
            for rank in range(WORLD):
                self.join(engine_id, "worker", rank, path)

    def join(self, engine_id: str, role: str, rank: int, path: str) -> None:
        client = Client(len(self.clients).to_bytes(16, "big"), engine_id, role, rank, path)
        self.clients.append(client)
        self.enroll(client)

    def enroll(self, client: Client) -> None:
        client.registration = self.domain.register(
            client.engine_id, client.role, client.rank, client.path, client.client_id
        )

    def expire_model(self) -> None:
        for lease in [*self.writes, *self.reads, *self.holds]:
            if lease.live and lease.deadline <= self.domain.now:
                self.lose(lease)

    def lose(self, lease: Write | Read | Hold) -> None:
        lease.live = False
        if isinstance(lease, Read):
            lease.sending = lease.client.server_moves_bytes

    def end_registration(self, registration: int) -> None:
        for lease in [*self.writes, *self.reads, *self.holds]:
            if lease.live and lease.registration == registration:
                self.lose(lease)

    def leave(self, client: Client) -> None:
        """Its registration has ended; the sessions of its engine end with the last scheduler."""
        self.end_registration(client.registration)
        client.registration = 0
        same_engine = [c for c in self.clients if c.registration and c.engine_id == client.engine_id]
        if client.role == "scheduler" and not any(c.role == "scheduler" for c in same_engine):
            for engine_id, session in list(self.sessions):
                if engine_id == client.engine_id:
                    self.forget_session(engine_id, session)

    def forget_session(self, engine_id: str, session: str) -> None:
        self.sessions.pop((engine_id, session), None)
        self.versions[engine_id, session] = self.versions.get((engine_id, session), 0) + 1
        for hold in self.holds:
            if hold.live and (hold.client.engine_id, hold.session) == (engine_id, session):
                hold.live = False

    def client(self, index: int, role: str | None = None) -> Client:
        """One of the living, which registers if it must."""
        chosen = [c for c in self.clients if c.alive and role in (None, c.role)]
        client = chosen[index % len(chosen)]
        if not client.registration:
            self.enroll(client)
        return client

    def session(self, client: Client, index: int) -> str:
        """One of the sessions of its engine, which looks a prompt up if there is none, mostly."""
        if index % 10 and not any(engine_id == client.engine_id for engine_id, _ in self.sessions):
            scheduler = next(i for i in range(2) if self.client(i, "scheduler").engine_id == client.engine_id)
            self.look_up(scheduler, index % 4, MAX_CHUNKS - index % 2, "x")
        own = sorted(name for engine_id, name in self.sessions if engine_id == client.engine_id)
        return own[index % len(own)] if own else "x"

    @staticmethod
    def part(keys: list[bytes], first: int, count: int) -> tuple[int, int]:
        """A range of a prompt; now and then, one that reaches beyond it."""
        first %= max(len(keys), 1)
        return first, 1 + count % (len(keys) - first + (count % 7 == 6)) if keys else 1

    def keys(self, seed: int, chunks: int) -> list[bytes]:
        return chunk_keys(self.root, self.prompt(seed, chunks), CHUNK)

    @staticmethod
    def prompt(seed: int, chunks: int) -> bytes:
        """Seeds share a head of two chunks in pairs: 0 with 1, 2 with 3."""
        shared = tokens(min(chunks, 2), seed // 2)
        return shared + tokens(max(chunks - 2, 0), 10 + seed)

    def asked_again(self, client: Client, name: str) -> None:
        self.versions[client.engine_id, name] = self.versions.get((client.engine_id, name), 0) + 1

    def look_up(self, index: int, seed: int, chunks: int, name: str) -> None:
        client = self.client(index, "scheduler")
        self.asked_again(client, name)
        dry = self.domain.hit(self.prompt(seed, chunks))
        result = self.domain.lookup(client.registration, name, self.prompt(seed, chunks))
        self.found(client, name, self.keys(seed, chunks), result)
        assert result.hit_chunks == dry

    def found(self, client: Client, name: str, keys: list[bytes], result: LookupResult) -> None:
        assert result.asked_chunks == len(keys)
        assert result.hit_chunks == self.longest_hit(keys)
        assert bool(result.lease_id) == bool(result.hit_chunks)
        for hold in self.holds:
            if hold.live and (hold.client.engine_id, hold.session) == (client.engine_id, name):
                hold.live = False
        known = self.sessions.get((client.engine_id, name), [])
        if known[: len(keys)] != keys:
            self.sessions[client.engine_id, name] = keys
        if result.lease_id:
            deadline = self.domain.now + result.lease_ttl
            held = keys[: result.hit_chunks]
            self.holds.append(Hold(client, client.registration, name, result.lease_id, held, deadline))

    def longest_hit(self, keys: list[bytes]) -> int:
        """By the definition, over what is in the index."""
        present: list[set[int]] = []
        for key in keys:
            chunk = self.domain.engine.store.get(key)
            present.append(
                set() if chunk is None else {s for s in range(WORLD * GROUPS) if chunk.mask >> s & 1}
            )
        for boundary in range(len(keys), 0, -1):
            full = all({0, 2} <= shards for shards in present[:boundary])
            if full and {1, 3} <= present[boundary - 1]:
                return boundary
        return 0

    def begin(
        self, client: Client, name: str, first: int, count: int, ranges: tuple[ObjectRange, ...]
    ) -> None:
        keys = self.sessions.get((client.engine_id, name), [])
        grant = self.domain.begin(client.registration, SessionRange(name, first, count), ranges=ranges)
        if first + count > len(keys):
            assert grant.error is not None
            known = (client.engine_id, name) in self.sessions
            assert grant.error.reason == ("RANGE_INVALID" if known else "SESSION_UNKNOWN")
            return
        assert grant.error is None
        assert len(grant.slots) == (sum(r.chunk_count for r in ranges) or count * GROUPS)
        for slot in grant.slots:
            object_name = (keys[slot.chunk_index], client.rank, slot.group_index)
            assert self.being_written(object_name) == (slot.state is SlotState.BEING_WRITTEN)
            assert slot.state is not SlotState.ALREADY_STORED or object_name in self.committed
        slots = [Slot((keys[s.chunk_index], client.rank, s.group_index), s.offset) for s in grant.reserved]
        assert all(slot.offset >= BASE for slot in slots)
        assert bool(slots) == bool(grant.lease_id)
        if slots:
            deadline = self.domain.now + grant.ttl
            self.writes.append(Write(client, client.registration, grant.lease_id, slots, deadline))

    def finish(self, write: Write, picked: set[int], everything: bool) -> None:
        named = sorted(i for i in picked if i < len(write.slots)) or [0]
        if everything:
            named = list(range(len(write.slots)))
        for i in named:
            slot = write.slots[i]
            data = pattern(slot.name, write.lease_id)
            self.arena[slot.offset : slot.offset + OBJECT_BYTES] = data
        same = write.client.registration == write.registration
        result = self.domain.commit(write.client.registration, write.lease_id, *(() if everything else named))
        if write.live and same:
            assert result.error is None
            assert (result.committed, result.aborted) == (len(named), len(write.slots) - len(named))
            for i in named:
                self.committed[write.slots[i].name] = pattern(write.slots[i].name, write.lease_id)
            write.slots = [slot for i, slot in enumerate(write.slots) if i not in named]
        else:
            assert result.error is not None
            assert result.error.reason == "LEASE_LOST"
            assert result.committed == 0
        self.said_done(write)

    def arrived(self, write: Write) -> None:
        for slot in write.slots:
            self.arena[slot.offset : slot.offset + OBJECT_BYTES] = pattern(slot.name, write.lease_id)
        refs = self.domain.engine.commit_arrived(write.registration, write.lease_id, self.domain.now)
        stands = write.live and write.client.registration == write.registration
        assert len(refs) == (len(write.slots) if stands else 0)
        if stands:
            for slot in write.slots:
                self.committed[slot.name] = pattern(slot.name, write.lease_id)
            write.slots = []
        self.said_done(write)

    def said_done(self, write: Write) -> None:
        """The owner writes no more; where the server moves the bytes, its receives may still be running."""
        write.live = False
        write.done = True
        if not write.client.server_moves_bytes or not write.slots:
            self.writes.remove(write)

    def still_held(self, hold: Hold) -> list[bytes]:
        return [key for index, key in enumerate(hold.keys) if index not in hold.released]

    def accounts_agree(self) -> None:
        self.domain.check()

    def what_is_resident_is_what_was_committed(self) -> None:
        for chunk in self.domain.engine.store.chunks():
            for shard, stored in enumerate(chunk.shards):
                if stored is not None and chunk.mask >> shard & 1:
                    rank, group = divmod(shard, GROUPS)
                    data = self.arena[stored.offset : stored.offset + OBJECT_BYTES]
                    assert data == self.committed[chunk.key, rank, group]

    def what_is_pinned_stays(self) -> None:
        store = self.domain.engine.store
        kept = {
            (chunk.key, shard)
            for chunk in store.chunks()
            if chunk.kept
            for shard in range(WORLD * GROUPS)
            if chunk.mask >> shard & 1
        }
        assert self.kept <= kept
        self.kept = kept
        pins = store.key_pins
        assert pins.keys == self.pinned
        # What is being written when the limit is reached is kept, too.
        assert pins.bytes <= pins.limit + WORLD * GROUPS * MAX_CHUNKS * OBJECT_BYTES
        resident = {chunk.key for chunk in store.chunks() if chunk.key in self.pinned}
        assert resident - {key for key, _ in kept} <= {
            chunk.key for chunk in store.chunks() if not chunk.mask or chunk.key in pins.over
        }

    def pin(self, keys: list[bytes]) -> None:
        self.domain.engine.store.pin_keys(keys)
        self.pinned |= set(keys)

    def unpin(self, keys: list[bytes]) -> None:
        self.domain.engine.store.unpin_keys(keys)
        self.pinned -= set(keys)
        self.kept = {name for name in self.kept if name[0] in self.pinned}

    def readers_see_their_bytes(self) -> None:
        for read in self.reads:
            if read.live or read.sending:
                for slot, expected in zip(read.slots, read.expected, strict=True):
                    assert self.arena[slot.offset : slot.offset + OBJECT_BYTES] == expected

    def what_is_leased_stays(self) -> None:
        for hold in self.holds:
            if hold.live and hold.registration == hold.client.registration:
                for key in self.still_held(hold):
                    chunk = self.domain.engine.store.get(key)
                    assert chunk is not None
                    assert chunk.mask & 0b0101 == 0b0101

    def memory_in_use_is_not_handed_out(self) -> None:
        written = self.writing_offsets()
        read = {slot.offset for read in self.reads if read.live or read.sending for slot in read.slots}
        assert len(written) == len(set(written))
        assert not read & set(written)
        assert self.domain.engine.store.quarantined_bytes == self.waiting_objects() * OBJECT_BYTES
        # What somebody may touch is never free.
        allocated = self.domain.engine.store.allocator._taken
        assert all(offset in allocated for offset in [*written, *read])

    def being_written(self, name: Name) -> bool:
        return any(write.live and any(slot.name == name for slot in write.slots) for write in self.writes)

    def writing_offsets(self) -> list[int]:
        return [slot.offset for write in self.writes if write.writing for slot in write.slots]

    def waiting_objects(self) -> int:
        return sum(len(write.slots) for write in self.writes if not write.live)

    def drain(self) -> None:
        """Everyone goes, and everything comes back."""
        engine = self.domain.engine
        self.domain.now += 1000
        engine.expire(self.domain.now)
        engine.shutdown()
        for ended in engine.drain_ended():
            engine.confirm_cancelled(ended.lease_id)
        for owner in engine.quarantined_owners():
            engine.owner_dead(owner.registration_id)
        self.domain.check()
        status = engine.status()
        assert not any(status.leases[kind] for kind in LeaseKind)
        assert (status.waiting_leases, status.sessions, status.registrations) == (0, 0, ())
        assert status.l1.quarantined_bytes == status.l1.reserved_bytes == 0
        assert status.l1.used_bytes == status.l1.resident_bytes
        assert status.l1.evictable_bytes == status.l1.resident_bytes - engine.store.key_pins.bytes
        self.unpin(list(self.pinned))
        engine.evict_to(0.0, max_chunks=1000)
        assert engine.store.allocator.used == 0
        assert engine.store.key_pins.bytes == engine.store.key_pins.chunks == 0
        assert len(engine.store) == 0
