from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TierCounters:
    """What happened since the start. Bytes are those stored, with headers.

    `failed_writes` left nothing behind; `failed_reads` includes `damaged_objects`, which were dropped;
    `skipped_objects` were not written: too many waited, no room, or gone before it was their turn.
    """

    written_objects: int = 0
    written_bytes: int = 0
    read_objects: int = 0
    read_bytes: int = 0
    failed_writes: int = 0
    failed_reads: int = 0
    damaged_objects: int = 0
    skipped_objects: int = 0


@dataclass(frozen=True, slots=True)
class TierStatus:
    """`used_bytes` counts what is being written or deleted, too. `problem` is empty while all is well."""

    name: str
    location: str
    capacity_bytes: int
    used_bytes: int
    chunks: int
    objects: int
    store: str
    encrypted: bool
    queued_objects: int
    evicted_chunks: int
    problem: str
    counters: TierCounters
