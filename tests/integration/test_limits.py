"""Limits on calls, clients and load: each refuses with its reason, in time, and changes nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import layout_pb2, transfer_pb2
from support.local_server import local_server
from support.raw_client import CALL_S, RawClient, content, failure, tokens
from support.server_process import server_process

LIMITS = {"max_items": 2, "max_chunks": 8, "max_slots": 4, "max_sessions": 2, "max_registrations": 3}


@pytest.fixture
def small(short_tmp):
    with local_server(short_tmp, **LIMITS) as started:
        yield started


@pytest.fixture
def client(small):
    return RawClient(small.channel()).register("inline")


def session(count, first=0):
    return pb.SessionRange(session_id="s", first_chunk=first, chunk_count=count)


def keyed(client, count):
    return pb.KeyRange(namespace=client.namespace, keys=[bytes([n]) * 32 for n in range(count)])


def too_many(failed, what, actual, allowed):
    assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.reason == "TOO_MANY_ITEMS"
    assert failed.metadata == {"field": what, "actual": str(actual), "allowed": str(allowed)}


def test_items_of_a_batch(client):
    mine = {"registration_id": client.registration_id}
    calls = (
        (client.stub.ReleaseLookup, pb.ReleaseLookupRequest(items=[pb.ReleaseLookupItem()] * 3, **mine)),
        (client.stub.BeginStore, pb.BeginStoreRequest(items=[pb.StoreItem()] * 3, **mine)),
        (client.stub.CommitStore, pb.CommitStoreRequest(items=[pb.CommitStoreItem()] * 3, **mine)),
        (client.stub.BeginRetrieve, pb.BeginRetrieveRequest(items=[pb.RetrieveItem()] * 3, **mine)),
        (client.stub.EndRetrieve, pb.EndRetrieveRequest(items=[pb.EndRetrieveItem()] * 3, **mine)),
        (client.stub.AbortStore, pb.AbortStoreRequest(lease_ids=[1, 2, 3], **mine)),
        (client.stub.EndSession, pb.EndSessionRequest(session_ids=["a", "b", "c"], **mine)),
    )
    for call, request in calls:
        failed = failure(call, request, timeout=CALL_S)
        too_many(failed, failed.metadata["field"], 3, 2)
    stream = client.stub.ReadChunks(pb.ReadChunksRequest(lease_ids=[1, 2, 3], **mine), timeout=CALL_S)
    too_many(failure(list, stream), "lease_ids", 3, 2)


def test_chunks_and_keys_of_a_call(client):
    too_many(failure(client.lookup, "s", tokens(9)), "chunks", 9, 8)
    keys = pb.ChunkKeys(keys=[bytes(32)] * 9)
    too_many(failure(client.lookup, "s", None, chunk_keys=keys), "chunk_keys", 9, 8)
    assert client.lookup("s", tokens(8)).asked_chunks == 8
    for items in ([pb.StoreItem(session=session(9))], [pb.StoreItem(keys=keyed(client, 5))] * 2):
        request = pb.BeginStoreRequest(registration_id=client.registration_id, items=items)
        too_many(failure(client.stub.BeginStore, request), "chunks", 10 if len(items) > 1 else 9, 8)


def test_slots_of_a_call(client):
    client.lookup("s", tokens(8))
    mine = {"registration_id": client.registration_id}
    too_many(failure(client.begin_store, "s", 0, 5), "slots", 5, 4)
    too_many(failure(client.begin_retrieve, "s", 0, 5), "slots", 5, 4)
    ranges = [pb.ObjectRange(chunk_count=3), pb.ObjectRange(chunk_count=2)]
    request = pb.BeginStoreRequest(items=[pb.StoreItem(session=session(8), ranges=ranges)], **mine)
    too_many(failure(client.stub.BeginStore, request), "slots", 5, 4)
    # Empty ranges lease nothing, and still there may not be millions of them.
    request = pb.BeginStoreRequest(
        items=[pb.StoreItem(session=session(8), ranges=[pb.ObjectRange()] * 5)], **mine
    )
    too_many(failure(client.stub.BeginStore, request), "ranges", 5, 4)
    commit = pb.CommitStoreRequest(items=[pb.CommitStoreItem(lease_id=1, slots=range(5))], **mine)
    too_many(failure(client.stub.CommitStore, commit), "slots", 5, 4)
    end = pb.EndRetrieveRequest(items=[pb.EndRetrieveItem(lease_id=1, corrupt_slots=range(5))], **mine)
    too_many(failure(client.stub.EndRetrieve, end), "corrupt_slots", 5, 4)


def test_what_a_client_may_list(client):
    versions = pb.NegotiateChunkSizeRequest(required_alignment=1, protocol_versions=range(1, 66))
    too_many(failure(client.stub.NegotiateChunkSize, versions), "protocol_versions", 65, 64)
    digests = pb.NegotiateChunkSizeRequest(required_alignment=1, digest_functions=[1] * 65)
    too_many(failure(client.stub.NegotiateChunkSize, digests), "digest_functions", 65, 64)
    offers = [transfer_pb2.DataPathOffer(path=transfer_pb2.DATA_PATH_INLINE)] * 65
    request = client.registration(offers=offers)
    too_many(failure(client.stub.RegisterKvCache, request), "offers", 65, 64)
    groups = [layout_pb2.KvGroup()] * 65
    request = client.registration(layout=layout_pb2.KvLayout(world_size=1, groups=groups))
    assert failure(client.stub.RegisterKvCache, request).reason == "LAYOUT_UNSUPPORTED"


def test_extra_inputs(client):
    """Side by side as many as are allowed; piled up on one token only a few."""

    def look(*spans):
        inputs = [pb.ExtraInput(digest=b"image", start=start, length=length) for start, length in spans]
        return client.lookup("", tokens(8), registration_id=0, extra_inputs=inputs)

    assert look(*((n, 1) for n in range(1024))).asked_chunks == 8
    too_many(failure(look, *((n, 1) for n in range(1025))), "extra_inputs", 1025, 1024)
    assert look(*((0, 1 << 20) for _ in range(16))).asked_chunks == 8
    too_many(failure(look, *((n, 32) for n in range(17))), "extra_inputs that cover one token", 17, 16)
    # One that ends where the next begins does not pile up.
    assert look(*((8 * n, 8) for n in range(17) for _ in range(16))).asked_chunks == 8


def test_sessions(client):
    client.lookup("a", tokens(1))
    client.lookup("b", tokens(1))
    failed = failure(client.lookup, "c", tokens(1))
    assert failed.reason == "TOO_MANY_SESSIONS"
    assert failed.metadata == {"allowed": "2"}
    assert client.lookup("a", tokens(2)).asked_chunks == 2
    assert client.lookup("", tokens(1), registration_id=0).asked_chunks == 1
    assert client.end_session("a") == 1
    assert client.lookup("c", tokens(1)).asked_chunks == 1


def test_registrations(small, client):
    others = [RawClient(small.channel(), f"e{n}").register("inline") for n in range(2)]
    failed = failure(RawClient(small.channel(), "more").register, "shm")
    assert failed.reason == "TOO_MANY_SESSIONS"
    assert failed.metadata == {"allowed": "3"}
    # One that comes again takes its own place.
    client.register("inline")
    others[0].unregister()
    RawClient(small.channel(), "more").register("inline")


class Held:
    """Makes every commit over the inline path wait, as slow calls do."""

    def __init__(self, local):
        self._local = local
        self._released = local.run(asyncio.Event)
        self.entered = threading.Semaphore(0)
        self._real = local.core.plane.path("inline").received
        local.core.plane.path("inline").received = self._received

    async def _received(self, *args):
        self.entered.release()
        await self._released.wait()
        return await self._real(*args)

    def release(self):
        self._local.run(self._released.set)


def test_overload_is_refused_at_once_while_life_signs_and_returns_are_answered(short_tmp):
    with local_server(short_tmp, max_in_flight=3) as local:
        client = RawClient(local.channel()).register("inline", attach=True)
        packed = tokens(4)
        client.lookup("s", packed)
        tickets = [client.begin_store("s", n, 1).ticket for n in range(3)]
        for ticket in tickets:
            client.write(ticket, [content(client.keys(packed)[ticket.slots[0].chunk_index])])
        held = Held(local)
        with ThreadPoolExecutor(3) as pool:
            commits = [pool.submit(client.commit, ticket.lease_id) for ticket in tickets]
            assert all(held.entered.acquire(timeout=CALL_S) for _ in commits)
            started = time.monotonic()
            for call in (lambda: client.lookup("t", packed), client.negotiate):
                failed = failure(call)
                assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert failed.reason == "OVERLOADED"
                assert failed.metadata == {"in_flight": "4", "allowed": "3"}
                assert 0 < failed.details["RetryInfo"].retry_delay.ToTimedelta().total_seconds() <= 1
            assert client.ping().registration == pb.REGISTRATION_STATE_KNOWN
            assert client.status().chunk_size.chunk_size == 4
            assert client.end_session("s") == 1
            assert client.abort(999) == 0
            assert not client.end_retrieve(999)
            assert time.monotonic() - started < 2
            assert local.core.guard.rejected == 2
            held.release()
            assert [commit.result(CALL_S).committed for commit in commits] == [1, 1, 1]
        assert client.hits(packed) == 3


def test_bl62_ping_is_answered_while_long_prompts_are_hashed(short_tmp):
    """Eight callers at once with 131,072 tokens each, as fast as they can."""
    packed = tokens(131_072 // 256, chunk_size=256)
    with server_process(short_tmp, "--chunk-size=256") as server:
        watcher = RawClient(server.channel()).register("inline")
        stop = threading.Event()

        def look(number):
            client = RawClient(server.channel(), f"engine-{number}").register("inline")
            done = 0
            while not stop.is_set():
                assert client.lookup(f"s{done}", packed).asked_chunks == 512
                done += 1
            return done

        with ThreadPoolExecutor(8) as pool:
            lookers = [pool.submit(look, number) for number in range(8)]
            slowest = 0.0
            for _ in range(40):
                started = time.monotonic()
                watcher.ping()
                slowest = max(slowest, time.monotonic() - started)
            stop.set()
            assert all(looker.result(30) for looker in lookers)
        assert slowest < 1.0
