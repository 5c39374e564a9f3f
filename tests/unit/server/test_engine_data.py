"""Lookups, stores and retrieves beyond the public cases."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import InvalidArgument, TokensInvalid
from kvwire.keys import ExtraInput, Namespace, chunk_keys
from kvwire.keys import root as root_of
from kvwire.server.messages import CommitItem, KeyedChunks, ObjectRange, Prompt, SlotState
from kvwire.server.state import EngineConfig
from kvwire.server.store import StoredChunk
from support.domain import CHUNK, FULL, NAMESPACE, OBJECT_BYTES, Domain, layout, states, tokens, window_group

ROOT = root_of(NAMESPACE, CHUNK)


def keys_of(packed: bytes) -> tuple[bytes, ...]:
    return tuple(chunk_keys(ROOT, packed, CHUNK))


@pytest.fixture
def domain() -> Domain:
    return Domain()


def session_keys(domain: Domain, session: str) -> tuple[bytes, ...]:
    found = domain.engine._state.sessions.get("engine", session)
    assert found is not None
    return tuple(found.keys)


def test_a_lookup_without_registration_changes_nothing(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(3))
    before = domain.engine.status()
    result = domain.lookup(None, "", tokens(4))
    assert (result.asked_chunks, result.hit_chunks, result.lease_id) == (4, 3, 0)
    after = domain.engine.status()
    assert (after.sessions, after.leases, after.l1) == (before.sessions, before.leases, before.l1)
    assert after.counters.asked_tokens == before.counters.asked_tokens
    assert after.counters.dry_lookups == before.counters.dry_lookups + 1
    # It tells what is there also when nobody is registered any more.
    domain.engine.unregister(client, domain.now)
    assert domain.hit(tokens(4)) == 3


def test_a_namespace_without_a_layout_is_a_miss_with_a_reason(domain: Domain) -> None:
    client = domain.register()
    result = domain.lookup(client, "r", tokens(2), Namespace("another model"))
    assert (result.asked_chunks, result.hit_chunks, result.lease_id) == (2, 0, 0)
    assert domain.engine.counters.failures == {"no_layout": 1}
    assert domain.engine.counters.miss_tokens == 2 * CHUNK
    assert domain.engine.status().sessions == 0


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        (Prompt(NAMESPACE), InvalidArgument),
        (Prompt(NAMESPACE, b"", keys=()), InvalidArgument),
        (Prompt(NAMESPACE, b"12345"), TokensInvalid),
        (Prompt(NAMESPACE, keys=(b"short",)), InvalidArgument),
        (Prompt(Namespace(""), b""), InvalidArgument),
    ],
)
def test_bad_prompts_are_refused_and_leave_nothing(domain: Domain, prompt: Prompt, error: type) -> None:
    client = domain.register()
    with pytest.raises(error):
        domain.engine.lookup(client, "r", prompt, domain.now)
    with pytest.raises(InvalidArgument, match="session_id"):
        domain.lookup(client, "", tokens(1))
    assert domain.engine.status().sessions == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.booleans()), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_a_session_always_has_the_keys_of_its_last_prompt(
    prompts: list[tuple[int, int, bool]], slice_chunks: int
) -> None:
    domain = Domain(config=EngineConfig(slice_chunks=slice_chunks))
    client = domain.register()
    for chunks, seed, image in prompts:
        packed = tokens(chunks, seed, extra=1)
        extras = (ExtraInput(b"image", CHUNK + 1, CHUNK),) if image else ()
        result = domain.lookup(client, "r", packed, extras=extras)
        expected = tuple(chunk_keys(ROOT, packed, CHUNK, extras))
        assert result.asked_chunks == chunks
        # A prompt that is the start of the known one does not shorten what the session knows.
        assert session_keys(domain, "r")[:chunks] == expected


def test_a_growing_prompt_hashes_only_what_is_new(domain: Domain, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(root, packed, chunk_size, extras, **chain):
        hashed.append(len(packed) // 4 // chunk_size)
        return chunk_keys(root, packed, chunk_size, extras, **chain)

    monkeypatch.setattr("kvwire.server.lookups.chunk_keys", counting)
    client = domain.register()
    for chunks in (3, 5, 5, 4, 6):
        domain.lookup(client, "r", tokens(chunks, extra=2))
    assert hashed == [3, 2, 0, 0, 1]


def test_keys_and_tokens_find_the_same(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(3))
    by_keys = domain.engine.lookup(client, "k", Prompt(NAMESPACE, keys=keys_of(tokens(4))), domain.now)
    assert (by_keys.asked_chunks, by_keys.hit_chunks) == (4, 3)
    assert not domain.retrieve(client, "k", 0, 3).missing


def test_a_new_lookup_of_a_session_takes_over_its_lease(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(3))
    first = domain.lookup(client, "r", tokens(3))
    second = domain.lookup(client, "r", tokens(2))
    assert second.lease_id != first.lease_id
    assert sorted(chunk.pins for chunk in domain.engine.store.chunks()) == [0, 1, 1]
    domain.check()


def test_two_writers_of_one_key(domain: Domain) -> None:
    first, second = domain.register("a"), domain.register("b")
    for client in (first, second):
        domain.lookup(client, "r", tokens(2))
    mine = domain.begin(first, "r", 0, 1)
    theirs = domain.begin(second, "r", 0, 2)
    assert states(theirs) == [SlotState.BEING_WRITTEN, SlotState.RESERVED]
    domain.commit(first, mine.lease_id)
    again = domain.begin(second, "r", 0, 2)
    assert states(again) == [SlotState.ALREADY_STORED, SlotState.BEING_WRITTEN]
    assert (again.lease_id, again.reserved) == (0, ())
    # Slots are counted among those that were granted.
    assert domain.commit(second, theirs.lease_id, 0).committed == 1
    assert domain.hit(tokens(2)) == 2
    assert domain.used == 2


def test_a_worker_stores_the_shards_of_its_own_rank() -> None:
    domain = Domain(kv_layout=layout(2, FULL, window_group(4)))
    scheduler = domain.register(role="scheduler")
    ranks = [domain.register(role="worker", rank=rank) for rank in range(2)]
    domain.lookup(scheduler, "r", tokens(2))
    domain.store(ranks[1], "r", 0, 2)
    assert domain.hit(tokens(2)) == 0
    grant = domain.begin(ranks[0], "r", 0, 2)
    assert [(s.chunk_index, s.group_index) for s in grant.slots] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert states(grant) == [SlotState.RESERVED] * 4
    domain.commit(ranks[0], grant.lease_id)
    assert domain.hit(tokens(2)) == 2


def test_a_chunk_gets_all_its_slots_or_none() -> None:
    domain = Domain(pool=5, kv_layout=layout(1, FULL, window_group(4)))
    client = domain.register()
    domain.lookup(client, "r", tokens(4))
    grant = domain.begin(client, "r", 0, 4)
    assert states(grant) == [SlotState.RESERVED] * 4 + [SlotState.NO_SPACE] * 4
    assert all(slot.offset == 0 for slot in grant.slots[4:])
    assert domain.used == 4
    domain.commit(client, grant.lease_id)
    domain.check()


def test_a_prompt_longer_than_the_pool_keeps_its_head_over_many_calls() -> None:
    domain = Domain(pool=4)
    client = domain.register()
    domain.lookup(client, "r", tokens(10))
    for first in range(0, 10, 2):
        domain.store(client, "r", first, 2)
    assert domain.hit(tokens(10)) == 4


def test_items_of_one_call_do_not_evict_one_another() -> None:
    from kvwire.server.messages import SessionRange, StoreItem

    domain = Domain(pool=6)
    client = domain.register()
    domain.store_prompt(client, "old", tokens(2, seed=9))
    for seed in (1, 2):
        domain.store_prompt(client, "w", tokens(1, seed))
        domain.lookup(client, f"s{seed}", tokens(4, seed))
        domain.engine.end_session(client, ["none"], domain.now)
    items = [StoreItem(SessionRange(f"s{seed}", 1, 3)) for seed in (1, 2)]
    grants = domain.engine.begin_store(client, items, domain.now)
    assert [state for grant in grants for state in states(grant)].count(SlotState.RESERVED) == 4
    assert domain.hit(tokens(1, seed=1)) == domain.hit(tokens(1, seed=2)) == 1
    assert domain.hit(tokens(2, seed=9)) == 0


def test_keyed_ranges_of_one_session_are_one_chain(domain: Domain) -> None:
    client = domain.register()
    keys = keys_of(tokens(6))
    for first in (0, 2, 4):
        target = KeyedChunks(NAMESPACE, keys[first : first + 2], first, "r")
        grant = domain.begin(client, target)
        assert [slot.chunk_index for slot in grant.slots] == [first, first + 1]
        domain.commit(client, grant.lease_id)
    assert domain.engine.status().sessions == 0
    assert not domain.engine.store.tree.unreachable
    tail = domain.engine.store.get(keys[5])
    assert [chunk.key for chunk in domain.engine.store.tree.ancestry(tail)] == list(keys)
    domain.engine.evict_to(3 / 64)
    assert domain.hit(tokens(6)) == 3


def test_keyed_ranges_extend_the_session_that_a_lookup_made(domain: Domain) -> None:
    client = domain.register()
    keys = keys_of(tokens(4))
    domain.engine.lookup(client, "r", Prompt(NAMESPACE, keys=keys[:2]), domain.now)
    grant = domain.begin(client, KeyedChunks(NAMESPACE, keys[1:4], 1, "r"))
    assert states(grant) == [SlotState.RESERVED] * 3
    assert session_keys(domain, "r") == keys
    wrong = domain.begin(client, KeyedChunks(NAMESPACE, keys_of(tokens(2, seed=5)), 0, "r"))
    assert wrong.error is not None
    assert wrong.error.reason == "INVALID_FIELD"
    domain.check()


@pytest.mark.parametrize(
    "target",
    [
        KeyedChunks(NAMESPACE, ()),
        KeyedChunks(NAMESPACE, (b"short",)),
        KeyedChunks(NAMESPACE, (b"k" * 32,), -1),
        KeyedChunks(Namespace("another model"), (b"k" * 32,)),
    ],
)
def test_bad_keyed_targets_fail_their_item(domain: Domain, target: KeyedChunks) -> None:
    client = domain.register()
    for grant in (domain.begin(client, target), domain.retrieve(client, target)):
        assert grant.error is not None
        assert grant.error.reason == "INVALID_FIELD"
    assert domain.used == 0


def test_another_models_data_cannot_be_read_or_written(domain: Domain) -> None:
    other = Namespace("other")
    domain.register("other", namespace=other)
    client = domain.register()
    target = KeyedChunks(other, (b"k" * 32,))
    for grant in (domain.begin(client, target), domain.retrieve(client, target)):
        assert grant.error is not None
    domain.lookup(client, "r", tokens(1), other)
    assert domain.begin(client, "r", 0, 1).error is not None


def test_ranges_pick_objects_once_each(domain: Domain) -> None:
    domain = Domain(kv_layout=layout(1, FULL, window_group(4)))
    client = domain.register()
    domain.lookup(client, "r", tokens(4))
    ranges = (ObjectRange(1, 3, 1), ObjectRange(0, 0, 3), ObjectRange(0, 2, 2))
    grant = domain.begin(client, "r", 0, 4, ranges)
    assert [(s.chunk_index, s.group_index) for s in grant.slots] == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)]
    domain.commit(client, grant.lease_id)
    assert domain.hit(tokens(4)) == 4
    assert domain.hit(tokens(3)) == 0


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (CommitItem(1, (2,)), "RANGE_INVALID"),
        (CommitItem(1, (-1,)), "RANGE_INVALID"),
        (CommitItem(1, (), (b"c" * 16,)), "INVALID_FIELD"),
        (CommitItem(1, (0,), (b"c" * 15,)), "INVALID_FIELD"),
        (CommitItem(1, (0,), (b"c" * 16, b"c" * 16)), "INVALID_FIELD"),
    ],
)
def test_a_commit_that_makes_no_sense_leaves_the_lease(domain: Domain, item: CommitItem, reason: str) -> None:
    client = domain.register()
    domain.lookup(client, "r", tokens(2))
    assert domain.begin(client, "r", 0, 2).lease_id == 1
    (result,) = domain.engine.commit_store(client, [item], domain.now)
    assert result.error is not None
    assert result.error.reason == reason
    assert domain.commit(client, 1).committed == 2


def test_checksums_come_with_the_commit_or_later_and_only_once(domain: Domain) -> None:
    client = domain.register()
    domain.lookup(client, "r", tokens(3))
    grant = domain.begin(client, "r", 0, 3)
    item = CommitItem(grant.lease_id, (1,), (b"1" * 16,))
    (result,) = domain.engine.commit_store(client, [item], domain.now)
    assert result.unchecked == ()
    later = domain.begin(client, "r", 0, 1)
    (ref,) = domain.commit(client, later.lease_id).unchecked
    assert ref.offset == later.slots[0].offset
    assert domain.engine.set_checksum(ref, b"0" * 16)
    assert not domain.engine.set_checksum(ref, b"x" * 16)
    with pytest.raises(InvalidArgument):
        domain.engine.set_checksum(ref, b"short")
    read = domain.retrieve(client, "r", 0, 2)
    assert [slot.checksum for slot in read.slots] == [b"0" * 16, b"1" * 16]


def test_a_checksum_made_of_memory_that_was_reused_is_refused(domain: Domain) -> None:
    client = domain.register()
    domain.lookup(client, "r", tokens(1))
    (ref,) = domain.commit(client, domain.begin(client, "r", 0, 1).lease_id).unchecked
    domain.engine.evict_to(0.0)
    assert not domain.engine.set_checksum(ref, b"0" * 16)
    again = domain.store(client, "r", 0, 1)
    assert again.slots[0].offset == ref.offset
    assert not domain.engine.set_checksum(ref, b"0" * 16)
    assert not domain.engine.discard(ref)


def test_events_tell_tokens_and_parents(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(2))
    first, second = (event for event in domain.events.log if isinstance(event, StoredChunk))
    keys = keys_of(tokens(2))
    assert (first.key, first.parent_key, first.tokens) == (keys[0], b"", tokens(1))
    assert (second.key, second.parent_key, second.tokens) == (keys[1], keys[0], tokens(2)[CHUNK * 4 :])
    assert (first.root, first.base_root, first.size) == (ROOT, ROOT, OBJECT_BYTES)
    domain.engine.clear(NAMESPACE)
    assert domain.events.log[-1] == "cleared"


def test_counters_of_bytes_by_path(domain: Domain) -> None:
    shm, ucx = domain.register("a"), domain.register("b", path="ucx-local")
    domain.store_prompt(shm, "w", tokens(3))
    domain.store_prompt(ucx, "w", tokens(1, seed=2))
    domain.lookup(ucx, "r", tokens(3))
    grant = domain.retrieve(ucx, "r", 0, 3)
    assert domain.end(ucx, grant.lease_id)
    counters = domain.engine.counters
    assert counters.stored_objects == 4
    assert counters.stored_bytes == {"shm": 3 * OBJECT_BYTES, "ucx-local": OBJECT_BYTES}
    assert counters.retrieved_bytes == {"ucx-local": 3 * OBJECT_BYTES}
    assert counters.retrieved_objects == 3
