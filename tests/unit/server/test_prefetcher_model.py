"""Random prompts, sources and faults, several lookups at a time: what can come comes, and is right."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.server.fetch.planning import longest_boundary
from kvwire.server.fetch.prefetcher import FetchLimits
from kvwire.server.fetch.source import Origin
from support.below_memory import Below
from support.domain import FULL, OBJECT_BYTES, layout, recurrent_group, tokens, window_group
from support.fake_source import FakeSource

CHUNKS = 6
LAYOUTS = [
    layout(),
    layout(2),
    layout(1, FULL, window_group(9)),
    layout(2, FULL, recurrent_group()),
    layout(1, window_group(9), recurrent_group()),
]
PLACES = st.sets(st.tuples(st.integers(0, CHUNKS - 1), st.integers(0, 3)), max_size=30)
FAULTS = st.sets(st.tuples(st.integers(0, CHUNKS - 1), st.integers(0, 3)), max_size=3)


@st.composite
def situations(draw):
    sources = draw(st.lists(st.tuples(PLACES, FAULTS, FAULTS), min_size=1, max_size=3))
    lookups = draw(st.lists(st.integers(1, CHUNKS), min_size=1, max_size=4))
    limits = FetchLimits(
        batch_bytes=draw(st.integers(1, 12)) * OBJECT_BYTES,
        flight_bytes=draw(st.integers(1, 24)) * OBJECT_BYTES,
        batch_objects=draw(st.integers(1, 9)),
    )
    return draw(st.sampled_from(LAYOUTS)), draw(PLACES), sources, lookups, limits


def has(below: Below, places) -> set[tuple[bytes, int]]:
    keys, count = below.keys(CHUNKS), below.space.shards.num_shards
    return {(keys[index], shard) for index, shard in places if shard < count}


def in_memory(below: Below, places) -> None:
    """As if some of it had been brought before."""
    keys = below.keys(CHUNKS)
    for key, shard in sorted(has(below, places), key=lambda name: keys.index(name[0])):
        fill = below.fills.begin(below.space, keys, [(keys.index(key), 1 << shard)])
        for stored in list(fill.objects):
            below.fills.commit(stored, b"", b"")


def reachable(below: Below, sources, chunks: int) -> int:
    """The boundary over what memory has and any source can give."""
    good = set().union(*(source.objects - source.broken - source.damaged for source in sources))
    resident = below.fills.survey(below.space, below.keys(chunks)).resident
    masks = [
        mask | sum(1 << shard for name, shard in good if name == key)
        for key, mask in zip(below.keys(chunks), resident, strict=True)
    ]
    return longest_boundary(below.space.shards, masks)


@settings(max_examples=150, deadline=None)
@given(situations())
def test_what_can_come_comes_and_nothing_else(situation):
    asyncio.run(check(*situation))


async def check(kv_layout, memory, sources, lookups, limits):
    below = Below(kv_layout=kv_layout, limits=limits, pool=64)
    made = []
    for number, (places, broken, damaged) in enumerate(sources):
        source = FakeSource(f"source {number}", Origin.PEER if number == 2 else Origin.L2)
        source.objects, source.broken, source.damaged = (
            has(below, each) for each in (places, broken, damaged)
        )
        below.prefetcher.add(source)
        made.append(source)
    in_memory(below, memory)
    expected = [reachable(below, made, chunks) for chunks in lookups]
    found = await asyncio.gather(
        *(below.look_up(chunks, f"s{number}") for number, chunks in enumerate(lookups))
    )
    assert [each.hit_chunks for each in found] == expected
    for each in found:
        assert each.l2_chunks + each.peer_chunks <= each.hit_chunks
    for source in made:
        given = [name for name in source.fetched if name not in source.broken | source.damaged]
        assert len(given) == len(set(given))
    everything = [
        name for s in made for name in s.fetched if name not in s.broken | s.damaged and name in s.objects
    ]
    assert len(everything) == len(set(everything)), "an object was fetched twice"
    await below.settle()
    counters = below.domain.engine.counters
    assert counters.asked_tokens == 4 * sum(lookups)
    assert counters.hit_tokens == 4 * sum(expected)
    below.domain.engine.end_session(
        below.registration, [f"s{number}" for number in range(len(lookups))], below.domain.now
    )
    assert below.domain.engine.clear()[1] == 0
    assert below.domain.used == 0
    assert below.domain.hit(tokens(CHUNKS)) == 0
