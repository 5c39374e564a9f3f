"""BL-64: clients that are older or newer than the server."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from kvwire.client import Client
from kvwire.errors import VersionUnsupported
from kvwire.transfer.hosts import host_id
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import layout_pb2, transfer_pb2
from kvwire.vllm.adapters import SchedulerAdapter, WorkerAdapter
from support.fake_server import fake_server
from support.previous import ADDED, PreviousLock, PreviousStub
from support.raw_client import CALL_S, RawClient, content, failure, tokens

# Field 1000 as a varint, field 1001 as bytes: what a later minor version may add.
UNKNOWN_FIELDS = b"\xc0\x3e\x07" + b"\xca\x3e\x03new"


@pytest.fixture
def client(local):
    return RawClient(local.channel())


def test_bl64_fields_that_the_server_does_not_know_are_ignored(client):
    request = pb.NegotiateChunkSizeRequest(required_alignment=4).SerializeToString() + UNKNOWN_FIELDS
    call = client.channel.unary_unary("/kvwire.v1.CacheService/NegotiateChunkSize")
    reply = pb.NegotiateChunkSizeResponse.FromString(call(request, timeout=CALL_S))
    assert reply.chunk_size == 4


def test_bl64_a_client_from_before_versions_and_digests(client):
    reply = client.stub.NegotiateChunkSize(pb.NegotiateChunkSizeRequest(required_alignment=1), timeout=CALL_S)
    assert reply.protocol_version == 1


def test_bl64_the_best_in_common_is_taken(client):
    request = pb.NegotiateChunkSizeRequest(
        required_alignment=1, protocol_versions=[1, 9, 4_000_000_000], digest_functions=[77, 1]
    )
    reply = client.stub.NegotiateChunkSize(request, timeout=CALL_S)
    assert (reply.protocol_version, reply.digest_function) == (1, 1)
    request = pb.NegotiateChunkSizeRequest(required_alignment=1, protocol_versions=[9])
    refused = failure(client.stub.NegotiateChunkSize, request, timeout=CALL_S)
    assert refused.reason == "VERSION_UNSUPPORTED"
    assert "upgrade" in refused.text


def test_bl64_data_paths_of_the_future_are_passed_over(client):
    client.negotiate()
    offers = [
        transfer_pb2.DataPathOffer(path=99),
        transfer_pb2.DataPathOffer(path=transfer_pb2.DATA_PATH_INLINE),
    ]
    client.register("inline", offers=offers)
    assert client.store("s", tokens(1)) == 1
    refused = failure(client.register, offers=offers[:1])
    assert refused.reason == "DATA_PATH_UNAVAILABLE"


def test_bl64_what_cannot_be_passed_over_is_refused_in_one_line(client):
    client.negotiate()
    unknown = layout_pb2.KvLayout(world_size=1, groups=[layout_pb2.KvGroup(kind=99)])
    assert failure(client.register, layout=unknown).reason == "LAYOUT_UNSUPPORTED"
    request = client.registration()
    request.role = 99
    refused = failure(client.stub.RegisterKvCache, request, timeout=CALL_S)
    assert (refused.reason, refused.metadata["field"]) == ("INVALID_FIELD", "role")


@pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
@pytest.mark.parametrize("address", [b"x", b"\xff" * 200, bytes(range(256)), b"k" * 16384])
def test_bl56_bytes_that_are_no_ucx_address_never_reach_ucx(client, address):
    """UCX would end the process."""
    client.negotiate()
    offers = [
        transfer_pb2.DataPathOffer(path=path, host_id=host_id(), ucx_address=address)
        for path in (transfer_pb2.DATA_PATH_UCX_LOCAL, transfer_pb2.DATA_PATH_UCX_REMOTE)
    ]
    refused = failure(client.register, offers=offers)
    assert refused.reason == "DATA_PATH_UNAVAILABLE"
    assert "damaged" in refused.metadata["ucx-local"]
    inline = transfer_pb2.DataPathOffer(path=transfer_pb2.DATA_PATH_INLINE)
    client.register("inline", offers=[*offers, inline])
    assert client.store("s", tokens(1)) == 1


@pytest.mark.parametrize("path", ["shm", "inline"])
def test_bl64_a_client_with_the_stubs_of_before(client, path):
    """It does not know of boards, and commits by a call as it always did."""
    client.stub = PreviousStub(client.channel)
    client.register(path, attach=True)
    packed = tokens(3)
    ticket = client.lookup("t", packed) and client.begin_store("t", 0, 1).ticket
    assert not any(hasattr(ticket, name) for name in ADDED["Ticket"])
    assert client.abort(ticket.lease_id) == 1
    assert client.store("s", packed) == 3
    assert client.retrieve("r", packed) == [content(key) for key in client.keys(packed)]
    assert client.ping().registration
    assert client.end_session("t") == 1
    client.close()


def stores_and_retrieves(address):
    random = np.random.default_rng(1)
    kv = {"l0": random.integers(0, 255, (16, 4096), dtype=np.uint8)}
    with (
        Client(address) as client,
        client.register_kv_caches(
            kv, model="m", block_size=4, data_path="shm", heartbeat_interval=0.3
        ) as cache,
    ):
        for prompt in range(3):
            with cache.session([prompt] * 8) as session:
                assert session.store([0, 1]).ok
            with cache.session([prompt] * 8) as session:
                assert session.hit_tokens == 8
                assert session.retrieve([8 + prompt, 12 + prompt]).ok
            assert (kv["l0"][[8 + prompt, 12 + prompt]] == kv["l0"][:2]).all()


def test_bl64_a_server_without_boards(local, monkeypatch):
    """Its lock files are empty: this client asks for everything then."""
    monkeypatch.setattr("kvwire.server.dataplane.shm.LivenessLock", PreviousLock)
    stores_and_retrieves(local.address)
    counters = local.status().counters
    assert (counters.stored_objects, counters.retrieved_objects) == (6, 6)
    local.check()


def test_bl64_an_engine_that_is_too_new_for_its_server_says_so_in_one_line(socket_path):
    refused = VersionUnsupported(
        "The client speaks kvwire.v1 [1], this server [9]: upgrade the older of the two.",
        offered=[1],
        supported=[9],
    )
    with fake_server(f"unix:{socket_path}") as server:
        server.fail["NegotiateChunkSize"] = refused
        options = {"heartbeat_interval": 0.3, "start_wait": 5.0}
        scheduler = SchedulerAdapter(server.address, None, "m", 1, 0, 4, **options)
        worker = WorkerAdapter(server.address, None, "m", 1, 0, 4, data_path="inline", **options)
        for adapter in (scheduler, worker):
            assert not adapter.is_healthy
            assert "[1], this server [9]: upgrade the older" in adapter.degraded_reason
            assert "\n" not in adapter.degraded_reason
        scheduler.maybe_submit_lookup_request("r", tokens=range(64))
        assert scheduler.check_lookup_result("r") == 0
        worker.shutdown()
        scheduler.shutdown()
