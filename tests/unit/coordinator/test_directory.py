from __future__ import annotations

import tracemalloc

from kvwire.coordinator.directory import KeyDirectory
from kvwire.coordinator.messages import HoldingStats
from support.fleet_model import L1, L2, chunk

KEYS = [chunk(number) for number in range(10)]


def directory_with(**counts: int) -> KeyDirectory:
    """Each server holds that many leading keys."""
    directory = KeyDirectory()
    for name, count in counts.items():
        holdings = directory.holdings(name)
        holdings.reachable = True
        for key in KEYS[:count]:
            directory.store(holdings, L1, "memory", key, 10, 5.0)
    return directory


def test_longest_prefix_per_server_and_together():
    directory = directory_with(a=3, b=5)
    holdings = directory.holdings("c")
    holdings.reachable = True
    for key in KEYS[5:8]:
        directory.store(holdings, L1, "memory", key, 10, 5.0)
    located = directory.locate(KEYS)
    assert located.prefixes == (("b", 5), ("a", 3))
    assert (located.asked, located.combined) == (10, 8)
    assert located.placements == ()


def test_a_hole_ends_a_servers_prefix():
    directory = directory_with(a=5, b=1)
    directory.delete(directory.holdings("a"), L1, "memory", KEYS[2])
    located = directory.locate(KEYS, with_placements=True)
    assert located.prefixes == (("a", 2), ("b", 1))
    assert located.combined == 2
    assert [len(placements) for placements in located.placements] == [2, 1, 0, 1, 1, 0, 0, 0, 0, 0]


def test_a_chunk_in_two_tiers_is_in_one_prefix():
    directory = directory_with(a=2)
    directory.store(directory.holdings("a"), L2, "disk", KEYS[0], 4, 6.0)
    assert directory.locate(KEYS).prefixes == (("a", 2),)
    assert {placement.backend for placement in directory.placements(KEYS[0])} == {"memory", "disk"}


def test_storing_again_renews_size_and_time():
    directory = directory_with(a=1)
    directory.store(directory.holdings("a"), L1, "memory", KEYS[0], 33, 9.0)
    (placement,) = directory.placements(KEYS[0])
    assert (placement.size_bytes, placement.since) == (33, 9.0)
    stats = directory.stats()
    assert (stats.keys, stats.placements, stats.placement_bytes) == (1, 1, 33)


def test_fencing_is_at_once_and_sweeping_in_slices():
    dropped: list[bytes] = []
    directory = KeyDirectory(dropped.append)
    for name in ("a", "b"):
        holdings = directory.holdings(name)
        holdings.reachable = True
        for key in KEYS[: 10 if name == "a" else 4]:
            directory.store(holdings, L1, "memory", key, 10, 5.0)
    assert directory.fence("a") == 10
    assert directory.locate(KEYS).prefixes == (("b", 4),)
    stats = directory.stats()
    assert (stats.placements, stats.placement_bytes, stats.unswept) == (4, 40, 10)
    assert directory.sweep(3) == 7
    directory.check_integrity()
    directory.store(directory.holdings("a"), L1, "memory", KEYS[4], 1, 6.0)
    assert directory.sweep(100) == 0
    directory.check_integrity()
    assert sorted(dropped) == sorted(KEYS[5:])
    assert directory.stats().keys == 5


def test_rows_and_slots_are_used_again():
    directory = directory_with(a=10)
    for _ in range(20):
        directory.fence("a")
        directory.sweep(100)
        for key in KEYS:
            directory.store(directory.holdings("a"), L1, "memory", key, 10, 5.0)
    directory.check_integrity()
    assert len(directory._table.slots) == 11
    assert len(directory._slots) == 1


def test_pages_are_in_order_and_others_do_not_move():
    directory = directory_with(a=10)
    first = directory.page(limit=4)
    directory.delete(directory.holdings("a"), L1, "memory", first[0][0])
    rest = directory.page(after=first[-1][0], limit=100)
    assert [key for key, _ in first + rest] == sorted(KEYS)


def test_clear_of_one_store_leaves_the_others_of_its_tier():
    directory = directory_with(a=2)
    holdings = directory.holdings("a")
    directory.store(holdings, L2, "disk", KEYS[0], 1, 5.0)
    directory.store(holdings, L2, "s3", KEYS[0], 2, 5.0)
    assert directory.clear(holdings, L2, "disk") == 1
    assert directory.holding_stats() == [
        HoldingStats("a", L1, "memory", 2, 20),
        HoldingStats("a", L2, "s3", 1, 2),
    ]


def test_a_key_with_one_placement_takes_at_most_300_bytes():
    directory = KeyDirectory()
    holdings = directory.holdings("a")
    count = 60_000
    tracemalloc.start()
    try:
        for number in range(count):
            directory.store(holdings, L1, "memory", chunk(number), 1 << 20, float(number))
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 300 * count
    assert peak < 300 * count
