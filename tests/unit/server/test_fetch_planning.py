"""The plan of a fetch against brute force over every boundary."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.server.fetch.planning import longest_boundary, make_plan, needed_shards, origins_of, shards_of
from kvwire.server.fetch.source import Origin
from kvwire.server.layout import KvGroup, ShardMap
from kvwire.server.store import Hit
from support.domain import BLOCK_BYTES, CHUNK, FULL, layout, recurrent_group, window_group

LAYOUTS = [
    layout(),
    layout(2),
    layout(1, FULL, window_group(9)),
    layout(2, FULL, window_group(5), window_group(17)),
    layout(1, window_group(9), recurrent_group()),
    layout(2, recurrent_group()),
    layout(1, FULL, recurrent_group()),
]


def window_of(group: KvGroup) -> int | None:
    return group.chunks_needed(CHUNK)


def needs_of(shards: ShardMap, boundary: int, index: int) -> set[int]:
    """By the definition: shards of a chunk that a boundary leans on."""
    return {
        shards.shard(rank, number)
        for number, group in enumerate(shards.layout.groups)
        for rank in range(shards.layout.world_size)
        if (width := window_of(group)) is None or index >= boundary - width
    }


def reaches(shards: ShardMap, boundary: int, masks: list[int]) -> bool:
    return all(needs_of(shards, boundary, index) <= set(shards_of(masks[index])) for index in range(boundary))


@st.composite
def situations(draw):
    shards = ShardMap(draw(st.sampled_from(LAYOUTS)), CHUNK)
    everything = (1 << shards.num_shards) - 1
    mask = st.one_of(st.just(0), st.just(everything), st.integers(0, everything))
    chunks = draw(st.integers(0, 7))
    lists = st.lists(mask, min_size=chunks, max_size=chunks)
    memory = draw(lists)
    offers = draw(st.lists(lists, max_size=3))
    return shards, memory, offers


@given(situations())
def test_a_boundary_is_the_longest_that_every_group_can_resume_at(situation):
    shards, masks, _ = situation
    expected = max(b for b in range(len(masks) + 1) if reaches(shards, b, masks))
    assert longest_boundary(shards, masks) == expected
    for boundary in range(len(masks) + 1):
        found = needed_shards(shards, boundary)
        assert [set(shards_of(mask)) for mask in found] == [
            needs_of(shards, boundary, index) for index in range(boundary)
        ]


@settings(max_examples=300)
@given(situations(), st.integers(0, 40))
def test_a_plan_is_the_longest_boundary_that_all_reach_together_and_that_has_room(situation, units):
    shards, memory, offers = situation
    extents = [group.object_bytes + BLOCK_BYTES for group in shards.layout.groups]
    room = units * BLOCK_BYTES * 3
    plan = make_plan(shards, memory, offers, extents, room)
    together = list(memory)
    for offer in offers:
        together = [mine | theirs for mine, theirs in zip(together, offer, strict=True)]

    def size(boundary: int) -> int:
        lacking = [needs_of(shards, boundary, i) - set(shards_of(memory[i])) for i in range(boundary)]
        return sum(extents[shard % shards.num_groups] for each in lacking for shard in each)

    fitting = [b for b in range(len(memory) + 1) if reaches(shards, b, together) and size(b) <= room]
    assert plan.boundary == max(fitting)
    assert plan.size == size(plan.boundary)
    for index in range(plan.boundary):
        rest = needs_of(shards, plan.boundary, index) - set(shards_of(memory[index]))
        for offer, gives in zip(offers, plan.gives, strict=True):
            assert set(shards_of(gives[index])) == rest & set(shards_of(offer[index]))
            rest -= set(shards_of(offer[index]))
        assert not rest
    assert all(len(gives) == plan.boundary for gives in plan.gives)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.data())
def test_every_chunk_of_a_hit_has_one_origin(boundary, first, before, counted, data):
    first, before = min(first, boundary), min(before, boundary)
    came = data.draw(st.dictionaries(st.integers(0, 9), st.sampled_from([Origin.L2, Origin.PEER])))
    found = origins_of(Hit(boundary, first, []), before, came, counted)
    assert sum(found.values()) == max(boundary - counted, 0)
    if not came:
        assert not found[Origin.L2] + found[Origin.PEER]
    whole = origins_of(Hit(boundary, 0, []), before, came)
    assert whole[Origin.L2] == sum(came.get(index) is Origin.L2 for index in range(boundary))


def test_a_long_prompt_that_does_not_fit_is_planned_in_no_time():
    shards = ShardMap(layout(2, FULL, window_group(5)), CHUNK)
    chunks = 20_000
    everything = (1 << shards.num_shards) - 1
    plan = make_plan(shards, [0] * chunks, [[everything] * chunks], (128, 128), 128 * 1000)
    assert plan.boundary == 499
    assert plan.size <= 128 * 1000
