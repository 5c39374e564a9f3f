"""Journal batches as `kvwire.v1.CacheEventBatch`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvwire.v1 import event_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.journal import Closed, Entry


class BatchEncoder:
    """Makes a batch's bytes once, for every reader."""

    def __init__(self, server_id: str, incarnation: bytes) -> None:
        self._server_id = server_id
        self._incarnation = incarnation

    def __call__(self, sequence: int, entries: Sequence[Entry]) -> bytes:
        batch = event_pb2.CacheEventBatch(
            server_id=self._server_id,
            incarnation=self._incarnation,
            sequence=sequence,
            events=[cache_event(entry) for entry in entries],
        )
        batch.created_at.FromNanoseconds(time.time_ns())
        return batch.SerializeToString()


def cache_event(entry: Entry) -> event_pb2.CacheEvent:
    return event_pb2.CacheEvent(
        kind=int(entry.kind),  # type: ignore[arg-type]
        tier=entry.tier,  # type: ignore[arg-type]
        backend=entry.backend,
        chunk_key=entry.key,
        size_bytes=entry.size_bytes,
        tokens=entry.tokens,
        parent_key=entry.parent,
        namespace_root=entry.root,
        access_count=entry.uses,
    )


def with_lost(closed: Closed) -> bytes:
    """The bytes of the batch with what its reader has lost. Protobuf messages can be appended to."""
    if not closed.lost:
        return closed.payload
    return closed.payload + event_pb2.CacheEventBatch(lost=closed.lost).SerializeToString()
