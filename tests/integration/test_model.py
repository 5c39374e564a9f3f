"""Random interleavings of several clients of the real server, over gRPC, on both paths, against a model.

The server's clock is the model's. Every commit has bytes of its own, so a reader that sees another's notices.
Clients on shared memory write into their slots for as long as they may, also after their leases have ended.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support.interleavings import TTL, Read, World, Write, contents
from support.raw_client import CALL_S, OBJECT_BYTES, tokens

PARTIES = 4
SEEDS = 3
LENGTH = 6
PICK = st.integers(0, 1000)


class Machine(RuleBasedStateMachine, World):
    @initialize()
    def start(self):
        self.open()
        self.connect("shm")
        self.connect("inline")
        for seed in range(SEEDS):
            self.store(seed, seed, 0, 4, "commit")

    # What clients do.

    @precondition(lambda self: len(self.present()) < PARTIES)
    @rule(path=st.sampled_from(["shm", "inline"]))
    def connect(self, path):
        self.join(path)

    @precondition(lambda self: self.parties)
    @rule(who=PICK, seed=st.integers(0, SEEDS - 1), length=st.integers(1, LENGTH))
    def look(self, who, seed, length):
        party = self.pick(self.parties, who)
        packed = tokens(length, seed)
        found = self.look_up(party, f"s{seed}", packed)
        if found is not None:
            assert found.asked_chunks == length
            assert all(key in self.committed for key in self.keys(packed)[: found.hit_chunks])

    @precondition(lambda self: self.present())
    @rule(
        who=PICK,
        seed=st.integers(0, SEEDS - 1),
        first=st.integers(0, LENGTH - 1),
        count=st.integers(1, 4),
        how=st.sampled_from(["begin", "half", "write", "commit"]),
    )
    def store(self, who, seed, first, count, how):
        party = self.pick(self.present(), who)
        packed = tokens(LENGTH, seed)
        count = min(count, LENGTH - first)
        self.look_up(party, f"s{seed}", packed)
        result = party.client.begin_store(f"s{seed}", first, count)
        keys = self.keys(packed)
        named = keys[first : first + count]
        writing = {key for write in self.live_writes() for key in write.keys}
        assert result.being_written == sum(key in writing for key in named)
        ticket = result.ticket
        granted = [keys[slot.chunk_index] for slot in ticket.slots]
        assert not writing & set(granted)
        assert len(granted) + result.being_written + result.already_stored + result.no_space == count
        taken = self.touchable()
        assert not taken & {slot.arena_offset for slot in ticket.slots}
        if granted:
            data = [contents(key, ticket.lease_id) for key in granted]
            self.writes.append(Write(party, ticket, granted, data, self.time + TTL))
            if how != "begin":
                self.write(-1, whole=how != "half")
            if how == "commit":
                self.commit(-1, len(granted))

    @precondition(lambda self: self.writes)
    @rule(which=PICK, whole=st.booleans())
    def write(self, which, whole):
        write = self.pick(self.writes, which)
        stop = len(write.data) if whole else len(write.data) // 2
        if write.party.client.path == "shm":
            self.write_in_place(write, stop)
        elif write.live:
            self.write_inline(write, stop)

    def write_in_place(self, write, stop):
        view = write.party.client.arena.view
        for index, slot in enumerate(write.ticket.slots[:stop]):
            view(slot.arena_offset, slot.size_bytes)[:] = write.data[index]
            write.written.add(index)

    def write_inline(self, write, stop):
        client, todo = write.party.client, [n for n in range(stop) if n not in write.written]
        pieces = [piece for piece in client.pieces(write.ticket, write.data) if piece.slot in todo]
        if pieces:
            client.stub.WriteChunks(iter(pieces), timeout=CALL_S)
            write.written |= set(todo)

    @precondition(lambda self: self.writes)
    @rule(which=PICK, most=st.integers(1, 4))
    def commit(self, which, most):
        """What has been written, or too much: what is not there must not come out."""
        write = self.pick(self.writes, which)
        on_shm = write.party.client.path == "shm"
        named = sorted(write.written)[:most] if on_shm else list(range(min(most, len(write.data))))
        if not named:
            return
        result = self.call(write.party, write.party.client.commit, write.ticket.lease_id, named)
        if result is None:
            return
        self.finish(write)
        if not write.live:
            assert result.committed == 0
            assert result.HasField("error")
            return
        good = [index for index in named if index in write.written]
        assert result.committed == len(good)
        assert result.aborted == len(write.data) - len(good)
        assert sorted(result.failed_slots) == [index for index in named if index not in write.written]
        for index in good:
            self.committed[write.keys[index]] = write.data[index]

    @precondition(lambda self: self.writes)
    @rule(which=PICK)
    def abort(self, which):
        write = self.pick(self.writes, which)
        slots = self.call(write.party, write.party.client.abort, write.ticket.lease_id)
        if slots is not None:
            # Of an expired one inline the server has let go by itself.
            assert slots == len(write.data) or (not write.live and slots == 0)
            self.finish(write)

    @precondition(lambda self: self.present())
    @rule(who=PICK, seed=st.integers(0, SEEDS - 1), first=st.integers(0, LENGTH - 1), whole=st.booleans())
    def retrieve(self, who, seed, first, whole):
        party = self.pick(self.present(), who)
        packed = tokens(LENGTH, seed)
        self.look_up(party, f"s{seed}", packed)
        result = party.client.begin_retrieve(f"s{seed}", first, LENGTH - first)
        assert len(result.missing) + len(result.ticket.slots) == LENGTH - first
        keys = self.keys(packed)
        expected = [self.committed[keys[slot.chunk_index]] for slot in result.ticket.slots]
        if expected:
            self.reads.append(Read(party, result.ticket, expected, self.time + TTL))
            if whole:
                self.read(-1)
                self.end_retrieve(-1)

    @precondition(lambda self: self.reads)
    @rule(which=PICK)
    def read(self, which):
        """At any time while the lease holds, whatever else goes on: the bytes are those of its begin."""
        read = self.pick(self.reads, which)
        if read.live:
            assert read.party.client.read(read.ticket) == read.expected

    @precondition(lambda self: self.reads)
    @rule(which=PICK)
    def end_retrieve(self, which):
        read = self.pick(self.reads, which)
        held = self.call(read.party, read.party.client.end_retrieve, read.ticket.lease_id)
        if held is not None:
            assert held == read.live
            assert not read.party.client.end_retrieve(read.ticket.lease_id)
            self.reads.remove(read)

    @precondition(lambda self: self.present())
    @rule(who=PICK, seed=st.integers(0, SEEDS - 1))
    def end_session(self, who, seed):
        self.pick(self.present(), who).client.end_session(f"s{seed}")

    @precondition(lambda self: self.present())
    @rule(who=PICK, number=st.integers(0, 50))
    def crowd_out(self, who, number):
        """Another prompt that nobody holds afterwards."""
        client = self.pick(self.present(), who).client
        packed = tokens(5, seed=100 + number)
        client.lookup("crowd", packed)
        ticket = client.begin_store("crowd", 0, 5).ticket
        if ticket.lease_id:
            keys = self.keys(packed)
            granted = [keys[slot.chunk_index] for slot in ticket.slots]
            data = [contents(key, ticket.lease_id) for key in granted]
            client.write(ticket, data)
            assert client.commit(ticket.lease_id).committed == len(data)
            self.committed.update(zip(granted, data, strict=True))
        client.end_session("crowd")

    @rule(
        seed=st.integers(0, SEEDS - 1),
        first=st.integers(0, LENGTH - 1),
        count=st.integers(1, LENGTH),
        damaged=st.booleans(),
    )
    def lies_below(self, seed, first, count, damaged):
        """A lower tier has it from now on, maybe with the last of it damaged."""
        names = [(key, 0) for key in self.keys(tokens(LENGTH, seed))[first : first + count]]
        self.below.objects |= set(names)
        self.below.damaged -= set(names)
        if damaged:
            self.below.damaged.add(names[-1])

    # What happens to them.

    @rule(seconds=st.sampled_from([TTL / 3, TTL / 3, TTL + 1]))
    def time_passes(self, seconds):
        self.time += seconds
        for lease in [*self.writes, *self.reads]:
            lease.live = lease.live and lease.deadline > self.time

    @rule()
    def sweep(self):
        """After it, what is taken is just what somebody may still write to."""
        self.server.sweep()
        l1 = self.server.status().l1
        assert l1.reserved_bytes == OBJECT_BYTES * sum(len(write.data) for write in self.live_writes())
        assert l1.quarantined_bytes == OBJECT_BYTES * sum(
            len(write.data) for write in self.writes if write.party.client.path == "shm" and not write.live
        )

    @precondition(lambda self: self.parties)
    @rule(
        who=PICK,
        how=st.sampled_from(["stream", "unregister", "death"]),
        path=st.sampled_from(["shm", "inline"]),
    )
    def leave(self, who, how, path):
        party = self.pick(self.parties, who)
        getattr(self, f"by_{how}")(party)
        # There are always some that go on.
        if len(self.present()) < 2:
            self.connect(path)

    # What always holds.

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "server"):
            return
        self.server.check()
        reserved = sum(len(write.data) for write in self.live_writes())
        status = self.server.status()
        assert status.l1.reserved_bytes >= reserved * OBJECT_BYTES
        assert status.l1.used_bytes <= status.l1.capacity_bytes

    @invariant()
    def hits_are_of_what_was_committed(self):
        if not hasattr(self, "server"):
            return
        for seed in range(SEEDS):
            packed = tokens(LENGTH, seed)
            hit = self.watcher.hits(packed)
            assert all(key in self.committed for key in self.keys(packed)[:hit])

    def teardown(self):
        if not hasattr(self, "server"):
            return
        try:
            self.all_ends()
        finally:
            self.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.leakcheck("shm", "fds", "threads")
def test_random_interleavings_of_clients():
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
