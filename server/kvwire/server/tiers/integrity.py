"""The invariants of a tier's index, checked the slow way: for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.server.fetch.planning import shards_of
from kvwire.server.store.integrity import ensure

if TYPE_CHECKING:
    from kvwire.server.tiers.index import TierIndex


def check_index(index: TierIndex) -> None:
    """Raise AssertionError, naming the first thing that does not hold."""
    used_by: dict[str, int] = {}
    writing = 0
    for chunk in index:
        space, there = chunk.space, set(shards_of(chunk.mask))
        ensure(index.get(chunk.key) is chunk, "a chunk is filed under another key")
        ensure(index.spaces.get(space.folder) is space, "a chunk's namespace is not open")
        ensure(bool(chunk.mask or chunk.writing), "an empty chunk is in the index")
        ensure(not there & chunk.writing.keys(), "an object is written twice")
        ensure(chunk.size == sum(space.sizes[shard] for shard in there), "a chunk's size drifted")
        ensure(chunk.announced == chunk.is_complete, "the listener was told something else")
        ensure(chunk.queued & 1 == 1 or not chunk.evictable, "an evictable chunk is not offered")
        pending = sum(each.size for each in chunk.writing.values())
        writing += pending
        used_by[space.tenant] = used_by.get(space.tenant, 0) + chunk.size + pending
    ensure(index.object_bytes == sum(chunk.size for chunk in index), "bytes of objects drifted")
    ensure(index.objects == sum(chunk.mask.bit_count() for chunk in index), "the count of objects drifted")
    ensure(index.writing_bytes == writing, "bytes being written drifted")
    ensure(index.doomed_bytes == sum(index.doomed.values()), "doomed bytes drifted")
    spaces = index.spaces.values()
    ensure(index.manifest_bytes == sum(space.manifest_bytes for space in spaces), "manifests drifted")
    for space in spaces:
        ensure(space.chunks == sum(chunk.space is space for chunk in index), "chunks of a space drifted")
    ensure(index.tenants() == used_by, "bytes of tenants drifted")
