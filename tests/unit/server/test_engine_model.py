"""Random interleavings of several clients against a model that knows only what clients were told.

The arena is real memory. Writers write, also after their lease has ended, until they have acknowledged that,
are dead, or (where the server moves the bytes) the transfer is confirmed over. Readers compare what they see,
at any time while they hold a lease, with what was committed under the key.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvwire.errors import NotRegistered
from kvwire.server.messages import ObjectRange, Prompt, ReleaseItem, SessionRange
from support.domain import NAMESPACE, OBJECT_BYTES
from support.engine_model import (
    GROUPS,
    MAX_CHUNKS,
    REGISTRATION_TTL,
    SESSION_TTL,
    TTL,
    WORLD,
    Read,
    Slot,
    step,
)
from support.loan_model import LoanModel

INDEX = st.integers(0, 1000)
LENGTH = st.integers(1, MAX_CHUNKS).map(lambda length: MAX_CHUNKS + 1 - length)


class EngineMachine(LoanModel, RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "arc", "tenant"]))
    def start(self, policy: str) -> None:
        self.begin_with(policy)

    @rule(index=INDEX, seed=st.integers(0, 3), chunks=LENGTH, name=st.sampled_from("xy"))
    def ask(self, index: int, seed: int, chunks: int, name: str) -> None:
        self.look_up(index, seed, chunks, name)

    @rule(index=INDEX, seed=st.integers(0, 3), chunks=LENGTH, name=st.sampled_from("xy"))
    def start_a_long_lookup(self, index: int, seed: int, chunks: int, name: str) -> None:
        client = self.client(index, "scheduler")
        prompt = Prompt(NAMESPACE, self.prompt(seed, chunks))
        steps = self.domain.engine.lookup_steps(client.registration, name, prompt, self.domain.now)
        result = step(steps, None)
        if result is not None:
            self.asked_again(client, name)
            self.found(client, name, self.keys(seed, chunks), result)
            return
        self.asked_again(client, name)
        self.sessions.setdefault((client.engine_id, name), [])
        version = self.versions[client.engine_id, name]
        self.lookups.append((client, client.registration, name, self.keys(seed, chunks), steps, version))

    @precondition(lambda self: self.lookups)
    @rule(index=INDEX)
    def go_on_with_a_lookup(self, index: int) -> None:
        pending = self.lookups.pop(index % len(self.lookups))
        client, registration, name, keys, steps, version = pending
        if client.registration != registration:
            with pytest.raises(NotRegistered):
                list(steps)
            return
        result = step(steps, self.domain.now)
        if result is None:
            self.lookups.append(pending)
        elif self.versions[client.engine_id, name] == version:
            self.found(client, name, keys, result)
        else:
            assert (result.hit_chunks, result.lease_id) == (0, 0)

    @rule(index=INDEX, which=INDEX, first=INDEX, count=INDEX, both=st.booleans())
    def begin_store(self, index: int, which: int, first: int, count: int, both: bool) -> None:
        client = self.client(index, "worker")
        name = self.session(client, which)
        keys = self.sessions.get((client.engine_id, name), [])
        first, count = self.part(keys, first, count)
        self.begin(client, name, first, count, () if both else (ObjectRange(0, first, count),))

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

    @rule(index=INDEX, seed=st.integers(0, 3), chunks=LENGTH, done=st.booleans())
    def store_a_prompt_that_a_peer_asks_for(self, index: int, seed: int, chunks: int, done: bool) -> None:
        self.store_a_prompt(index, seed, chunks, sparse=False)
        before = len(self.lent)
        self.lend(seed, chunks, [], 100, "p")
        if done and len(self.lent) > before:
            self.a_peer_is_done(before, "p")

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

    @precondition(lambda self: any(write.writing for write in self.writes))
    @rule(index=INDEX)
    def arrive(self, index: int) -> None:
        """All slots are written, which the server sees whether their registration still stands or not."""
        writes = [w for w in self.writes if w.writing and not w.client.server_moves_bytes and not w.done]
        if writes:
            self.arrived(writes[index % len(writes)])

    @precondition(lambda self: any(write.writing for write in self.writes))
    @rule(index=INDEX)
    def abort(self, index: int) -> None:
        writes = [w for w in self.writes if w.writing and w.client.registration and not w.done]
        if writes:
            write = writes[index % len(writes)]
            self.domain.engine.abort_store(write.client.registration, [write.lease_id], self.domain.now)
            self.said_done(write)

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

    @precondition(lambda self: [*self.writes, *self.reads, *self.holds])
    @rule(index=INDEX, thief=INDEX)
    def touch_a_foreign_lease(self, index: int, thief: int) -> None:
        leases = [*self.writes, *self.reads, *self.holds]
        lease = leases[index % len(leases)]
        client = self.client(thief)
        if client is lease.client:
            return
        engine, now = self.domain.engine, self.domain.now
        assert self.domain.commit(client.registration, lease.lease_id).committed == 0
        assert engine.abort_store(client.registration, [lease.lease_id], now) == (0,)
        assert not self.domain.end(client.registration, lease.lease_id)
        item = ReleaseItem(getattr(lease, "session", "x"), lease.lease_id)
        assert engine.release_lookup(client.registration, [item], now)[0].released == 0
        if lease.live or not lease.client.server_moves_bytes:
            assert not engine.confirm_cancelled(lease.lease_id)

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
            self.sent(ended.lease_id)
            self.writes = [write for write in self.writes if write.lease_id != ended.lease_id]
            for read in self.reads:
                if read.lease_id == ended.lease_id:
                    read.sending = False
        self.reads = [read for read in self.reads if read.live or read.sending or read.client.registration]

    @precondition(lambda self: self.domain.engine.store.policy.name == "tenant")
    @rule(objects=st.integers(0, 20))
    def set_quota(self, objects: int) -> None:
        self.domain.engine.store.tenants.set_limits({"": objects * OBJECT_BYTES} if objects else {})

    @rule(fraction=st.sampled_from([0.0, 0.3, 0.7]))
    def evict(self, fraction: float) -> None:
        self.domain.engine.evict_to(fraction)

    @rule(seed=st.integers(0, 3), first=st.integers(0, MAX_CHUNKS), count=st.integers(1, MAX_CHUNKS))
    def pin_a_prompt(self, seed: int, first: int, count: int) -> None:
        """An operator does, by keys, whether they are there or not."""
        self.pin(self.keys(seed, MAX_CHUNKS)[first : first + count])

    @rule(seed=st.integers(0, 3), first=st.integers(0, MAX_CHUNKS))
    def unpin_a_prompt(self, seed: int, first: int) -> None:
        self.unpin(self.keys(seed, MAX_CHUNKS)[first:])

    @precondition(lambda self: self.domain.engine.store.resident_objects)
    @rule(index=INDEX)
    def clear(self, index: int) -> None:
        if index % 5 == 0:
            self.domain.engine.clear()

    @invariant()
    def what_was_promised_holds(self) -> None:
        if hasattr(self, "domain"):
            self.accounts_agree()
            self.what_is_resident_is_what_was_committed()
            self.what_is_pinned_stays()
            self.readers_see_their_bytes()
            self.what_is_leased_stays()
            self.what_is_held_stays()
            self.what_was_lent_stays()
            self.memory_in_use_is_not_handed_out()

    def teardown(self) -> None:
        if hasattr(self, "domain"):
            self.drain()


EngineMachine.TestCase.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestEngine = pytest.mark.timeout(300)(EngineMachine.TestCase)
