"""Every method of a real coordinator, asked wrongly: a typed error, and nothing has changed."""

from __future__ import annotations

import grpc
import pytest

from kvwire.client.status import from_rpc_error
from kvwire.coordinator import convert
from kvwire.coordinator.questions import MAX_PAGE
from kvwire.v1 import admin_service_pb2, admin_service_pb2_grpc, event_pb2, namespace_pb2
from kvwire.v1 import coordinator_service_pb2 as pb
from support.coordinator_process import coordinator_process
from support.fleet_member import Member, key, store

RUN = b"r" * 16
MODEL = namespace_pb2.Namespace(model="m")


def info(**fields):
    return pb.RegisterServerRequest(server=pb.ServerInfo(**{"server_id": "x", "incarnation": RUN} | fields))


def locate(**fields):
    return pb.LocateChunksRequest(namespace=MODEL, **fields)


def keys(*given):
    return pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=given))


LONG = "x" * (convert.MAX_TEXT_BYTES + 1)
BAD = {
    "no id": ("RegisterServer", info(server_id=""), "INVALID_FIELD"),
    "long id": ("RegisterServer", info(server_id="x" * 129), "INVALID_FIELD"),
    "no run": ("RegisterServer", info(incarnation=b"r"), "INVALID_FIELD"),
    "nothing": ("RegisterServer", pb.RegisterServerRequest(), "INVALID_FIELD"),
    "addresses": ("RegisterServer", info(addresses=["a:1"] * 17), "TOO_MANY_ITEMS"),
    "long address": ("RegisterServer", info(addresses=[LONG]), "INVALID_FIELD"),
    "features": ("RegisterServer", info(features=["f"] * 65), "TOO_MANY_ITEMS"),
    "version": ("RegisterServer", info(version=LONG), "INVALID_FIELD"),
    "chunk size": ("RegisterServer", info(chunk_size=2**31), "INVALID_FIELD"),
    "stranger": ("Heartbeat", pb.HeartbeatRequest(server_id="x", incarnation=RUN), "SERVER_NOT_REGISTERED"),
    "tiers": ("Heartbeat", pb.HeartbeatRequest(tiers=[pb.TierUsage()] * 65), "TOO_MANY_ITEMS"),
    "no prompt": ("LocateChunks", pb.LocateChunksRequest(), "INVALID_FIELD"),
    "short key": ("LocateChunks", keys(b"k"), "INVALID_FIELD"),
    "many keys": ("LocateChunks", keys(*[key(1)] * 101), "TOO_MANY_ITEMS"),
    "many chunks": ("LocateChunks", locate(tokens=bytes(4 * 4 * 101)), "TOO_MANY_ITEMS"),
    "odd tokens": ("LocateChunks", locate(tokens=b"12345"), "TOKENS_INVALID"),
    "no model": ("LocateChunks", pb.LocateChunksRequest(tokens=bytes(16)), "INVALID_FIELD"),
    "page": ("ListChunks", pb.ListChunksRequest(page_token="zz"), "INVALID_FIELD"),
    "short page": ("ListChunks", pb.ListChunksRequest(page_token="00"), "INVALID_FIELD"),
    "blend is off": ("MatchBlend", pb.MatchBlendRequest(namespace=MODEL), "NOT_SERVED"),
}


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("c")
    with coordinator_process(folder, "--max-keys=100", "--max-watchers=1", listen="127.0.0.1:0") as started:
        yield started


@pytest.fixture
def member(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as joined:
        joined.register()
        yield joined


def reason(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc_error(caught.value, address="", method="", seconds=None).reason


@pytest.mark.parametrize("case", BAD)
def test_bad_requests(member, case):
    method, request, expected = BAD[case]
    before = member.stub.GetDirectoryStats(pb.GetDirectoryStatsRequest())
    assert reason(lambda: getattr(member.stub, method)(request)) == expected
    after = member.stub.GetDirectoryStats(pb.GetDirectoryStatsRequest())
    assert after.keys == before.keys
    assert [each.server.server_id for each in member.stub.ListServers(pb.ListServersRequest()).members] == [
        "a"
    ]


def test_bad_batches_end_the_stream_and_bad_entries_are_skipped(member):
    none = member.batch()
    none.sequence = 0
    assert reason(lambda: member.send(none)) == "INVALID_FIELD"
    many = member.batch(*[store(1)] * 10_001)
    assert reason(lambda: member.send(many)) == "TOO_MANY_ITEMS"
    member.sequence = 0
    wrong = event_pb2.CacheEvent(kind=1, chunk_key=b"short", tier=1, size_bytes=1)
    newer = event_pb2.CacheEvent(kind=99)
    assert member.tell(wrong, newer, store(1)).unknown_events == 1
    assert member.holders(1) == [("a", 1)]
    assert member.stub.GetDirectoryStats(pb.GetDirectoryStatsRequest()).skipped_events == 2


def test_no_chunk_size_yet(coordinator):
    # The members of other tests have left or are none: whoever is here has no say in this.
    stub = coordinator.stub()
    for member in stub.ListServers(pb.ListServersRequest()).members:
        server = member.server
        stub.DeregisterServer(
            pb.DeregisterServerRequest(server_id=server.server_id, incarnation=server.incarnation)
        )
    assert reason(lambda: stub.LocateChunks(locate(tokens=bytes(16)))) == "CHUNK_SIZE_NOT_NEGOTIATED"


def test_pages_of_chunks(member):
    member.held = [store(n) for n in range(25)]
    member.run = 7
    member.register()
    member.tell(*member.held)
    seen, token = [], ""
    while True:
        page = member.stub.ListChunks(pb.ListChunksRequest(page_size=10, page_token=token))
        seen += [each.chunk_key for each in page.chunks]
        token = page.next_page_token
        if not token:
            break
    assert seen == sorted({key(n) for n in range(25)} | set(seen))
    assert {key(n) for n in range(25)} <= set(seen)
    assert len(member.stub.ListChunks(pb.ListChunksRequest(page_size=10**6)).chunks) <= MAX_PAGE


def test_more_watchers_than_allowed(coordinator):
    first = coordinator.stub().WatchServers(pb.WatchServersRequest())
    while not next(first).synced:
        pass
    assert reason(lambda: next(coordinator.stub().WatchServers(pb.WatchServersRequest()))) == "OVERLOADED"
    first.cancel()


def test_what_only_a_cache_server_serves(coordinator):
    admin = admin_service_pb2_grpc.AdminServiceStub(coordinator.channel())
    assert reason(lambda: admin.GetStatus(admin_service_pb2.GetStatusRequest())) == "NOT_SERVED"
    assert reason(lambda: admin.Clear(admin_service_pb2.ClearRequest())) == "NOT_SERVED"
