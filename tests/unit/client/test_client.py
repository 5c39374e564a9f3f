from __future__ import annotations

import threading
import time

import grpc
import pytest

from kvwire import errors
from kvwire.client import (
    Client,
    CommitItem,
    EndRetrieveItem,
    GroupKind,
    KvGroup,
    KvLayout,
    ObjectRange,
    Offer,
    Path,
    Registration,
    ReleaseItem,
    Role,
    SessionRange,
    TransferItem,
)
from kvwire.errors import Unavailable
from kvwire.keys import Namespace
from kvwire.v1 import cache_service_pb2 as pb
from support.fake_server import fake_server

NAMESPACE = Namespace("m")
LAYOUT = KvLayout((KvGroup(GroupKind.FULL_ATTENTION, 4, 2, 64, 2),))
TOKENS = range(32)


def registration(client_id: bytes = b"c" * 16, **changes) -> Registration:
    values = {
        "client_id": client_id,
        "engine_id": "e",
        "role": Role.STANDALONE,
        "namespace": NAMESPACE,
        "layout": LAYOUT,
        "chunk_size": 8,
        "offers": (Offer(Path.INLINE),),
    }
    return Registration(**{**values, **changes})


@pytest.fixture
def server(socket_path):
    with fake_server(f"unix:{socket_path}") as running:
        yield running


@pytest.fixture
def client(server):
    with Client(server.address, client_name="test") as made:
        yield made


@pytest.fixture
def registered(client):
    client.negotiate(4)
    return client.register(registration()).registration_id


def store(client, registered, session="s") -> int:
    """Stores the four chunks of the session; returns the bytes written."""
    grants = client.begin_store(registered, [TransferItem(SessionRange(session, 0, 4))])
    ticket = grants[0].ticket
    pieces = [
        pb.WriteChunksRequest(
            registration_id=registered, lease_id=ticket.lease_id, slot=i, data=bytes([i]) * slot.size_bytes
        )
        for i, slot in enumerate(ticket.slots)
    ]
    written = client.write_chunks(iter(pieces))
    client.commit_store(registered, [CommitItem(ticket.lease_id, tuple(range(len(ticket.slots))))])
    return written


@pytest.mark.leakcheck("threads")
def test_the_whole_contract_in_order(server, client):
    negotiated = client.negotiate(4)
    assert (negotiated.chunk_size, negotiated.incarnation) == (8, server.incarnation)
    registered = client.register(registration())
    assert (registered.path, registered.expires_after) == (Path.INLINE, 30)
    me = registered.registration_id
    assert client.ping(me).registration_known is True
    assert client.ping().registration_known is None
    missed = client.lookup(NAMESPACE, TOKENS, registration_id=me, session_id="s")
    assert (missed.asked_chunks, missed.hit_chunks, missed.lease_id) == (4, 0, 0)
    assert store(client, me) == 4 * 128
    found = client.lookup(NAMESPACE, TOKENS, registration_id=me, session_id="s")
    assert (found.hit_chunks, found.hit_tokens) == (4, 32)
    assert found.expires_at > time.monotonic() + 25
    assert client.release_lookup(me, [ReleaseItem("s", found.lease_id, 0, 2)])[0].released_chunks == 2
    grant = client.begin_retrieve(me, [TransferItem(SessionRange("s", 2, 2))])[0]
    got = b"".join(piece.data for piece in client.read_chunks(me, [grant.ticket.lease_id]))
    assert got == b"\x02" * 128 + b"\x03" * 128
    assert client.end_retrieve(me, [EndRetrieveItem(grant.ticket.lease_id)]) == [True]
    assert client.end_sessions(me, ["s", "t"]) == 1
    client.unregister(me)
    assert client.ping(me).registration_known is False
    assert client.status().server_version == "fake"


def test_every_call_carries_a_deadline(server, client, registered):
    seen = []
    server._enter = lambda method, _request, context: seen.append((method, context.time_remaining()))
    client.ping()
    client.lookup(NAMESPACE, TOKENS)
    client.begin_store(registered, [TransferItem(SessionRange("s", 0, 1))])
    assert [method for method, _left in seen] == ["Ping", "Lookup", "BeginStore"]
    assert all(0 < left <= client.deadlines[method] + 0.1 for method, left in seen)


def test_a_slow_server_costs_the_deadline_and_no_more(server, client):
    server.delay["Lookup"] = 2.0
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceeded, match="Lookup at unix:"):
        client.lookup(NAMESPACE, TOKENS, timeout=0.2)
    assert time.monotonic() - start < 1.0


def test_typed_errors_come_out_of_every_kind_of_call(server, client, registered):
    client.end_sessions(registered, ["x"])
    server.drop_registrations()
    for call in (
        lambda: client.lookup(NAMESPACE, TOKENS, registration_id=registered, session_id="s"),
        lambda: client.begin_store(registered, [TransferItem(SessionRange("s", 0, 1))]),
        lambda: list(client.read_chunks(registered, [1])),
        lambda: client.write_chunks(iter([pb.WriteChunksRequest(registration_id=registered, data=b"x")])),
        lambda: list(client.attach(registered)),
    ):
        with pytest.raises(errors.NotRegistered) as caught:
            call()
        assert caught.value.metadata["registration_id"] == str(registered)


def test_item_errors_stay_with_their_items(server, client, registered):
    client.lookup(NAMESPACE, TOKENS, registration_id=registered, session_id="s")
    items = [TransferItem(SessionRange("s", 0, 1)), TransferItem(SessionRange("unknown", 0, 1))]
    good, bad = client.begin_store(registered, items)
    assert (good.error, len(good.ticket.slots)) == (None, 1)
    assert isinstance(bad.error, errors.SessionUnknown)
    assert bad.ticket is None


def test_a_short_answer_to_a_batch_is_no_success(server, client, registered):
    server.CommitStore = lambda _request, _context: pb.CommitStoreResponse()
    server.restart(keep=True)
    with pytest.raises(errors.Internal, match="0 of 1 items"):
        client.commit_store(registered, [CommitItem(1, (0,))])


def test_a_chunk_size_that_breaks_the_alignment_is_not_believed(server, client):
    with pytest.raises(errors.ChunkSizeIncompatible, match="alignment 3"):
        client.negotiate(3)


def test_reads_are_repeated_once_and_writes_never(server, client, registered):
    server.fail["Ping"] = server.fail["BeginStore"] = Unavailable("busy")
    server.fail["Lookup"] = errors.Overloaded("busy", retry_delay_seconds=0.05)
    server.fail["EndSession"] = errors.NotRegistered("x")
    before = server.calls.copy()
    calls = {
        "Ping": client.ping,
        "Lookup": lambda: client.lookup(NAMESPACE, TOKENS),
        "BeginStore": lambda: client.begin_store(registered, [TransferItem(SessionRange("s", 0, 1))]),
    }
    for call in calls.values():
        with pytest.raises((Unavailable, errors.Overloaded)):
            call()
    assert {name: server.calls[name] - before[name] for name in calls} == {
        "Ping": 2,
        "Lookup": 2,
        "BeginStore": 1,
    }
    with pytest.raises(errors.Overloaded):
        client.lookup(NAMESPACE, TOKENS, registration_id=registered, session_id="s")
    assert server.calls["Lookup"] == before["Lookup"] + 3


def test_a_server_that_is_not_there_is_named(tmp_path):
    with Client("unix:/tmp/kvw-nobody-is-here.sock") as client:
        start = time.monotonic()
        with pytest.raises(Unavailable, match="kvw-nobody-is-here"):
            client.negotiate(4)
        assert time.monotonic() - start < 1.0


def test_bl58_back_within_a_second_of_the_server(server, client):
    assert client.ping()
    server.stop()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        with pytest.raises(Unavailable):
            client.negotiate(4)
        time.sleep(0.2)
    server.start()
    start = time.monotonic()
    while True:
        try:
            client.negotiate(4)
            break
        except Unavailable:
            assert time.monotonic() - start < 2.0
            time.sleep(0.05)


def test_bl58_a_proxy_in_the_environment_is_not_asked(server, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with fake_server("127.0.0.1:0") as tcp:
        for address in (server.address, tcp.address, tcp.address.replace("127.0.0.1", "localhost")):
            with Client(address) as client:
                assert client.ping().chunk_size == 8


def test_bl59_two_million_tokens_in_one_lookup(server, client):
    assert client.lookup(NAMESPACE, b"\x01\x00\x00\x00" * 2_000_000).asked_chunks == 250_000


def test_bl59_more_tokens_than_a_message_holds_go_as_keys(server, client):
    tokens = b"\x01\x00\x00\x00" * 4_500_000
    with pytest.raises(errors.MessageTooLarge) as caught:
        client.lookup(NAMESPACE, tokens)
    assert int(caught.value.metadata["actual"]) > int(caught.value.metadata["allowed"]) == 16 << 20
    assert client.ping().chunk_size == 8
    server.chunk_size = 4096
    client.negotiate(4)
    assert client.lookup(NAMESPACE, tokens).asked_chunks == 4_500_000 // 4096


def test_batches_above_the_limits_become_several_calls(server, client, registered):
    client.lookup(NAMESPACE, range(8 * 2000), registration_id=registered, session_id="s")
    items = [TransferItem(SessionRange("s", i, 1), (ObjectRange(0, i, 1),)) for i in range(150)]
    grants = client.begin_store(registered, items)
    assert len(grants) == 150
    assert [g.ticket.slots[0].chunk_index for g in grants] == list(range(150))
    assert server.calls["BeginStore"] == 3
    assert len(client.commit_store(registered, [CommitItem(g.ticket.lease_id, (0,)) for g in grants])) == 150
    assert server.calls["CommitStore"] == 3


def test_leases_of_a_half_failed_batch_are_given_back(server, client, registered):
    client.lookup(NAMESPACE, range(8 * 100), registration_id=registered, session_id="s")
    items = [TransferItem(SessionRange("s", i, 1)) for i in range(100)]
    begin = server.BeginStore

    def second_fails(request, context):
        if server.calls["BeginStore"] == 1:
            server.fail["BeginStore"] = errors.Overloaded("Later.")
        return begin(request, context)

    server.BeginStore = second_fails
    server.restart(keep=True)
    with pytest.raises(errors.Overloaded):
        client.begin_store(registered, items)
    until = time.monotonic() + 5
    while server.leases and time.monotonic() < until:
        time.sleep(0.02)
    assert not server.leases


def test_a_lookup_can_be_waited_for_later(server, client):
    server.hold["Lookup"] = threading.Event()
    future = client.lookup_future(NAMESPACE, TOKENS)
    assert not future.done()
    server.hold["Lookup"].set()
    assert future.result(5).asked_chunks == 4


def test_a_lookup_that_is_waited_for_later_fails_as_any_other(server, client):
    server.fail["Lookup"] = errors.ChunkSizeNotNegotiated("Negotiate first.")
    assert isinstance(client.lookup_future(NAMESPACE, TOKENS).exception(5), errors.ChunkSizeNotNegotiated)
    server.fail.clear()
    server.delay["Lookup"] = 1
    assert isinstance(
        client.lookup_future(NAMESPACE, TOKENS, timeout=0.1).exception(5), errors.DeadlineExceeded
    )


def test_a_future_is_done_when_the_client_is_closed(server):
    server.hold["Lookup"] = threading.Event()
    client = Client(server.address)
    future = client.lookup_future(NAMESPACE, TOKENS)
    client.close()
    assert isinstance(future.exception(5), Unavailable)
    with pytest.raises(Unavailable, match="closed"):
        client.ping()
    client.close()


def test_a_cancelled_future_cancels_the_call(server, client):
    server.hold["Lookup"] = threading.Event()
    future = client.lookup_future(NAMESPACE, TOKENS)
    assert future.cancel()
    assert future.cancelled()


def test_a_token_goes_with_every_kind_of_call(server):
    with Client(server.address, token="s3cret") as client:
        client.negotiate(4)
        registered = client.register(registration()).registration_id
        client.lookup_future(NAMESPACE, TOKENS, registration_id=registered, session_id="s").result(5)
        store(client, registered)
        stream = client.attach(registered)
        next(iter(stream))
        stream.cancel()
    for method in ("NegotiateChunkSize", "Lookup", "WriteChunks", "Attach"):
        assert server.metadata[method]["authorization"] == "Bearer s3cret", method


def test_no_token_no_header(server, client):
    client.ping()
    assert "authorization" not in server.metadata["Ping"]


def test_a_new_incarnation_is_told_once(server, client):
    told = []
    client.state.on_new_incarnation.append(lambda: told.append(client.state.incarnation))
    client.ping()
    client.ping()
    assert told == []
    server.restart()
    client.ping()
    client.ping()
    assert told == [server.incarnation]


def test_other_services_on_the_channel(server, client):
    grpc.channel_ready_future(client.channel()).result(timeout=5)


def test_a_clone_has_its_own_connection(server, client):
    copy = client.clone()
    assert copy.channel() is not client.channel()
    client.close()
    assert copy.ping().chunk_size == 8
    copy.close()


def test_reset_ends_calls_in_flight_and_connects_again(server, client):
    server.hold["Lookup"] = threading.Event()
    future = client.lookup_future(NAMESPACE, TOKENS)
    client.reset()
    assert isinstance(future.exception(2), Unavailable)
    assert client.ping().chunk_size == 8
