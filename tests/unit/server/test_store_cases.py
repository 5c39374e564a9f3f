"""Cases of the public record, as far as the engine decides them: stores, retrieves, eviction."""

from __future__ import annotations

import pytest

from kvwire.errors import (
    InvalidArgument,
    LeaseLost,
    NotRegistered,
    OutOfSpace,
)
from kvwire.keys import ExtraInput, Namespace
from kvwire.server.engine import make_store
from kvwire.server.messages import (
    MissingObject,
    ObjectRange,
    SlotState,
)
from kvwire.server.store import POLICIES
from support.domain import (
    CHUNK,
    FULL,
    OBJECT_BYTES,
    Domain,
    layout,
    states,
    tokens,
    window_group,
    with_salt,
)


@pytest.fixture
def domain() -> Domain:
    return Domain()


def test_bl19_a_writer_that_dies_publishes_nothing_and_blocks_nobody(domain: Domain) -> None:
    domain = Domain(pool=8)
    dead, alive = domain.register("a"), domain.register("b")
    domain.lookup(dead, "r", tokens(4))
    domain.lookup(alive, "r", tokens(4))
    orphaned = domain.begin(dead, "r", 0, 4)
    assert domain.hit(tokens(4)) == 0
    assert states(domain.begin(alive, "r", 0, 4)) == [SlotState.BEING_WRITTEN] * 4
    domain.engine.disconnect(dead, domain.now)
    domain.check()
    assert domain.hit(tokens(4)) == 0
    assert domain.events.log == []
    # At once, although the old slots are not free yet.
    again = domain.begin(alive, "r", 0, 4)
    assert states(again) == [SlotState.RESERVED] * 4
    assert not {slot.offset for slot in again.slots} & {slot.offset for slot in orphaned.slots}
    assert domain.commit(alive, again.lease_id).committed == 4
    (owner,) = domain.engine.quarantined_owners()
    assert (owner.registration_id, owner.quarantined_bytes) == (dead, 4 * OBJECT_BYTES)
    assert domain.used == 8
    assert domain.engine.owner_dead(dead) == 1
    assert domain.used == 4
    assert len(domain.events.stored) == 4
    with pytest.raises(NotRegistered):
        domain.commit(dead, orphaned.lease_id)
    domain.check()


def test_bl19_an_expired_store_publishes_nothing_even_if_its_commit_comes(domain: Domain) -> None:
    client = domain.register()
    domain.lookup(client, "r", tokens(3))
    grant = domain.begin(client, "r", 0, 3)
    domain.now += grant.ttl
    late = domain.commit(client, grant.lease_id)
    assert isinstance(late.error, LeaseLost)
    assert (late.committed, late.lost) == (0, 3)
    assert domain.hit(tokens(3)) == 0
    # The commit was the acknowledgement: the memory is back.
    assert domain.used == 0
    assert domain.engine.counters.expired_leases == 1
    domain.check()


def test_bl19_bad_slots_of_a_store_are_aborted_and_the_good_ones_committed(domain: Domain) -> None:
    client = domain.register()
    domain.lookup(client, "r", tokens(4))
    grant = domain.begin(client, "r", 0, 4)
    result = domain.commit(client, grant.lease_id, 0, 1, 3)
    assert (result.committed, result.aborted, result.lost) == (3, 1, 0)
    assert domain.hit(tokens(4)) == 2
    assert domain.used == 3
    domain.check()


def test_bl22_a_retrieve_names_exactly_what_is_missing(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(4))
    assert domain.lookup(client, "r", tokens(4)).hit_chunks == 4
    held = domain.retrieve(client, "r", 0, 4)
    damaged = domain.engine.live_lease(client, held.lease_id, domain.now).objects[2]
    assert domain.engine.discard(damaged)
    domain.check()
    # Who was reading it learns that, and who comes after gets the rest.
    assert not domain.end(client, held.lease_id)
    grant = domain.retrieve(client, "r", 0, 4)
    assert grant.missing == (MissingObject(2, 0),)
    assert [slot.chunk_index for slot in grant.slots] == [0, 1, 3]
    assert domain.end(client, grant.lease_id)
    assert domain.hit(tokens(4)) == 2


def test_bl22_an_expired_read_is_never_plain_success(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(2))
    domain.lookup(client, "r", tokens(2))
    grant = domain.retrieve(client, "r", 0, 2)
    domain.now += grant.ttl
    assert not domain.end(client, grant.lease_id)
    assert not domain.end(client, grant.lease_id)
    assert domain.engine.counters.retrieved_objects == 0


def test_bl23_only_the_missing_part_of_a_hit_is_retrieved(domain: Domain) -> None:
    domain = Domain(kv_layout=layout(1, FULL, window_group(4)))
    client = domain.register()
    domain.store_prompt(client, "w", tokens(4))
    domain.lookup(client, "r", tokens(4))
    ranges = (ObjectRange(0, 2, 2), ObjectRange(1, 3, 1), ObjectRange(0, 3, 1))
    grant = domain.retrieve(client, "r", 2, 2, ranges)
    assert [(slot.chunk_index, slot.group_index) for slot in grant.slots] == [(2, 0), (3, 0), (3, 1)]
    assert domain.end(client, grant.lease_id)
    for bad in (ObjectRange(0, 1, 2), ObjectRange(2, 2, 1), ObjectRange(0, 2, 0), ObjectRange(0, 3, 2)):
        assert domain.retrieve(client, "r", 2, 2, (bad,)).error is not None
    domain.check()


def test_bl26_ranks_never_disagree_about_a_hit(domain: Domain) -> None:
    domain = Domain(kv_layout=layout(2))
    scheduler = domain.register(role="scheduler")
    workers = [domain.register(role="worker", rank=rank) for rank in range(2)]
    domain.lookup(scheduler, "w", tokens(5))
    for worker in workers:
        domain.store(worker, "w", 0, 5)
    read = domain.retrieve(workers[1], "w", 2, 1)
    assert domain.engine.discard(domain.engine.live_lease(workers[1], read.lease_id, domain.now).objects[0])
    domain.end(workers[1], read.lease_id)
    found = domain.lookup(scheduler, "r", tokens(5))
    assert found.hit_chunks == 2
    assert sorted(chunk.pins for chunk in domain.engine.store.chunks()) == [0, 0, 0, 1, 1]
    domain.check()


def test_bl26_siblings_are_evicted_together_under_pressure() -> None:
    domain = Domain(pool=24, kv_layout=layout(2, FULL, window_group(4)))
    scheduler = domain.register(role="scheduler")
    workers = [domain.register(role="worker", rank=rank) for rank in range(2)]
    domain.lookup(scheduler, "w", tokens(6))
    for worker in workers:
        domain.store(worker, "w", 0, 6)
    assert domain.used == 24
    domain.engine.evict_to(0.5)
    assert domain.used == 12
    assert domain.hit(tokens(6)) == 3
    for worker in workers:
        grant = domain.retrieve(worker, "w", 0, 6)
        assert len(grant.slots) == 6
        assert len(grant.missing) == 6
    domain.check()


def shared_copy(ranks: int) -> tuple[Domain, int, list[int]]:
    """Ranks that hold the same bytes have one shard, of which each is a reader. Two chunks are stored, looked
    up and leased."""
    domain = Domain(pool=8)
    scheduler = domain.register(role="scheduler")
    workers = [domain.register(role="worker", rank=0) for _ in range(ranks)]
    domain.lookup(scheduler, "w", tokens(2))
    grants = [domain.begin(worker, "w", 0, 2) for worker in workers]
    assert [states(grant)[0] for grant in grants] == [SlotState.RESERVED] + [SlotState.BEING_WRITTEN] * (
        ranks - 1
    )
    assert domain.commit(workers[0], grants[0].lease_id).committed == 2
    domain.engine.end_session(scheduler, ["w"], domain.now)
    assert domain.lookup(scheduler, "r", tokens(2)).hit_chunks == 2
    return domain, scheduler, workers


@pytest.mark.parametrize("failing", [None, 0, 2])
def test_bl29_a_shared_copy_stays_until_its_last_reader_has_done(failing: int | None) -> None:
    domain, scheduler, workers = shared_copy(4)
    reads = [domain.retrieve(worker, "r", 0, 2) for worker in workers]
    domain.engine.end_session(scheduler, ["r"], domain.now)
    order = [failing, *(rank for rank in range(4) if rank != failing)] if failing is not None else range(4)
    for rank in order:
        domain.engine.evict_to(0.0)
        assert domain.used == 2
        if rank == failing:
            # Its lease ends with its registration, and takes nobody else's with it.
            domain.engine.disconnect(workers[rank], domain.now)
        else:
            assert domain.end(workers[rank], reads[rank].lease_id)
            # Given back twice, it is counted and does not become negative.
            assert not domain.end(workers[rank], reads[rank].lease_id)
        domain.check()
    assert all(chunk.pins == 0 for chunk in domain.engine.store.chunks())
    domain.engine.evict_to(0.0)
    assert domain.used == 0


def test_bl29_readers_come_at_different_times() -> None:
    """The lookup's lease holds what no rank has asked for yet."""
    domain, scheduler, workers = shared_copy(4)
    for worker in workers:
        domain.engine.evict_to(0.0)
        grant = domain.retrieve(worker, "r", 0, 2)
        assert (len(grant.slots), list(grant.missing)) == (2, [])
        assert domain.end(worker, grant.lease_id)
    domain.engine.end_session(scheduler, ["r"], domain.now)
    assert all(chunk.pins == 0 for chunk in domain.engine.store.chunks())
    domain.engine.evict_to(0.0)
    assert domain.used == 0


@pytest.mark.parametrize("salt", ["s" * 512, "@", "/", "..", "Ω", "a-SEP-b"])
def test_bl50_long_and_odd_but_legal_identities_work_and_never_meet(domain: Domain, salt: str) -> None:
    client = domain.register(namespace=Namespace("m" * 512))
    space = Namespace("m" * 512, salt=salt)
    domain.store_prompt(client, "w", tokens(1), space)
    assert domain.hit(tokens(1), space) == 1
    assert domain.hit(tokens(1), Namespace("m" * 512)) == 0
    assert domain.hit(tokens(1), Namespace("m" * 512, adapter=salt)) == 0


@pytest.mark.parametrize("salt", ["new\nline", "nul\0", "s" * 513])
def test_bl50_illegal_identities_are_refused_without_quoting_them(domain: Domain, salt: str) -> None:
    client = domain.register()
    with pytest.raises(InvalidArgument) as refused:
        domain.lookup(client, "r", tokens(1), with_salt(salt))
    assert refused.value.metadata["field"] == "salt"
    assert salt not in str(refused.value)
    assert domain.engine.status().sessions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_bl52_use_falls_for_every_policy(policy: str) -> None:
    domain = Domain(pool=20, policy=policy)
    client = domain.register()
    for seed in range(12):
        domain.store_prompt(client, "w", tokens(2, seed))
        domain.hit(tokens(2, seed))
    assert domain.used == 20
    domain.engine.evict_to(0.8)
    assert domain.used == 16
    assert domain.engine.evict_to(0.0, max_chunks=3) == 3 * OBJECT_BYTES
    domain.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_bl52_everything_locked_is_refused_at_once(policy: str) -> None:
    domain = Domain(pool=4, policy=policy)
    client = domain.register()
    domain.store_prompt(client, "w", tokens(4))
    assert domain.lookup(client, "r", tokens(4)).hit_chunks == 4
    domain.lookup(client, "new", tokens(2, seed=1))
    refused = domain.begin(client, "new", 0, 2)
    assert states(refused) == [SlotState.NO_SPACE] * 2
    assert refused.lease_id == 0
    assert domain.engine.counters.evicted_chunks == 0
    assert domain.engine.counters.failures["OUT_OF_SPACE"] == 2
    domain.engine.end_session(client, ["r"], domain.now)
    assert states(domain.begin(client, "new", 0, 2)) == [SlotState.RESERVED] * 2


@pytest.mark.parametrize("policy", POLICIES)
def test_bl52_room_is_made_where_it_can_be(policy: str) -> None:
    """A pool of 28 with 18 unlocked residents takes 11 new objects by evicting one."""
    domain = Domain(pool=28, policy=policy)
    client = domain.register()
    for seed in range(9):
        domain.store_prompt(client, "w", tokens(2, seed))
    domain.lookup(client, "r", tokens(11, seed=50))
    assert states(domain.begin(client, "r", 0, 11)) == [SlotState.RESERVED] * 11
    assert domain.engine.counters.evicted_chunks == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_bl52_an_object_larger_than_the_pool_evicts_nothing(policy: str) -> None:
    domain = Domain(pool=4, policy=policy, kv_layout=layout(1, FULL, window_group(9)))
    client = domain.register()
    domain.store_prompt(client, "w", tokens(2))
    giant = Namespace("giant")
    huge = layout(1, type(FULL)("full", 2, 0, 1, 4 * OBJECT_BYTES, 2))
    big = domain.register("big", namespace=giant, kv_layout=huge)
    domain.lookup(big, "r", tokens(1), giant)
    refused = domain.begin(big, "r", 0, 1)
    assert isinstance(refused.error, OutOfSpace)
    assert refused.error.metadata["capacity"] == str(4 * OBJECT_BYTES)
    assert domain.hit(tokens(2)) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_bl53_the_tail_of_a_prompt_stored_in_parts_goes_first(policy: str) -> None:
    domain = Domain(pool=8, policy=policy)
    client = domain.register()
    domain.lookup(client, "w", tokens(8))
    for first in range(0, 8, 2):
        domain.store(client, "w", first, 2)
    domain.engine.evict_to(0.5)
    assert domain.hit(tokens(8)) == 4
    domain.check()


@pytest.mark.parametrize("policy", POLICIES)
def test_bl53_a_hit_refreshes_the_head_also_when_only_the_tail_is_read(policy: str) -> None:
    domain = Domain(pool=16, policy=policy)
    client = domain.register()
    domain.store_prompt(client, "a", tokens(8, seed=1))
    domain.store_prompt(client, "b", tokens(8, seed=2))
    assert domain.lookup(client, "r", tokens(8, seed=1)).hit_chunks == 8
    grant = domain.retrieve(client, "r", 4, 4)
    assert domain.end(client, grant.lease_id)
    domain.engine.end_session(client, ["r"], domain.now)
    domain.engine.evict_to(14 / 16)
    assert (domain.hit(tokens(8, seed=1)), domain.hit(tokens(8, seed=2))) == (8, 6)
    domain.engine.evict_to(6 / 16)
    assert (domain.hit(tokens(8, seed=1)), domain.hit(tokens(8, seed=2))) == (6, 0)


def test_bl07_an_image_is_part_of_the_key(domain: Domain) -> None:
    client = domain.register()
    first = ExtraInput(b"image 1", start=CHUNK, length=2)
    domain.lookup(client, "w", tokens(3), extras=(first,))
    domain.store(client, "w", 0, 3)
    assert domain.lookup(client, "r1", tokens(3), extras=(first,)).hit_chunks == 3
    assert domain.lookup(client, "r2", tokens(3), extras=(ExtraInput(b"image 2", CHUNK, 2),)).hit_chunks == 1
    assert domain.lookup(client, "r3", tokens(3)).hit_chunks == 1
    # The same session, asked again with another image, must not reuse the keys that it knows.
    assert domain.lookup(client, "r1", tokens(3), extras=(ExtraInput(b"image 2", CHUNK, 2),)).hit_chunks == 1


def test_an_unknown_policy_never_starts() -> None:
    with pytest.raises(Exception, match="not implemented"):
        make_store(4096, "fifo")


@pytest.mark.parametrize("quota", [True, False])
def test_bl52_a_chunk_that_has_no_room_as_a_whole_evicts_nothing(quota: bool) -> None:
    """Its first object would find room in place of another prompt's, its second none."""
    room = 5 * OBJECT_BYTES // 2
    domain = Domain(pool=20, policy="tenant", kv_layout=layout(1, FULL, window_group(5, blocks=1)))
    store = domain.engine.store
    client = domain.register()
    domain.store_prompt(client, "w", tokens(1))
    assert domain.lookup(client, "held", tokens(1)).hit_chunks == 1
    domain.lookup(client, "part", tokens(1, seed=1))
    grant = domain.begin(client, "part", 0, 1, (ObjectRange(0, 0, 1),))
    domain.commit(client, grant.lease_id)
    domain.engine.end_session(client, ["part"], domain.now)
    if quota:
        store.tenants.set_limits({"": room})
    else:
        store.allocator.allocate(store.allocator.free_bytes)
        store.quarantined_bytes += store.allocator.used - room
        assert store.allocator.free_bytes == 0
    domain.lookup(client, "new", tokens(1, seed=2))
    refused = domain.begin(client, "new", 0, 1)
    assert states(refused) == [SlotState.NO_SPACE] * 2
    assert domain.engine.counters.evicted_chunks == 0
    assert domain.engine.counters.quota_refusals == quota
