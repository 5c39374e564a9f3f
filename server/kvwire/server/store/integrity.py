"""The invariants of the store, checked the slow way: for tests, never on a hot path."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from kvwire.server.store.objects import Chunk, ObjectState
from kvwire.server.store.tenants import NOBODY

if TYPE_CHECKING:
    from kvwire.server.store.l1 import L1Store


def check_store(store: L1Store) -> None:
    """Raise AssertionError, naming the first thing that does not hold."""
    store.allocator.check_integrity()
    chunks = list(store.chunks())
    for chunk in chunks:
        _check_chunk(store, chunk)
        _check_links(store, chunk)
    _check_bytes(store, chunks)
    _check_tenants(store, chunks)
    _check_pinned(store, chunks)
    _check_overlap(chunks)
    listed = list(store.tree.listing.after(0))
    ensure(listed == sorted(chunks, key=lambda chunk: chunk.serial), "the listing drifted")
    store.policy.check_integrity(chunks)
    for parent_key, children in store.tree.waiting().items():
        for child in children.values():
            ensure(store.get(child.key) is child, "a removed chunk waits for its parent")
            ensure(
                child.parent is None and child.parent_key == parent_key, "a linked chunk waits for its parent"
            )


def ensure(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)


def _check_chunk(store: L1Store, chunk: Chunk) -> None:
    present = [stored for stored in chunk.shards if stored is not None]
    resident = [stored for stored in present if stored.state is ObjectState.RESIDENT]
    reserved = [stored for stored in present if stored.state is ObjectState.RESERVED]
    ensure(
        len(resident) + len(reserved) == len(present),
        "an object in the index is neither reserved nor resident",
    )
    ensure(bool(present or chunk.dropped), "an empty chunk is in the index")
    ensure(chunk.pins >= len(reserved), "a reserved object does not pin its chunk")
    ensure(bool(chunk.pins) or not chunk.dropped, "dropped objects outlive the pins")
    mask = sum(1 << stored.shard for stored in resident)
    ensure(chunk.mask == mask, "mask drifted")
    size = sum(stored.extent for stored in [*resident, *chunk.dropped])
    ensure(chunk.size == size, "size of a chunk drifted")
    ensure(chunk.announced == chunk.is_complete, "the listener was told something else")
    ensure(store.get(chunk.key) is chunk, "a chunk is filed under another key")


def _check_links(store: L1Store, chunk: Chunk) -> None:
    for child in (chunk.children or {}).values():
        ensure(child.parent is chunk and store.get(child.key) is child, "a child is not linked both ways")
    parent = chunk.parent
    if parent is not None:
        ensure((parent.children or {}).get(chunk.key) is chunk, "a parent is not linked both ways")
        ensure(parent.key == chunk.parent_key, "a parent has another key")
    elif chunk.parent_key:
        ensure(
            chunk.key in store.tree.waiting().get(chunk.parent_key, {}),
            "an orphan does not wait for its parent",
        )
    stranded = bool(chunk.parent_key) and parent is None
    lost = bool(chunk.space.shards.full_mask) and (stranded or chunk.broken)
    ensure((chunk.key in store.tree.unreachable) == lost, "unreachable chunks drifted")


def _check_bytes(store: L1Store, chunks: list[Chunk]) -> None:
    resident = sum(chunk.size for chunk in chunks)
    present = [stored for chunk in chunks for stored in chunk.shards if stored is not None]
    reserved = sum(stored.extent for stored in present if stored.state is ObjectState.RESERVED)
    ensure(store.resident_bytes == resident, "resident bytes drifted")
    ensure(store.reserved_bytes == reserved, "reserved bytes drifted")
    used = resident + reserved + store.quarantined_bytes
    ensure(store.allocator.used == used, "resident, reserved and quarantined bytes are not what is in use")
    idle = sum(chunk.size for chunk in chunks if chunk.idle)
    ensure(store.evictable_bytes == idle, "evictable bytes drifted")
    objects = sum(stored.state is ObjectState.RESIDENT for stored in present)
    ensure(store.resident_objects == objects, "object count drifted")
    spaces = {id(chunk.space): chunk.space for chunk in chunks}
    for space in spaces.values():
        own = [chunk for chunk in chunks if chunk.space is space]
        ensure(space.chunks == len(own), "chunks of a namespace drifted")
        ensure(space.resident_bytes == sum(chunk.size for chunk in own), "bytes of a namespace drifted")


def _check_tenants(store: L1Store, chunks: list[Chunk]) -> None:
    ensure(NOBODY.used == NOBODY.evictable == 0, "bytes were counted for nobody")
    uses = store.tenants.uses()
    ensure(
        sum(use.quarantined for use in uses) == store.quarantined_bytes,
        "quarantined bytes of tenants drifted",
    )
    for use in uses:
        own = [chunk for chunk in chunks if chunk.space.use is use]
        ensure(all(chunk.space.tenant == use.tenant for chunk in own), "a chunk is another tenant's")
        ensure(use.resident == sum(chunk.size for chunk in own), "resident bytes of a tenant drifted")
        present = [stored for chunk in own for stored in chunk.shards if stored is not None]
        reserved = sum(stored.extent for stored in present if stored.state is ObjectState.RESERVED)
        ensure(use.reserved == reserved, "reserved bytes of a tenant drifted")
        idle = sum(chunk.size for chunk in own if chunk.idle)
        ensure(use.evictable == idle, "evictable bytes of a tenant drifted")
        lost = {chunk.key for chunk in own if chunk.key in store.tree.unreachable}
        ensure(set(use.unreachable) == lost, "unreachable chunks of a tenant drifted")
        ensure(use.limit == store.tenants.limits.get(use.tenant, 0), "a tenant has another limit")
        known = use.excess() <= 0 or use in store.tenants.over()
        ensure(known, "a tenant is above its limit, and nobody knows it")


def _check_pinned(store: L1Store, chunks: list[Chunk]) -> None:
    pins, kept = store.key_pins, [chunk for chunk in chunks if chunk.kept]
    ensure(all(chunk.key in pins.keys for chunk in kept), "a chunk is kept that is not pinned")
    ensure(
        (pins.chunks, pins.bytes) == (len(kept), sum(chunk.size for chunk in kept)), "pinned bytes drifted"
    )
    missing = {chunk.key for chunk in chunks if chunk.key in pins.keys and not chunk.kept}
    ensure(missing <= set(pins.over) <= pins.keys, "a pinned chunk is not kept, and nobody knows it")


def _check_overlap(chunks: list[Chunk]) -> None:
    extents = sorted(
        (stored.offset, stored.extent)
        for chunk in chunks
        for stored in [*chunk.shards, *chunk.dropped]
        if stored is not None
    )
    for (start, extent), (following, _) in pairwise(extents):
        ensure(start + extent <= following, "two objects overlap")
