"""What an engine notices of a quota: fewer hits, and nothing else."""

from __future__ import annotations

from e2e.harness import engine, prompt
from kvwire.client import Client
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc

PROMPTS = [prompt(200, seed) for seed in range(3)]


def test_a_tenant_at_its_quota_computes_and_the_others_hit(serve, short_tmp, baseline):
    right = baseline("llama", *PROMPTS)
    server = serve("--policy", "tenant", "--state", str(short_tmp / "state"))
    with Client(server.address) as client:
        stub = admin_service_pb2_grpc.AdminServiceStub(client.channel())
        with engine("llama", server) as first:
            for salt in ("small", "free"):
                assert [each.tokens for each in first.run(*PROMPTS, salt=salt)] == right
        used = {row.tenant: row.used_bytes for row in stub.GetQuota(admin.GetQuotaRequest()).quotas}
        assert len(set(used.values())) == 1
        # Room for one of the three prompts.
        limit = used.popitem()[1] // 3
        stub.SetQuota(admin.SetQuotaRequest(salt="small", tier=1, limit_bytes=limit))
        with engine("llama", server) as second:
            for _ in range(2):
                small, free = (second.run(*PROMPTS, salt=salt) for salt in ("small", "free"))
                assert [each.tokens for each in small] == [each.tokens for each in free] == right
                assert [each.cached for each in free] == [192] * 3
        rows = {row.tenant: row for row in stub.GetQuota(admin.GetQuotaRequest()).quotas}
        assert sorted(row.used_bytes for row in rows.values()) == [limit, 3 * limit]
        assert not server.status().counters.expired_leases
