"""Lookups that find below the memory what they lack, from sources that do all that real ones might."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvwire import telemetry
from kvwire.server.fetch.prefetcher import FetchLimits
from kvwire.server.fetch.source import Origin
from kvwire.telemetry import tracing
from support.below_memory import Below, until
from support.domain import FULL, OBJECT_BYTES, layout, recurrent_group, tokens, window_group
from support.fake_source import FakeSource

pytestmark = pytest.mark.asyncio


def disk(**settings) -> FakeSource:
    return FakeSource("disk", Origin.L2, **settings)


def peers(**settings) -> FakeSource:
    return FakeSource("peers", Origin.PEER, **settings)


def counted(below: Below) -> tuple[int, int, int, int, int]:
    """asked, missed, and hits from memory, from a tier, from a peer; in chunks."""
    c = below.domain.engine.counters
    memory = c.hit_tokens - c.l2_hit_tokens - c.peer_hit_tokens
    return tuple(n // 4 for n in (c.asked_tokens, c.miss_tokens, memory, c.l2_hit_tokens, c.peer_hit_tokens))


async def test_a_lookup_brings_what_a_tier_has_and_leases_it():
    source = disk()
    below = Below(source)
    source.have(below.keys(6))
    found = await below.look_up(8)
    assert (found.asked_chunks, found.hit_chunks, found.l2_chunks, found.peer_chunks) == (8, 6, 6, 0)
    assert found.lease_id
    assert counted(below) == (8, 2, 0, 6, 0)
    assert below.domain.engine.clear()[1] == 6
    await below.settle()
    assert below.domain.events.stored == below.keys(6)
    # It is in memory now.
    again = await below.look_up(6, "t")
    assert (again.hit_chunks, again.l2_chunks) == (6, 0)
    assert len(source.fetched) == 6


async def test_only_what_memory_lacks_is_brought_and_what_it_has_is_leased_meanwhile():
    source = disk(gate=asyncio.Event())
    below = Below(source)
    source.have(below.keys(8))
    below.domain.store_prompt(below.registration, "before", tokens(3))
    lookup = asyncio.create_task(below.look_up(8))
    await source.began()
    assert below.domain.engine.clear()[1] >= 3
    assert below.domain.engine.status().leases["lookup"] == 1
    source.gate.set()
    found = await lookup
    assert (found.hit_chunks, found.l2_chunks) == (8, 5)
    assert {key for key, _ in source.fetched} == set(below.keys(8)[3:])
    # The first three were stored by a session of their own.
    assert counted(below) == (3 + 8, 3, 3, 5, 0)
    assert below.domain.engine.status().leases["lookup"] == 1
    await below.settle()


async def test_a_full_hit_and_a_server_without_sources_ask_nobody():
    source = disk()
    below = Below(source)
    below.domain.store_prompt(below.registration, "before", tokens(3))
    assert (await below.look_up(3)).hit_chunks == 3
    assert not source.asked
    assert (await Below().look_up(3)).hit_chunks == 0


async def test_a_tier_and_peers_reach_further_together_and_the_tier_comes_first():
    near, far = disk(), peers()
    below = Below(far, near)
    keys = below.keys(8)
    near.have(keys[:2] + keys[4:6])
    far.have(keys)
    found = await below.look_up(8)
    assert (found.hit_chunks, found.l2_chunks, found.peer_chunks) == (8, 4, 4)
    assert far.asked == [(1, 1, 0, 0, 1, 1, 0, 0)]
    assert {key for key, _ in far.fetched} == {keys[2], keys[3], keys[6], keys[7]}
    assert counted(below) == (8, 0, 0, 4, 4)
    await below.settle()


async def test_peers_are_not_asked_for_what_a_tier_has_all_of():
    near, far = disk(), peers()
    below = Below(near, far)
    near.have(below.keys(4))
    far.have(below.keys(4))
    await below.look_up(4)
    assert not far.asked
    await below.settle()


async def test_nothing_is_fetched_that_no_boundary_needs():
    source = disk()
    below = Below(source)
    keys = below.keys(6)
    source.have([keys[0], *keys[2:]])
    assert (await below.look_up(6)).hit_chunks == 1
    assert source.fetched == [(keys[0], 0)]
    await below.settle()


async def test_what_a_client_is_writing_is_not_fetched_and_nothing_behind_it():
    source = disk()
    below = Below(source)
    source.have(below.keys(4))
    domain = below.domain
    domain.lookup(below.registration, "writer", tokens(4))
    grant = domain.begin(below.registration, "writer", 1, 1)
    assert (await below.look_up(4)).hit_chunks == 1
    assert domain.commit(below.registration, grant.lease_id).error is None
    assert (await below.look_up(4, "t")).hit_chunks == 4
    assert len(source.fetched) == 3
    await below.settle()


@pytest.mark.parametrize("shards", [(0, 1, 2, 3), (0, 2)])
async def test_windows_are_brought_as_far_as_a_boundary_leans_on_them(shards):
    source = disk()
    below = Below(source, kv_layout=layout(2, FULL, window_group(5)))
    keys = below.keys(6)
    source.have(keys, (0, 2)).have(keys[3:4], (1, 3)).have(keys[5:], shards)
    found = await below.look_up(6)
    assert found.hit_chunks == (6 if shards == (0, 1, 2, 3) else 4)
    windows = {key for key, shard in source.fetched if shard in (1, 3)}
    assert windows == {keys[found.hit_chunks - 1]}
    await below.settle()


async def test_recurrent_state_is_brought_for_one_boundary_and_counts_for_all_before_it():
    source = disk()
    below = Below(source, kv_layout=layout(1, recurrent_group()))
    keys = below.keys(6)
    source.have([keys[1], keys[4]])
    found = await below.look_up(6)
    assert (found.hit_chunks, found.l2_chunks) == (5, 5)
    assert source.fetched == [(keys[4], 0)]
    assert counted(below) == (6, 1, 0, 5, 0)
    await below.settle()


async def test_half_a_chunk_from_each_side_is_a_whole_one():
    near, far = disk(), peers()
    below = Below(near, far, kv_layout=layout(2))
    keys = below.keys(3)
    near.have(keys, (0,))
    far.have(keys, (1,))
    assert (await below.look_up(3)).hit_chunks == 3
    assert far.asked == [(1, 1, 1)]
    await below.settle()


# --- what fails


async def test_what_one_source_fails_to_give_comes_from_the_next_one():
    near, far = disk(), peers()
    below = Below(near, far)
    keys = below.keys(6)
    near.have(keys)
    far.have(keys)
    near.broken.add((keys[1], 0))
    near.damaged.add((keys[4], 0))
    found = await below.look_up(6)
    assert (found.hit_chunks, found.l2_chunks, found.peer_chunks) == (6, 4, 2)
    assert sorted(far.fetched) == sorted([(keys[1], 0), (keys[4], 0)])
    # It is not asked again for what it could not give.
    assert near.fetched.count((keys[1], 0)) == 1
    assert below.prefetcher.counters.failed_objects == {"l2": 2}
    await below.settle()


async def test_what_nobody_can_give_is_a_shorter_hit():
    near = disk()
    below = Below(near)
    keys = below.keys(6)
    near.have(keys)
    near.damaged.add((keys[3], 0))
    found = await below.look_up(6)
    assert (found.hit_chunks, found.l2_chunks) == (3, 3)
    assert counted(below) == (6, 3, 0, 3, 0)
    await below.settle()
    assert below.prefetcher.counters.faults == 0


FAULTS = {
    "promises_what_it_has_not": lambda s, keys: (s.objects.clear(), s.promises.update((k, 0) for k in keys)),
    "raises_when_asked": lambda s, keys: setattr(s, "find_raises", True),
    "raises_at_once": lambda s, keys: setattr(s, "raises_after", 0),
    "raises_after_half": lambda s, keys: setattr(s, "raises_after", 3),
    "forgets_to_tell": lambda s, keys: setattr(s, "silent_after", 3),
    "gives_no_checksum": lambda s, keys: setattr(s, "bad_checksum", True),
    "all_are_damaged": lambda s, keys: s.damaged.update((k, 0) for k in keys),
    "tells_of_too_few_chunks": lambda s, keys: setattr(s, "masks_are", [1, 1]),
    "tells_of_too_many_chunks": lambda s, keys: setattr(s, "masks_are", [1] * 20),
    "tells_of_shards_that_there_are_none": lambda s, keys: setattr(s, "masks_are", [0xFF] * 6),
    "tells_of_nonsense": lambda s, keys: setattr(s, "masks_are", [-1, "?"]),
    "tells_twice": lambda s, keys: setattr(s, "tells_twice", True),
}
UNHARMED = {"tells_of_too_many_chunks": 6, "tells_of_shards_that_there_are_none": 6, "tells_twice": 6}
HALF = {"raises_after_half": 3, "forgets_to_tell": 3, "tells_of_too_few_chunks": 2}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_source_that_misbehaves_is_a_shorter_hit(fault, caplog):
    source = disk()
    below = Below(source)
    keys = below.keys(6)
    source.have(keys)
    FAULTS[fault](source, keys)
    found = await below.look_up(6)
    assert found.hit_chunks == (UNHARMED | HALF).get(fault, 0)
    await below.settle()
    assert below.domain.used == found.hit_chunks


@pytest.mark.parametrize("fault", FAULTS)
async def test_and_with_another_source_beside_it_no_shorter_one(fault):
    near, far = disk(), peers()
    below = Below(near, far)
    keys = below.keys(6)
    near.have(keys)
    far.have(keys)
    FAULTS[fault](near, keys)
    assert (await below.look_up(6)).hit_chunks == 6
    await below.settle()


async def test_a_source_that_hangs_is_given_up_and_its_memory_waits_until_it_lets_go():
    source = disk(gate=asyncio.Event(), stubborn=asyncio.Event())
    below = Below(source, limits=FetchLimits(fetch_s=0.02, grace_s=0.02))
    source.have(below.keys(4))
    found = await below.look_up(4)
    assert found.hit_chunks == 0
    store = below.domain.engine.store
    await until(lambda: store.quarantined_bytes)
    below.check()
    assert (store.reserved_bytes, store.quarantined_bytes) == (0, 4 * OBJECT_BYTES)
    # Others may store the same chunks: nothing that is written late ever shows there.
    below.domain.store_prompt(below.registration, "other", tokens(4))
    source.stubborn.set()
    await until(lambda: not store.quarantined_bytes)
    await below.settle()
    assert below.domain.hit(tokens(4)) == 4


async def test_a_source_that_cannot_tell_in_time_is_left_out():
    near, far = disk(asking=asyncio.Event()), peers()
    below = Below(near, far)
    near.have(below.keys(2))
    far.have(below.keys(4))
    found = await below.look_up(4, patience=0.02)
    assert found.hit_chunks == 0
    await below.settle()


# --- time


async def test_what_is_late_is_brought_all_the_same():
    source = disk(gate=asyncio.Event())
    below = Below(source)
    source.have(below.keys(4))
    found = await below.look_up(4, patience=0.02)
    assert (found.hit_chunks, found.lease_id) == (0, 0)
    assert below.domain.engine.store.reserved_bytes == 4 * OBJECT_BYTES
    below.check()
    source.gate.set()
    await below.settle()
    assert below.domain.hit(tokens(4)) == 4
    # Nothing holds it: whoever asks again finds it in memory.
    again = await below.look_up(4, "t")
    assert (again.hit_chunks, again.l2_chunks) == (4, 0)
    below.domain.engine.end_session(below.registration, ["s", "t"], below.domain.now)
    assert below.domain.engine.clear() == (4, 0)


async def test_what_was_not_begun_in_time_is_not_begun_any_more():
    source = disk(gate=asyncio.Event())
    limits = FetchLimits(batch_bytes=2 * OBJECT_BYTES, flight_bytes=100 * OBJECT_BYTES)
    below = Below(source, limits=limits)
    source.have(below.keys(8))
    await below.look_up(8, patience=0.02)
    source.gate.set()
    await below.settle()
    assert below.domain.hit(tokens(8)) == 4


@pytest.mark.parametrize("steps", range(14))
async def test_two_batches_of_a_prompt_come_at_once_and_end_together(steps):
    source = disk(gate=asyncio.Event())
    limits = FetchLimits(batch_bytes=2 * OBJECT_BYTES, flight_bytes=100 * OBJECT_BYTES, grace_s=0.02)
    below = Below(source, limits=limits)
    source.have(below.keys(8))
    lookup = asyncio.create_task(below.look_up(8))
    most = 0
    for _ in range(steps):
        await asyncio.sleep(0)
        most = max(most, below.prefetcher.budget.used)
    assert most <= 4 * OBJECT_BYTES
    assert steps < 13 or most == 4 * OBJECT_BYTES
    lookup.cancel()
    await asyncio.gather(lookup, return_exceptions=True)
    await below.prefetcher.close()
    below.nothing_is_left()


async def test_a_caller_that_gives_up_leaves_nothing_behind():
    source = disk(gate=asyncio.Event())
    below = Below(source)
    source.have(below.keys(6))
    below.domain.store_prompt(below.registration, "before", tokens(2))
    lookup = asyncio.create_task(below.look_up(6))
    await source.began()
    lookup.cancel()
    with pytest.raises(asyncio.CancelledError):
        await lookup
    assert not any(below.domain.engine.status().leases.values())
    below.check()
    source.gate.set()
    await below.settle()
    assert below.domain.engine.clear() == (6, 0)
    assert counted(below) == (2, 2, 0, 0, 0)


@pytest.mark.parametrize("steps", range(12))
async def test_a_caller_that_gives_up_at_any_moment_leaves_nothing_behind(steps):
    near, far = disk(), peers()
    below = Below(near, far)
    near.have(below.keys(4))
    far.have(below.keys(6))
    lookup = asyncio.create_task(below.look_up(6))
    for _ in range(steps):
        await asyncio.sleep(0)
    lookup.cancel()
    await asyncio.wait({lookup})
    await below.settle()
    below.domain.engine.end_session(below.registration, ["s"], below.domain.now)
    assert below.domain.engine.clear()[1] == 0


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("gate", [False, True])
async def test_closing_at_any_moment_leaves_nothing_behind(steps, gate):
    near, far = disk(gate=asyncio.Event() if gate else None), peers()
    below = Below(near, far)
    near.have(below.keys(4))
    far.have(below.keys(6))
    lookup = asyncio.create_task(below.look_up(6))
    for _ in range(steps):
        await asyncio.sleep(0)
    below.prefetcher.answer_now()
    await below.prefetcher.close()
    found = await lookup
    assert found.asked_chunks == 6
    assert below.prefetcher.under_way == 0
    below.nothing_is_left()


async def test_nothing_is_brought_once_the_server_stops():
    source = disk()
    below = Below(source)
    source.have(below.keys(2))
    below.prefetcher.answer_now()
    assert (await below.look_up(2)).hit_chunks == 0
    assert (await below.bring(2)).origins == {}
    assert not source.asked


# --- several at once


async def test_what_many_want_is_fetched_once():
    source = disk(gate=asyncio.Event())
    below = Below(source)
    source.have(below.keys(8))
    lookups = [asyncio.create_task(below.look_up(8 - i % 3, f"s{i}")) for i in range(9)]
    await source.began()
    source.gate.set()
    found = await asyncio.gather(*lookups)
    assert [each.hit_chunks for each in found] == [8 - i % 3 for i in range(9)]
    assert [each.l2_chunks for each in found] == [8 - i % 3 for i in range(9)]
    assert len(source.fetched) == len(set(source.fetched)) == 8
    await below.settle()


async def test_who_waits_for_anothers_fetch_that_fails_tries_for_himself():
    source, far = disk(gate=asyncio.Event()), peers()
    below = Below(source)
    source.have(below.keys(4))
    source.broken |= {(key, 0) for key in below.keys(4)[2:]}
    first = asyncio.create_task(below.look_up(4))
    await source.began()
    far.have(below.keys(4))
    below.prefetcher.add(far)
    second = asyncio.create_task(below.look_up(4, "t"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not far.fetched
    source.gate.set()
    found = await asyncio.gather(first, second)
    assert [each.hit_chunks for each in found] == [4, 4]
    assert len(far.fetched) == len(set(far.fetched)) == 2
    await below.settle()


async def test_a_fetch_goes_on_for_those_who_wait_when_its_caller_gives_up():
    source = disk(gate=asyncio.Event())
    below = Below(source)
    source.have(below.keys(4))
    first = asyncio.create_task(below.look_up(4))
    await source.began()
    second = asyncio.create_task(below.look_up(4, "t"))
    for _ in range(5):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    source.gate.set()
    assert (await second).hit_chunks == 4
    await below.settle()


async def test_bytes_under_way_are_bounded_over_all_lookups():
    source = disk(gate=asyncio.Event())
    limits = FetchLimits(batch_bytes=3 * OBJECT_BYTES, flight_bytes=5 * OBJECT_BYTES)
    below = Below(source, limits=limits, pool=64)
    for seed in range(6):
        source.have(below.keys(8, seed))
    lookups = [asyncio.create_task(below.look_up(8, f"s{seed}", seed)) for seed in range(6)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert below.domain.engine.store.reserved_bytes == 3 * OBJECT_BYTES
    source.gate.set()
    found = await asyncio.gather(*lookups)
    assert [each.hit_chunks for each in found] == [8] * 6
    assert source.most_in_flight <= 5 * OBJECT_BYTES
    await below.settle()


async def test_one_object_larger_than_the_bound_comes_alone():
    source = disk()
    below = Below(source, limits=FetchLimits(batch_bytes=1, flight_bytes=1))
    source.have(below.keys(3))
    assert (await below.look_up(3)).hit_chunks == 3
    assert source.most_in_flight == OBJECT_BYTES
    await below.settle()


async def test_bl52_a_prompt_larger_than_the_pool_gets_the_head_that_has_room():
    source = disk()
    below = Below(source, pool=20)
    source.have(below.keys(30))
    found = await below.look_up(30)
    # A tenth is left for what is stored meanwhile.
    assert found.hit_chunks == 18
    below.domain.store_prompt(below.registration, "other", tokens(2, seed=5))
    assert below.domain.hit(tokens(2, seed=5)) == 2
    await below.settle()


async def test_bl52_what_is_leased_is_never_evicted_for_what_is_brought():
    source = disk()
    below = Below(source, pool=20)
    domain = below.domain
    domain.store_prompt(below.registration, "held", tokens(6, seed=5))
    domain.store_prompt(below.registration, "idle", tokens(12, seed=6))
    domain.lookup(below.registration, "holder", tokens(6, seed=5))
    source.have(below.keys(19))
    found = await below.look_up(19)
    assert found.hit_chunks == 12
    assert domain.hit(tokens(6, seed=5)) == 6
    await below.settle()


# --- what comes in between


async def test_a_session_that_ended_meanwhile_gets_no_lease():
    source = disk()
    below = Below(source)
    source.have(below.keys(4))
    domain = below.domain
    found = await below.look_up(
        4, meanwhile=lambda: domain.engine.end_session(below.registration, ["s"], domain.now)
    )
    assert (found.hit_chunks, found.lease_id) == (0, 0)
    assert not any(domain.engine.status().leases.values())
    await below.settle()
    assert domain.engine.counters.failures["lookup_overtaken"] == 1


async def test_a_session_that_was_looked_up_again_meanwhile_keeps_the_newer_lease():
    source = disk()
    below = Below(source)
    source.have(below.keys(4))
    below.domain.store_prompt(below.registration, "before", tokens(2))
    newer = []
    found = await below.look_up(
        4, meanwhile=lambda: newer.append(below.domain.lookup(below.registration, "s", tokens(2)))
    )
    assert (found.hit_chunks, found.lease_id) == (0, 0)
    (session,) = below.domain.engine.sessions(0, 10, below.domain.now)
    assert session.lease_id == newer[0].lease_id
    await below.settle()


async def test_a_cleared_memory_is_brought_again():
    source = disk()
    below = Below(source)
    source.have(below.keys(4))
    await below.look_up(4)
    below.domain.engine.end_session(below.registration, ["s"], below.domain.now)
    assert below.domain.engine.clear() == (4, 0)
    found = await below.look_up(4)
    assert (found.hit_chunks, found.l2_chunks) == (4, 4)
    await below.settle()


async def test_what_is_evicted_while_its_tail_is_asked_for_is_brought_too():
    source = disk(asking=asyncio.Event())
    below = Below(source, kv_layout=layout(1, recurrent_group()))
    keys = below.keys(3)
    domain = below.domain
    source.have([keys[2]])
    lookup = asyncio.create_task(below.look_up(3))
    await asyncio.sleep(0)
    domain.engine.clear()
    source.asking.set()
    assert (await lookup).hit_chunks == 3
    await below.settle()


async def test_a_session_that_is_looked_up_twice_is_counted_once():
    source = disk()
    below = Below(source)
    source.have(below.keys(6))
    await below.look_up(4)
    assert counted(below) == (4, 0, 0, 4, 0)
    found = await below.look_up(8)
    assert (found.hit_chunks, found.l2_chunks) == (6, 2)
    assert counted(below) == (8, 2, 0, 6, 0)
    await below.look_up(8)
    assert counted(below) == (8, 2, 0, 6, 0)
    await below.settle()


async def test_a_brought_chunk_counts_as_seen_once_for_arc():
    source = disk()
    below = Below(source, policy="arc")
    source.have(below.keys(2))
    await below.look_up(2)
    assert [below.domain.engine.store.get(key).tier for key in below.keys(2)] == [1, 1]
    await below.look_up(2, "t")
    assert [below.domain.engine.store.get(key).tier for key in below.keys(2)] == [2, 2]
    await below.settle()


# --- what is told


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = tracing.make_provider("server")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    on = tracing.activate(tracing.Tracing(provider))
    yield exporter.get_finished_spans
    on.shutdown()


async def test_a_span_for_each_source_is_a_child_of_the_lookups(spans):
    near, far = disk(), peers()
    below = Below(near, far)
    keys = below.keys(5)
    near.have(keys[:3])
    far.have(keys)
    near.damaged.add((keys[1], 0))
    with telemetry.span("a lookup"):
        await below.look_up(5)
    await below.settle()
    *fetches, lookup = spans()
    assert lookup.name == "a lookup"
    assert {span.name for span in fetches} == {"kvwire.fetch"}
    assert {span.parent.span_id for span in fetches} == {lookup.context.span_id}
    told = {
        (a["kvwire.origin"], a["kvwire.source"], a["kvwire.chunks"], a["kvwire.size_bytes"] // OBJECT_BYTES,
         a["kvwire.fetched_bytes"] // OBJECT_BYTES, a["kvwire.failed_objects"])
        for a in (span.attributes for span in fetches)
    }  # fmt: skip
    assert told == {("l2", "disk", 3, 3, 2, 1), ("peer", "peers", 2, 2, 2, 0), ("peer", "peers", 1, 1, 1, 0)}


async def test_what_was_fetched_is_counted_by_origin():
    near, far = disk(), peers()
    below = Below(near, far)
    keys = below.keys(5)
    near.have(keys[:3])
    far.have(keys)
    near.damaged.add((keys[1], 0))
    await below.look_up(5)
    counters = below.prefetcher.counters
    assert counters.objects == {"l2": 2, "peer": 3}
    assert counters.bytes == {"l2": 2 * OBJECT_BYTES, "peer": 3 * OBJECT_BYTES}
    assert (counters.failed_objects, counters.faults) == ({"l2": 1}, 0)
    await below.settle()
