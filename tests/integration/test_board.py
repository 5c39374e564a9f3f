"""Shared memory without calls: stores that are committed on the board, reads that the server does not doubt.

What may go wrong between the last byte and the word, and between the bytes and the end of a read lease.
"""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from kvwire.client import Client
from kvwire.client.types import Path
from kvwire.transfer.arena_path import ShmPath
from kvwire.v1 import cache_service_pb2 as pb
from support.raw_client import CALL_S, OBJECT_BYTES, RawClient, content, tokens
from support.server_process import server_process
from support.victims import victim
from support.waiting import eventually

FAST = ("--chunk-size=4", "--sweep-interval=0.1")
BLOCKS, BLOCK_SIZE, CHUNK = 32, 16, 64
DEADLINES = {"Ping": 0.3, "Lookup": 1.0, "NegotiateChunkSize": 1.0, "RegisterKvCache": 2.0, "Attach": 1.0}


@pytest.fixture
def server(short_tmp):
    with server_process(short_tmp, *FAST) as started:
        yield started


@pytest.fixture
def client(server):
    made = RawClient(server.channel()).register("shm", attach=True)
    yield made
    made.close()


def begin(client, seed=1, chunks=2, session_id="s"):
    """A write lease whose slots are filled with what belongs there."""
    packed = tokens(chunks, seed)
    client.lookup(session_id, packed)
    ticket = client.begin_store(session_id, 0, chunks).ticket
    client.write(ticket, right(client, packed))
    client.end_session(session_id)
    return packed, ticket


def right(client, packed):
    return [content(key) for key in client.keys(packed)]


def at_rest(client, registrations=1):
    status = client.status()
    leases, memory = status.leases, status.memory
    left = leases.lookup or leases.read or leases.write or memory.reserved_bytes or memory.quarantined_bytes
    return len(status.registrations) == registrations and not left


# A store's last word


def test_an_arrival_is_a_commit(client):
    packed, ticket = begin(client)
    assert ticket.arrival_word
    assert client.hits(packed) == 0
    client.arrive(ticket)
    assert client.hits(packed) == 2
    assert client.retrieve("r", packed) == right(client, packed)
    assert at_rest(client)


def test_events_of_an_arrival_wait_for_nobody(client):
    events = client.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(), timeout=CALL_S)
    assert not next(events).events
    packed, ticket = begin(client)
    client.arrive(ticket)
    assert [event.chunk_key for event in next(events).events] == client.keys(packed)
    events.cancel()


def test_a_client_that_calls_has_its_word_back(client):
    """More leases than there are words, committed and aborted by calls."""
    for seed in range(600):
        packed = tokens(1, seed)
        client.lookup("s", packed)
        ticket = client.begin_store("s", 0, 1).ticket
        assert ticket.arrival_word
        if seed % 2:
            assert client.abort(ticket.lease_id) == 1
        else:
            assert client.commit(ticket.lease_id).committed == 1
    assert at_rest(client)


def test_a_word_and_a_call_publish_once(client):
    packed, ticket = begin(client)
    client.arrive(ticket)
    again = client.commit(ticket.lease_id)
    assert again.committed in {0, 2}
    assert client.hits(packed) == 2
    assert client.status().counters.stored_objects == 2
    assert at_rest(client)


def test_nobody_commits_for_others(server, client):
    other = RawClient(server.channel()).register("shm", attach=True)
    packed, ticket = begin(client)
    theirs, their_ticket = begin(other, seed=2)
    other.lock.board.arrive(their_ticket.arrival_word, ticket.lease_id)
    other.lock.board.arrive(ticket.arrival_word + 1, ticket.lease_id)
    assert (client.hits(packed), client.hits(theirs)) == (0, 0)
    client.arrive(ticket)
    other.arrive(their_ticket)
    assert (client.hits(packed), client.hits(theirs)) == (2, 2)
    other.close()


def test_killed_between_the_last_byte_and_the_word(server, client):
    packed = tokens(3, seed=1)
    with victim(server.address, "shm") as dying:
        dying.do("begin", 1, 3)
        dying.do("finish")
        dying.kill()
    eventually(lambda: at_rest(client))
    assert client.hits(packed) == 0
    assert client.store("mine", packed) == 3
    assert client.retrieve("r", packed) == right(client, packed)


def test_killed_right_after_the_word(server, client):
    """What was said before the end counts, whatever the server hears first."""
    packed = tokens(3, seed=1)
    with victim(server.address, "shm") as dying:
        dying.do("begin", 1, 3)
        dying.do("finish")
        dying.do("arrive")
        dying.kill()
    eventually(lambda: at_rest(client))
    assert client.hits(packed) == 3
    assert client.retrieve("r", packed) == right(client, packed)


def test_a_word_after_the_leases_time_publishes_nothing(short_tmp):
    with server_process(short_tmp, *FAST, "--write-lease=0.5") as server:
        client = RawClient(server.channel()).register("shm", attach=True)
        packed = tokens(2, seed=1)
        with victim(server.address, "shm") as sleepy:
            offsets = set(sleepy.do("begin", 1, 2)["offsets"])
            sleepy.stop()
            eventually(lambda: client.status().memory.quarantined_bytes == 2 * OBJECT_BYTES)
            assert client.store("mine", packed) == 2
            # It wakes up, writes on as if nothing had happened, and says so.
            sleepy.go_on()
            sleepy.do("scribble")
            sleepy.do("arrive")
            # With that it has said that it is done: the memory comes back.
            eventually(lambda: client.status().memory.quarantined_bytes == 0)
            assert client.retrieve("r", packed) == right(client, packed)
            assert client.status().counters.stored_objects == 2
            client.lookup("next", tokens(2, seed=3))
            again = client.begin_store("next", 0, 2).ticket
            assert {slot.arena_offset for slot in again.slots} & offsets
            assert client.abort(again.lease_id) == 2
            assert sleepy.do("store", 2, 2)["committed"] == 2
        client.close()


def test_a_server_that_slept_over_the_end_of_the_lease(short_tmp):
    """The word was in time, the server is not: published or not, nothing is wrong and nothing is left."""
    with server_process(short_tmp, *FAST, "--write-lease=1") as server:
        client = RawClient(server.channel()).register("shm", attach=True)
        packed, ticket = begin(client)
        os.kill(server.pid, signal.SIGSTOP)
        client.arrive(ticket)
        time.sleep(1.5)
        os.kill(server.pid, signal.SIGCONT)
        eventually(lambda: at_rest(client))
        found = client.hits(packed)
        assert client.store("mine", packed) == 2 - found
        assert client.retrieve("r", packed) == right(client, packed)
        client.close()


def test_registered_anew_before_the_word(client):
    """The client's own older board: it is told to ask, nothing is published, and nothing stays taken."""
    packed, ticket = begin(client)
    lock, arena = client.lock, client.arena
    doubts = lock.board.doubts
    client.attachment.call.cancel()
    client.register("shm", attach=True)
    assert lock.board.doubts > doubts
    lock.board.arrive(ticket.arrival_word, ticket.lease_id)
    assert client.hits(packed) == 0
    arena.close()
    lock.close()
    eventually(lambda: at_rest(client))
    assert client.hits(packed) == 0
    assert client.store("s", packed) == 2


# The client library over it


def register(address, **options):
    random = np.random.default_rng(1)
    kv = {f"l{i}": random.integers(0, 255, (BLOCKS, 4096), dtype=np.uint8) for i in range(2)}
    client = Client(address, deadlines={**DEADLINES, **options})
    cache = client.register_kv_caches(
        kv, model="m", block_size=BLOCK_SIZE, heartbeat_interval=0.3, data_path=Path.SHM.label
    )
    return client, cache, kv


@pytest.fixture
def start(short_tmp):
    def started(*flags, **options):
        return server_process(short_tmp, "--chunk-size=64", "--sweep-interval=0.1", *flags, **options)

    return started


def meanwhile(monkeypatch, method, act):
    """Once, when the bytes of a transfer have been copied, and before anybody is told."""
    real = getattr(ShmPath, method)

    def copy_and_act(self, *args, **kwargs):
        results = real(self, *args, **kwargs)
        monkeypatch.undo()
        act()
        return results

    monkeypatch.setattr(ShmPath, method, copy_and_act)


def settled(client):
    status = client.status()
    leases, memory = status.leases, status.memory
    return not (leases.lookup or leases.read or leases.write or memory.quarantined_bytes or status.sessions)


def test_a_restart_between_begin_and_the_word(start, monkeypatch):
    """The store ends at once, the server that comes back knows nothing of it, and everything goes on."""
    with start(stop=False) as first:
        client, cache, kv = register(first.address)
        meanwhile(monkeypatch, "write", first.kill)
        with cache.session(range(64)) as session:
            session.store(range(4))
    with start() as second, Client(second.address) as watching:
        eventually(lambda: cache.is_healthy)
        with cache.session(range(64)) as session:
            assert session.hit_tokens == 0
            assert session.store(range(4)).ok
        with cache.session(range(64)) as session:
            assert session.retrieve(range(10, 14)).ok
        assert all((layer[10:14] == layer[:4]).all() for layer in kv.values())
        eventually(lambda: settled(watching))
        cache.close()
        client.close()


def test_a_client_that_was_removed_before_the_word_is_told(start, monkeypatch):
    with start() as server, Client(server.address) as watching:
        client, cache, _kv = register(server.address)
        meanwhile(monkeypatch, "write", lambda: watching.unregister(cache.link.registration_id))
        with cache.session(range(64)) as session:
            assert not session.store(range(4)).ok
        eventually(lambda: cache.is_healthy)
        with cache.session(range(64)) as session:
            assert session.hit_tokens == 0
            assert session.store(range(4)).ok
        eventually(lambda: settled(watching))
        cache.close()
        client.close()


@pytest.fixture
def stored(start):
    """A server, and a client that has stored one chunk there."""
    with start("--read-lease=2", stop=False) as server:
        client, cache, kv = register(server.address, EndRetrieve=2.0)
        with cache.session(range(64)) as session:
            assert session.store(range(4)).ok
        yield server, cache, kv
        if server.process.poll() is None:
            os.kill(server.pid, signal.SIGCONT)
        cache.close()
        client.close()


def is_right(kv):
    return all((layer[10:14] == layer[:4]).all() for layer in kv.values())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_falls_silent_after_the_bytes_were_read(stored, monkeypatch, number):
    """Nothing it could still say would change them."""
    server, cache, kv = stored
    with cache.session(range(64)) as session:
        meanwhile(monkeypatch, "read", lambda: os.kill(server.pid, number))
        assert session.retrieve(range(10, 14)).ok
        assert is_right(kv)


def test_a_lease_that_ran_out_while_its_bytes_were_read_proves_nothing(stored, monkeypatch):
    server, cache, kv = stored
    with Client(server.address) as watching, cache.session(range(64)) as session:
        meanwhile(monkeypatch, "read", lambda: eventually(lambda: not watching.status().leases.read))
        assert session.retrieve(range(10, 14)).error.reason == "LEASE_LOST"
    with cache.session(range(64)) as session:
        assert session.retrieve(range(10, 14)).ok
        assert is_right(kv)


def test_a_client_that_was_removed_while_it_read_has_read_nothing(stored, monkeypatch):
    server, cache, kv = stored
    with Client(server.address) as watching:
        session = cache.session(range(64))
        meanwhile(monkeypatch, "read", lambda: watching.unregister(cache.link.registration_id))
        assert session.retrieve(range(10, 14)).error.reason == "NOT_REGISTERED"
        eventually(lambda: cache.is_healthy)
        with cache.session(range(64)) as again:
            assert again.retrieve(range(10, 14)).ok
        assert is_right(kv)
        eventually(lambda: settled(watching))


def test_the_end_of_a_read_is_told_although_nobody_waits_for_it(stored):
    server, cache, _kv = stored
    with Client(server.address) as watching:
        for _ in range(20):
            with cache.session(range(64)) as session:
                assert session.retrieve(range(10, 14)).ok
        # Sooner than by the time of the leases: by the client's word.
        eventually(lambda: settled(watching))
        counters = watching.status().counters
        assert counters.expired_leases == 0
        assert counters.retrieved_objects == 20
