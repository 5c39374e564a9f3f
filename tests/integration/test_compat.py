"""BL-64: clients that are older or newer than the server."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from kvwire.transfer.hosts import host_id
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import layout_pb2, transfer_pb2
from support.raw_client import CALL_S, RawClient, failure, tokens

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
