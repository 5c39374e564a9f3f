"""A client of the contract over the generated stubs alone: what any language could do, right or wrong."""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2, status_pb2

from kvwire.keys import Namespace, chunk_keys, pack_tokens, root
from kvwire.transfer.hosts import host_id
from kvwire.transfer.shm import LivenessLock, MappedArena
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc as admin_grpc
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import cache_service_pb2_grpc as pb_grpc
from kvwire.v1 import layout_pb2, namespace_pb2, transfer_pb2

CALL_S = 10.0
MODEL = "test/model"
OBJECT_BYTES = 64 << 10
PATHS = {"inline": transfer_pb2.DATA_PATH_INLINE, "shm": transfer_pb2.DATA_PATH_SHM}
ROLES = {
    "scheduler": pb.CLIENT_ROLE_SCHEDULER,
    "worker": pb.CLIENT_ROLE_WORKER,
    "standalone": pb.CLIENT_ROLE_STANDALONE,
}


@dataclass(frozen=True)
class Failure:
    """A failed call as a client sees it. `details` holds the packed messages by their short type name."""

    code: grpc.StatusCode
    text: str
    reason: str
    metadata: dict[str, str]
    details: dict[str, object]

    @classmethod
    def of(cls, error: grpc.RpcError) -> Failure:
        details: dict[str, object] = {}
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                for packed in status_pb2.Status.FromString(value).details:
                    name = packed.TypeName().rpartition(".")[2]
                    details[name] = message = getattr(error_details_pb2, name)()
                    packed.Unpack(message)
        info = details.get("ErrorInfo") or error_details_pb2.ErrorInfo()
        return cls(error.code(), error.details() or "", info.reason, dict(info.metadata), details)


def failure(call, *args, **kwargs) -> Failure:
    """The failure of a call that must fail."""
    try:
        reply = call(*args, **kwargs)
    except grpc.RpcError as error:
        return Failure.of(error)
    raise AssertionError(f"the call did not fail: {reply}")


def tokens(chunks: int, seed: int = 0, chunk_size: int = 4) -> bytes:
    """Prompts of one seed are prefixes of each other; those of different seeds share nothing."""
    return pack_tokens(seed * 1_000 + position for position in range(chunks * chunk_size))


def content(key: bytes, size: int = OBJECT_BYTES) -> bytes:
    """The only right bytes of the object under a key."""
    return hashlib.shake_128(key).digest(size)


@dataclass
class Attached:
    """An open Attach stream. `ended` is set when it is over, `failure` says why unless it ended well."""

    call: grpc.Future
    events: list[str] = field(default_factory=list)
    attached: threading.Event = field(default_factory=threading.Event)
    draining: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    failure: Failure | None = None

    def follow(self) -> None:
        try:
            for event in self.call:
                name = event.WhichOneof("event")
                self.events.append(name)
                getattr(self, name).set()
        except grpc.RpcError as error:
            self.failure = Failure.of(error)
        finally:
            self.ended.set()

    def close(self) -> None:
        self.call.cancel()
        assert self.ended.wait(CALL_S)


class RawClient:
    """Registered by `register`. Objects are of `object_bytes`, one per chunk and KV group."""

    def __init__(self, channel: grpc.Channel, engine_id: str = "engine") -> None:
        self.channel = channel
        self.stub = pb_grpc.CacheServiceStub(channel)
        self.admin = admin_grpc.AdminServiceStub(channel)
        self.engine_id = engine_id
        self.client_id = os.urandom(16)
        self.namespace = namespace_pb2.Namespace(model=MODEL)
        self.chunk_size = 0
        self.registration_id = 0
        self.path = ""
        self.arena: MappedArena | None = None
        self.lock = None
        self.attachment: Attached | None = None

    def negotiate(self, alignment: int = 1) -> int:
        request = pb.NegotiateChunkSizeRequest(required_alignment=alignment)
        self.chunk_size = self.stub.NegotiateChunkSize(request, timeout=CALL_S).chunk_size
        return self.chunk_size

    def registration(self, path: str = "inline", role: str = "standalone", **fields):
        """A RegisterKvCacheRequest."""
        size = fields.pop("object_bytes", OBJECT_BYTES)
        group = layout_pb2.KvGroup(
            kind=layout_pb2.KV_GROUP_KIND_FULL_ATTENTION,
            span_tokens=self.chunk_size or 1,
            num_layers=1,
            block_bytes=size,
            blocks_per_object=1,
        )
        layout = layout_pb2.KvLayout(world_size=fields.pop("world_size", 1), groups=[group])
        offers = [transfer_pb2.DataPathOffer(path=PATHS[path], host_id=host_id())] if path else []
        values = {
            "client_id": self.client_id,
            "engine_id": self.engine_id,
            "client_name": "raw client",
            "role": ROLES[role],
            "namespace": namespace_pb2.Namespace(model=self.namespace.model),
            "layout": layout,
            "chunk_size": self.chunk_size,
            "offers": offers,
        }
        return pb.RegisterKvCacheRequest(**{**values, **fields})

    def register(
        self, path: str = "inline", role: str = "standalone", *, attach=False, **fields
    ) -> RawClient:
        if not self.chunk_size:
            self.negotiate()
        request = self.registration(path, role, **fields)
        reply = self.stub.RegisterKvCache(request, timeout=CALL_S)
        self.registration_id = reply.registration_id
        self.path = path
        if reply.WhichOneof("access") == "shm":
            self.lock = LivenessLock.open(reply.shm.liveness_name)
            self.arena = MappedArena.open(reply.shm.arena_name, reply.shm.nonce)
        if attach:
            self.attach()
        return self

    def attach(self) -> Attached:
        request = pb.AttachRequest(registration_id=self.registration_id)
        self.attachment = attached = Attached(self.stub.Attach(request))
        threading.Thread(target=attached.follow, daemon=True).start()
        assert attached.attached.wait(CALL_S), attached.failure
        return attached

    def ping(self) -> pb.PingResponse:
        return self.stub.Ping(pb.PingRequest(registration_id=self.registration_id), timeout=CALL_S)

    def status(self) -> admin.GetStatusResponse:
        return self.admin.GetStatus(admin.GetStatusRequest(), timeout=CALL_S)

    def lookup(self, session_id: str, packed: bytes, *, salt: str = "", **fields) -> pb.LookupResponse:
        namespace = namespace_pb2.Namespace(model=self.namespace.model, salt=salt)
        values = {"registration_id": self.registration_id, "session_id": session_id, "tokens": packed}
        request = pb.LookupRequest(namespace=namespace, **{**values, **fields})
        return self.stub.Lookup(request, timeout=CALL_S)

    def hits(self, packed: bytes, salt: str = "") -> int:
        """Chunks that a prompt would hit. Changes nothing."""
        return self.lookup("", packed, registration_id=0, salt=salt).hit_chunks

    def release(self, session_id: str, lease_id: int, first: int = 0, count: int = 0):
        item = pb.ReleaseLookupItem(
            session_id=session_id, lease_id=lease_id, first_chunk=first, chunk_count=count
        )
        request = pb.ReleaseLookupRequest(registration_id=self.registration_id, items=[item])
        return self.stub.ReleaseLookup(request, timeout=CALL_S).results[0]

    def begin_store(self, session_id: str, first: int, count: int) -> pb.BeginStoreResult:
        chunks = pb.SessionRange(session_id=session_id, first_chunk=first, chunk_count=count)
        request = pb.BeginStoreRequest(
            registration_id=self.registration_id, items=[pb.StoreItem(session=chunks)]
        )
        return self.stub.BeginStore(request, timeout=CALL_S).results[0]

    def pieces(self, ticket: transfer_pb2.Ticket, data: list[bytes], stop: int | None = None):
        """WriteChunks messages; `stop` cuts the stream off after so many bytes."""
        left = sum(map(len, data)) if stop is None else stop
        for slot, whole in enumerate(data):
            for offset in range(0, len(whole), ticket.piece_bytes):
                piece = whole[offset : offset + min(ticket.piece_bytes, left)]
                if not piece:
                    return
                left -= len(piece)
                yield pb.WriteChunksRequest(
                    registration_id=self.registration_id,
                    lease_id=ticket.lease_id,
                    slot=slot,
                    offset=offset,
                    data=piece,
                )

    def write(self, ticket: transfer_pb2.Ticket, data: list[bytes]) -> None:
        if self.path == "shm":
            for slot, whole in zip(ticket.slots, data, strict=True):
                self.arena.view(slot.arena_offset, slot.size_bytes)[:] = whole
        else:
            self.stub.WriteChunks(self.pieces(ticket, data), timeout=CALL_S)

    def commit(self, lease_id: int, slots=(), checksums=()) -> pb.CommitStoreResult:
        item = pb.CommitStoreItem(lease_id=lease_id, slots=slots, checksums=checksums)
        request = pb.CommitStoreRequest(registration_id=self.registration_id, items=[item])
        return self.stub.CommitStore(request, timeout=CALL_S).results[0]

    def arrive(self, ticket: transfer_pb2.Ticket) -> None:
        """Publish a whole lease on the board, without a call."""
        self.lock.board.arrive(ticket.arrival_word, ticket.lease_id)

    def abort(self, lease_id: int) -> int:
        request = pb.AbortStoreRequest(registration_id=self.registration_id, lease_ids=[lease_id])
        return self.stub.AbortStore(request, timeout=CALL_S).aborted_slots[0]

    def store(self, session_id: str, packed: bytes, salt: str = "") -> int:
        """Look up, write and publish what is absent, end the session. Returns the objects committed."""
        asked = self.lookup(session_id, packed, salt=salt).asked_chunks
        result = self.begin_store(session_id, 0, asked)
        committed = 0
        if result.ticket.lease_id:
            keys = self.keys(packed, salt)
            data = [content(keys[slot.chunk_index], slot.size_bytes) for slot in result.ticket.slots]
            self.write(result.ticket, data)
            committed = self.commit(result.ticket.lease_id).committed
        self.end_session(session_id)
        return committed

    def begin_retrieve(self, session_id: str, first: int, count: int) -> pb.BeginRetrieveResult:
        chunks = pb.SessionRange(session_id=session_id, first_chunk=first, chunk_count=count)
        request = pb.BeginRetrieveRequest(
            registration_id=self.registration_id, items=[pb.RetrieveItem(session=chunks)]
        )
        return self.stub.BeginRetrieve(request, timeout=CALL_S).results[0]

    def read(self, ticket: transfer_pb2.Ticket) -> list[bytes]:
        if self.path == "shm":
            return [bytes(self.arena.view(slot.arena_offset, slot.size_bytes)) for slot in ticket.slots]
        data = [bytearray() for _ in ticket.slots]
        request = pb.ReadChunksRequest(registration_id=self.registration_id, lease_ids=[ticket.lease_id])
        for piece in self.stub.ReadChunks(request, timeout=CALL_S):
            assert piece.offset == len(data[piece.slot])
            data[piece.slot] += piece.data
        return [bytes(each) for each in data]

    def end_retrieve(self, lease_id: int, corrupt=()) -> bool:
        item = pb.EndRetrieveItem(lease_id=lease_id, corrupt_slots=corrupt)
        request = pb.EndRetrieveRequest(registration_id=self.registration_id, items=[item])
        state = self.stub.EndRetrieve(request, timeout=CALL_S).results[0].state
        return state == pb.LEASE_STATE_HELD

    def retrieve(self, session_id: str, packed: bytes, salt: str = "") -> list[bytes] | None:
        """What the hit of a prompt reads, chunk by chunk; None when the lease was lost meanwhile."""
        hit = self.lookup(session_id, packed, salt=salt).hit_chunks
        if not hit:
            return []
        result = self.begin_retrieve(session_id, 0, hit)
        data = self.read(result.ticket) if result.ticket.lease_id else []
        held = self.end_retrieve(result.ticket.lease_id)
        self.end_session(session_id)
        return data if held and not result.missing else None

    def end_session(self, *session_ids: str) -> int:
        request = pb.EndSessionRequest(registration_id=self.registration_id, session_ids=session_ids)
        return self.stub.EndSession(request, timeout=CALL_S).ended

    def keys(self, packed: bytes, salt: str = "") -> list[bytes]:
        namespace = Namespace(self.namespace.model, salt=salt)
        return chunk_keys(root(namespace, self.chunk_size), packed, self.chunk_size)

    def unregister(self) -> None:
        request = pb.UnregisterKvCacheRequest(registration_id=self.registration_id)
        self.stub.UnregisterKvCache(request, timeout=CALL_S)

    def close(self) -> None:
        """What the client holds on its own side; the server is told nothing."""
        if self.attachment is not None:
            self.attachment.close()
        self.let_go()

    def let_go(self) -> None:
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        if self.lock is not None:
            self.lock.close()
            self.lock = None
