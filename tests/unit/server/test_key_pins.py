"""What an operator's pins do in memory."""

from __future__ import annotations

import hashlib

import pytest

from kvwire.server.engine import make_store
from kvwire.server.layout import ShardMap
from kvwire.server.store import POLICIES, L1Store, Space
from support.domain import BLOCK_BYTES, CHUNK, FULL, OBJECT_BYTES, layout

KEYS = [hashlib.sha256(bytes([index])).digest() for index in range(40)]


class Memory:
    """Room for ten chunks, or five of two shards."""

    def __init__(self, policy: str = "lru", world: int = 1) -> None:
        self.store: L1Store = make_store(10 * OBJECT_BYTES, policy, base=0, alignment=BLOCK_BYTES)
        self.space = Space(b"root", b"base", "model", "", ShardMap(layout(world, FULL), CHUNK))

    def reserve(self, index: int, shard: int = 0):
        stamp = self.store.refresh((None,))
        return self.store.reserve(self.space, KEYS[index], b"", shard, lease_id=1, stamp=stamp, protect=stamp)

    def put(self, *indexes: int, shard: int = 0) -> None:
        for index in indexes:
            stored = self.reserve(index, shard)
            assert stored is not None
            self.store.commit(stored)
            self.store.check_integrity()

    def has(self, index: int) -> bool:
        return self.store.get(KEYS[index]) is not None

    def pinned(self) -> tuple[int, int]:
        return self.store.key_pins.chunks, self.store.key_pins.bytes // OBJECT_BYTES


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("before", [True, False])
def test_a_pinned_chunk_stays_and_an_unpinned_one_goes(policy, before):
    memory = Memory(policy)
    if before:
        memory.store.pin_keys([KEYS[0], KEYS[1]])
    memory.put(0, 1)
    memory.store.pin_keys([KEYS[0], KEYS[1]])
    assert memory.pinned() == (2, 2)
    memory.put(*range(2, 30))
    assert memory.has(0)
    assert memory.has(1)
    assert memory.store.clear() == (8, 2)
    assert memory.store.evict_to(0) == 0
    memory.store.unpin_keys([KEYS[0], KEYS[33]])
    memory.store.check_integrity()
    assert memory.pinned() == (1, 1)
    assert memory.store.evict_to(0) == OBJECT_BYTES
    assert not memory.has(0)
    assert memory.has(1)


def test_pins_leave_room_for_others():
    memory = Memory()
    memory.store.pin_keys(KEYS[:12])
    memory.put(*range(12))
    assert memory.pinned() == (9, 9)
    assert memory.has(8)
    memory.put(20, 21)
    assert [index for index in range(12) if memory.has(index)] == list(range(9))
    # One of those that had no room takes the place that comes free.
    memory.put(11)
    memory.store.unpin_keys([KEYS[0]])
    assert memory.pinned() == (9, 9)
    memory.put(22, 23, 24)
    assert memory.has(11)
    assert not memory.has(0)


def test_part_of_a_chunk_is_held_until_the_rest_comes():
    memory = Memory(world=2)
    memory.store.pin_keys([KEYS[0]])
    memory.put(0)
    memory.put(*range(1, 30))
    assert memory.has(0)
    memory.put(0, shard=1)
    assert memory.pinned() == (1, 2)
    assert memory.store.find(memory.space, [KEYS[0]]).boundary == 1


def test_a_lease_and_a_pin_end_in_either_order():
    for first in ("lease", "pin"):
        memory = Memory()
        memory.put(0)
        chunk = memory.store.get(KEYS[0])
        memory.store.pin([chunk])
        memory.store.pin_keys([KEYS[0]])
        for what in (first, "pin" if first == "lease" else "lease"):
            assert memory.store.evict_to(0) == 0
            if what == "lease":
                memory.store.unpin([chunk])
            else:
                memory.store.unpin_keys([KEYS[0]])
            memory.store.check_integrity()
        assert memory.store.evict_to(0) == OBJECT_BYTES


def test_what_is_damaged_goes_in_spite_of_a_pin():
    memory = Memory()
    memory.store.pin_keys([KEYS[0]])
    memory.put(0)
    memory.store.discard(memory.store.get(KEYS[0]).shards[0])
    memory.store.check_integrity()
    assert memory.pinned() == (0, 0)
    assert memory.store.allocator.used == 0
    memory.put(0)
    assert memory.pinned() == (1, 1)


def test_an_aborted_write_leaves_nothing_behind():
    memory = Memory()
    memory.store.pin_keys([KEYS[0]])
    memory.store.abort(memory.reserve(0))
    memory.store.check_integrity()
    assert memory.pinned() == (0, 0)
    assert not memory.has(0)


def test_a_layout_that_changed_makes_way():
    memory = Memory()
    memory.store.pin_keys([KEYS[0]])
    memory.put(0)
    memory.space = Space(b"root", b"base", "model", "", ShardMap(layout(2, FULL), CHUNK))
    memory.put(0)
    assert memory.pinned() == (1, 1)
    assert memory.store.get(KEYS[0]).space is memory.space
