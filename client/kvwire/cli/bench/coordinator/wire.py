"""Messages of simulated servers, put together as bytes: the sender must never be the bottleneck.

Every entry of a batch has the same length, so a batch is a table of bytes into which the keys are written.
Keys follow from a seed and are never kept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvwire.v1 import event_pb2
from kvwire.v1 import peer_service_pb2 as peer

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH: Final = 1000
KEY_BYTES: Final = 32
BACKEND: Final = "memory"
CHUNK_BYTES: Final = 32 << 20
TOKENS: Final = 256
_KEY_MARK, _TOKEN_MARK = b"K" * KEY_BYTES, b"T" * 4 * TOKENS
_EVENTS_FIELD, _PLACEMENTS_FIELD = 6, 4


@dataclass(frozen=True, slots=True)
class Keys:
    """`count` keys: `first` of them given, the others random and the same each time."""

    seed: int
    count: int
    given: bytes = b""

    def batches(self) -> int:
        return -(-self.count // BATCH)

    def batch(self, number: int) -> bytes:
        """The keys of batch `number` from 0, one after the other."""
        size = min(BATCH, self.count - number * BATCH)
        found = np.random.default_rng((self.seed, number)).bytes(size * KEY_BYTES)
        start = number * BATCH * KEY_BYTES
        given = self.given[start : start + len(found)]
        return given + found[len(given) :]


def entries(keys: bytes, field: int, *, tokens: bool = False, tier: int = 1) -> bytes:
    """STORE entries as the repeated `field` of a message. Token ids are noise."""
    template, key_at, tokens_at = _template(field, tokens, tier)
    count = len(keys) // KEY_BYTES
    table = np.tile(np.frombuffer(template, np.uint8), (count, 1))
    table[:, key_at : key_at + KEY_BYTES] = np.frombuffer(keys, np.uint8).reshape(count, KEY_BYTES)
    if tokens:
        noise = np.random.default_rng(7).integers(0, 256, (count, 4 * TOKENS), np.uint8)
        table[:, tokens_at : tokens_at + 4 * TOKENS] = noise
    return table.tobytes()


@lru_cache(maxsize=16)
def _template(field: int, tokens: bool, tier: int) -> tuple[bytes, int, int]:
    event = event_pb2.CacheEvent(
        kind=event_pb2.CACHE_EVENT_KIND_STORE,
        chunk_key=_KEY_MARK,
        tier=tier,  # type: ignore[arg-type]
        backend=BACKEND,
        size_bytes=CHUNK_BYTES,
        tokens=_TOKEN_MARK if tokens else b"",
        parent_key=b"P" * KEY_BYTES,
        namespace_root=b"R" * KEY_BYTES,
    )
    raw = delimited(field, event.SerializeToString())
    return raw, raw.index(_KEY_MARK), raw.find(_TOKEN_MARK)


def report(server_id: str, incarnation: bytes, sequence: int, events: bytes, lost: int = 0) -> bytes:
    """A serialized ReportEventsRequest."""
    head = event_pb2.CacheEventBatch(
        server_id=server_id, incarnation=incarnation, sequence=sequence, lost=lost
    )
    head.created_at.FromNanoseconds(time.time_ns())
    return delimited(1, head.SerializeToString() + events)


def store_report(server_id: str, incarnation: bytes, sequence: int, keys: bytes, **how: Any) -> bytes:
    return report(server_id, incarnation, sequence, entries(keys, _EVENTS_FIELD, **how))


def events_of(changes: Sequence[tuple[int, bytes]]) -> bytes:
    """(kind, key) pairs as the events of a batch."""
    batch = event_pb2.CacheEventBatch()
    for kind, key in changes:
        size = CHUNK_BYTES if kind == event_pb2.CACHE_EVENT_KIND_STORE else 0
        batch.events.add(kind=kind, chunk_key=key, tier=1, backend=BACKEND, size_bytes=size)
    return batch.SerializeToString()


def page(server_id: str, incarnation: bytes, sequence: int, keys: bytes, tier: int = 1) -> bytes:
    """A serialized SnapshotPlacementsResponse."""
    head = peer.SnapshotPlacementsResponse(server_id=server_id, incarnation=incarnation, sequence=sequence)
    return head.SerializeToString() + entries(keys, _PLACEMENTS_FIELD, tier=tier)


def delimited(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
