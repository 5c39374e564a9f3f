"""A cache server as a coordinator meets it over the wire: it registers, reports, tells what it holds."""

from __future__ import annotations

import threading
from concurrent import futures
from hashlib import sha256
from typing import Self

import grpc

from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2, peer_service_pb2, peer_service_pb2_grpc


def key(name: object) -> bytes:
    return sha256(repr(name).encode()).digest()


def store(name: object, tier: int = 1, size: int = 100, **more) -> event_pb2.CacheEvent:
    return event_pb2.CacheEvent(
        kind=1, chunk_key=key(name), tier=tier, backend="memory", size_bytes=size, **more
    )


def gone(name: object, tier: int = 1) -> event_pb2.CacheEvent:
    return event_pb2.CacheEvent(kind=3, chunk_key=key(name), tier=tier, backend="memory")


class Member(peer_service_pb2_grpc.PeerServiceServicer):
    """`held` is what its snapshot tells. `hang`: it takes the call and never answers."""

    def __init__(
        self, coordinator, server_id: str, folder, run: int = 1, chunk_size: int = 4, features=()
    ) -> None:
        self.stub = coordinator.stub()
        self.server_id = server_id
        self.run = run
        self.chunk_size = chunk_size
        self.features = features
        self.sequence = 0
        self.held: list[event_pb2.CacheEvent] = []
        self.snapshots = 0
        self.hang = False
        self._let_go = threading.Event()
        self.address = f"unix:{folder / server_id}.sock"
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        peer_service_pb2_grpc.add_PeerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    @property
    def incarnation(self) -> bytes:
        return sha256(f"{self.server_id}/{self.run}".encode()).digest()[:16]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._let_go.set()
        self._server.stop(0).wait()

    def SnapshotPlacements(self, request, context):
        self.snapshots += 1
        if self.hang:
            self._let_go.wait(20)
            return
        yield peer_service_pb2.SnapshotPlacementsResponse(
            server_id=self.server_id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            placements=self.held,
        )

    def register(self) -> pb.RegisterServerResponse:
        info = pb.ServerInfo(
            server_id=self.server_id,
            incarnation=self.incarnation,
            addresses=[self.address],
            chunk_size=self.chunk_size,
            digest_function=1,
            features=self.features,
        )
        return self.stub.RegisterServer(pb.RegisterServerRequest(server=info))

    def beat(self) -> pb.HeartbeatResponse:
        return self.stub.Heartbeat(
            pb.HeartbeatRequest(
                server_id=self.server_id, incarnation=self.incarnation, last_sequence=self.sequence
            )
        )

    def batch(self, *events: event_pb2.CacheEvent, sequence: int = 0, lost: int = 0):
        self.sequence = sequence or self.sequence + 1
        return event_pb2.CacheEventBatch(
            server_id=self.server_id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            lost=lost,
            events=events,
        )

    def tell(self, *events: event_pb2.CacheEvent, **more) -> pb.ReportEventsResponse:
        return self.send(self.batch(*events, **more))

    def send(self, batch: event_pb2.CacheEventBatch) -> pb.ReportEventsResponse:
        (reply,) = self.stub.ReportEvents(iter([pb.ReportEventsRequest(batch=batch)]), timeout=10)
        return reply

    def me(self) -> pb.Member | None:
        members = self.stub.ListServers(pb.ListServersRequest()).members
        return next((each for each in members if each.server.server_id == self.server_id), None)

    def holders(self, name: object) -> list[tuple[str, int]]:
        found = self.stub.LocateChunks(
            pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=[key(name)]), with_placements=True)
        )
        return [(each.server_id, each.tier) for each in found.chunks[0].placements]
