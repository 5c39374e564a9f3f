"""Pins and quotas at a coordinator."""

from __future__ import annotations

from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc
from kvwire.v1 import coordinator_service_pb2 as pb
from support.coordinator_process import coordinator_process
from support.raw_client import failure

KEYS = [index.to_bytes(32, "big") for index in range(1, 100)]
PIN = admin.PinRequest(selector={"chunk_keys": {"keys": KEYS[:3]}})


def test_what_was_acknowledged_is_there_after_a_kill(tmp_path):
    state = f"--state={tmp_path / 'state'}"
    with coordinator_process(tmp_path, state, stop=False) as coordinator:
        stub = admin_service_pb2_grpc.AdminServiceStub(coordinator.channel())
        assert coordinator.stub().GetIntents(pb.GetIntentsRequest()).revision == 0
        assert stub.Pin(PIN).pinned_chunks == 3
        tenant = stub.SetQuota(admin.SetQuotaRequest(salt="red", tier=1, limit_bytes=1000)).tenant
        assert (
            stub.Unpin(admin.UnpinRequest(selector={"chunk_keys": {"keys": KEYS[2:5]}})).unpinned_chunks == 1
        )
        assert (
            failure(stub.SetQuota, admin.SetQuotaRequest(salt="red", limit_bytes=1)).reason == "INVALID_FIELD"
        )
        for name in ({}, {"salt": "red", "tenant": tenant}, {"tenant": "red"}, {"salt": "new\nline"}):
            request = admin.SetQuotaRequest(tier=1, limit_bytes=1, **name)
            assert failure(stub.SetQuota, request).reason == "INVALID_FIELD"
        log = coordinator.output()
        assert "pin peer=unix: chunks=3" in log
        assert f"quota peer=unix: tier=L1 tenant={tenant} limit=1000" in log
        assert "unpin peer=unix: chunks=1" in log
        coordinator.process.kill()
        coordinator.process.wait(10)
    with coordinator_process(tmp_path, state) as coordinator:
        intents = coordinator.stub().GetIntents(pb.GetIntentsRequest())
        assert (intents.revision, list(intents.pinned_keys)) == (3, KEYS[:2])
        stub = admin_service_pb2_grpc.AdminServiceStub(coordinator.channel())
        (quota,) = stub.GetQuota(admin.GetQuotaRequest()).quotas
        assert (quota.tenant, quota.tier, quota.limit_bytes, quota.used_bytes) == (tenant, 1, 1000, 0)
        assert not stub.GetQuota(admin.GetQuotaRequest(tenant="0" * 16)).quotas
        assert failure(stub.GetQuota, admin.GetQuotaRequest(tenant="red")).reason == "INVALID_FIELD"
        for name, limit in ((tenant, 0), ("none", 5)):
            request = admin.SetQuotaRequest(tenant=name, tier=1, limit_bytes=limit)
            assert stub.SetQuota(request).tenant == name
        (quota,) = stub.GetQuota(admin.GetQuotaRequest(tenant="none")).quotas
        assert (quota.tenant, quota.limit_bytes) == ("none", 5)


def test_without_a_state_folder_nothing_is_promised(tmp_path):
    with coordinator_process(tmp_path) as coordinator:
        stub = admin_service_pb2_grpc.AdminServiceStub(coordinator.channel())
        quota = admin.SetQuotaRequest(salt="red", tier=1, limit_bytes=1)
        for call, request in (
            (stub.Pin, PIN),
            (stub.SetQuota, quota),
            (stub.GetQuota, admin.GetQuotaRequest()),
        ):
            assert failure(call, request).reason == "STATE_UNAVAILABLE"
        assert coordinator.stub().GetIntents(pb.GetIntentsRequest()) == pb.GetIntentsResponse()
        assert failure(stub.GetStatus, admin.GetStatusRequest()).reason == "NOT_SERVED"
