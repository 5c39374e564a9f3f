"""Objects that the server itself brings into memory: what they take, and that it comes back."""

from __future__ import annotations

import pytest

from kvwire.keys import chunk_keys, root, salt_digest
from kvwire.server.messages import Prompt, SlotState
from support.domain import (
    CHUNK,
    FULL,
    NAMESPACE,
    OBJECT_BYTES,
    Domain,
    layout,
    states,
    tokens,
    with_salt,
)

SUM = b"c" * 16


class Below:
    """A domain with an engine, and a prompt that lies somewhere below the memory."""

    def __init__(self, pool: int = 28, world: int = 1, policy: str = "lru") -> None:
        self.domain = Domain(pool, policy, layout(world))
        self.registration = self.domain.register()
        self.fills = self.domain.engine.fills
        self.store = self.domain.engine.store
        self.space = self.domain.engine._state.spaces.open(NAMESPACE, CHUNK)

    def keys(self, chunks: int, seed: int = 0) -> list[bytes]:
        return chunk_keys(root(NAMESPACE, CHUNK), tokens(chunks, seed), CHUNK)

    def begin(self, keys, mask: int = 1, first: int = 0):
        fill = self.fills.begin(self.space, keys, [(i, mask) for i in range(first, len(keys))])
        self.domain.check()
        return fill

    def commit_all(self, fill, hold=None) -> None:
        for stored, index in list(fill.objects.items()):
            self.fills.commit(stored, SUM, tokens(1, index), hold)
            self.domain.check()


@pytest.fixture
def below() -> Below:
    return Below()


def test_what_was_filled_is_found_as_if_it_had_been_stored(below):
    keys = below.keys(4)
    fill = below.begin(keys)
    assert below.domain.hit(tokens(4)) == 0
    below.commit_all(fill)
    assert below.domain.hit(tokens(4)) == 4
    assert below.domain.events.stored == keys
    assert below.domain.events.log[2].tokens == tokens(1, 2)
    assert below.domain.events.log[2].parent_key == keys[1]
    assert [below.store.lookup_object(below.space, key, 0).checksum for key in keys] == [SUM] * 4
    assert not len(below.fills)


def test_nothing_is_readable_before_it_is_committed_and_an_aborted_object_is_free(below):
    keys = below.keys(2)
    fill = below.begin(keys)
    assert below.domain.used == 2
    for stored in list(fill.objects):
        below.fills.abort(stored)
        below.domain.check()
    assert below.domain.used == 0
    assert below.domain.hit(tokens(2)) == 0
    assert not below.domain.events.stored


def test_memory_that_may_still_be_written_to_waits(below):
    keys = below.keys(2)
    fill = below.begin(keys)
    stored = next(iter(fill.objects))
    below.fills.quarantine(stored)
    below.domain.check()
    assert below.store.quarantined_bytes == OBJECT_BYTES
    # The key is free for others meanwhile, and so is not the memory.
    again = below.begin(keys)
    assert [new.offset == stored.offset for new in again.objects] == [False]
    below.fills.release(stored)
    below.domain.check()
    assert below.store.quarantined_bytes == 0


def test_what_is_there_or_being_written_by_anybody_is_left_to_them(below):
    domain, registration = below.domain, below.registration
    domain.lookup(registration, "s", tokens(4))
    domain.store(registration, "s", 0, 1)
    written = domain.begin(registration, "s", 1, 1)
    first = below.begin(below.keys(3))
    assert list(first.objects.values()) == [2]
    second = below.begin(below.keys(4))
    assert list(second.objects.values()) == [3]
    survey = below.fills.survey(below.space, below.keys(5))
    assert survey.resident == [1, 0, 0, 0, 0]
    assert survey.closed == [0, 1, 0, 0, 0]
    assert survey.coming == [0, 0, 1, 1, 0]
    # And a client is told to leave it to the fill.
    grant = domain.begin(registration, "s", 0, 4)
    assert states(grant) == [
        SlotState.ALREADY_STORED,
        SlotState.BEING_WRITTEN,
        SlotState.BEING_WRITTEN,
        SlotState.BEING_WRITTEN,
    ]
    below.commit_all(first)
    below.commit_all(second)
    assert domain.commit(registration, written.lease_id).error is None
    assert domain.hit(tokens(4)) == 4
    domain.check()


def test_ids_of_fills_and_leases_are_never_the_same(below):
    domain, registration = below.domain, below.registration
    domain.lookup(registration, "s", tokens(4))
    ids = []
    for index in range(3):
        fill = below.begin(below.keys(4)[: index + 1])
        ids += [fill.id, domain.begin(registration, "s", 3 - index, 1).lease_id]
        for stored in list(fill.objects):
            below.fills.abort(stored)
    # The last store finds its chunk being written.
    assert len({each for each in ids if each}) == len([each for each in ids if each])


def test_bl52_restoring_11_into_28_of_which_18_are_taken_evicts_one():
    below = Below(pool=28)
    domain, registration = below.domain, below.registration
    domain.store_prompt(registration, "other", tokens(18, seed=5))
    assert domain.used == 18
    fill = below.begin(below.keys(11))
    assert not fill.full
    assert len(fill.objects) == 11
    assert domain.engine.store.evicted_chunks == 1
    below.commit_all(fill)
    assert domain.hit(tokens(11)) == 11
    assert domain.hit(tokens(18, seed=5)) == 17


@pytest.mark.parametrize("chunks", [29, 40])
def test_bl52_a_request_larger_than_the_pool_evicts_nothing(chunks):
    below = Below(pool=28)
    below.domain.store_prompt(below.registration, "other", tokens(18, seed=5))
    fill = below.begin(below.keys(chunks))
    assert fill.full
    assert not fill.objects
    assert below.domain.hit(tokens(18, seed=5)) == 18
    assert below.domain.engine.store.evicted_chunks == 0


def test_bl52_a_request_that_leases_leave_no_room_for_evicts_nothing():
    below = Below(pool=28)
    domain, registration = below.domain, below.registration
    domain.store_prompt(registration, "idle", tokens(10, seed=6))
    domain.store_prompt(registration, "held", tokens(10, seed=5))
    domain.lookup(registration, "holder", tokens(10, seed=5))
    assert below.begin(below.keys(19)).full
    assert domain.hit(tokens(10, seed=6)) == 10
    fits = below.begin(below.keys(18))
    assert len(fits.objects) == 18
    assert domain.hit(tokens(10, seed=6)) == 0


def test_the_prompt_itself_is_never_evicted_for_its_own_tail():
    below = Below(pool=8)
    domain = below.domain
    domain.store_prompt(below.registration, "own", tokens(4))
    domain.store_prompt(below.registration, "other", tokens(4, seed=5))
    assert below.begin(below.keys(9), first=4).full
    fill = below.begin(below.keys(8), first=4)
    assert len(fill.objects) == 4
    assert domain.hit(tokens(4)) == 4
    assert domain.hit(tokens(4, seed=5)) == 0


def test_a_chunk_is_reserved_whole_or_not_at_all():
    below = Below(pool=7, world=2)
    domain = below.domain
    domain.register(engine_id="held", rank=0)
    domain.lookup(below.registration, "s", tokens(1, seed=9))
    blocker = domain.begin(below.registration, "s", 0, 1)
    assert len(blocker.reserved) == 1
    fill = below.begin(below.keys(4), mask=0b11)
    assert fill.full
    assert not fill.objects
    assert len(below.begin(below.keys(3), mask=0b11).objects) == 6


def test_what_was_brought_stays_until_somebody_has_leased_it():
    below = Below(pool=8)
    domain, registration = below.domain, below.registration
    hold = below.fills.hold()
    below.commit_all(below.begin(below.keys(4)), hold)
    domain.store_prompt(registration, "other", tokens(8, seed=5))
    assert domain.hit(tokens(4)) == 4
    assert domain.engine.clear()[1] == 4
    found = domain.lookup(registration, "s", tokens(4))
    below.fills.let_go(hold)
    below.fills.let_go(hold)
    domain.check()
    assert domain.engine.clear()[1] == 4
    assert found.hit_chunks == 4
    domain.engine.end_session(registration, ["s"], domain.now)
    assert domain.engine.clear() == (4, 0)


def test_a_hold_that_has_ended_takes_nothing_more(below):
    hold = below.fills.hold()
    fill = below.begin(below.keys(2))
    below.fills.let_go(hold)
    below.commit_all(fill, hold)
    assert below.domain.engine.clear() == (2, 0)
    below.domain.check()


def test_a_discarded_object_that_a_hold_has_goes_with_the_hold(below):
    hold = below.fills.hold()
    below.commit_all(below.begin(below.keys(2)), hold)
    stored = below.store.lookup_object(below.space, below.keys(2)[1], 0)
    assert below.domain.engine.discard(below.store.ref(stored))
    below.domain.check()
    below.fills.let_go(hold)
    below.domain.check()
    assert below.domain.used == 1


def test_a_layout_that_is_registered_anew_meanwhile_does_not_get_the_old_bytes():
    below = Below(pool=8)
    domain = below.domain
    fill = below.begin(below.keys(2))
    domain.engine.unregister(below.registration, domain.now)
    other = domain.register(kv_layout=layout(2))
    domain.lookup(other, "s", tokens(2))
    # The place is taken until the fill is over.
    assert states(domain.begin(other, "s", 0, 2)) == [SlotState.NO_SPACE] * 2
    below.commit_all(fill)
    assert domain.hit(tokens(2)) == 0
    domain.store(other, "s", 0, 2)
    domain.check()


def test_a_former_layouts_chunk_makes_way_and_one_that_is_held_does_not(below):
    domain = below.domain
    domain.store_prompt(below.registration, "s", tokens(2))
    domain.engine.unregister(below.registration, domain.now)
    below.registration = domain.register(kv_layout=layout(1, FULL, FULL))
    former, below.space = below.space, domain.engine._state.spaces.open(NAMESPACE, CHUNK)
    assert below.fills.survey(below.space, below.keys(2)).closed == [0, 0]
    hold = below.fills.hold()
    below.fills.keep_resident(hold, former, below.keys(1), [1])
    assert below.fills.survey(below.space, below.keys(2)).closed == [-1, 0]
    assert below.begin(below.keys(2)).full
    below.fills.let_go(hold)
    assert len(below.begin(below.keys(2), mask=0b11).objects) == 4


def test_keys_that_name_themselves_as_their_own_parents_harm_nothing():
    below = Below()
    (key,) = below.keys(1)
    fill = below.fills.begin(below.space, [key, key], [(1, 1)])
    below.domain.check()
    below.commit_all(fill)
    assert below.domain.hit(tokens(1)) == 1
    below.begin(below.keys(3))


def test_a_client_whose_keys_name_themselves_as_parents_stops_nobody():
    domain = Domain(8)
    registration = domain.register()
    (key,) = Below().keys(1)
    domain.engine.lookup(registration, "s", Prompt(NAMESPACE, keys=(key, key, key)), domain.now)
    domain.store(registration, "s", 1, 1)
    assert states(domain.begin(registration, "s", 2, 1)) == [SlotState.ALREADY_STORED]
    domain.check()


def test_bl52_a_tenant_at_its_quota_gives_way_to_itself_or_gets_nothing():
    below = Below(pool=28, policy="tenant")
    domain, registration = below.domain, below.registration
    domain.store_prompt(registration, "others", tokens(10, seed=6), with_salt("b"))
    domain.store_prompt(registration, "own", tokens(6, seed=5), with_salt("a"))
    below.store.tenants.set_limits({salt_digest("a"): 8 * OBJECT_BYTES})
    below.space = domain.engine.space_of(with_salt("a"))
    keys = chunk_keys(root(with_salt("a"), CHUNK), tokens(9), CHUNK)
    assert below.begin(keys).full
    assert domain.engine.store.evicted_chunks == 0
    fill = below.begin(keys[:5])
    assert not fill.full
    below.commit_all(fill)
    assert domain.hit(tokens(6, seed=5), with_salt("a")) == 3
    assert domain.hit(tokens(10, seed=6), with_salt("b")) == 10


def test_tenants_of_one_prompt_share_nothing(below):
    fill = below.begin(below.keys(2))
    below.commit_all(fill)
    assert below.domain.hit(tokens(2), with_salt("a")) == 0
