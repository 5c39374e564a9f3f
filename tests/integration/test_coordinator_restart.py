"""BL-40: a coordinator that is killed comes back with pins, quotas, and all that the fleet holds."""

from __future__ import annotations

import time

import pytest

from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc, event_pb2
from kvwire.v1 import coordinator_service_pb2 as pb
from support.coordinator_process import coordinator_process
from support.waiting import eventually

KEYS = [index.to_bytes(32, "big") for index in range(1, 101)]


class Reporter:
    """A cache server as a coordinator sees it, without snapshots: all must come from its events."""

    def __init__(self, server_id: str) -> None:
        self.server_id = server_id
        self.incarnation = server_id.encode() * 16
        self.batches = []

    def register(self, stub) -> int:
        info = pb.ServerInfo(
            server_id=self.server_id,
            incarnation=self.incarnation,
            chunk_size=16,
            digest_function="DIGEST_FUNCTION_SHA256",
        )
        return stub.RegisterServer(pb.RegisterServerRequest(server=info)).next_sequence

    def report(self, stub, keys, tier) -> None:
        events = [
            event_pb2.CacheEvent(kind=1, chunk_key=key, tier=tier, backend="m", size_bytes=9) for key in keys
        ]
        self.batches.append(
            event_pb2.CacheEventBatch(
                server_id=self.server_id,
                incarnation=self.incarnation,
                sequence=len(self.batches) + 1,
                events=events,
            )
        )
        self.send(stub, len(self.batches))

    def send(self, stub, first: int) -> None:
        requests = [pb.ReportEventsRequest(batch=batch) for batch in self.batches[first - 1 :]]
        list(stub.ReportEvents(iter(requests)))


def located(stub) -> pb.LocateChunksResponse:
    return stub.LocateChunks(
        pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=KEYS), with_placements=True)
    )


def listed(stub) -> int:
    return sum(bool(chunk.placements) for chunk in located(stub).chunks)


def test_bl_40_a_killed_coordinator_finds_everything_again(tmp_path):
    state = tmp_path / "state"
    flags = ("--heartbeat=0.2", f"--state={state}", "--checkpoint-interval=0.1")
    servers = [Reporter("a"), Reporter("b")]
    with coordinator_process(tmp_path, *flags, stop=False) as coordinator:
        stub = coordinator.stub()
        operator = admin_service_pb2_grpc.AdminServiceStub(coordinator.channel())
        for number, server in enumerate(servers):
            server.register(stub)
            server.report(stub, KEYS[20 + number : 100 : 2], 1)
            server.report(stub, KEYS[number:20:2], 2)
        operator.Pin(admin.PinRequest(selector={"chunk_keys": {"keys": KEYS[:1]}}))
        operator.SetQuota(admin.SetQuotaRequest(salt="red", tier=1, limit_bytes=1000))
        assert listed(stub) == 100
        full = 100 * 56
        eventually(lambda: (state / "checkpoint").exists() and (state / "checkpoint").stat().st_size > full)
        time.sleep(0.3)
        coordinator.process.kill()
        coordinator.process.wait(10)
    with coordinator_process(tmp_path, *flags, stop=False) as coordinator:
        stub = coordinator.stub()
        stats = stub.GetDirectoryStats(pb.GetDirectoryStatsRequest())
        assert (stats.checkpoint, stats.keys) == ("loaded", 100)
        assert located(stub).combined_prefix_chunks == 0
        for server in servers:
            server.send(stub, server.register(stub))
        assert listed(stub) == located(stub).combined_prefix_chunks == 100
        intents = stub.GetIntents(pb.GetIntentsRequest())
        assert (list(intents.pinned_keys), intents.quotas[0].limit_bytes) == ([KEYS[0]], 1000)
        coordinator.process.kill()
        coordinator.process.wait(10)
    content = (state / "checkpoint").read_bytes()
    (state / "checkpoint").write_bytes(content[: len(content) // 2])
    with coordinator_process(tmp_path, *flags) as coordinator:
        stub = coordinator.stub()
        stats = stub.GetDirectoryStats(pb.GetDirectoryStatsRequest())
        assert (stats.checkpoint, stats.keys) == ("damaged", 0)
        assert coordinator.output().count("starting without it") == 1
        for server in servers:
            server.send(stub, server.register(stub))
        assert listed(stub) == 100
        assert stub.GetIntents(pb.GetIntentsRequest()).pinned_keys


def test_a_second_coordinator_on_the_folder_is_refused_and_harms_nothing(tmp_path):
    flags = (f"--state={tmp_path / 'state'}", "--checkpoint-interval=0.1")
    with coordinator_process(tmp_path, *flags, stop=False) as coordinator:
        stub = coordinator.stub()
        server = Reporter("a")
        server.register(stub)
        server.report(stub, KEYS, 1)
        eventually(
            lambda: (
                (tmp_path / "state/checkpoint").exists()
                and (tmp_path / "state/checkpoint").stat().st_size > 5600
            )
        )
        second = tmp_path / "second"
        second.mkdir()
        with (
            pytest.raises(AssertionError, match="in use by another process"),
            coordinator_process(second, *flags),
        ):
            pass
        assert (tmp_path / "state/checkpoint").stat().st_size > 5600
