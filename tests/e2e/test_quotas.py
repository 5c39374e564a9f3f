"""What an engine notices of a quota: fewer hits, and nothing else."""

from __future__ import annotations

from e2e.harness import engine, prompt
from kvwire.client import Client
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc
from support.waiting import eventually

PROMPTS = [prompt(200, seed) for seed in range(3)]


def test_a_tenant_at_its_quota_computes_and_the_others_hit(serve, short_tmp, baseline):
    right = baseline("llama", *PROMPTS)
    server = serve("--policy", "tenant", "--state", str(short_tmp / "state"))
    with Client(server.address) as client:
        stub = admin_service_pb2_grpc.AdminServiceStub(client.channel())
        with engine("llama", server) as first:
            for salt in ("small", "free"):
                assert [each.tokens for each in first.run(*PROMPTS, salt=salt)] == right
        used, same = in_use(stub)
        assert used == same
        # Room for one of the three prompts.
        limit = used // 3
        stub.SetQuota(admin.SetQuotaRequest(salt="small", tier=1, limit_bytes=limit))
        # What is above it goes in the background.
        eventually(lambda: sorted(in_use(stub)) == [limit, 3 * limit])
        with engine("llama", server) as second:
            for _ in range(2):
                small, free = (second.run(*PROMPTS, salt=salt) for salt in ("small", "free"))
                assert [each.tokens for each in small] == [each.tokens for each in free] == right
                assert [each.cached for each in free] == [192] * 3
        assert sorted(in_use(stub)) == [limit, 3 * limit]
        assert not server.status().counters.expired_leases


def in_use(stub):
    """Bytes by tenant."""
    return [row.used_bytes for row in stub.GetQuota(admin.GetQuotaRequest()).quotas]
