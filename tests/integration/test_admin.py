"""AdminService: listings, quotas, evict, clear. What is asked wrongly is refused and changes nothing."""

from __future__ import annotations

import logging
import random

import grpc
import pytest

from kvwire.keys import salt_digest
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc
from support.coordinator_process import coordinator_process
from support.local_server import local_server
from support.operators import (
    BLUE,
    L1,
    L2,
    RED,
    client_of,
    limit,
    listed,
    quotas,
    stub_of,
)
from support.raw_client import OBJECT_BYTES, failure, tokens
from support.server_process import server_process
from support.waiting import eventually


def test_what_is_cached_is_listed_by_tier_and_tenant(tmp_path):
    with local_server(tmp_path) as server:
        client, stub = client_of(server), stub_of(server)
        client.store("a", tokens(3))
        client.store("b", tokens(2), salt=RED)
        client.lookup("held", tokens(2))
        client.begin_store("held", 2, 1)
        all_of_them = listed(stub)
        assert {each.chunk_key for each in all_of_them} == {
            *client.keys(tokens(3)), *client.keys(tokens(2), RED)
        }  # fmt: skip
        assert {(each.tier, each.backend, each.size_bytes, each.objects, each.complete, each.model)
                for each in all_of_them} == {(L1, "memory", OBJECT_BYTES, 1, True, "test/model")}  # fmt: skip
        assert [each.leases > 0 for each in all_of_them] == [True, True, False, False, False]
        assert {each.tenant for each in all_of_them} == {"", salt_digest(RED)}
        assert len(listed(stub, tenant=salt_digest(RED))) == 2
        assert len(listed(stub, tenant="none")) == 3
        assert listed(stub, tenant="0" * 16) == listed(stub, tier=L2) == []
        assert listed(stub, size=2, tier=L1) == all_of_them


def test_a_listing_is_stable_while_chunks_come_and_go(tmp_path):
    """What is there all the time is listed once, whatever happens between two pages."""
    choice = random.Random(7)
    with local_server(tmp_path, l1_size=8 << 20) as server:
        client, stub = client_of(server), stub_of(server)
        stay = set()
        for seed in range(12):
            client.store("s", tokens(3, seed))
            stay |= set(client.keys(tokens(3, seed)))
        found, token, seed = [], "", 100
        while True:
            page = stub.ListObjects(admin.ListObjectsRequest(page_size=4, page_token=token))
            found += [each.chunk_key for each in page.chunks]
            token = page.next_page_token
            if not token:
                break
            gone = choice.sample(sorted(stay), 2)
            stub.Evict(admin.EvictRequest(selector={"chunk_keys": {"keys": gone}}))
            stay -= set(gone)
            seed += 1
            client.store("s", tokens(1, seed))
        assert stay <= set(found)
        assert len(found) == len(set(found))


def test_a_page_that_looks_at_many_chunks_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("kvwire.server.holdings.MAX_SCAN", 3)
    with local_server(tmp_path) as server:
        client, stub = client_of(server), stub_of(server)
        client.store("a", tokens(7))
        client.store("b", tokens(2), salt=RED)
        first = stub.ListObjects(admin.ListObjectsRequest(tenant=salt_digest(RED)))
        assert not first.chunks
        assert first.next_page_token
        assert len(listed(stub, tenant=salt_digest(RED))) == 2


def test_evict_drops_what_was_named_and_nothing_else(tmp_path):
    with local_server(tmp_path, state=str(tmp_path / "state")) as server:
        client, stub = client_of(server), stub_of(server)
        client.store("a", tokens(4))
        client.store("b", tokens(2, seed=1))
        pinned = {"chunk_keys": {"keys": client.keys(tokens(1))}}
        stub.Pin(admin.PinRequest(selector=pinned))
        client.lookup("held", tokens(2))
        by_tokens = admin.PromptSelector(namespace=client.namespace, tokens=tokens(4))
        assert stub.Evict(admin.EvictRequest(selector=by_tokens, tier=L2)).evicted_chunks == 0
        reply = stub.Evict(admin.EvictRequest(selector=by_tokens))
        assert (reply.evicted_chunks, reply.kept_chunks) == (2, 2)
        assert (client.hits(tokens(4)), client.hits(tokens(2, seed=1))) == (2, 2)
        client.end_session("held")
        reply = stub.Evict(admin.EvictRequest(selector=by_tokens))
        assert (reply.evicted_chunks, reply.kept_chunks) == (1, 1)
        server.check()


def test_clear_by_tier_namespace_and_tenant(tmp_path):
    with local_server(tmp_path) as server:
        client, stub = client_of(server), stub_of(server)
        for salt in ("", RED, BLUE):
            client.store("s", tokens(2), salt=salt)
        assert stub.Clear(admin.ClearRequest(tier=L2)).cleared_chunks == 0
        other = {"namespace": {"model": "other"}}
        assert stub.Clear(admin.ClearRequest(**other)).cleared_chunks == 0
        reply = stub.Clear(admin.ClearRequest(tenant=salt_digest(RED), namespace=client.namespace, tier=L1))
        assert (reply.cleared_chunks, reply.kept_chunks) == (2, 0)
        assert [client.hits(tokens(2), salt) for salt in ("", RED, BLUE)] == [2, 0, 2]
        assert stub.Clear(admin.ClearRequest(tenant="none")).cleared_chunks == 2
        assert [client.hits(tokens(2), salt) for salt in ("", RED, BLUE)] == [0, 0, 2]


def test_a_quota_holds_is_shown_and_outlives_a_kill(tmp_path):
    flags = ("--policy=tenant", f"--state={tmp_path / 'state'}", "--chunk-size=4")
    with server_process(tmp_path, *flags, stop=False) as server:
        client, stub = client_of(server), stub_of(server)
        red = limit(stub, 3, salt=RED)
        assert red == salt_digest(RED)
        assert limit(stub, 2, tenant="none") == "none"
        client.store("s", tokens(5), salt=RED)
        client.store("s", tokens(5, seed=1), salt=RED)
        client.store("s", tokens(5), salt=BLUE)
        client.store("s", tokens(5))
        assert quotas(stub) == {red: (3, 3), salt_digest(BLUE): (0, 5), "none": (2, 2)}
        assert quotas(stub, tenant="none") == {"none": (2, 2)}
        assert [client.hits(tokens(5, seed), RED) for seed in (0, 1)] == [0, 3]
        server.process.kill()
        server.process.wait(10)
    with server_process(tmp_path, *flags) as server:
        client, stub = client_of(server), stub_of(server)
        assert quotas(stub) == {red: (3, 0), "none": (2, 0)}
        client.store("s", tokens(5), salt=RED)
        assert client.hits(tokens(5), RED) == 3
        assert limit(stub, 0, tenant=red) == red
        client.store("s", tokens(5), salt=RED)
        assert quotas(stub) == {red: (0, 5), "none": (2, 0)}


def test_of_many_tenants_those_that_use_most_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr("kvwire.server.quotas.MAX_LISTED", 2)
    with local_server(tmp_path, policy="tenant", state=str(tmp_path / "state")) as server:
        client, stub = client_of(server), stub_of(server)
        for number, salt in enumerate("abcd", 1):
            client.store("s", tokens(number), salt=salt)
        limit(stub, 9, salt="a")
        shown = quotas(stub)
        assert shown == {salt_digest("a"): (9, 1), salt_digest("c"): (0, 3), salt_digest("d"): (0, 4)}
        assert quotas(stub, tenant=salt_digest("b")) == {salt_digest("b"): (0, 2)}


def test_a_lower_quota_is_met_by_the_next_sweeps(tmp_path):
    with local_server(tmp_path, policy="tenant", state=str(tmp_path / "state")) as server:
        client, stub = client_of(server), stub_of(server)
        client.store("s", tokens(9), salt=RED)
        client.store("s", tokens(9), salt=BLUE)
        red = limit(stub, 4, salt=RED)
        eventually(lambda: quotas(stub)[red] == (4, 4))
        assert (client.hits(tokens(9), RED), client.hits(tokens(9), BLUE)) == (4, 9)


def test_of_its_own_quota_and_that_of_its_fleet_the_smaller_one_holds(tmp_path):
    fleet = coordinator_process(tmp_path, f"--state={tmp_path / 'fleet'}", "--heartbeat=100ms")
    with fleet as coordinator:
        own = {"policy": "tenant", "state": str(tmp_path / "state"), "coordinator": (coordinator.address,)}
        with local_server(tmp_path, **own) as server:
            everywhere = admin_service_pb2_grpc.AdminServiceStub(coordinator.channel())
            client, stub = client_of(server), stub_of(server)
            red = limit(stub, 5, salt=RED)
            limit(everywhere, 3, salt=RED)
            limit(everywhere, 2, tenant="none")
            eventually(lambda: quotas(stub) == {red: (3, 0), "none": (2, 0)})
            client.store("s", tokens(7), salt=RED)
            assert client.hits(tokens(7), RED) == 3
            limit(stub, 1, salt=RED)
            eventually(lambda: quotas(stub)[red] == (1, 1))
            limit(everywhere, 0, salt=RED)
            limit(stub, 6, salt=RED)
            eventually(lambda: quotas(stub)[red] == (6, 1))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tier": L1}, "salt"),
        ({"tier": L1, "salt": RED, "tenant": "none"}, "salt"),
        ({"tier": L1, "tenant": RED}, "tenant"),
        ({"tier": L1, "tenant": "NONE"}, "tenant"),
        ({"tier": L1, "salt": "new\nline"}, "salt"),
        ({"tier": L1, "salt": "s" * 600}, "salt"),
        ({"salt": RED}, "tier"),
        ({"tier": 3, "salt": RED}, "tier"),
        ({"tier": L2, "salt": RED}, "tier"),
    ],
)
def test_a_quota_that_means_nothing_is_refused(tmp_path, fields, field):
    with local_server(tmp_path, policy="tenant", state=str(tmp_path / "state")) as server:
        stub = stub_of(server)
        told = failure(stub.SetQuota, admin.SetQuotaRequest(limit_bytes=OBJECT_BYTES, **fields))
        assert (told.code, told.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
        assert told.metadata["field"] == field
        assert RED not in told.text
        assert quotas(stub) == {}


def test_a_quota_that_cannot_be_kept_says_what_it_needs(tmp_path):
    with local_server(tmp_path, state=str(tmp_path / "state")) as server:
        request = admin.SetQuotaRequest(tier=L1, tenant="none", limit_bytes=1)
        assert "--policy tenant" in failure(stub_of(server).SetQuota, request).text
        request.tier = L2
        assert "--l2" in failure(stub_of(server).SetQuota, request).text
        # What never holds may always be taken back.
        request.limit_bytes = 0
        stub_of(server).SetQuota(request)
    (tmp_path / "other").mkdir()
    with local_server(tmp_path / "other", policy="tenant") as server:
        request = admin.SetQuotaRequest(tier=L1, tenant="none", limit_bytes=1)
        assert failure(stub_of(server).SetQuota, request).reason == "STATE_UNAVAILABLE"


def test_quotas_of_a_former_policy_are_told_at_the_start(tmp_path, caplog):
    state = {"state": str(tmp_path / "state")}
    with local_server(tmp_path, policy="tenant", **state) as server:
        limit(stub_of(server), 1, salt=RED)
    with caplog.at_level(logging.WARNING), local_server(tmp_path, **state) as server:
        assert "--policy tenant" in caplog.text
        client = client_of(server)
        client.store("s", tokens(3), salt=RED)
        assert client.hits(tokens(3), RED) == 3


BAD = [
    ("ListObjects", admin.ListObjectsRequest(page_token="next")),
    ("ListObjects", admin.ListObjectsRequest(page_token="9-1")),
    ("ListObjects", admin.ListObjectsRequest(page_token="1-0", tier=1)),
    ("ListObjects", admin.ListObjectsRequest(page_token="0-" + "9" * 30)),
    ("ListObjects", admin.ListObjectsRequest(page_token="٣-٣")),
    ("ListObjects", admin.ListObjectsRequest(tenant="red")),
    ("ListObjects", admin.ListObjectsRequest(tier=7)),
    ("GetQuota", admin.GetQuotaRequest(tenant="red")),
    ("Clear", admin.ClearRequest(tenant="red")),
    ("Clear", admin.ClearRequest(tier=7)),
    ("Clear", admin.ClearRequest(namespace={"model": "new\nline"})),
    ("Evict", admin.EvictRequest()),
    ("Evict", admin.EvictRequest(tier=7, selector={"chunk_keys": {"keys": [bytes(32)]}})),
    ("Evict", admin.EvictRequest(selector={"chunk_keys": {"keys": [b"short"]}})),
    ("Evict", admin.EvictRequest(selector={"namespace": {"model": "m"}, "tokens": b"abc"})),
]


def test_bad_input_is_refused_and_changes_nothing(tmp_path):
    with local_server(tmp_path, max_chunks=100) as server:
        client, stub = client_of(server), stub_of(server)
        client.store("s", tokens(3))
        for method, request in BAD:
            told = failure(getattr(stub, method), request)
            assert told.code == grpc.StatusCode.INVALID_ARGUMENT, (method, request, told)
        many = admin.EvictRequest(selector={"chunk_keys": {"keys": [bytes(32)] * 101}})
        assert failure(stub.Evict, many).reason == "TOO_MANY_ITEMS"
        assert client.hits(tokens(3)) == 3
        server.check()


def test_bl55_changes_are_in_the_log_and_salts_are_nowhere(tmp_path, caplog):
    own = {"policy": "tenant", "state": str(tmp_path / "state")}
    with caplog.at_level(logging.DEBUG), local_server(tmp_path, **own) as server:
        client, stub = client_of(server), stub_of(server)
        client.store("s", tokens(3), salt=RED)
        red = limit(stub, 2, salt=RED)
        selector = admin.PromptSelector(
            namespace={"model": client.namespace.model, "salt": RED}, tokens=tokens(3)
        )
        stub.Pin(admin.PinRequest(selector=selector))
        stub.Unpin(admin.UnpinRequest(selector=selector))
        stub.Evict(admin.EvictRequest(selector=selector))
        stub.Clear(admin.ClearRequest(tenant=red))
        replies = (
            stub.ListObjects(admin.ListObjectsRequest()),
            stub.GetQuota(admin.GetQuotaRequest()),
            stub.GetStatus(admin.GetStatusRequest()),
            stub.ListSessions(admin.ListSessionsRequest()),
        )
        audit = [each.getMessage() for each in caplog.records if each.name == "kvwire.audit"]
    assert [line.split()[0] for line in audit] == ["quota", "pin", "unpin", "evict", "clear"]
    assert all(" peer=unix:" in line for line in audit)
    assert f"tier=L1 tenant={red} limit={2 * OBJECT_BYTES}" in audit[0]
    assert RED not in caplog.text + "".join(map(str, replies))
    assert RED.encode() not in (tmp_path / "state" / "intents.log").read_bytes()


@pytest.mark.parametrize("policy", ["lru", "arc", "tenant"])
def test_bl52_use_falls_below_the_watermark_by_itself(tmp_path, policy):
    with local_server(tmp_path, policy=policy, watermark=0.5) as server:
        client = client_of(server)
        for seed in range(8):
            client.store("s", tokens(5, seed))
        half = server.status().l1.capacity_bytes // 2
        eventually(lambda: server.status().l1.used_bytes <= half)
        server.check()


@pytest.mark.parametrize("policy", ["lru", "arc", "tenant"])
def test_bl52_an_eviction_that_raises_is_seen_from_outside(tmp_path, policy):
    with local_server(tmp_path, policy=policy, watermark=0.1) as server:
        client = client_of(server)

        def broken(_protect):
            raise RuntimeError("the policy is broken")

        server.run(setattr, server.engine.store.policy, "victim", broken)
        client.store("s", tokens(20))
        eventually(lambda: [task.name for task in client.status().tasks if not task.running] == ["sweep"])
        (task,) = [task for task in client.status().tasks if not task.running]
        assert "the policy is broken" in task.error
        assert server.core.supervisor.deaths == 1
        assert server.server._problem()
