"""BL-56, BL-59, BL-62: whatever a client sends, it gets a status, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf import message_factory

from kvwire.client import Client
from kvwire.errors import MessageTooLarge
from kvwire.keys import Namespace
from kvwire.v1 import admin_service_pb2, namespace_pb2, peer_service_pb2
from kvwire.v1 import cache_service_pb2 as pb
from support.fuzz import Fuzzer
from support.local_server import local_server
from support.raw_client import CALL_S, Failure, RawClient, content, failure, tokens
from support.waiting import eventually

METHODS = [
    method
    for file in (pb, admin_service_pb2, peer_service_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
ADMIN = {"GetStatus", "ListSessions", "ListObjects", "GetQuota", "SetQuota", "Evict"}
SERVED = [
    method for method in METHODS if method.containing_service.name == "CacheService" or method.name in ADMIN
]
GARBAGE = (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0f", b"\x08", bytes(range(1, 200)))
MIB = 1 << 20


def name_of(method):
    return f"/{method.containing_service.full_name}/{method.name}"


def send(channel, method, raw, timeout=CALL_S):
    """One request message as bytes; the first reply, if there is one, as bytes."""
    kind = ("stream" if method.client_streaming else "unary") + (
        "_stream" if method.server_streaming else "_unary"
    )
    call = getattr(channel, kind)(name_of(method))
    reply = call(iter([raw]) if method.client_streaming else raw, timeout=timeout)
    if not method.server_streaming:
        return reply
    first = next(iter(reply), b"")
    reply.cancel()
    return first


def footprint(local):
    """What bad calls may not change."""
    status = local.status()
    return (status.leases, status.sessions, status.l1, len(status.registrations), status.waiting_leases)


def check_clean(failed: Failure):
    """No stack trace and no address in the text; an error of this server says why."""
    shown = f"{failed.text} {failed.metadata}"
    assert not re.search(r"0x[0-9a-f]{5,}|Traceback|File \"|\.py", shown), shown
    assert failed.code not in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}, shown
    assert failed.reason, shown


@pytest.fixture
def good(local):
    """A registered client that does a whole round trip on its own channel and on a new one."""
    client = RawClient(local.channel(), "good").register("inline")
    packed = tokens(2, seed=7)
    assert client.store("first", packed) == 2

    def works():
        for channel in (client.channel, local.channel()):
            again = RawClient(channel, "good")
            again.registration_id, again.chunk_size, again.path = client.registration_id, 4, "inline"
            assert again.retrieve("round", packed) == [content(key) for key in again.keys(packed)]

    return works


def test_bl56_random_bytes(local, good):
    before = footprint(local)
    for method in METHODS:
        for raw in GARBAGE:
            failed = failure(send, local.channel(), method, raw)
            check_clean(failed)
            assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
            assert failed.reason == "INVALID_FIELD"
    good()
    assert footprint(local) == before
    local.check()


def test_bl56_empty_messages(local, good):
    before = footprint(local)
    for method in METHODS:
        if method.name == "Clear":
            # Empty it asks for everything to go, and is answered.
            continue
        try:
            send(local.channel(), method, b"")
        except grpc.RpcError as error:
            check_clean(Failure.of(error))
    good()
    assert footprint(local) == before


def test_bl56_absurd_messages(local, good):
    """Legal encodings with legal and illegal values, some of which get far."""
    client = RawClient(local.channel(), "fuzz").register("inline")
    packed = tokens(3, seed=9)
    client.lookup("s", packed)
    known = {
        "registration_id": (client.registration_id,),
        "namespace": (namespace_pb2.Namespace(model="test/model"),),
        "session_id": ("s", "t"),
        "session_ids": ("s",),
        "lease_id": tuple(range(1, 60)),
        "lease_ids": tuple(range(1, 60)),
        "tokens": (packed,),
        "first_chunk": (0, 1),
        "chunk_count": (1, 2, 3),
        "slot": (0, 1),
        "slots": (0, 1),
        "group_index": (0,),
        "chunk_size": (4,),
        "client_id": (b"k" * 16,),
        "required_alignment": (4,),
    }
    fuzzer = Fuzzer(random.Random(20), known)
    answers = {"OK": 0}
    # Their effect is that nothing else gets far.
    ending = {"UnregisterKvCache", "Attach"}
    for turn in range(100):
        for method in SERVED:
            if method.name in ending and turn % 20 < 19:
                continue
            request = fuzzer.message(message_factory.GetMessageClass(method.input_type))
            try:
                send(client.channel, method, request.SerializeToString())
                answers["OK"] += 1
            except grpc.RpcError as error:
                failed = Failure.of(error)
                check_clean(failed)
                answers[failed.reason] = answers.get(failed.reason, 0) + 1
        local.check()
        if turn % 20 == 19:
            client = RawClient(local.channel(), "fuzz").register("inline")
            known["registration_id"] = (client.registration_id,)
            client.lookup("s", packed)
    assert answers["OK"] > 500, answers
    assert len(answers) > 8, answers
    good()
    for status in local.status().registrations:
        client.registration_id = status.registration_id
        client.unregister()
    local.sweep()
    status = local.status()
    assert not any(status.leases.values())
    assert not status.waiting_leases
    assert status.l1.used_bytes == status.l1.resident_bytes
    local.check()


def test_bl56_an_unknown_method_and_an_unknown_service(local, good):
    for name in ("/kvwire.v1.CacheService/DoIt", "/kvwire.v1.Nothing/Ping", "/nonsense"):
        failed = failure(local.channel().unary_unary(name), b"", timeout=CALL_S)
        assert failed.code == grpc.StatusCode.UNIMPLEMENTED
    good()


@pytest.mark.parametrize("error", [RuntimeError("at <object 0x7f00dead> in x.py"), KeyError("k")])
def test_bl56_a_handler_that_raises(local, good, error, caplog):
    before = footprint(local)

    def broken(*_args, **_kwargs):
        raise error

    local.engine.end_session = broken
    local.core.events.follow = broken
    client = RawClient(local.channel())
    for call in (
        lambda: client.end_session("s"),
        lambda: list(client.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(), timeout=CALL_S)),
    ):
        failed = failure(call)
        assert failed.code == grpc.StatusCode.INTERNAL
        assert failed.reason == "INTERNAL"
        assert "0x" not in failed.text
        assert ".py" not in failed.text
    # The log has what the caller is spared.
    assert sum(record.exc_info is not None for record in caplog.records) == 2
    del local.engine.end_session, local.core.events.follow
    good()
    assert footprint(local) == before


def test_bl62_a_handler_that_meets_a_cancellation(local, good, caplog):
    """Something it waited for was cancelled, not the call: the caller must not wait for ever."""

    async def cancelled(*_args):
        raise asyncio.CancelledError

    client = RawClient(local.channel()).register("inline")
    client.lookup("s", tokens(1))
    ticket = client.begin_store("s", 0, 1).ticket
    local.core.plane.path("inline").received = cancelled
    assert failure(client.commit, ticket.lease_id).reason == "INTERNAL"
    del local.core.plane.path("inline").received
    assert client.abort(ticket.lease_id) == 1
    good()


def test_bl62_a_client_that_gives_up(short_tmp):
    """Its deadline ends a commit that waits; nothing is published, and its lease goes on."""
    with local_server(short_tmp, write_lease=1.0) as local:
        client = RawClient(local.channel()).register("inline")
        packed = tokens(2)
        client.lookup("s", packed)
        ticket = client.begin_store("s", 0, 2).ticket
        client.write(ticket, [content(key) for key in client.keys(packed)])
        entered = threading.Event()

        async def never(*_args):
            entered.set()
            await asyncio.Event().wait()

        local.core.plane.path("inline").received = never
        item = pb.CommitStoreItem(lease_id=ticket.lease_id)
        request = pb.CommitStoreRequest(registration_id=client.registration_id, items=[item])
        failed = failure(client.stub.CommitStore, request, timeout=0.2)
        assert failed.code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert entered.is_set()
        del local.core.plane.path("inline").received
        wait_idle(local)
        assert client.hits(packed) == 0
        # Its own second try is as good as the first.
        assert client.commit(ticket.lease_id).committed == 2
        assert client.hits(packed) == 2
        local.check()


def test_bl62_a_lookup_that_is_given_up_holds_nothing(local):
    client = RawClient(local.channel()).register("inline")
    packed = tokens(3)
    assert client.store("first", packed) == 3
    steps = local.engine.lookup_steps
    going = threading.Event()

    def slow(*args, **options):
        going.set()
        while going.is_set():
            yield
        return (yield from steps(*args, **options))

    local.engine.lookup_steps = slow
    with ThreadPoolExecutor(1) as pool:
        request = client.stub.Lookup.future(
            pb.LookupRequest(
                registration_id=client.registration_id,
                session_id="s",
                namespace=client.namespace,
                tokens=packed,
            ),
            timeout=CALL_S,
        )
        assert going.wait(CALL_S)
        pool.submit(request.cancel).result()
        wait_idle(local)
    going.clear()
    del local.engine.lookup_steps
    assert not any(local.status().leases.values())
    assert client.retrieve("s", packed)


def wait_idle(local):
    eventually(lambda: local.core.guard.in_flight == 0)


def test_bl59_two_million_tokens_in_one_lookup(short_tmp):
    with local_server(short_tmp, chunk_size=256) as local:
        client = RawClient(local.channel()).register("inline")
        reply = client.lookup("long", tokens(2_000_000 // 256, chunk_size=256))
        assert reply.asked_chunks == 2_000_000 // 256
        assert client.end_session("long") == 1


def test_bl59_just_above_the_limit_both_sizes_are_told_and_the_channel_survives(local, good):
    client = RawClient(local.channel())
    client.negotiate()
    failed = failure(client.lookup, "", bytes(16 * MIB), registration_id=0)
    assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    actual, allowed = map(int, re.findall(r"\d{6,}", failed.text))
    assert allowed == 16 * MIB < actual < 17 * MIB
    assert client.ping().chunk_size == 4
    with Client(local.address) as library, pytest.raises(MessageTooLarge) as typed:
        library.lookup(Namespace("test/model"), bytes(16 * MIB))
    assert int(typed.value.metadata["allowed"]) == 16 * MIB
    assert int(typed.value.metadata["actual"]) == actual
    good()


@pytest.mark.parametrize("size", [0, 1, 32])
def test_bl56_a_million_keys(local, good, size):
    """Short ones fit into a message; long ones do not."""
    before = footprint(local)
    client = RawClient(local.channel())
    client.negotiate()
    keys = pb.ChunkKeys(keys=[bytes(size)] * 1_000_000)
    failed = failure(client.lookup, "", None, registration_id=0, chunk_keys=keys)
    assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.reason == ("" if size == 32 else "TOO_MANY_ITEMS")
    good()
    assert footprint(local) == before
