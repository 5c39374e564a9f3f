"""Who may touch what, for how long: the rules of leases, seen from clients."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import error_reason_pb2 as reasons
from support.local_server import MIB, local_server
from support.raw_client import CALL_S, OBJECT_BYTES, RawClient, content, failure, tokens
from support.waiting import eventually


def standalone(local, engine_id="engine", path="inline", **fields):
    return RawClient(local.channel(), engine_id).register(path, **fields)


def no_leases(local):
    status = local.status()
    assert not any(status.leases.values()), status.leases
    assert not status.waiting_leases
    local.check()


@pytest.fixture
def client(local):
    return standalone(local)


@pytest.fixture
def other(local):
    return standalone(local, "other")


def test_bl13_hits_that_are_not_needed_are_given_back(local, client):
    packed = tokens(4)
    assert client.store("first", packed, "t1") == 4
    hit = client.lookup("s", packed, salt="t1")
    assert hit.hit_chunks == 4
    released = client.release("s", hit.lease_id, 0, 3)
    assert (released.released_chunks, released.not_held_chunks) == (3, 0)
    result = client.begin_retrieve("s", 3, 1)
    assert client.read(result.ticket) == [content(client.keys(packed, "t1")[3])]
    assert client.end_retrieve(result.ticket.lease_id)
    # A release cannot forget the salt: it names the lease. What is not held is told and counted.
    for session_id, lease_id in (("s", hit.lease_id + 99), ("another", hit.lease_id)):
        wrong = client.release(session_id, lease_id, 0, 4)
        assert (wrong.released_chunks, wrong.not_held_chunks) == (0, 4)
    assert client.status().counters.surplus_releases == 8
    assert client.end_session("s") == 1
    no_leases(local)


def test_bl14_a_request_frees_only_what_it_holds(short_tmp):
    with local_server(short_tmp, l1_size=MIB) as local:
        client = standalone(local)
        packed = tokens(3)
        assert client.store("first", packed) == 3
        one, two = client.lookup("r1", packed), client.lookup("r2", packed)
        assert client.release("r1", one.lease_id, 0, 3).released_chunks == 3
        for first, count in ((0, 3), (1, 7)):
            assert client.release("r1", one.lease_id, first, count).not_held_chunks == count
        # Not even with the other's lease in hand, and not from another engine.
        assert client.release("r1", two.lease_id, 0, 3).released_chunks == 0
        assert standalone(local, "other").release("r2", two.lease_id, 0, 3).released_chunks == 0
        assert client.end_session("r1") == 1
        pressure(client)
        result = client.begin_retrieve("r2", 0, 3)
        assert not result.missing
        assert client.read(result.ticket) == [content(key) for key in client.keys(packed)]
        assert client.end_retrieve(result.ticket.lease_id)
        client.end_session("r2")
        no_leases(local)


def pressure(client, objects=40, seed=500):
    """Store until everything that may go has gone."""
    for number in range(objects):
        client.store("pressure", tokens(1, seed=seed + number))


def test_bl16_the_answer_of_a_lookup_is_final(local, client):
    """One call: there is nothing to poll, and one that is overtaken holds nothing."""
    packed = tokens(3)
    client.store("first", packed)
    real = local.engine.lookup_steps
    waiting, late = threading.Event(), threading.Event()

    def slow(registration_id, session_id, prompt, now, **settings):
        steps = real(registration_id, session_id, prompt, now, **settings)
        if session_id == "slow":
            # The session is open and its keys are being made: what may happen meanwhile?
            local.engine._state.registrations.require(registration_id, now)
            waiting.set()
            while not late.is_set():
                yield
        return (yield from steps)

    local.engine.lookup_steps = slow
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.lookup, "slow", packed)
        assert waiting.wait(CALL_S)
        for _ in range(100):
            assert client.begin_retrieve("slow", 0, 3).error.reason == reasons.ERROR_REASON_SESSION_UNKNOWN
        late.set()
        assert asked.result(CALL_S).hit_chunks == 3
    assert client.begin_retrieve("slow", 0, 3).ticket.lease_id
    client.unregister()
    local.sweep()
    no_leases(local)


def test_bl17_the_session_ends_before_its_last_store(local, client):
    packed = tokens(2)
    client.lookup("s", packed)
    tickets = [client.begin_store("s", n, 1).ticket for n in range(2)]
    keys = client.keys(packed)
    for ticket, key in zip(tickets, keys, strict=True):
        client.write(ticket, [content(key)])
    assert client.end_session("s") == 1
    assert [client.commit(ticket.lease_id).committed for ticket in tickets] == [1, 1]
    assert local.status().sessions == 0
    assert client.end_session("s") == 0
    assert client.hits(packed) == 2
    # The same id again is another session.
    assert client.lookup("s", packed).hit_chunks == 2
    assert local.status().sessions == 1
    client.end_session("s")
    no_leases(local)


def test_bl17_a_swept_session_that_was_made_again_lives(short_tmp):
    with local_server(short_tmp, session_ttl=0.3, lookup_lease=30.0) as local:
        client = standalone(local)
        client.store("first", tokens(1))
        client.lookup("r", tokens(1))
        eventually(lambda: local.status().sessions == 0)
        no_leases(local)
        assert client.lookup("r", tokens(1)).hit_chunks == 1
        assert client.begin_retrieve("r", 0, 1).ticket.lease_id
        assert local.status().sessions == 1


def test_bl22_what_is_gone_between_lookup_and_retrieve_is_named(local, client):
    packed = tokens(4)
    client.store("first", packed)
    assert client.lookup("s", packed).hit_chunks == 4
    held = client.begin_retrieve("s", 0, 4).ticket
    (gone,) = local.run(local.engine.live_lease, client.registration_id, held.lease_id, 0.0).objects[1:2]
    assert local.run(local.engine.discard, gone)
    # Who was reading learns that it must not use what it has read.
    assert not client.end_retrieve(held.lease_id)
    result = client.begin_retrieve("s", 0, 4)
    assert [(each.chunk_index, each.group_index) for each in result.missing] == [(1, 0)]
    assert [slot.chunk_index for slot in result.ticket.slots] == [0, 2, 3]
    assert client.end_retrieve(result.ticket.lease_id)
    assert client.hits(packed) == 1
    client.end_session("s")
    no_leases(local)


def test_bl34_the_layout_goes_with_its_last_user(local):
    a, b = standalone(local, "a"), standalone(local, "b")
    b.store("first", tokens(2))
    a.unregister()
    assert b.lookup("s", tokens(2)).hit_chunks == 2
    a.unregister()
    conflict = failure(RawClient(local.channel(), "c").register, object_bytes=4096)
    assert conflict.reason == "LAYOUT_CONFLICT"
    assert conflict.metadata["engine_id"] == "b"
    b.unregister()
    third = RawClient(local.channel(), "c").register("inline", object_bytes=4096)
    assert third.hits(tokens(2)) == 0
    assert third.store("own", tokens(1)) == 1
    local.check()


def test_bl53_eviction_takes_the_tail_before_the_head(short_tmp):
    # Room for 16 objects and the first page.
    with local_server(short_tmp, l1_size=MIB + 4096, watermark=1.0) as local:
        client = standalone(local)
        packed = tokens(8)
        client.lookup("s", packed)
        for first in range(0, 8, 2):
            ticket = client.begin_store("s", first, 2).ticket
            client.write(ticket, [content(key) for key in client.keys(packed)[first : first + 2]])
            assert client.commit(ticket.lease_id).committed == 2
        client.end_session("s")
        pressure(client, objects=12)
        assert client.hits(packed) == 4
        # Reading the tail alone keeps the head as well: the next victims are others.
        client.lookup("again", packed)
        assert client.end_retrieve(client.begin_retrieve("again", 2, 2).ticket.lease_id)
        client.end_session("again")
        pressure(client, objects=2, seed=900)
        assert client.hits(packed) == 4


def test_no_space_is_told_at_once_when_everything_is_held(short_tmp):
    with local_server(short_tmp, l1_size=MIB + 4096, watermark=1.0) as local:
        client = standalone(local)
        held = tokens(16)
        assert client.store("first", held) == 16
        assert client.lookup("holder", held).hit_chunks == 16
        client.lookup("s", tokens(3, seed=5))
        result = client.begin_store("s", 0, 3)
        assert (result.no_space, result.ticket.lease_id) == (3, 0)
        assert client.hits(held) == 16
        client.end_session("holder")
        assert len(client.begin_store("s", 0, 3).ticket.slots) == 3


def test_two_writers_of_one_key(local, client, other):
    packed = tokens(3)
    client.lookup("s", packed)
    other.lookup("s", packed)
    ticket = client.begin_store("s", 0, 2).ticket
    second = other.begin_store("s", 0, 3)
    assert (second.being_written, len(second.ticket.slots)) == (2, 1)
    reserved = local.status().l1.reserved_bytes
    assert reserved == 3 * OBJECT_BYTES
    client.write(ticket, [content(key) for key in client.keys(packed)[:2]])
    assert client.commit(ticket.lease_id).committed == 2
    assert other.begin_store("s", 0, 2).already_stored == 2
    assert other.hits(packed) == 2
    assert other.abort(second.ticket.lease_id) == 1
    client.end_session("s")
    other.end_session("s")
    no_leases(local)


def test_another_clients_lease_cannot_be_touched(local, client, other):
    packed = tokens(2)
    client.lookup("s", packed)
    ticket = client.begin_store("s", 0, 2).ticket
    data = [content(key) for key in client.keys(packed)]
    client.write(ticket, data[:1])
    # Not written to, committed, aborted, nor cut off in the middle.
    ticket_piece = pb.WriteChunksRequest(
        registration_id=other.registration_id, lease_id=ticket.lease_id, slot=1, data=b"evil"
    )
    assert failure(other.stub.WriteChunks, iter([ticket_piece]), timeout=CALL_S).reason == "LEASE_UNKNOWN"
    assert other.commit(ticket.lease_id).error.reason == reasons.ERROR_REASON_LEASE_UNKNOWN
    assert other.abort(ticket.lease_id) == 0
    assert not other.end_retrieve(ticket.lease_id, corrupt=[0, 1])
    client.stub.WriteChunks(iter([*client.pieces(ticket, data)][1:]), timeout=CALL_S)
    assert client.commit(ticket.lease_id).committed == 2
    client.lookup("s", packed)
    reading = client.begin_retrieve("s", 0, 2).ticket
    stolen = pb.ReadChunksRequest(registration_id=other.registration_id, lease_ids=[reading.lease_id])
    assert failure(list, other.stub.ReadChunks(stolen, timeout=CALL_S)).reason == "LEASE_UNKNOWN"
    assert not other.end_retrieve(reading.lease_id)
    assert client.read(reading) == data
    assert client.end_retrieve(reading.lease_id)


def test_a_client_that_registers_again_gives_up_what_it_had(local, client):
    packed = tokens(1)
    client.lookup("s", packed)
    lease_id = client.begin_store("s", 0, 1).ticket.lease_id
    former = client.registration_id
    attached = client.attach()
    client.register("inline")
    assert attached.ended.wait(CALL_S)
    assert attached.failure.reason == "NOT_REGISTERED"
    assert client.commit(lease_id).error.reason == reasons.ERROR_REASON_LEASE_LOST
    assert client.ping().registration == pb.REGISTRATION_STATE_KNOWN
    client.registration_id = former
    assert client.ping().registration == pb.REGISTRATION_STATE_UNKNOWN
    local.sweep()
    no_leases(local)


def test_events_tell_what_can_be_found_and_nothing_else(local, client):
    subscribed = pb.SubscribeKvEventsRequest(namespace=client.namespace)
    events = client.stub.SubscribeKvEvents(subscribed, timeout=CALL_S)
    assert not next(events).events
    client.lookup("s", tokens(1))
    aborted = client.begin_store("s", 0, 1).ticket
    client.write(aborted, [content(b"x")])
    client.abort(aborted.lease_id)
    packed = tokens(2, seed=3)
    client.store("whole", packed)
    seen = []
    while len(seen) < 2:
        seen += next(events).events
    assert [event.chunk_key for event in seen] == client.keys(packed)
    assert seen[1].parent_key == seen[0].chunk_key
    late = client.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(resume_after=1), timeout=CALL_S)
    first = next(late)
    assert (first.sequence, [event.chunk_key for event in first.events]) == (2, client.keys(packed)[1:])
    ahead = client.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(resume_after=99), timeout=CALL_S)
    assert next(ahead).lost
    for stream in (events, late, ahead):
        stream.cancel()


def test_sessions_are_listed_in_pages(local, client):
    client.store("first", tokens(2), "salt")
    for number in range(5):
        client.lookup(f"s{number}", tokens(2), salt="salt" if number else "")
    seen, token = [], ""
    while True:
        request = admin.ListSessionsRequest(page_size=2, page_token=token)
        page = client.admin.ListSessions(request, timeout=CALL_S)
        seen += page.sessions
        token = page.next_page_token
        if not token:
            break
    assert [each.session_id for each in seen] == [f"s{number}" for number in range(5)]
    assert [each.leased_chunks for each in seen] == [0, 2, 2, 2, 2]
    assert len({each.tenant for each in seen}) == 2
    assert all(each.chunks == 2 and each.engine_id == "engine" for each in seen)
    assert all(bool(each.lease_id) == bool(each.leased_chunks) for each in seen)
    for bad in ("x", "-1", "9" * 5000):
        request = admin.ListSessionsRequest(page_token=bad)
        assert failure(client.admin.ListSessions, request, timeout=CALL_S).reason == "INVALID_FIELD"
