"""AdminService at a server with a tier below its memory."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from kvwire.keys import salt_digest
from kvwire.v1 import admin_service_pb2 as admin
from support.local_server import local_server
from support.operators import (
    BLUE,
    L1,
    L2,
    RED,
    below,
    client_of,
    limit,
    listed,
    stored_quota,
    stub_of,
)
from support.raw_client import OBJECT_BYTES, failure, tokens
from support.waiting import eventually


@pytest.fixture
def two_tiers(tmp_path):
    """A server with a folder below its memory, its client, and three tenants' prompts in both."""
    with local_server(tmp_path, **below(tmp_path)) as server:
        client = client_of(server)
        for salt in ("", RED, BLUE):
            client.store("s", tokens(3), salt=salt)
        stub = stub_of(server)
        eventually(lambda: len(listed(stub, tier=L2)) == 9)
        yield server, client, stub


def test_a_listing_goes_on_into_the_lower_tiers(two_tiers):
    _, client, stub = two_tiers
    found = listed(stub, size=4)
    assert [(each.tier, each.backend) for each in found] == [(L1, "memory")] * 9 + [(L2, "disk")] * 9
    assert {each.chunk_key for each in found[:9]} == {each.chunk_key for each in found[9:]}
    of_red = listed(stub, tenant=salt_digest(RED), tier=L2)
    assert [each.chunk_key for each in of_red] == client.keys(tokens(3), RED)
    assert all(each.complete and each.objects == 1 and each.size_bytes > OBJECT_BYTES for each in of_red)


def test_evict_and_clear_reach_the_tier_that_was_meant(two_tiers):
    server, client, stub = two_tiers
    keys = {"chunk_keys": {"keys": client.keys(tokens(3), RED)}}
    assert stub.Evict(admin.EvictRequest(selector=keys, tier=L2)).evicted_chunks == 3
    assert (len(listed(stub, tier=L1)), len(listed(stub, tier=L2))) == (9, 6)
    assert stub.Evict(admin.EvictRequest(selector=keys)).evicted_chunks == 3
    assert stub.Clear(admin.ClearRequest(tier=L1)).cleared_chunks == 6
    assert (len(listed(stub, tier=L1)), len(listed(stub, tier=L2))) == (0, 6)
    reply = stub.Clear(admin.ClearRequest(tenant="none", namespace=client.namespace))
    assert (reply.cleared_chunks, reply.kept_chunks) == (3, 0)
    assert {each.tenant for each in listed(stub)} == {salt_digest(BLUE)}
    assert stub.Clear(admin.ClearRequest()).cleared_chunks == 3
    assert listed(stub) == []
    eventually(lambda: not server.core.tiers.tiers[0].index.used)


def test_nothing_is_dropped_while_a_tier_does_not_know_what_it_holds(two_tiers):
    server, client, stub = two_tiers
    server.run(setattr, server.core.tiers.tiers[0], "ready", False)
    keys = {"chunk_keys": {"keys": client.keys(tokens(3))}}
    for call, request in (
        (stub.Clear, admin.ClearRequest()),
        (stub.Evict, admin.EvictRequest(selector=keys)),
    ):
        told = failure(call, request)
        assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "SERVER_UNAVAILABLE")
        assert "L2 disk" in told.text
    assert len(listed(stub, tier=L1)) == 9
    assert stub.Clear(admin.ClearRequest(tier=L1)).cleared_chunks == 9


def test_a_quota_of_the_lower_tier_holds_there(two_tiers):
    server, client, stub = two_tiers
    one = listed(stub, tier=L2)[0].size_bytes
    red = salt_digest(RED)
    assert stored_quota(stub, red) == (0, 3 * one)
    stub.SetQuota(admin.SetQuotaRequest(salt=RED, tier=L2, limit_bytes=2 * one))
    assert stored_quota(stub, red) == (2 * one, 2 * one)
    assert [each.chunk_key for each in listed(stub, tier=L2, tenant=red)] == client.keys(tokens(2), RED)
    assert len(listed(stub, tier=L1, tenant=red)) == 3
    client.store("s", tokens(4, seed=1), salt=RED)
    client.store("s", tokens(4, seed=1), salt=BLUE)
    eventually(lambda: len(listed(stub, tier=L2, tenant=salt_digest(BLUE))) == 7)
    assert stored_quota(stub, red) == (2 * one, 2 * one)
    assert stored_quota(stub, "none") == (0, 3 * one)
    server.check()


def test_a_quota_of_the_lower_tier_outlives_a_restart(tmp_path):
    red = salt_digest(RED)
    with local_server(tmp_path, **below(tmp_path)) as server:
        client, stub = client_of(server), stub_of(server)
        client.store("s", tokens(3), salt=RED)
        eventually(lambda: len(listed(stub, tier=L2)) == 3)
        one = listed(stub, tier=L2)[0].size_bytes
        stub.SetQuota(admin.SetQuotaRequest(tenant=red, tier=L2, limit_bytes=2 * one))
    with local_server(tmp_path, **below(tmp_path)) as server:
        stub = stub_of(server)
        assert stored_quota(stub, red) == (2 * one, 2 * one)
        stub.SetQuota(admin.SetQuotaRequest(tenant=red, tier=L2, limit_bytes=one))
        assert stored_quota(stub, red) == (one, one)


def test_a_quota_that_was_lowered_while_the_server_was_away_holds_from_the_start(tmp_path):
    full, spare = (below(tmp_path / name) for name in ("full", "spare"))
    for each in (full, spare):
        Path(each["state"]).parent.mkdir()
    with local_server(tmp_path, **full) as server:
        client, stub = client_of(server), stub_of(server)
        client.store("s", tokens(3), salt=RED)
        eventually(lambda: len(listed(stub, tier=L2)) == 3)
        one = listed(stub, tier=L2)[0].size_bytes
    with local_server(tmp_path, **spare) as server:
        stub_of(server).SetQuota(admin.SetQuotaRequest(salt=RED, tier=L2, limit_bytes=2 * one))
    with local_server(tmp_path, **{**full, "state": spare["state"]}) as server:
        assert stored_quota(stub_of(server), salt_digest(RED)) == (2 * one, 2 * one)


def test_what_a_quota_drives_out_of_memory_is_written_below_first(tmp_path, monkeypatch):
    monkeypatch.setattr("kvwire.server.tiers.spilling.EVICTED", 1)
    place = f"file://{tmp_path / 'below'}?size=64MiB&store=evict"
    own = {"policy": "tenant", "state": str(tmp_path / "state"), "l2": (place,)}
    with local_server(tmp_path, **own) as server:
        client, stub = client_of(server), stub_of(server)
        red = limit(stub, 8, salt=RED)
        for seed in range(7):
            client.store("s", tokens(2, seed), salt=RED)
        stored = {key for seed in range(7) for key in client.keys(tokens(2, seed), RED)}
        in_memory = {each.chunk_key for each in listed(stub, tier=L1, tenant=red)}
        assert len(in_memory) == 8
        assert stored - in_memory <= {each.chunk_key for each in listed(stub, tier=L2, tenant=red)}
        # The same when the quota is lowered: nothing is lost.
        limit(stub, 1, salt=RED)
        eventually(lambda: len(listed(stub, tier=L1, tenant=red)) == 1)
        assert stored == {each.chunk_key for each in listed(stub, tenant=red)}
        assert server.core.tiers.tiers[0].counters.skipped_objects == 0
        assert client.lookup("r", tokens(2), salt=RED).hit_chunks == 1
        server.check()
