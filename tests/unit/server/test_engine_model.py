"""Random interleavings of several clients against a model that knows only what clients were told.

The arena is real memory. Writers write, also after their lease has ended, until they have acknowledged that,
are dead, or (where the server moves the bytes) the transfer is confirmed over. Readers compare what they see,
at any time while they hold a lease, with what was committed under the key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvwire.keys import chunk_keys
from kvwire.keys import root as root_of
from kvwire.server.messages import LeaseKind, ObjectRange, ReleaseItem, SessionRange, SlotState
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
    lookup_ttl=TTL, read_ttl=TTL, write_ttl=TTL, session_ttl=SESSION_TTL, registration_ttl=REGISTRATION_TTL
)

INDEX = st.integers(0, 1000)
LENGTH = st.integers(1, MAX_CHUNKS).map(lambda length: MAX_CHUNKS + 1 - length)

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


class EngineMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "arc"]))
    def start(self, policy: str) -> None:
        self.domain = Domain(POOL, policy, layout(WORLD, FULL, window_group(5)), CONFIG)
        self.arena = bytearray(BASE + POOL * OBJECT_BYTES)
        self.clients: list[Client] = []
        self.dead: list[tuple[int, Client]] = []
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        self.holds: list[Hold] = []
        self.committed: dict[Name, bytes] = {}
        self.sessions: dict[tuple[str, str], list[bytes]] = {}
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

    # What the model knows without being told: deadlines, and registrations that the client itself ended.

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
        for hold in self.holds:
            if hold.live and (hold.client.engine_id, hold.session) == (engine_id, session):
                hold.live = False

    # Drawing

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

    # Rules

    @rule(index=INDEX, seed=st.integers(0, 3), chunks=LENGTH, name=st.sampled_from("xy"))
    def look_up(self, index: int, seed: int, chunks: int, name: str) -> None:
        client = self.client(index, "scheduler")
        dry = self.domain.hit(self.prompt(seed, chunks))
        result = self.domain.lookup(client.registration, name, self.prompt(seed, chunks))
        keys = self.keys(seed, chunks)
        assert result.asked_chunks == chunks
        assert result.hit_chunks == dry == self.longest_hit(keys)
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

    @rule(index=INDEX, which=INDEX, first=INDEX, count=INDEX, both=st.booleans())
    def begin_store(self, index: int, which: int, first: int, count: int, both: bool) -> None:
        client = self.client(index, "worker")
        name = self.session(client, which)
        keys = self.sessions.get((client.engine_id, name), [])
        first, count = self.part(keys, first, count)
        self.begin(client, name, first, count, () if both else (ObjectRange(0, first, count),))

    def begin(
        self, client: Client, name: str, first: int, count: int, ranges: tuple[ObjectRange, ...]
    ) -> None:
        keys = self.sessions.get((client.engine_id, name), [])
        grant = self.domain.begin(client.registration, SessionRange(name, first, count), ranges=ranges)
        if first + count > len(keys):
            assert grant.error is not None
            assert grant.error.reason == ("RANGE_INVALID" if keys else "SESSION_UNKNOWN")
            return
        assert grant.error is None
        assert len(grant.slots) == (sum(r.chunk_count for r in ranges) or count * GROUPS)
        for slot in grant.slots:
            object_name = (keys[slot.chunk_index], client.rank, slot.group_index)
            writers = [w for w in self.writes if w.live and any(s.name == object_name for s in w.slots)]
            assert bool(writers) == (slot.state is SlotState.BEING_WRITTEN)
            assert slot.state is not SlotState.ALREADY_STORED or object_name in self.committed
        slots = [Slot((keys[s.chunk_index], client.rank, s.group_index), s.offset) for s in grant.reserved]
        assert all(slot.offset >= BASE for slot in slots)
        assert bool(slots) == bool(grant.lease_id)
        if slots:
            deadline = self.domain.now + grant.ttl
            self.writes.append(Write(client, client.registration, grant.lease_id, slots, deadline))

    @rule(index=INDEX, seed=st.integers(0, 3), chunks=LENGTH, sparse=st.booleans())
    def store_a_prompt(self, index: int, seed: int, chunks: int, sparse: bool) -> None:
        """All that a request does when nothing comes in between; sparse: the window only at its end."""
        self.look_up(index, seed, chunks, "x")
        engine_id = self.client(index, "scheduler").engine_id
        for worker in range(2 * WORLD):
            client = self.client(worker, "worker")
            keys = self.sessions[engine_id, "x"]
            if client.engine_id == engine_id and self.session(client, 0) == "x":
                before = len(self.writes)
                window = ObjectRange(1, len(keys) - 1, 1)
                ranges = (ObjectRange(0, 0, len(keys)), window) if sparse else ()
                self.begin(client, "x", 0, len(keys), ranges)
                if len(self.writes) > before:
                    self.finish(self.writes[-1], set(), everything=True)

    @precondition(lambda self: any(write.writing for write in self.writes))
    @rule(index=INDEX, live_only=st.booleans())
    def scribble(self, index: int, live_only: bool) -> None:
        """A writer writes, whether its lease holds or not."""
        writing = [w for w in self.writes if w.writing and (w.live or not live_only)]
        if writing:
            write = writing[index % len(writing)]
            for slot in write.slots:
                self.arena[slot.offset : slot.offset + OBJECT_BYTES] = b"\xee" * OBJECT_BYTES

    @precondition(lambda self: any(write.writing for write in self.writes))
    @rule(index=INDEX, picked=st.sets(st.integers(0, 9)), everything=st.booleans())
    def commit(self, index: int, picked: set[int], everything: bool) -> None:
        writes = [w for w in self.writes if w.writing and w.client.registration and not w.done]
        if writes:
            self.finish(writes[index % len(writes)], picked, everything)

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

    @precondition(lambda self: any(write.writing for write in self.writes))
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        writes = [w for w in self.writes if w.writing and w.client.registration and not w.done]
        if writes:
            write = writes[index % len(writes)]
            self.domain.engine.abort_store(write.client.registration, [write.lease_id], self.domain.now)
            self.said_done(write)

    def said_done(self, write: Write) -> None:
        """The owner writes no more; where the server moves the bytes, its receives may still be running."""
        write.live = False
        write.done = True
        if not write.client.server_moves_bytes or not write.slots:
            self.writes.remove(write)

    @rule(index=INDEX, which=INDEX, first=INDEX, count=INDEX)
    def begin_retrieve(self, index: int, which: int, first: int, count: int) -> None:
        client = self.client(index, "worker")
        name = self.session(client, which)
        keys = self.sessions.get((client.engine_id, name), [])
        first, count = self.part(keys, first, count)
        grant = self.domain.retrieve(client.registration, SessionRange(name, first, count))
        if first + count > len(keys):
            assert grant.error is not None
            return
        assert len(grant.slots) + len(grant.missing) == count * GROUPS
        held = {key for hold in self.holds if hold.live for key in self.still_held(hold)}
        assert not [m for m in grant.missing if m.group_index == 0 and keys[m.chunk_index] in held]
        slots = [Slot((keys[s.chunk_index], client.rank, s.group_index), s.offset) for s in grant.slots]
        if grant.lease_id:
            expected = [self.committed[slot.name] for slot in slots]
            deadline = self.domain.now + grant.ttl
            self.reads.append(Read(client, client.registration, grant.lease_id, slots, expected, deadline))

    @precondition(lambda self: self.reads)
    @rule(index=INDEX)
    def end_retrieve(self, index: int) -> None:
        reads = [read for read in self.reads if read.client.registration]
        if not reads:
            return
        read = reads[index % len(reads)]
        held = self.domain.end(read.client.registration, read.lease_id)
        assert held == (read.live and read.registration == read.client.registration)
        if read.live:
            self.lose(read)
        if not read.sending:
            self.reads.remove(read)

    @precondition(lambda self: self.holds)
    @rule(index=INDEX, first=st.integers(0, MAX_CHUNKS), count=st.integers(0, MAX_CHUNKS))
    def release_lookup(self, index: int, first: int, count: int) -> None:
        hold = self.holds[index % len(self.holds)]
        if not hold.client.registration:
            return
        item = ReleaseItem(hold.session, hold.lease_id, first, count)
        (result,) = self.domain.engine.release_lookup(hold.client.registration, [item], self.domain.now)
        if not hold.live or hold.registration != hold.client.registration:
            assert (result.released, result.not_held) == (0, count or 1)
            return
        end = first + count if count else len(hold.keys)
        asked = set(range(first, end)) if end > first else set()
        given = asked & set(range(len(hold.keys))) - hold.released
        assert (result.released, result.not_held) == (len(given), len(asked) - len(given))
        hold.released |= given
        hold.live = len(hold.released) < len(hold.keys)

    @rule(index=INDEX, name=st.sampled_from("xy"))
    def end_session(self, index: int, name: str) -> None:
        client = self.client(index)
        ended = self.domain.engine.end_session(client.registration, [name], self.domain.now)
        assert ended == ((client.engine_id, name) in self.sessions)
        self.forget_session(client.engine_id, name)

    @rule(seconds=st.sampled_from([1.0, 4.0, TTL, SESSION_TTL, REGISTRATION_TTL + 1]), sweep=st.booleans())
    def time_passes(self, seconds: float, sweep: bool) -> None:
        self.domain.now += seconds
        if seconds < REGISTRATION_TTL:
            for client in self.clients:
                if client.registration and client.alive:
                    assert self.domain.engine.ping(client.registration, self.domain.now)
        if sweep or seconds >= SESSION_TTL:
            expired = self.domain.engine.expire(self.domain.now)
            for client in self.clients:
                if client.registration in expired.registration_ids:
                    self.leave(client)
            live = {(s.engine_id, s.session_id) for s in self.domain.engine._state.sessions}
            for engine_id, name in list(self.sessions):
                if (engine_id, name) not in live:
                    self.forget_session(engine_id, name)
        else:
            # Any call ends what is due.
            self.domain.engine.unregister(1, self.domain.now)
        self.expire_model()

    @rule(index=INDEX)
    def disconnect(self, index: int) -> None:
        """The process goes on, and may write on."""
        client = self.client(index)
        assert self.domain.engine.disconnect(client.registration, self.domain.now)
        self.leave(client)

    @rule(index=INDEX)
    def kill(self, index: int) -> None:
        """The process dies, and a new one takes its place. The server notices later, in two steps."""
        client = self.client(index)
        client.alive = False
        self.dead.append((client.registration, client))
        if not client.server_moves_bytes:
            for write in self.writes:
                write.writing = write.writing and write.client is not client
        self.join(client.engine_id, client.role, client.rank, client.path)

    @precondition(lambda self: self.dead)
    @rule(index=INDEX, proven=st.booleans())
    def notice_death(self, index: int, proven: bool) -> None:
        registration, client = self.dead[index % len(self.dead)]
        if self.domain.engine.disconnect(registration, self.domain.now):
            self.leave(client)
        if proven:
            for owner in self.domain.engine.quarantined_owners():
                if owner.client_id == client.client_id:
                    assert self.domain.engine.owner_dead(owner.registration_id) == owner.leases
            self.dead.remove((registration, client))
            if not client.server_moves_bytes:
                self.writes = [write for write in self.writes if write.client is not client]

    @precondition(lambda self: any(lease.live for lease in [*self.writes, *self.reads, *self.holds]))
    @rule(index=INDEX, thief=INDEX)
    def touch_a_foreign_lease(self, index: int, thief: int) -> None:
        live = [lease for lease in [*self.writes, *self.reads, *self.holds] if lease.live]
        lease = live[index % len(live)]
        client = self.client(thief)
        if client.registration == lease.registration:
            return
        engine, now = self.domain.engine, self.domain.now
        assert self.domain.commit(client.registration, lease.lease_id).committed == 0
        assert engine.abort_store(client.registration, [lease.lease_id], now) == (0,)
        assert not self.domain.end(client.registration, lease.lease_id)
        item = ReleaseItem(getattr(lease, "session", "x"), lease.lease_id)
        assert engine.release_lookup(client.registration, [item], now)[0].released == 0
        assert not engine.confirm_cancelled(lease.lease_id)

    @precondition(lambda self: any(w.writing and w.client.path == "shm" for w in self.writes))
    @rule(index=INDEX)
    def confirm_what_no_transfer_holds(self, index: int) -> None:
        writes = [w for w in self.writes if w.writing and w.client.path == "shm"]
        assert not self.domain.engine.confirm_cancelled(writes[index % len(writes)].lease_id)

    @rule(index=INDEX)
    def register_again(self, index: int) -> None:
        living = [client for client in self.clients if client.alive]
        client = living[index % len(living)]
        if client.registration:
            self.end_registration(client.registration)
        self.enroll(client)

    @rule(index=INDEX)
    def unregister(self, index: int) -> None:
        client = self.client(index)
        assert self.domain.engine.unregister(client.registration, self.domain.now)
        assert not self.domain.engine.unregister(client.registration, self.domain.now)
        self.leave(client)
        # It has said that it writes no more, in all its registrations.
        for write in [w for w in self.writes if w.client is client and not client.server_moves_bytes]:
            self.writes.remove(write)

    @rule()
    def data_path_catches_up(self) -> None:
        for ended in self.domain.engine.drain_ended():
            assert ended.data_path == "ucx-local"
            self.domain.check()
            assert self.domain.engine.confirm_cancelled(ended.lease_id)
            assert not self.domain.engine.confirm_cancelled(ended.lease_id)
            self.writes = [write for write in self.writes if write.lease_id != ended.lease_id]
            for read in self.reads:
                if read.lease_id == ended.lease_id:
                    read.sending = False
        self.reads = [read for read in self.reads if read.live or read.sending or read.client.registration]

    @rule(fraction=st.sampled_from([0.0, 0.3, 0.7]))
    def evict(self, fraction: float) -> None:
        self.domain.engine.evict_to(fraction)

    @precondition(lambda self: self.domain.engine.store.resident_objects)
    @rule(index=INDEX)
    def clear(self, index: int) -> None:
        if index % 5 == 0:
            self.domain.engine.clear()

    # Invariants

    def still_held(self, hold: Hold) -> list[bytes]:
        return [key for index, key in enumerate(hold.keys) if index not in hold.released]

    @invariant()
    def accounts_agree(self) -> None:
        if hasattr(self, "domain"):
            self.domain.check()

    @invariant()
    def what_is_resident_is_what_was_committed(self) -> None:
        if not hasattr(self, "domain"):
            return
        for chunk in self.domain.engine.store.chunks():
            for shard, stored in enumerate(chunk.shards):
                if stored is not None and chunk.mask >> shard & 1:
                    rank, group = divmod(shard, GROUPS)
                    data = self.arena[stored.offset : stored.offset + OBJECT_BYTES]
                    assert data == self.committed[chunk.key, rank, group]

    @invariant()
    def readers_see_their_bytes(self) -> None:
        if not hasattr(self, "domain"):
            return
        for read in self.reads:
            if read.live or read.sending:
                for slot, expected in zip(read.slots, read.expected, strict=True):
                    assert self.arena[slot.offset : slot.offset + OBJECT_BYTES] == expected

    @invariant()
    def what_is_leased_stays(self) -> None:
        if not hasattr(self, "domain"):
            return
        for hold in self.holds:
            if hold.live and hold.registration == hold.client.registration:
                for key in self.still_held(hold):
                    chunk = self.domain.engine.store.get(key)
                    assert chunk is not None
                    assert chunk.mask & 0b0101 == 0b0101

    @invariant()
    def memory_in_use_is_not_handed_out(self) -> None:
        if not hasattr(self, "domain"):
            return
        written = [slot.offset for write in self.writes if write.writing for slot in write.slots]
        read = {slot.offset for read in self.reads if read.live or read.sending for slot in read.slots}
        assert len(written) == len(set(written))
        assert not read & set(written)
        waiting = sum(len(write.slots) for write in self.writes if not write.live)
        assert self.domain.engine.store.quarantined_bytes == waiting * OBJECT_BYTES
        # What somebody may touch is never free.
        allocated = self.domain.engine.store.allocator._taken
        assert all(offset in allocated for offset in [*written, *read])

    def teardown(self) -> None:
        if not hasattr(self, "domain"):
            return
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
        assert status.l1.used_bytes == status.l1.resident_bytes == status.l1.evictable_bytes
        engine.evict_to(0.0, max_chunks=1000)
        assert engine.store.allocator.used == 0
        assert len(engine.store) == 0


EngineMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngine = pytest.mark.timeout(300)(EngineMachine.TestCase)
