"""Every call of the contract as a value: the request, and what its reply means. Both clients send them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kvwire.client import types
from kvwire.client.deadlines import READS
from kvwire.client.status import item_error
from kvwire.errors import ChunkSizeIncompatible, Internal, InvalidArgument
from kvwire.keys import pack_tokens
from kvwire.v1 import admin_service_pb2 as admin_pb
from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import namespace_pb2, transfer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from google.protobuf.message import Message

    from kvwire.keys import ExtraInput, Namespace, Tokens

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class Call(Generic[R_co]):
    """`parse` takes the reply and the monotonic time at which the request left."""

    method: str
    request: Message
    parse: Callable[[Any, float], R_co]
    is_read: bool = False
    service: str = "CacheService"


def namespace_message(namespace: Namespace) -> namespace_pb2.Namespace:
    return namespace_pb2.Namespace(
        model=namespace.model,
        revision=namespace.revision,
        kv_dtype=namespace.kv_dtype,
        layout_fingerprint=namespace.layout_fingerprint,
        adapter=namespace.adapter,
        adapter_revision=namespace.adapter_revision,
        salt=namespace.salt,
    )


def negotiate(required_alignment: int, client_name: str, expected: int = 0) -> Call[types.Negotiated]:
    def parse(reply: pb.NegotiateChunkSizeResponse, _sent: float) -> types.Negotiated:
        # The server is not trusted with what every address in the engine's cache depends on.
        if reply.chunk_size < 1 or reply.chunk_size % required_alignment:
            raise ChunkSizeIncompatible(
                f"The server answered with the chunk size {reply.chunk_size}, which is no multiple of the "
                f"required alignment {required_alignment}.",
                bound_size=reply.chunk_size,
                alignment=required_alignment,
            )
        limits = reply.limits
        return types.Negotiated(
            chunk_size=reply.chunk_size,
            minimum_chunk_size=reply.minimum_chunk_size,
            protocol_version=reply.protocol_version,
            limits=types.Limits(
                limits.max_message_bytes, limits.max_items, limits.max_chunks, limits.max_slots
            ),
            server_version=reply.server_version,
            incarnation=reply.header.incarnation,
        )

    request = pb.NegotiateChunkSizeRequest(
        required_alignment=required_alignment,
        client_name=client_name,
        expected_chunk_size=expected,
        digest_functions=[namespace_pb2.DIGEST_FUNCTION_SHA256],
        protocol_versions=[PROTOCOL_VERSION],
    )
    return Call("NegotiateChunkSize", request, parse)


def register(what: types.Registration) -> Call[types.Registered]:
    request = pb.RegisterKvCacheRequest(
        client_id=what.client_id,
        engine_id=what.engine_id,
        client_name=what.client_name,
        role=pb.ClientRole.ValueType(what.role),
        namespace=namespace_message(what.namespace),
        layout=what.layout.to_message(),
        kv_rank=what.kv_rank,
        chunk_size=what.chunk_size,
        offers=[
            transfer_pb2.DataPathOffer(
                path=transfer_pb2.DataPath.ValueType(offer.path),
                host_id=offer.host_id,
                ucx_address=offer.ucx_address,
            )
            for offer in what.offers
        ],
    )
    return Call("RegisterKvCache", request, _registered)


def _registered(reply: pb.RegisterKvCacheResponse, _sent: float) -> types.Registered:
    return types.Registered(
        registration_id=reply.registration_id,
        path=_path(reply.path),
        path_reason=reply.path_reason,
        expires_after=_seconds(reply.expires_after),
        incarnation=reply.header.incarnation,
        shm=reply.shm if reply.WhichOneof("access") == "shm" else None,
        ucx=reply.ucx if reply.WhichOneof("access") == "ucx" else None,
    )


def unregister(registration_id: int) -> Call[None]:
    request = pb.UnregisterKvCacheRequest(registration_id=registration_id)
    return Call("UnregisterKvCache", request, _nothing)


def ping(registration_id: int = 0) -> Call[types.Pong]:
    def parse(reply: pb.PingResponse, _sent: float) -> types.Pong:
        known = reply.registration == pb.REGISTRATION_STATE_KNOWN
        return types.Pong(
            chunk_size=reply.chunk_size,
            registration_known=known if registration_id else None,
            draining=reply.draining,
            incarnation=reply.header.incarnation,
        )

    return Call("Ping", pb.PingRequest(registration_id=registration_id), parse, is_read=True)


def lookup(
    namespace: Namespace,
    *,
    tokens: Tokens | None = None,
    keys: Iterable[bytes] | None = None,
    registration_id: int = 0,
    session_id: str = "",
    extra_inputs: Iterable[ExtraInput] = (),
) -> Call[types.LookupResult]:
    request = pb.LookupRequest(
        registration_id=registration_id,
        session_id=session_id,
        namespace=namespace_message(namespace),
        extra_inputs=[
            pb.ExtraInput(digest=extra.digest, start=extra.start, length=extra.length)
            for extra in extra_inputs
        ],
    )
    if (tokens is None) == (keys is None):
        raise InvalidArgument("prompt", "name the prompt by tokens or by keys, and not by both")
    if tokens is not None:
        request.tokens = pack_tokens(tokens)
    if keys is not None:
        request.chunk_keys.keys.extend(keys)
        request.chunk_keys.SetInParent()
    return Call("Lookup", request, _lookup_result, is_read=not registration_id)


def _lookup_result(reply: pb.LookupResponse, sent: float) -> types.LookupResult:
    return types.LookupResult(
        asked_chunks=reply.asked_chunks,
        hit_chunks=reply.hit_chunks,
        hit_tokens=reply.hit_tokens,
        lease_id=reply.lease_id,
        expires_at=sent + _seconds(reply.expires_in),
        l2_chunks=reply.l2_chunks,
        peer_chunks=reply.peer_chunks,
    )


def release_lookup(registration_id: int, items: Sequence[types.ReleaseItem]) -> Call[list[types.Released]]:
    def parse(reply: pb.ReleaseLookupResponse, _sent: float) -> list[types.Released]:
        return [
            types.Released(result.released_chunks, result.not_held_chunks)
            for result in _all(reply.results, items)
        ]

    request = pb.ReleaseLookupRequest(
        registration_id=registration_id,
        items=[
            pb.ReleaseLookupItem(
                session_id=item.session_id,
                lease_id=item.lease_id,
                first_chunk=item.first_chunk,
                chunk_count=item.chunk_count,
            )
            for item in items
        ],
    )
    return Call("ReleaseLookup", request, parse)


def begin_store(registration_id: int, items: Sequence[types.TransferItem]) -> Call[list[types.StoreGrant]]:
    def parse(reply: pb.BeginStoreResponse, _sent: float) -> list[types.StoreGrant]:
        return [_store_grant(result) for result in _all(reply.results, items)]

    request = pb.BeginStoreRequest(
        registration_id=registration_id, items=[fill_item(pb.StoreItem(), item) for item in items]
    )
    return Call("BeginStore", request, parse)


def _store_grant(result: pb.BeginStoreResult) -> types.StoreGrant:
    if result.HasField("error"):
        return types.StoreGrant(None, error=item_error(result.error))
    return types.StoreGrant(
        ticket=result.ticket if result.ticket.slots else None,
        already_stored=result.already_stored,
        being_written=result.being_written,
        no_space=result.no_space,
    )


def commit_store(registration_id: int, items: Sequence[types.CommitItem]) -> Call[list[types.Committed]]:
    def parse(reply: pb.CommitStoreResponse, _sent: float) -> list[types.Committed]:
        return [
            types.Committed(
                committed=result.committed,
                aborted=result.aborted,
                failed_slots=tuple(result.failed_slots),
                error=item_error(result.error) if result.HasField("error") else None,
            )
            for result in _all(reply.results, items)
        ]

    request = pb.CommitStoreRequest(
        registration_id=registration_id,
        items=[
            pb.CommitStoreItem(lease_id=item.lease_id, slots=item.slots, checksums=item.checksums)
            for item in items
        ],
    )
    return Call("CommitStore", request, parse)


def abort_store(registration_id: int, lease_ids: Sequence[int]) -> Call[list[int]]:
    def parse(reply: pb.AbortStoreResponse, _sent: float) -> list[int]:
        return list(reply.aborted_slots)

    request = pb.AbortStoreRequest(registration_id=registration_id, lease_ids=lease_ids)
    return Call("AbortStore", request, parse)


def begin_retrieve(
    registration_id: int, items: Sequence[types.TransferItem]
) -> Call[list[types.RetrieveGrant]]:
    def parse(reply: pb.BeginRetrieveResponse, _sent: float) -> list[types.RetrieveGrant]:
        return [_retrieve_grant(result) for result in _all(reply.results, items)]

    request = pb.BeginRetrieveRequest(
        registration_id=registration_id, items=[fill_item(pb.RetrieveItem(), item) for item in items]
    )
    return Call("BeginRetrieve", request, parse)


def _retrieve_grant(result: pb.BeginRetrieveResult) -> types.RetrieveGrant:
    if result.HasField("error"):
        return types.RetrieveGrant(None, error=item_error(result.error))
    missing = tuple((entry.chunk_index, entry.group_index) for entry in result.missing)
    return types.RetrieveGrant(result.ticket if result.ticket.slots else None, missing)


def end_retrieve(registration_id: int, items: Sequence[types.EndRetrieveItem]) -> Call[list[bool]]:
    """Whether each lease was held all the time. Only then may the bytes be used."""

    def parse(reply: pb.EndRetrieveResponse, _sent: float) -> list[bool]:
        return [result.state == pb.LEASE_STATE_HELD for result in _all(reply.results, items)]

    request = pb.EndRetrieveRequest(
        registration_id=registration_id,
        items=[
            pb.EndRetrieveItem(lease_id=item.lease_id, corrupt_slots=item.corrupt_slots) for item in items
        ],
    )
    return Call("EndRetrieve", request, parse)


def end_sessions(registration_id: int, session_ids: Sequence[str]) -> Call[int]:
    def parse(reply: pb.EndSessionResponse, _sent: float) -> int:
        return reply.ended

    request = pb.EndSessionRequest(registration_id=registration_id, session_ids=session_ids)
    return Call("EndSession", request, parse)


def admin(method: str, request: Message, _reply: type[R]) -> Call[R]:
    """A call of the operators' service; its reply is the message of the contract."""
    return Call(method, request, lambda reply, _sent: reply, method in READS, "AdminService")


def clear(namespace: Namespace | None) -> Call[admin_pb.ClearResponse]:
    request = admin_pb.ClearRequest()
    if namespace is not None:
        request.namespace.CopyFrom(namespace_message(namespace))
    return admin("Clear", request, admin_pb.ClearResponse)


def attach_event(reply: pb.AttachResponse) -> types.AttachEvent:
    draining = None
    if reply.WhichOneof("event") == "draining":
        draining = _seconds(reply.draining.stops_in)
    return types.AttachEvent(draining, reply.header.incarnation)


def kv_events(reply: pb.SubscribeKvEventsResponse) -> types.KvEvents:
    events = tuple(
        types.KvEvent(
            kind=_event_kind(event.kind),
            chunk_key=event.chunk_key,
            size_bytes=event.size_bytes,
            tokens=event.tokens,
            parent_key=event.parent_key,
        )
        for event in reply.events
    )
    return types.KvEvents(reply.sequence, reply.lost, events, reply.header.incarnation)


ItemMessage = TypeVar("ItemMessage", pb.StoreItem, pb.RetrieveItem)


def fill_item(message: ItemMessage, item: types.TransferItem) -> ItemMessage:
    target = item.target
    if isinstance(target, types.SessionRange):
        message.session.session_id = target.session_id
        message.session.first_chunk = target.first_chunk
        message.session.chunk_count = target.chunk_count
    else:
        message.keys.namespace.CopyFrom(namespace_message(target.namespace))
        message.keys.keys.extend(target.keys)
        message.keys.first_chunk = target.first_chunk
        message.keys.session_id = target.session_id
    for each in item.ranges:
        message.ranges.add(
            group_index=each.group_index, first_chunk=each.first_chunk, chunk_count=each.chunk_count
        )
    return message


def _all(results: Sequence[R], items: Sequence[Any]) -> Sequence[R]:
    # An answer that is missing must not turn into a success of the next item.
    if len(results) != len(items):
        raise Internal(f"The server answered {len(results)} of {len(items)} items of a batch.")
    return results


def _nothing(_reply: Any, _sent: float) -> None:
    return None


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos * 1e-9)


def _path(value: int) -> types.Path:
    try:
        return types.Path(value)
    except ValueError:
        raise Internal(f"The server chose data path {value}, which this version does not know.") from None


def _event_kind(value: int) -> types.EventKind:
    try:
        return types.EventKind(value)
    except ValueError:
        return types.EventKind.UNKNOWN
