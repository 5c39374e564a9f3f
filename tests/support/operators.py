"""What tests of AdminService ask for and compare."""

from __future__ import annotations

from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc
from support.raw_client import OBJECT_BYTES, RawClient

L1, L2 = 1, 2
RED, BLUE = "the secret of red", "the secret of blue"


def stub_of(server) -> admin_service_pb2_grpc.AdminServiceStub:
    return admin_service_pb2_grpc.AdminServiceStub(server.channel())


def client_of(server) -> RawClient:
    return RawClient(server.channel()).register()


def listed(stub, size: int = 0, **fields) -> list[admin.ChunkStatus]:
    found, token = [], ""
    while True:
        request = admin.ListObjectsRequest(page_size=size, page_token=token, **fields)
        page = stub.ListObjects(request)
        assert len(page.chunks) <= (size or 100)
        found += page.chunks
        token = page.next_page_token
        if not token:
            return found


def quotas(stub, **fields) -> dict[str, tuple[int, int]]:
    """Tenant to limit and use in objects, in memory."""
    rows = stub.GetQuota(admin.GetQuotaRequest(**fields)).quotas
    assert all(row.backend == "memory" for row in rows)
    return {row.tenant: (row.limit_bytes // OBJECT_BYTES, row.used_bytes // OBJECT_BYTES) for row in rows}


def limit(stub, objects: int, tier: int = L1, **name) -> str:
    return stub.SetQuota(admin.SetQuotaRequest(tier=tier, limit_bytes=objects * OBJECT_BYTES, **name)).tenant


def below(tmp_path) -> dict[str, object]:
    place = f"file://{tmp_path / 'below'}?size=64MiB"
    return {"policy": "tenant", "state": str(tmp_path / "state"), "l2": (place,)}


def stored_quota(stub, tenant: str) -> tuple[int, int]:
    rows = stub.GetQuota(admin.GetQuotaRequest(tenant=tenant)).quotas
    ((limit_bytes, used),) = [(row.limit_bytes, row.used_bytes) for row in rows if row.backend == "disk"]
    return limit_bytes, used
