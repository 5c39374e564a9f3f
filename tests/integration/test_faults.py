"""Clients that die, hang and come back, and a server that dies, as processes of their own."""

from __future__ import annotations

import contextlib
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import error_reason_pb2 as reasons
from support.raw_client import OBJECT_BYTES, RawClient, content, failure, tokens
from support.server_process import server_process
from support.victims import victim
from support.waiting import eventually

FAST = ("--chunk-size=4", "--sweep-interval=0.1")
LEASE_LOST = reasons.ERROR_REASON_LEASE_LOST
NOT_REGISTERED = "NOT_REGISTERED"


@pytest.fixture
def server(short_tmp):
    with server_process(short_tmp, *FAST) as started:
        yield started


@pytest.fixture(params=["shm", "inline"])
def path(request):
    return request.param


def writer(server, path):
    return RawClient(server.channel()).register(path, attach=True)


def leases(client):
    counts = client.status().leases
    return (counts.lookup, counts.read, counts.write)


def nobody_left(client, registrations=1):
    status = client.status()
    return len(status.registrations) == registrations and not status.memory.quarantined_bytes


def test_bl19_a_client_dies_in_the_middle_of_a_store(server, path):
    other = writer(server, path)
    events = other.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(namespace=other.namespace), timeout=30)
    next(events)
    packed = tokens(4, seed=1)
    before = other.status().memory
    with victim(server.address, path) as dying:
        assert dying.do("begin", 1, 4)["lease"]
        assert other.status().memory.reserved_bytes == 4 * OBJECT_BYTES
        assert other.hits(packed) == 0
        dying.kill()
    # The same chunks again, from another client: at once.
    eventually(lambda: other.status().leases.write == 0, within=5)
    assert other.hits(packed) == 0
    assert other.store("mine", packed) == 4
    assert other.retrieve("read", packed) == [content(key) for key in other.keys(packed)]
    eventually(lambda: nobody_left(other))
    used = other.status().memory
    assert used.used_bytes == before.used_bytes + 4 * OBJECT_BYTES
    assert used.reserved_bytes == 0
    seen = next(events).events
    assert [event.chunk_key for event in seen] == other.keys(packed)
    events.cancel()
    other.unregister()
    other.close()


def test_a_dead_writers_memory_is_free_only_when_it_is_proven_dead(server):
    """Its stream is cut while the process sleeps: it may still write. Then it dies."""
    other = writer(server, "shm")
    with victim(server.address, "shm") as sleeping:
        offsets = sleeping.do("begin", 1, 2)["offsets"]
        sleeping.stop()
        # gRPC's keepalive finds out that nobody answers, in about 10 s.
        eventually(lambda: other.status().leases.write == 0, within=20)
        memory = other.status().memory
        assert memory.quarantined_bytes == 2 * OBJECT_BYTES
        # Others get other memory, for the same keys too.
        other.lookup("s", tokens(2, seed=1))
        mine = other.begin_store("s", 0, 2).ticket
        assert not {slot.arena_offset for slot in mine.slots} & set(offsets)
        assert other.abort(mine.lease_id) == 2
        sleeping.kill()
    eventually(lambda: nobody_left(other))
    other.close()


def test_a_writer_that_sleeps_past_its_lease(short_tmp):
    with server_process(short_tmp, *FAST, "--write-lease=0.5") as server:
        other = writer(server, "shm")
        packed = tokens(2, seed=1)
        with victim(server.address, "shm") as sleepy:
            offsets = set(sleepy.do("begin", 1, 2)["offsets"])
            sleepy.stop()
            eventually(lambda: other.status().memory.quarantined_bytes == 2 * OBJECT_BYTES)
            assert other.hits(packed) == 0
            other.lookup("s", packed)
            ticket = other.begin_store("s", 0, 2).ticket
            assert not {slot.arena_offset for slot in ticket.slots} & offsets
            data = [content(key) for key in other.keys(packed)]
            other.write(ticket, data)
            assert other.commit(ticket.lease_id).committed == 2
            # It wakes up, writes on as if nothing had happened, and commits.
            sleepy.go_on()
            sleepy.do("scribble")
            late = sleepy.do("commit")
            assert (late["committed"], late["reason"]) == (0, LEASE_LOST)
            # With that it has said that it is done: the memory comes back, and the client goes on.
            eventually(lambda: other.status().memory.quarantined_bytes == 0)
            assert other.retrieve("read", packed) == data
            assert sleepy.do("store", 2, 2)["committed"] == 2
        other.close()


def test_bl35_crash_after_crash_leaves_nothing_and_disturbs_nobody(server, path):
    """Five times in the middle of a store, five times before the first request; another engine serves on."""
    other = writer(server, path)
    process = psutil.Process(server.pid)
    slowest, turns = 0.0, 0
    fds = 0
    with ThreadPoolExecutor(1) as pool:
        for kind in ("store", "warm up"):
            crashing = pool.submit(crash, server.address, path, 5, mid_store=kind == "store")
            while not crashing.done():
                started = time.monotonic()
                assert other.store("serving", tokens(1, seed=10_000 + turns)) == 1
                slowest = max(slowest, time.monotonic() - started)
                turns += 1
            crashing.result()
            eventually(lambda: nobody_left(other))
            # The arena, and the lock of the one that serves.
            eventually(lambda: len(server.shm_entries()) == (2 if path == "shm" else 1))
            # After the first round everything that grows once has grown.
            fds = fds or process.num_fds()
    eventually(lambda: process.num_fds() <= fds + 1)
    # The arena, and the board of the one that serves.
    assert shared_mappings(server.pid) == (2 if path == "shm" else 1)
    assert leases(other) == (0, 0, 0)
    assert turns > 5
    # Loose: ten Pythons start beside it on two cores.
    assert slowest < 5.0
    other.close()


def crash(address, path, times, *, mid_store):
    for number in range(times):
        with victim(address, path) as dying:
            if mid_store:
                assert dying.do("begin", 100 + number, 4)["lease"]
            dying.kill()


def shared_mappings(pid):
    maps = Path(f"/proc/{pid}/maps").read_text()
    return len(set(re.findall(r"/dev/shm/(\S+)", maps)))


def test_an_attach_stream_that_is_cut_ends_leases_of_every_kind(server, path):
    other = writer(server, path)
    packed = tokens(2, seed=1)
    assert other.store("first", packed) == 2
    doomed = RawClient(server.channel(), "doomed").register(path, attach=True)
    assert doomed.lookup("s", packed).lease_id
    assert doomed.begin_retrieve("s", 0, 2).ticket.lease_id
    doomed.lookup("w", tokens(1, seed=2))
    lease_id = doomed.begin_store("w", 0, 1).ticket.lease_id
    assert leases(other) == (1, 1, 1)
    doomed.attachment.close()
    eventually(lambda: leases(other) == (0, 0, 0))
    assert failure(doomed.commit, lease_id).reason == NOT_REGISTERED
    assert other.status().sessions == 0
    # This process lives: on shared memory its slot stays out of use until it lets go.
    quarantined = other.status().memory.quarantined_bytes
    assert quarantined == (OBJECT_BYTES if path == "shm" else 0)
    doomed.let_go()
    eventually(lambda: nobody_left(other))
    other.close()


def test_a_silent_client_expires_and_an_attached_one_does_not(short_tmp):
    with server_process(short_tmp, *FAST, "--registration-ttl=0.6") as server:
        silent = RawClient(server.channel(), "silent").register("shm")
        attached = RawClient(server.channel(), "attached").register("shm", attach=True)
        silent.lookup("s", tokens(2))
        lease_id = silent.begin_store("s", 0, 2).ticket.lease_id
        eventually(lambda: len(attached.status().registrations) == 1)
        assert attached.attachment.events == ["attached"]
        assert attached.store("alive", tokens(1)) == 1
        assert failure(silent.commit, lease_id).reason == NOT_REGISTERED
        # It comes back under its name, and says that it is done with what it had.
        assert attached.status().memory.quarantined_bytes == 2 * OBJECT_BYTES
        silent.let_go()
        silent.register("shm")
        eventually(lambda: not attached.status().memory.quarantined_bytes)
        assert silent.store("again", tokens(3)) == 2
        for client in (silent, attached):
            client.close()


def test_pings_keep_a_client_without_a_stream(short_tmp):
    with server_process(short_tmp, *FAST, "--registration-ttl=0.5") as server:
        client = RawClient(server.channel()).register("inline")
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            client.ping()
            time.sleep(0.1)
        assert client.store("s", tokens(1)) == 1


def test_the_server_dies_under_its_clients_and_comes_back(short_tmp, path):
    with server_process(short_tmp, *FAST, stop=False) as server:
        client = writer(server, path)
        packed = tokens(2)
        assert client.store("s", packed) == 2
        incarnation = client.ping().header.incarnation
        server.kill()
        # The end of the stream tells it at once.
        assert client.attachment.ended.wait(5)
        with server_process(short_tmp, *FAST) as following:
            fresh = following.channel()
            again = RawClient(fresh)
            again.registration_id, again.chunk_size = client.registration_id, 4
            pong = again.ping()
            assert pong.header.incarnation != incarnation
            assert pong.chunk_size == 0
            assert failure(again.lookup, "s", packed).reason == "CHUNK_SIZE_NOT_NEGOTIATED"
            again.chunk_size = 0
            again.register(path)
            assert again.hits(packed) == 0
            assert again.store("s", packed) == 2
            again.let_go()
        client.let_go()


def test_everything_ends_when_everyone_is_killed(server):
    """Several clients on both paths, in all states, all killed at once."""
    watcher = RawClient(server.channel())
    watcher.negotiate()
    before = watcher.status().memory.used_bytes
    with contextlib.ExitStack() as stack:
        victims = [
            stack.enter_context(victim(server.address, path)) for path in ("shm", "inline", "shm", "inline")
        ]
        for number, each in enumerate(victims):
            each.do("begin", 200 + number, 2)
        assert watcher.status().leases.write == 4
        for each in victims:
            each.process.kill()
    eventually(lambda: leases(watcher) == (0, 0, 0) and nobody_left(watcher, 0))
    assert watcher.status().memory.used_bytes == before
    assert watcher.status().sessions == 0
    eventually(lambda: len(server.shm_entries()) == 1)
