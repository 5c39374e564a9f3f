"""What calls take and return, as plain values. Times are seconds; `expires_at` is on `time.monotonic`."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

from kvwire.v1 import cache_service_pb2 as pb
from kvwire.v1 import event_pb2, transfer_pb2

if TYPE_CHECKING:
    from kvwire.client.layout import KvLayout
    from kvwire.errors import KvwireError
    from kvwire.keys import Namespace


class Role(IntEnum):
    """Which part of an engine a client is."""

    SCHEDULER = pb.CLIENT_ROLE_SCHEDULER
    WORKER = pb.CLIENT_ROLE_WORKER
    STANDALONE = pb.CLIENT_ROLE_STANDALONE


class Path(IntEnum):
    """A way of moving bytes. In a registration NONE stands for a scheduler, which moves none."""

    NONE = transfer_pb2.DATA_PATH_UNSPECIFIED
    SHM = transfer_pb2.DATA_PATH_SHM
    UCX_LOCAL = transfer_pb2.DATA_PATH_UCX_LOCAL
    UCX_REMOTE = transfer_pb2.DATA_PATH_UCX_REMOTE
    INLINE = transfer_pb2.DATA_PATH_INLINE

    @property
    def label(self) -> str:
        """As people write it: "shm", "ucx-local", ..."""
        return self.name.lower().replace("_", "-")


class EventKind(IntEnum):
    """What happened to a chunk. UNKNOWN is a kind of a newer server: skip it."""

    UNKNOWN = event_pb2.CACHE_EVENT_KIND_UNSPECIFIED
    STORE = event_pb2.CACHE_EVENT_KIND_STORE
    ACCESS = event_pb2.CACHE_EVENT_KIND_ACCESS
    DELETE = event_pb2.CACHE_EVENT_KIND_DELETE
    CLEAR = event_pb2.CACHE_EVENT_KIND_CLEAR


@dataclass(frozen=True, slots=True)
class Limits:
    """A server's limits on one call. 0: not known."""

    max_message_bytes: int = 0
    max_items: int = 0
    max_chunks: int = 0
    max_slots: int = 0


@dataclass(frozen=True, slots=True)
class Negotiated:
    chunk_size: int
    minimum_chunk_size: int
    protocol_version: int
    limits: Limits
    server_version: str
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class Offer:
    """A data path that this process can use. `host_id` is the same for processes that could share memory."""

    path: Path
    host_id: str = ""
    ucx_address: bytes = b""


@dataclass(frozen=True, slots=True)
class Registration:
    """What a client says of itself. The namespace has no adapter and no salt here."""

    client_id: bytes
    engine_id: str
    role: Role
    namespace: Namespace
    layout: KvLayout
    chunk_size: int
    kv_rank: int = 0
    client_name: str = ""
    offers: tuple[Offer, ...] = ()


@dataclass(frozen=True, slots=True)
class Registered:
    """`shm` and `ucx` tell how to use the path; they are the messages of the contract."""

    registration_id: int
    path: Path
    path_reason: str
    expires_after: float
    incarnation: bytes
    shm: transfer_pb2.ShmAccess | None = None
    ucx: transfer_pb2.UcxAccess | None = None


@dataclass(frozen=True, slots=True)
class Pong:
    """`registration_known` is None when the ping named none. `chunk_size` 0: not negotiated yet."""

    chunk_size: int
    registration_known: bool | None
    draining: bool
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class AttachEvent:
    """`draining_s` is the time until the server stops, or None for the first event of the stream."""

    draining_s: float | None
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`lease_id` 0: nothing is leased. `l2_chunks`, `peer_chunks`: of the hit, brought for this lookup."""

    asked_chunks: int
    hit_chunks: int
    hit_tokens: int
    lease_id: int
    expires_at: float
    l2_chunks: int = 0
    peer_chunks: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseItem:
    """`chunk_count` 0: all from `first_chunk` on."""

    session_id: str
    lease_id: int
    first_chunk: int = 0
    chunk_count: int = 0


@dataclass(frozen=True, slots=True)
class Released:
    released_chunks: int
    not_held_chunks: int


@dataclass(frozen=True, slots=True)
class SessionRange:
    """Chunks of a prompt that Lookup has named."""

    session_id: str
    first_chunk: int
    chunk_count: int


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Consecutive chunks by their keys. `first_chunk` is the position of the first key in its prompt."""

    namespace: Namespace
    keys: tuple[bytes, ...] = field(repr=False)
    first_chunk: int = 0
    session_id: str = ""

    @property
    def chunk_count(self) -> int:
        return len(self.keys)


ChunkRange: TypeAlias = SessionRange | KeyRange


@dataclass(frozen=True, slots=True)
class ObjectRange:
    """Consecutive chunks of one group, counted in the prompt."""

    group_index: int
    first_chunk: int
    chunk_count: int


@dataclass(frozen=True, slots=True)
class TransferItem:
    """Objects of one prompt to store or to retrieve. No ranges: every group of every chunk."""

    target: ChunkRange
    ranges: tuple[ObjectRange, ...] = ()


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """`ticket` has the slots to write, None where nothing is to be written."""

    ticket: transfer_pb2.Ticket | None
    already_stored: int = 0
    being_written: int = 0
    no_space: int = 0
    error: KvwireError | None = None


@dataclass(frozen=True, slots=True)
class CommitItem:
    """`slots` by index in the ticket. `checksums` in the order of slots; none: the server makes them."""

    lease_id: int
    slots: tuple[int, ...]
    checksums: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    committed: int
    aborted: int = 0
    failed_slots: tuple[int, ...] = ()
    error: KvwireError | None = None


@dataclass(frozen=True, slots=True)
class RetrieveGrant:
    """`missing` lists (chunk, group). `ticket` is None where nothing is resident."""

    ticket: transfer_pb2.Ticket | None
    missing: tuple[tuple[int, int], ...] = ()
    error: KvwireError | None = None


@dataclass(frozen=True, slots=True)
class EndRetrieveItem:
    """`corrupt_slots` by index in the ticket: their bytes did not match their checksum."""

    lease_id: int
    corrupt_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KvEvent:
    kind: EventKind
    chunk_key: bytes
    size_bytes: int = 0
    tokens: bytes = b""
    parent_key: bytes = b""


@dataclass(frozen=True, slots=True)
class KvEvents:
    """Events up to `sequence`, in order. `lost`: some before them were dropped."""

    sequence: int
    lost: bool
    events: tuple[KvEvent, ...]
    incarnation: bytes
