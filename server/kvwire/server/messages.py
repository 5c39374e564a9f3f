"""What the engine takes and returns: frozen, and free of gRPC and protobuf.

Chunk positions count from the start of the prompt, sizes are in bytes, times in seconds. `error` of a batch
entry is set when that entry failed; the rest of the batch is unaffected.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from kvwire.errors import KvwireError
    from kvwire.keys import ExtraInput, Namespace
    from kvwire.server.store import ObjectRef

Role = Literal["scheduler", "worker", "standalone"]


class LeaseKind(StrEnum):
    LOOKUP = "lookup"
    READ = "read"
    WRITE = "write"


class EndReason(StrEnum):
    """Why a lease ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    EXPIRED = "expired"
    DISCONNECTED = "disconnected"
    UNREGISTERED = "unregistered"
    REPLACED = "replaced"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """`client_id` is random, new for every run of a client. `pid` is 0 when it is not on this host."""

    client_id: bytes
    engine_id: str
    name: str
    role: Role
    kv_rank: int = 0
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Registered:
    """`registration_id` is random, 1 to 2^63-1; `replaced` is the client's former one, 0 without."""

    registration_id: int
    expires_after: float
    replaced: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: packed little-endian uint32 tokens, or the keys of its whole chunks from the first on."""

    namespace: Namespace
    tokens: bytes | None = None
    keys: tuple[bytes, ...] | None = None
    extras: tuple[ExtraInput, ...] = ()


@dataclass(frozen=True, slots=True)
class LookupResult:
    """`hit_tokens` is `hit_chunks` times the chunk size, also where an engine must still compute a token.

    `l2_chunks` and `peer_chunks` are those of the hit that were brought for this lookup.
    """

    asked_chunks: int
    hit_chunks: int
    hit_tokens: int
    lease_id: int = 0
    lease_ttl: float = 0.0
    l2_chunks: int = 0
    peer_chunks: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseItem:
    """`chunk_count` 0: all chunks from `first_chunk` on."""

    session_id: str
    lease_id: int
    first_chunk: int = 0
    chunk_count: int = 0


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """In chunks. Nothing held at all counts as `chunk_count`, or as 1 where that was 0."""

    released: int
    not_held: int


@dataclass(frozen=True, slots=True)
class SessionRange:
    session_id: str
    first_chunk: int
    chunk_count: int


@dataclass(frozen=True, slots=True)
class KeyedChunks:
    """Consecutive chunks by key. Ranges of one `session_id` are known to continue each other."""

    namespace: Namespace
    keys: tuple[bytes, ...]
    first_chunk: int = 0
    session_id: str = ""


Target: TypeAlias = SessionRange | KeyedChunks


@dataclass(frozen=True, slots=True)
class ObjectRange:
    group_index: int
    first_chunk: int
    chunk_count: int


class SlotState(IntEnum):
    RESERVED = 1
    ALREADY_STORED = 2
    BEING_WRITTEN = 3
    NO_SPACE = 4


@dataclass(frozen=True, slots=True)
class StoreItem:
    """`ranges` picks objects within the target; empty: every group of every chunk."""

    target: Target
    ranges: tuple[ObjectRange, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotGrant:
    """`offset` is 0 unless the slot is RESERVED."""

    chunk_index: int
    group_index: int
    offset: int
    size: int
    state: SlotState


@dataclass(frozen=True, slots=True)
class StoreGrant:
    """Slots chunk by chunk, groups in order of their index. `lease_id` is 0 when none is RESERVED."""

    lease_id: int
    ttl: float
    slots: tuple[SlotGrant, ...]
    error: KvwireError | None = None

    @property
    def reserved(self) -> tuple[SlotGrant, ...]:
        """The slots to write; a slot is named by its index in this tuple."""
        return tuple(slot for slot in self.slots if slot.state is SlotState.RESERVED)


@dataclass(frozen=True, slots=True)
class CommitItem:
    """`slots` are indexes into `StoreGrant.reserved`; empty: all. One checksum for each of them, or none."""

    lease_id: int
    slots: tuple[int, ...] = ()
    checksums: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class CommitResult:
    """Counts of slots. `unchecked` names the committed objects that came without a checksum."""

    committed: int
    aborted: int
    lost: int
    unchecked: tuple[ObjectRef, ...] = ()
    error: KvwireError | None = None


@dataclass(frozen=True, slots=True)
class RetrieveItem:
    """`ranges` picks objects within the target; empty: every group of every chunk."""

    target: Target
    ranges: tuple[ObjectRange, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadSlot:
    chunk_index: int
    group_index: int
    offset: int
    size: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class MissingObject:
    chunk_index: int
    group_index: int


@dataclass(frozen=True, slots=True)
class RetrieveGrant:
    """Slots chunk by chunk, groups in order of their index. `lease_id` is 0 when nothing is resident."""

    lease_id: int
    ttl: float
    slots: tuple[ReadSlot, ...]
    missing: tuple[MissingObject, ...]
    error: KvwireError | None = None


@dataclass(frozen=True, slots=True)
class LiveLease:
    """A read or write lease that holds right now, for a data path that moves its bytes."""

    lease_id: int
    kind: LeaseKind
    registration_id: int
    data_path: str
    expires_in: float
    objects: tuple[ObjectRef, ...]


@dataclass(frozen=True, slots=True)
class EndedLease:
    """Memory of this lease stays taken until `confirm_cancelled`: the data path may still move its bytes."""

    lease_id: int
    kind: LeaseKind
    registration_id: int
    data_path: str
    reason: EndReason


@dataclass(frozen=True, slots=True)
class QuarantinedOwner:
    """A former owner that may still write to `quarantined_bytes` of shared memory.

    They come free when it acknowledges, or when the caller has proof that the process is gone (`owner_dead`).
    """

    registration_id: int
    client_id: bytes
    pid: int
    leases: int
    quarantined_bytes: int


@dataclass(frozen=True, slots=True)
class Expired:
    """What a sweep ended."""

    leases: int
    sessions: int
    registration_ids: tuple[int, ...]
