"""grpcurl and `buf curl` against every service, through reflection alone: no .proto file is given to them."""

from __future__ import annotations

import base64

import pytest
from google.rpc import error_details_pb2

from kvwire.v1 import admin_service_pb2, cache_service_pb2, peer_service_pb2
from support.server_process import server_process
from support.tools import BufCurl, Grpcurl

SERVICES = {
    service.full_name: service
    for file in (cache_service_pb2, admin_service_pb2, peer_service_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
}
LISTED = {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
REQUESTS = {
    "NegotiateChunkSize": {"required_alignment": 16},
    "Lookup": {"namespace": {"model": "m"}, "tokens": base64.b64encode(bytes(range(64))).decode()},
}
"""What a method wants to be answered at all; the others take an empty message."""
REFUSED = {
    "RegisterKvCache": "INVALID_FIELD",
    "WriteChunks": "NOT_REGISTERED",
    "Attach": "NOT_REGISTERED",
    "ReleaseLookup": "NOT_REGISTERED",
    "BeginStore": "NOT_REGISTERED",
    "CommitStore": "NOT_REGISTERED",
    "AbortStore": "NOT_REGISTERED",
    "BeginRetrieve": "NOT_REGISTERED",
    "EndRetrieve": "NOT_REGISTERED",
    "ReadChunks": "NOT_REGISTERED",
    "EndSession": "NOT_REGISTERED",
    "Pin": "INVALID_FIELD",
    "Unpin": "INVALID_FIELD",
    "SetQuota": "INVALID_FIELD",
    "Evict": "INVALID_FIELD",
    "Prefetch": "INVALID_FIELD",
}
STREAMS = {"SubscribeKvEvents"}
"""It stays open until it is cut off, as is seen elsewhere."""
NOT_SERVED = {
    "kvwire.v1.CacheService/MatchBlend",
    "kvwire.v1.PeerService/LookupAndLease",
    "kvwire.v1.PeerService/ReleaseLease",
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A server on a socket file and on a port."""
    folder = tmp_path_factory.mktemp("s")
    path = f"/tmp/kvw-tools-{folder.name}-{id(folder)}.sock"
    flags = ("--listen=127.0.0.1:0", "--chunk-size=16")
    with server_process(folder, *flags, listen=f"unix:{path}") as server:
        port = [line.split()[1] for line in server.output().splitlines() if "address" in line][1]
        yield {"unix": server.address, "tcp": port}


@pytest.fixture(params=["grpcurl-tcp", "grpcurl-unix", "buf-v1-tcp", "buf-v1alpha-unix"])
def tool(request, both):
    name, *version, where = request.param.split("-")
    return BufCurl(both[where], f"grpc-{version[0]}") if name == "buf" else Grpcurl(both[where])


def test_the_services_are_listed(tool):
    assert set(tool.list_services()) == LISTED


@pytest.mark.parametrize("where", ["tcp", "unix"])
def test_everything_is_described(both, where):
    grpcurl = Grpcurl(both[where])
    for name, service in SERVICES.items():
        assert grpcurl.list_methods(name) == sorted(f"{name}.{method.name}" for method in service.methods)
        described = grpcurl.describe(name)
        for method in service.methods:
            assert f"rpc {method.name} (" in described
    assert "is a method" in grpcurl.describe("kvwire.v1.CacheService.Lookup")
    assert "bytes tokens = 4;" in grpcurl.describe("kvwire.v1.LookupRequest")
    assert "ERROR_REASON_OVERLOADED = 24" in grpcurl.describe("kvwire.v1.ErrorReason")


def test_every_method_is_called(tool):
    """Each answers what it must: a reply, or the error that an empty request deserves."""
    tool.call("kvwire.v1.CacheService/NegotiateChunkSize", **REQUESTS["NegotiateChunkSize"])
    for service in SERVICES.values():
        for method in service.methods:
            name = f"{service.full_name}/{method.name}"
            if method.name in STREAMS:
                continue
            if name in NOT_SERVED:
                assert reason(tool.refused(name)) == "NOT_SERVED"
            elif method.name in REFUSED:
                assert reason(tool.refused(name)) == REFUSED[method.name]
            else:
                reply = tool.call(name, **REQUESTS.get(method.name, {}))
                # Between servers a reply tells its sender itself.
                assert reply.get("header", reply)["incarnation"]
    assert tool.call("grpc.health.v1.Health/Check") == {"status": "SERVING"}


def test_rich_errors_are_readable(both):
    text = Grpcurl(both["tcp"]).refused("kvwire.v1.CacheService/NegotiateChunkSize", required_alignment=0)
    assert "Code: InvalidArgument" in text
    assert '"reason":"ALIGNMENT_INVALID"' in text
    assert '"domain":"kvwire"' in text
    bad = Grpcurl(both["unix"]).refused("kvwire.v1.CacheService/Lookup", tokens="AAAA", namespace={})
    assert '"field":"model"' in bad
    assert "google.rpc.BadRequest" in bad


def test_what_the_reply_says_is_what_the_server_did(both):
    tool = Grpcurl(both["unix"])
    tool.call("kvwire.v1.CacheService/NegotiateChunkSize", required_alignment=16, client_name="me")
    status = tool.call("kvwire.v1.AdminService/GetStatus")
    assert status["chunk_size"]["chunk_size"] == 16
    assert status["addresses"] == [both["unix"], both["tcp"]]
    reply = tool.call("kvwire.v1.CacheService/Lookup", **REQUESTS["Lookup"])
    assert reply["asked_chunks"] == 1
    assert "hit_chunks" not in reply


def reason(text):
    """Of the ErrorInfo: grpcurl shows it as JSON, buf as base64 of the message."""
    if '"reason":"' in text:
        return text.partition('"reason":"')[2].partition('"')[0]
    packed = text.partition("google.rpc.ErrorInfo")[2].partition('"value": "')[2].partition('"')[0]
    raw = base64.b64decode(packed + "=" * (-len(packed) % 4))
    return error_details_pb2.ErrorInfo.FromString(raw).reason
