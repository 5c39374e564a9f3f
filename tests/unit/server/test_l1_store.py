from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.server.engine import make_store
from kvwire.server.layout import KvLayout, ShardMap
from kvwire.server.store import L1Store, ObjectState, Space, StoredObject
from support.domain import (
    BLOCK_BYTES,
    CHUNK,
    FULL,
    OBJECT_BYTES,
    Events,
    layout,
    recurrent_group,
    window_group,
)

KEYS = [hashlib.sha256(bytes([index])).digest() for index in range(16)]


def space_for(kv_layout: KvLayout) -> Space:
    return Space(b"root", b"base", "model", "", ShardMap(kv_layout, CHUNK))


class Fixture:
    def __init__(self, kv_layout: KvLayout, pool: int = 64) -> None:
        self.events = Events()
        self.space = space_for(kv_layout)
        self.store: L1Store = make_store(
            pool * OBJECT_BYTES, base=0, alignment=BLOCK_BYTES, listener=self.events
        )

    def reserve(self, index: int, shard: int = 0, parent: int | None = None) -> StoredObject | None:
        before = index - 1 if parent is None else parent
        parent_key = KEYS[before] if before >= 0 else b""
        stamp = self.store.refresh((None,))
        return self.store.reserve(
            self.space, KEYS[index], parent_key, shard, lease_id=1, stamp=stamp, protect=stamp
        )

    def put(self, index: int, *shards: int, parent: int | None = None) -> StoredObject:
        for shard in shards or (0,):
            stored = self.reserve(index, shard, parent)
            assert stored is not None
            self.store.commit(stored)
        self.store.check_integrity()
        return stored

    def boundary(self) -> int:
        return self.store.find(self.space, KEYS).boundary


def resumes_at(present: list[set[int]], shards: ShardMap, boundary: int) -> bool:
    """The definition of a hit, written down naively: present[i] has the shards of chunk i."""
    world = shards.layout.world_size
    for group, spec in enumerate(shards.layout.groups):
        width = spec.chunks_needed(CHUNK)
        first = 0 if width is None else max(boundary - width, 0)
        for index in range(first, boundary):
            if any(rank * shards.num_groups + group not in present[index] for rank in range(world)):
                return False
    return True


GROUPS = st.sampled_from([FULL, window_group(4), window_group(6), window_group(13), recurrent_group()])


@settings(max_examples=250, deadline=None)
@given(st.integers(1, 2), st.lists(GROUPS, min_size=1, max_size=3), st.data())
def test_find_is_the_longest_boundary_by_definition(world: int, groups: list, data: st.DataObject) -> None:
    fixture = Fixture(layout(world, *groups), pool=256)
    shards = fixture.space.shards
    chunk = st.sets(st.integers(0, shards.num_shards - 1))
    # Mostly complete chunks, so that long hits are seen.
    whole = st.just(set(range(shards.num_shards)))
    present = data.draw(st.lists(st.one_of(whole, whole, whole, chunk), max_size=8))
    for index, held in enumerate(present):
        if held:
            fixture.put(index, *sorted(held))
    hit = fixture.store.find(fixture.space, KEYS[: len(present)])
    expected = max(b for b in range(len(present) + 1) if resumes_at(present, shards, b))
    assert hit.boundary == expected
    assert [chunk.key for chunk in hit.chunks] == KEYS[hit.first : hit.boundary]
    widest = max((width for width, _ in shards.windows), default=0)
    assert hit.first == (0 if shards.full_mask else max(expected - widest, 0))


def test_a_reserved_object_is_not_readable_and_not_evictable() -> None:
    fixture = Fixture(layout())
    stored = fixture.reserve(0)
    assert stored is not None
    assert fixture.boundary() == 0
    assert fixture.store.evict_to(0) == 0
    assert fixture.events.log == []
    fixture.store.commit(stored)
    assert fixture.boundary() == 1
    assert fixture.events.stored == [KEYS[0]]


def test_siblings_of_a_chunk_are_evicted_together() -> None:
    fixture = Fixture(layout(2, FULL, window_group(4)))
    for index in range(4):
        fixture.put(index, 0, 1, 2, 3)
    fixture.store.evict_to(fixture.store.allocator.used - 1)
    assert len(fixture.store) == 3
    assert fixture.store.resident_objects == 12
    assert fixture.events.removed == [KEYS[3]]


def test_a_chunk_is_announced_once_all_ranks_have_it() -> None:
    fixture = Fixture(layout(2))
    fixture.put(0, 0)
    assert fixture.events.stored == []
    fixture.put(0, 1)
    assert fixture.events.stored == [KEYS[0]]
    assert fixture.events.log[0].size == 2 * OBJECT_BYTES


def test_an_orphan_goes_first_and_takes_its_tail_along() -> None:
    fixture = Fixture(layout())
    for index in range(6):
        fixture.put(index)
    head = fixture.store.get(KEYS[2])
    assert head is not None
    stored = head.shards[0]
    assert stored is not None
    fixture.store.discard(stored)
    fixture.store.check_integrity()
    assert fixture.boundary() == 2
    assert set(fixture.store.tree.unreachable) == {KEYS[3]}
    # The rest of the chain is old; what nothing can resume at goes before it.
    used = fixture.store.allocator.used
    fixture.store.evict_to(used - 3 * OBJECT_BYTES)
    assert fixture.boundary() == 2
    assert len(fixture.store) == 2


def test_an_orphan_is_adopted_when_its_parent_comes_back() -> None:
    fixture = Fixture(layout())
    fixture.put(1)
    assert fixture.store.tree.unreachable
    assert fixture.boundary() == 0
    fixture.put(0)
    assert not fixture.store.tree.unreachable
    assert fixture.boundary() == 2


def test_keys_that_name_each_other_as_parents_do_not_hang_anything() -> None:
    fixture = Fixture(layout())
    fixture.put(0, parent=1)
    fixture.put(1, parent=0)
    chunk = fixture.store.get(KEYS[0])
    assert len(fixture.store.tree.ancestry(chunk)) <= 2
    fixture.store.evict_to(0)
    assert len(fixture.store) == 0
    fixture.store.check_integrity()


def test_a_chunk_whose_shard_failed_goes_before_older_ones() -> None:
    fixture = Fixture(layout(2))
    fixture.put(8, 0, 1, parent=-1)
    fixture.put(0, 0)
    failed = fixture.reserve(0, 1)
    assert failed is not None
    fixture.store.abort(failed)
    fixture.store.check_integrity()
    assert set(fixture.store.tree.unreachable) == {KEYS[0]}
    fixture.store.evict_to(fixture.store.allocator.used - 1)
    assert fixture.store.get(KEYS[8]) is not None
    assert fixture.store.get(KEYS[0]) is None


def test_a_failed_shard_that_comes_after_all_makes_the_chunk_whole() -> None:
    fixture = Fixture(layout(2))
    fixture.put(0, 0)
    failed = fixture.reserve(0, 1)
    assert failed is not None
    fixture.store.quarantine(failed)
    fixture.put(0, 1)
    assert not fixture.store.tree.unreachable
    assert fixture.boundary() == 1
    fixture.store.release(failed)
    fixture.store.check_integrity()


def test_quarantined_memory_is_taken_and_its_key_is_free() -> None:
    fixture = Fixture(layout(), pool=2)
    stored = fixture.reserve(0)
    assert stored is not None
    fixture.store.quarantine(stored)
    assert fixture.store.get(KEYS[0]) is None
    again = fixture.reserve(0)
    assert again is not None
    assert again.offset != stored.offset
    assert fixture.reserve(1) is None
    fixture.store.release(stored)
    assert fixture.reserve(1) is not None
    fixture.store.check_integrity()


def test_discarded_objects_stay_where_they_are_while_pinned() -> None:
    fixture = Fixture(layout(), pool=2)
    stored = fixture.put(0)
    chunk = stored.chunk
    fixture.store.pin((chunk,))
    fixture.store.discard(stored)
    fixture.store.check_integrity()
    assert stored.state is ObjectState.DROPPED
    assert fixture.boundary() == 0
    assert fixture.events.removed == [KEYS[0]]
    renewed = fixture.put(0)
    assert renewed.offset != stored.offset
    assert fixture.store.allocator.used == 2 * OBJECT_BYTES
    fixture.store.unpin((chunk,))
    fixture.store.check_integrity()
    assert fixture.store.allocator.used == OBJECT_BYTES
    assert fixture.boundary() == 1


def test_the_head_of_a_pinned_tail_goes_only_when_nothing_else_is_left() -> None:
    fixture = Fixture(layout(), pool=6)
    for index in range(4):
        fixture.put(index)
    fixture.store.refresh([fixture.store.get(key) for key in KEYS[:4]])
    fixture.put(8, parent=-1)
    fixture.put(9, parent=8)
    tail = fixture.store.get(KEYS[3])
    assert tail is not None
    fixture.store.pin((tail,))
    fixture.put(12, parent=-1)
    fixture.put(13, parent=12)
    assert fixture.store.get(KEYS[9]) is None
    assert fixture.store.get(KEYS[2]) is not None
    fixture.store.pin([chunk for chunk in fixture.store.chunks() if chunk.key in KEYS[12:14]])
    assert fixture.store.evictable_bytes == 3 * OBJECT_BYTES
    fixture.put(10, parent=-1)
    assert fixture.store.get(KEYS[2]) is None
    assert fixture.boundary() == 2


def test_nothing_is_evicted_when_that_could_not_make_room() -> None:
    fixture = Fixture(layout(), pool=2)
    stored = [fixture.put(0), fixture.put(1)]
    fixture.store.pin([stored[0].chunk, stored[1].chunk])
    assert fixture.reserve(2) is None
    fixture.store.unpin([stored[1].chunk])
    assert fixture.reserve(2, parent=-1) is not None
    assert fixture.store.evicted_chunks == 1


def test_clear_keeps_what_is_pinned_and_says_so_once() -> None:
    fixture = Fixture(layout())
    stored = [fixture.put(index) for index in range(3)]
    fixture.store.pin([stored[0].chunk])
    assert fixture.store.clear(lambda space: space.base_root == b"another base") == (0, 0)
    assert fixture.store.clear(lambda space: space.base_root == b"base") == (2, 1)
    assert sorted(fixture.events.removed) == sorted(KEYS[1:3])
    fixture.store.unpin([stored[0].chunk])
    fixture.events.log.clear()
    assert fixture.store.clear() == (1, 0)
    assert fixture.events.log == ["cleared"]
    assert fixture.store.allocator.used == 0
    fixture.store.check_integrity()


def test_states_are_passed_in_order_only() -> None:
    fixture = Fixture(layout())
    stored = fixture.put(0)
    for misuse in (
        fixture.store.commit,
        fixture.store.abort,
        fixture.store.quarantine,
        fixture.store.release,
    ):
        with pytest.raises(RuntimeError, match="RESIDENT"):
            misuse(stored)
    fixture.store.check_integrity()
