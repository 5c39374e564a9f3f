"""PeerService as another server may call it, right or wrong: what is refused leases nothing."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import pytest

from kvwire.keys import Namespace, root
from kvwire.server.layout import KvGroup, KvLayout, layout_digest
from kvwire.transfer.hosts import host_id
from kvwire.v1 import peer_service_pb2 as pb
from kvwire.v1 import peer_service_pb2_grpc, transfer_pb2
from support.fleet import fleet
from support.raw_client import MODEL, OBJECT_BYTES, failure, tokens

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")

LAYOUT = KvLayout(1, (KvGroup("full", 4, 0, 1, OBJECT_BYTES, 1),))
LOCAL, REMOTE = transfer_pb2.DATA_PATH_UCX_LOCAL, transfer_pb2.DATA_PATH_UCX_REMOTE


@pytest.fixture(scope="module")
def owner():
    """A fleet of one server that holds a prompt, a stub of it, and a good request."""
    with (
        tempfile.TemporaryDirectory(prefix="kvw-", dir="/tmp") as folder,
        fleet(Path(folder), "a", data_paths=("shm", "ucx-local")) as made,
    ):
        made.store("a", tokens(4))
        stub = peer_service_pb2_grpc.PeerServiceStub(made.servers["a"].channel())
        good = pb.LookupAndLeaseRequest(
            requester_id="b",
            expected_incarnation=made.servers["a"].core.incarnation,
            layout_digest=layout_digest(LAYOUT, 4),
            chunk_size=4,
            chunk_keys=made.client("a").keys(tokens(4)),
            transfer_id=1,
            namespace_root=root(Namespace(MODEL), 4),
            digest_function=1,
            protocol_version=1,
        )
        yield made, stub, good


def changed(good, **fields):
    request = pb.LookupAndLeaseRequest()
    request.CopyFrom(good)
    for name, value in fields.items():
        request.ClearField(name)
        if isinstance(value, list):
            getattr(request, name).extend(value)
        else:
            setattr(request, name, value)
    return request


def offer(path=LOCAL, host="", address=b""):
    return [transfer_pb2.DataPathOffer(path=path, host_id=host or host_id(), ucx_address=address)]


METADATA = {
    "FLEET_MIXED": {"chunk_size", "fleet_chunk_size", "digest", "fleet_digest"},
    "INCARNATION_STALE": {"server_id"},
    "INVALID_FIELD": {"field"},
}
BAD = {
    "another run": ({"expected_incarnation": bytes(16)}, "INCARNATION_STALE"),
    "no run": ({"expected_incarnation": b""}, "INCARNATION_STALE"),
    "another chunk size": ({"chunk_size": 8}, "FLEET_MIXED"),
    "another digest": ({"digest_function": 0}, "FLEET_MIXED"),
    "another protocol": ({"protocol_version": 99}, "FLEET_MIXED"),
    "another layout": ({"layout_digest": bytes(32)}, "FLEET_MIXED"),
    "no name": ({"requester_id": ""}, "INVALID_FIELD"),
    "a name that is too long": ({"requester_id": "x" * 129}, "INVALID_FIELD"),
    "a name with a newline": ({"requester_id": "x\ny"}, "INVALID_FIELD"),
    "a short digest": ({"layout_digest": b"x"}, "INVALID_FIELD"),
    "a short root": ({"namespace_root": b"x"}, "INVALID_FIELD"),
    "a short key": ({"chunk_keys": [b"x"]}, "INVALID_FIELD"),
    "too many keys": ({"chunk_keys": [bytes(32)] * 65537}, "TOO_MANY_ITEMS"),
    "no transfer": ({"transfer_id": 0}, "INVALID_FIELD"),
    "a transfer beyond the tags": ({"transfer_id": 1 << 32}, "INVALID_FIELD"),
    "more masks than keys": ({"have_objects": [b""] * 5}, "INVALID_FIELD"),
    "a mask beyond any layout": ({"have_objects": [bytes(513)]}, "INVALID_FIELD"),
    "no path": ({}, "DATA_PATH_UNAVAILABLE"),
    "a path that is not here": ({"offers": offer(REMOTE)}, "DATA_PATH_UNAVAILABLE"),
    "a path of another host": ({"offers": offer(host="elsewhere")}, "DATA_PATH_UNAVAILABLE"),
    "no address": ({"offers": offer()}, "DATA_PATH_UNAVAILABLE"),
    "an address that is none": ({"offers": offer(address=b"x" * 100)}, "DATA_PATH_UNAVAILABLE"),
    "an address that is too long": ({"offers": offer(address=bytes(16385))}, "INVALID_FIELD"),
    "too many offers": ({"offers": offer() * 65}, "TOO_MANY_ITEMS"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_refused_and_leases_nothing(owner, case):
    made, stub, good = owner
    fields, reason = BAD[case]
    refused = failure(stub.LookupAndLease, changed(good, **fields), timeout=10)
    assert refused.reason == reason
    assert METADATA.get(reason, set()) <= set(refused.metadata)
    sharing = made.servers["a"].run(made.sharing("a").status)
    assert (sharing.given_leases, sharing.given_bytes) == (0, 0)
    made.check()


def test_what_is_not_here_needs_no_path(owner):
    _, stub, good = owner
    for fields in (
        {"chunk_keys": [bytes(32)]},
        {"chunk_keys": []},
        {"namespace_root": bytes(32)},
        {"have_objects": [b"\1"] * 4},
    ):
        reply = stub.LookupAndLease(changed(good, **fields), timeout=10)
        assert not reply.HasField("ticket")
        assert reply.hit_chunks == (4 if "have_objects" in fields else 0)


def test_leases_that_nobody_has_are_not_held(owner):
    made, stub, _ = owner
    request = pb.ReleaseLeaseRequest(requester_id="b", lease_ids=[0, 7, 1 << 40])
    assert list(stub.ReleaseLease(request, timeout=10).held) == [False] * 3
    made.check()


def test_a_server_that_shares_nothing_says_so(short_tmp):
    with fleet(short_tmp, data_paths=("shm",)) as made:
        made.start("off", peers=False)
        made.start("none")
        for name, reason in (("off", "NOT_SERVED"), ("none", "INCARNATION_STALE")):
            stub = peer_service_pb2_grpc.PeerServiceStub(made.servers[name].channel())
            request = pb.LookupAndLeaseRequest(
                requester_id="b", transfer_id=1, layout_digest=bytes(32), namespace_root=bytes(32)
            )
            assert failure(stub.LookupAndLease, request, timeout=10).reason == reason
