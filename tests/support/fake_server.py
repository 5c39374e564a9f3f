"""A cache server in a few lines, inside the test's process, that does what a test tells it to.

It keeps objects by (chunk key, group) and moves bytes over the inline path only. What the real server decides
is tested against the real server.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import grpc

from kvwire.client.status import rpc_status, to_item_error
from kvwire.errors import KvwireError, LeaseUnknown, NotRegistered, SessionUnknown
from kvwire.keys import Namespace, chunk_keys, root
from kvwire.v1 import admin_service_pb2 as admin_pb
from kvwire.v1 import admin_service_pb2_grpc as admin_grpc
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import cache_service_pb2_grpc as pb_grpc
from kvwire.v1 import transfer_pb2

LIMIT = 16 << 20


class FakeServer(pb_grpc.CacheServiceServicer, admin_grpc.AdminServiceServicer):
    """Counts calls in `calls`. `fail[method]` is raised, `delay[method]` slept, `hold[method]` waited for."""

    def __init__(self, address: str, *, chunk_size: int = 8, limits: pb.ServerLimits | None = None) -> None:
        self.address = address
        self.chunk_size = chunk_size
        self.limits = limits or pb.ServerLimits(
            max_message_bytes=LIMIT, max_items=64, max_chunks=1024, max_slots=1024
        )
        self.calls: Counter[str] = Counter()
        self.requests: dict[str, list] = defaultdict(list)
        self.metadata: dict[str, dict[str, str]] = {}
        self.fail: dict[str, KvwireError] = {}
        self.delay: dict[str, float] = {}
        self.hold: dict[str, threading.Event] = {}
        self.lose_leases = False
        self.draining = False
        self.item_errors: dict[int, KvwireError] = {}
        self.missing: set[tuple[int, int]] = set()
        self.objects: dict[tuple[bytes, int], bytes] = {}
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None
        self._forget()

    def _forget(self) -> None:
        self.incarnation = os.urandom(16)
        self.registrations: dict[int, pb.RegisterKvCacheRequest] = {}
        self.sessions: dict[tuple[str, str], list[bytes]] = {}
        self.leases: dict[int, list] = {}
        self._next = 1

    def start(self) -> FakeServer:
        options = [("grpc.max_receive_message_length", LIMIT), ("grpc.max_send_message_length", LIMIT)]
        self._server = grpc.server(ThreadPoolExecutor(16, thread_name_prefix="fake-server"), options=options)
        pb_grpc.add_CacheServiceServicer_to_server(self, self._server)
        admin_grpc.add_AdminServiceServicer_to_server(self, self._server)
        self.stopping = threading.Event()
        port = self._server.add_insecure_port(self.address)
        if self.address.endswith(":0"):
            self.address = self.address.removesuffix("0") + str(port)
        self._server.start()
        return self

    def stop(self) -> None:
        self.stopping.set()
        if self._server is not None:
            self._server.stop(0).wait()
        self._server = None

    def restart(self, *, keep: bool = False) -> None:
        self.stop()
        if not keep:
            self._forget()
            self.objects.clear()
        self.start()

    def drop_registrations(self) -> None:
        with self._lock:
            self.registrations.clear()

    # The contract.

    def _enter(self, method: str, request, context) -> None:
        with self._lock:
            self.calls[method] += 1
            self.requests[method].append(request)
            self.metadata[method] = dict(context.invocation_metadata())
        time.sleep(self.delay.get(method, 0))
        if method in self.hold:
            self.hold[method].wait(20)
        if method in self.fail:
            context.abort_with_status(rpc_status(self.fail[method]))

    def _known(self, request, context) -> pb.RegisterKvCacheRequest:
        registration = self.registrations.get(request.registration_id)
        if registration is None:
            error = NotRegistered("Register again.", registration_id=request.registration_id)
            context.abort_with_status(rpc_status(error))
        return registration

    @property
    def _header(self) -> pb.ResponseHeader:
        return pb.ResponseHeader(incarnation=self.incarnation)

    def NegotiateChunkSize(self, request, context):
        self._enter("NegotiateChunkSize", request, context)
        return pb.NegotiateChunkSizeResponse(
            header=self._header, chunk_size=self.chunk_size, minimum_chunk_size=1, limits=self.limits
        )

    def RegisterKvCache(self, request, context):
        self._enter("RegisterKvCache", request, context)
        with self._lock:
            for key in [k for k, r in self.registrations.items() if r.client_id == request.client_id]:
                del self.registrations[key]
            registration_id = self._take()
            self.registrations[registration_id] = request
        reply = pb.RegisterKvCacheResponse(header=self._header, registration_id=registration_id)
        reply.expires_after.seconds = 30
        paths = {offer.path for offer in request.offers}
        if paths:
            reply.path = transfer_pb2.DATA_PATH_INLINE
            if transfer_pb2.DATA_PATH_SHM in paths:
                # There is no such arena: the probe must find out.
                reply.path = transfer_pb2.DATA_PATH_SHM
                reply.shm.arena_name = "kvwire-no-such-arena"
                reply.shm.nonce = b"n" * 16
                reply.shm.arena_bytes = 1 << 20
            reply.path_reason = "a test says so"
        return reply

    def Attach(self, request, context):
        self._enter("Attach", request, context)
        self._known(request, context)
        yield pb.AttachResponse(header=self._header, attached=pb.Attached())
        ended = threading.Event()
        context.add_callback(ended.set)
        while not ended.wait(0.02) and not self.stopping.is_set():
            self._known(request, context)

    def UnregisterKvCache(self, request, context):
        self._enter("UnregisterKvCache", request, context)
        self.registrations.pop(request.registration_id, None)
        return pb.UnregisterKvCacheResponse(header=self._header)

    def Ping(self, request, context):
        self._enter("Ping", request, context)
        known = pb.REGISTRATION_STATE_KNOWN
        if request.registration_id not in self.registrations:
            known = pb.REGISTRATION_STATE_UNKNOWN
        return pb.PingResponse(
            header=self._header, chunk_size=self.chunk_size, registration=known, draining=self.draining
        )

    def Lookup(self, request, context):
        self._enter("Lookup", request, context)
        n = request.namespace
        namespace = Namespace(
            n.model, n.revision, n.kv_dtype, n.layout_fingerprint, n.adapter, n.adapter_revision, n.salt
        )
        keys = list(request.chunk_keys.keys)
        if request.WhichOneof("prompt") == "tokens":
            keys = chunk_keys(root(namespace, self.chunk_size), request.tokens, self.chunk_size)
        lease_id = 0
        if request.registration_id:
            registration = self._known(request, context)
            self.sessions[registration.engine_id, request.session_id] = keys
            lease_id = self._take()
        hit = 0
        while hit < len(keys) and any(key == keys[hit] for key, _group in self.objects):
            hit += 1
        reply = pb.LookupResponse(
            header=self._header,
            asked_chunks=len(keys),
            hit_chunks=hit,
            hit_tokens=hit * self.chunk_size,
            lease_id=lease_id if hit else 0,
        )
        reply.expires_in.seconds = 30
        return reply

    def ReleaseLookup(self, request, context):
        self._enter("ReleaseLookup", request, context)
        self._known(request, context)
        results = [pb.ReleaseLookupResult(released_chunks=item.chunk_count) for item in request.items]
        return pb.ReleaseLookupResponse(header=self._header, results=results)

    def BeginStore(self, request, context):
        self._enter("BeginStore", request, context)
        registration = self._known(request, context)
        reply = pb.BeginStoreResponse(header=self._header)
        for index, item in enumerate(request.items):
            result = reply.results.add()
            wanted = self._wanted(registration, item, result, index)
            new = [(c, g, k) for c, g, k in wanted if (k, g) not in self.objects]
            result.already_stored = len(wanted) - len(new)
            self._grant(registration, result.ticket, new)
        return reply

    def CommitStore(self, request, context):
        self._enter("CommitStore", request, context)
        self._known(request, context)
        reply = pb.CommitStoreResponse(header=self._header)
        for item in request.items:
            lease = self.leases.pop(item.lease_id, None)
            if lease is None or self.lose_leases:
                reply.results.add(error=to_item_error(LeaseUnknown("gone", lease_id=item.lease_id)))
                continue
            slots = list(item.slots) or range(len(lease))
            for slot in slots:
                _chunk, group, key, data = lease[slot]
                self.objects[key, group] = bytes(data)
            reply.results.add(committed=len(slots), aborted=len(lease) - len(slots))
        return reply

    def AbortStore(self, request, context):
        self._enter("AbortStore", request, context)
        aborted = [len(self.leases.pop(lease_id, ())) for lease_id in request.lease_ids]
        return pb.AbortStoreResponse(header=self._header, aborted_slots=aborted)

    def BeginRetrieve(self, request, context):
        self._enter("BeginRetrieve", request, context)
        registration = self._known(request, context)
        reply = pb.BeginRetrieveResponse(header=self._header)
        for index, item in enumerate(request.items):
            result = reply.results.add()
            there = []
            for chunk, group, key in self._wanted(registration, item, result, index):
                if (key, group) in self.objects and (chunk, group) not in self.missing:
                    there.append((chunk, group, key))
                else:
                    result.missing.add(chunk_index=chunk, group_index=group)
            self._grant(registration, result.ticket, there)
        return reply

    def EndRetrieve(self, request, context):
        self._enter("EndRetrieve", request, context)
        self._known(request, context)
        held = [self.leases.pop(item.lease_id, None) is not None for item in request.items]
        good = [pb.LEASE_STATE_HELD if h and not self.lose_leases else pb.LEASE_STATE_LOST for h in held]
        return pb.EndRetrieveResponse(
            header=self._header, results=[pb.EndRetrieveResult(state=state) for state in good]
        )

    def WriteChunks(self, request_iterator, context):
        written = 0
        for request in request_iterator:
            if not written:
                self._enter("WriteChunks", request, context)
                self._known(request, context)
            lease = self.leases.get(request.lease_id)
            if lease is None:
                context.abort_with_status(rpc_status(LeaseUnknown("gone", lease_id=request.lease_id)))
            data = lease[request.slot][3]
            data[request.offset : request.offset + len(request.data)] = request.data
            written += len(request.data)
        return pb.WriteChunksResponse(header=self._header, written_bytes=written)

    def ReadChunks(self, request, context):
        self._enter("ReadChunks", request, context)
        self._known(request, context)
        for lease_id in request.lease_ids:
            for slot, (_chunk, group, key, _data) in enumerate(self.leases.get(lease_id, ())):
                data = self.objects[key, group]
                for offset in range(0, len(data), 1 << 20):
                    yield pb.ReadChunksResponse(
                        lease_id=lease_id, slot=slot, offset=offset, data=data[offset : offset + (1 << 20)]
                    )

    def EndSession(self, request, context):
        self._enter("EndSession", request, context)
        registration = self._known(request, context)
        ended = [
            self.sessions.pop((registration.engine_id, name), None) is not None
            for name in request.session_ids
        ]
        return pb.EndSessionResponse(header=self._header, ended=sum(ended))

    def GetStatus(self, request, context):
        self._enter("GetStatus", request, context)
        return admin_pb.GetStatusResponse(header=self._header, server_version="fake")

    def _take(self) -> int:
        self._next += 1
        return self._next

    def _wanted(self, registration, item, result, index) -> list[tuple[int, int, bytes]]:
        """(chunk, group, key) of every object that an item names."""
        if index in self.item_errors:
            result.error.CopyFrom(to_item_error(self.item_errors[index]))
            return []
        if item.WhichOneof("target") == "keys":
            first, keys = item.keys.first_chunk, dict(enumerate(item.keys.keys, item.keys.first_chunk))
            count = len(keys)
        else:
            first, count = item.session.first_chunk, item.session.chunk_count
            known = self.sessions.get((registration.engine_id, item.session.session_id))
            if known is None:
                result.error.CopyFrom(
                    to_item_error(SessionUnknown("gone", session_id=item.session.session_id))
                )
                return []
            keys = dict(enumerate(known))
        ranges = [(r.group_index, r.first_chunk, r.chunk_count) for r in item.ranges]
        ranges = ranges or [(group, first, count) for group in range(len(registration.layout.groups))]
        return [(c, g, keys[c]) for g, begin, n in ranges for c in range(begin, begin + n)]

    def _grant(self, registration, ticket, wanted) -> None:
        if not wanted:
            return
        lease = []
        for chunk, group, key in wanted:
            shape = registration.layout.groups[group]
            size = shape.block_bytes * shape.blocks_per_object
            ticket.slots.add(chunk_index=chunk, group_index=group, size_bytes=size)
            lease.append((chunk, group, key, bytearray(size)))
        ticket.lease_id = self._take()
        ticket.path = transfer_pb2.DATA_PATH_INLINE
        ticket.expires_in.seconds = 30
        ticket.piece_bytes = 1 << 20
        self.leases[ticket.lease_id] = lease


@contextlib.contextmanager
def fake_server(address: str, **options):
    server = FakeServer(address, **options).start()
    try:
        yield server
    finally:
        for event in server.hold.values():
            event.set()
        server.stop()
