from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from kvwire.server.store.tenants import NOBODY, TenantUse

if TYPE_CHECKING:
    from kvwire.server.layout import ShardMap


class ObjectState(IntEnum):
    """RESERVED -> RESIDENT -> FREED.

    A write that ends without commit may pass through QUARANTINED, what is discarded under a lease through
    DROPPED.
    """

    RESERVED = 1
    RESIDENT = 2
    QUARANTINED = 3
    DROPPED = 4
    FREED = 5


@dataclass(slots=True, eq=False)
class Space:
    """One namespace with one layout: what chunks of a key chain have in common. Compared by identity.

    `tenant` is a digest of the salt, empty without one; the salt itself is never kept.
    """

    root: bytes
    base_root: bytes
    model: str
    tenant: str
    shards: ShardMap
    chunks: int = 0
    resident_bytes: int = 0
    # Of the tenant, once it has stored anything.
    use: TenantUse = field(default=NOBODY, repr=False)


@dataclass(slots=True, eq=False)
class StoredObject:
    """The bytes of one shard of one chunk, and the place that they have in the arena.

    `size` is exact, `extent` what the allocator took for it. `lease_id` is the write lease that it came with:
    it tells this object from a later one of the same key.
    """

    chunk: Chunk = field(repr=False)
    shard: int
    offset: int
    size: int
    extent: int
    lease_id: int
    state: ObjectState = ObjectState.RESERVED
    checksum: bytes = b""


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk of the index: it exists as long as one of its shards is reserved or resident.

    `pins` counts the leases that hold it (each reserved object counts as one), `kept` says that an operator's
    pin does; only an `idle` chunk is ever evicted. `mask` has the bits of resident shards, `size` the bytes
    of those and of `dropped` ones.
    """

    key: bytes
    parent_key: bytes
    space: Space
    shards: list[StoredObject | None]
    parent: Chunk | None = field(default=None, repr=False)
    children: dict[bytes, Chunk] | None = field(default=None, repr=False)
    mask: int = 0
    size: int = 0
    pins: int = 0
    # Recency: larger is later, and a parent is always later than its children.
    stamp: int = 0
    # The order of coming.
    serial: int = 0
    # Of the eviction policy.
    tier: int = 0
    queued: bool = False
    # A write failed and left other shards alone: nothing can resume behind this chunk.
    broken: bool = False
    # An operator has pinned it.
    kept: bool = False
    # The listener was told that it is stored.
    announced: bool = False
    # Objects that were discarded while a lease may still read them.
    dropped: tuple[StoredObject, ...] = ()

    @property
    def idle(self) -> bool:
        return not self.pins and not self.kept

    @property
    def is_evictable_leaf(self) -> bool:
        return self.size > 0 and self.pins == 0 and not self.kept and not self.children

    @property
    def is_complete(self) -> bool:
        need = self.space.shards.complete_mask
        return self.mask & need == need

    @property
    def is_empty(self) -> bool:
        return not self.dropped and all(shard is None for shard in self.shards)


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """Names one stored object, and no other one that ever has the same key."""

    key: bytes
    rank: int
    group_index: int
    offset: int
    size: int
    lease_id: int
    checksum: bytes = b""
