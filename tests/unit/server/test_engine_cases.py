"""Cases of the public record, as far as the engine decides them: sessions, leases, clients."""

from __future__ import annotations

import pytest

from kvwire.errors import (
    LayoutConflict,
    LeaseUnknown,
    NotRegistered,
    SessionUnknown,
)
from kvwire.server.messages import (
    CommitItem,
    EndReason,
    KeyedChunks,
    LeaseKind,
    Prompt,
    ReleaseItem,
    SessionRange,
    SlotState,
    StoreItem,
)
from kvwire.server.state import EngineConfig
from support.domain import (
    CHUNK,
    NAMESPACE,
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


def release(domain: Domain, client: int, *items: ReleaseItem) -> list[tuple[int, int]]:
    results = domain.engine.release_lookup(client, items, domain.now)
    return [(result.released, result.not_held) for result in results]


@pytest.mark.parametrize(("length", "hit"), [(CHUNK, 1), (2 * CHUNK, 2), (2 * CHUNK + 1, 2), (1, 0)])
def test_bl10_hits_are_whole_chunks_of_what_was_asked(domain: Domain, length: int, hit: int) -> None:
    client = domain.register()
    domain.store_prompt(client, "stored", tokens(3))
    result = domain.lookup(client, "r", tokens(0, extra=length))
    assert (result.asked_chunks, result.hit_chunks, result.hit_tokens) == (hit, hit, hit * CHUNK)
    assert bool(result.lease_id) == bool(hit)


def test_bl13_unneeded_hits_are_given_back_and_nothing_stays_locked(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(4), with_salt("t1"))
    found = domain.lookup(client, "r", tokens(4), with_salt("t1"))
    assert found.hit_chunks == 4
    assert release(domain, client, ReleaseItem("r", found.lease_id, 0, 3)) == [(3, 0)]
    grant = domain.retrieve(client, "r", 3, 1)
    assert domain.end(client, grant.lease_id)
    # A lease is named by its id, so no call can miss it by forgetting the salt; a wrong name is told so.
    assert release(domain, client, ReleaseItem("r", found.lease_id + 7, 3, 1)) == [(0, 1)]
    assert release(domain, client, ReleaseItem("other", found.lease_id, 3, 1)) == [(0, 1)]
    assert domain.engine.counters.surplus_releases == 2
    assert domain.engine.end_session(client, ["r"], domain.now) == 1
    assert all(chunk.pins == 0 for chunk in domain.engine.store.chunks())
    assert not any(domain.engine.status().leases.values())
    domain.check()


def test_bl14_surplus_releases_never_touch_another_request(domain: Domain) -> None:
    domain = Domain(pool=4)
    client = domain.register()
    domain.store_prompt(client, "w", tokens(3))
    first = domain.lookup(client, "r1", tokens(3))
    second = domain.lookup(client, "r2", tokens(3))
    item = ReleaseItem("r1", first.lease_id, 0, 3)
    assert release(domain, client, item, item) == [(3, 0), (0, 3)]
    assert release(domain, client, ReleaseItem("r1", first.lease_id, 40, 5)) == [(0, 5)]
    assert release(domain, client, ReleaseItem("r1", second.lease_id, 0, 3)) == [(0, 3)]
    domain.engine.end_session(client, ["r1"], domain.now)
    assert domain.engine.evict_to(0.0) == 0
    grant = domain.retrieve(client, "r2", 0, 3)
    assert not grant.missing
    assert domain.end(client, grant.lease_id)
    assert domain.engine.counters.surplus_releases == 11
    domain.engine.end_session(client, ["r2"], domain.now)
    assert domain.engine.evict_to(0.0) == 3 * OBJECT_BYTES


def test_bl14_another_clients_lease_cannot_be_released(domain: Domain) -> None:
    owner = domain.register("a")
    stranger = domain.register("a", role="worker")
    domain.store_prompt(owner, "w", tokens(2))
    found = domain.lookup(owner, "r", tokens(2))
    assert release(domain, stranger, ReleaseItem("r", found.lease_id)) == [(0, 1)]
    read = domain.retrieve(owner, "r", 0, 2)
    assert not domain.end(stranger, read.lease_id)
    write = domain.begin(owner, _session_of(domain, owner, 5), 0, 1)
    assert isinstance(domain.commit(stranger, write.lease_id).error, LeaseUnknown)
    assert domain.engine.abort_store(stranger, [write.lease_id], domain.now) == (0,)
    assert domain.end(owner, read.lease_id)
    assert domain.commit(owner, write.lease_id).committed == 1
    domain.check()


def _session_of(domain: Domain, client: int, seed: int, chunks: int = 2) -> str:
    name = f"session {seed}"
    domain.lookup(client, name, tokens(chunks, seed))
    return name


def test_bl14_a_window_lease_released_over_the_whole_range(domain: Domain) -> None:
    """Only the last window is held; the rest of the range is counted, and held by others as before."""
    domain = Domain(kv_layout=layout(1, window_group(6)))
    client = domain.register()
    domain.store_prompt(client, "w", tokens(5))
    found = domain.lookup(client, "r1", tokens(5))
    other = domain.lookup(client, "r2", tokens(5))
    assert found.hit_chunks == 5
    assert release(domain, client, ReleaseItem("r1", found.lease_id, 0, 5)) == [(2, 3)]
    assert release(domain, client, ReleaseItem("r2", other.lease_id)) == [(2, 0)]
    domain.check()


def test_bl16_a_lookup_answers_once_and_finally(domain: Domain) -> None:
    """There is no status to poll: what a sliced lookup finds is known, and leased, only when it is done."""
    domain = Domain(config=EngineConfig(slice_chunks=1))
    client = domain.register()
    domain.store_prompt(client, "w", tokens(4))
    steps = domain.engine.lookup_steps(client, "r", Prompt(NAMESPACE, tokens(4)), domain.now)
    for _ in range(3):
        assert next(steps) is None
        assert not domain.engine.status().leases[LeaseKind.LOOKUP]
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value.hit_chunks == 4
    # Timed out at the client and ended: nothing stays, however often it is ended.
    for _ in range(3):
        domain.engine.end_session(client, ["r"], domain.now)
    assert not any(domain.engine.status().leases.values())


@pytest.mark.parametrize("what", ["end_session", "lookup_again", "unregister", "close"])
def test_bl16_a_lookup_that_is_overtaken_leaves_no_lease(what: str) -> None:
    domain = Domain(config=EngineConfig(slice_chunks=1))
    client = domain.register()
    domain.store_prompt(client, "w", tokens(3))
    steps = domain.engine.lookup_steps(client, "r", Prompt(NAMESPACE, tokens(3)), domain.now)
    next(steps)
    leases = 0
    if what == "end_session":
        assert domain.engine.end_session(client, ["r"], domain.now) == 1
    elif what == "lookup_again":
        assert domain.lookup(client, "r", tokens(3)).hit_chunks == 3
        leases = 1
    elif what == "unregister":
        domain.engine.unregister(client, domain.now)
    if what == "close":
        steps.close()
    elif what == "unregister":
        with pytest.raises(NotRegistered):
            list(steps)
    else:
        next(steps)
        with pytest.raises(StopIteration) as stop:
            next(steps)
        assert (stop.value.value.hit_chunks, stop.value.value.lease_id) == (0, 0)
    assert domain.engine.status().leases[LeaseKind.LOOKUP] == leases
    domain.check()


def test_bl17_a_store_in_flight_neither_needs_nor_revives_its_session(domain: Domain) -> None:
    client = domain.register()
    domain.lookup(client, "r", tokens(4))
    early, late = domain.begin(client, "r", 0, 2), domain.begin(client, "r", 2, 2)
    assert domain.commit(client, early.lease_id).committed == 2
    assert domain.engine.end_session(client, ["r"], domain.now) == 1
    assert domain.commit(client, late.lease_id).committed == 2
    assert domain.engine.status().sessions == 0
    assert domain.engine.end_session(client, ["r"], domain.now) == 0
    assert domain.hit(tokens(4)) == 4
    assert isinstance(domain.begin(client, "r", 0, 1).error, SessionUnknown)


def test_bl17_the_sweep_spares_a_session_that_was_made_again(domain: Domain) -> None:
    client = domain.register()
    domain.lookup(client, "r", tokens(1))
    sessions = domain.engine._state.sessions
    domain.now += 601
    (idle,) = sessions.idle(domain.now)
    domain.engine.end_session(client, ["r"], domain.now)
    domain.lookup(client, "r", tokens(2))
    assert not domain.engine._lifecycle.end_session(idle, EndReason.EXPIRED)
    assert domain.engine.status().sessions == 1
    assert domain.engine.expire(domain.now).sessions == 0
    domain.now += 599
    domain.engine.ping(client, domain.now)
    domain.lookup(client, "r", tokens(2))
    domain.now += 599
    domain.engine.ping(client, domain.now)
    # Idle time counts from the last use, not from the start.
    assert domain.engine.expire(domain.now).sessions == 0
    domain.now += 2
    assert domain.engine.expire(domain.now).sessions == 1


def test_bl31_a_silent_worker_stays_while_it_pings(domain: Domain) -> None:
    domain = Domain(config=EngineConfig(registration_ttl=3.0))
    client = domain.register()
    for _ in range(10):
        domain.now += 1
        assert domain.engine.ping(client, domain.now)
        assert domain.engine.expire(domain.now).registration_ids == ()
    domain.now += 3
    assert domain.engine.expire(domain.now).registration_ids == (client,)
    assert not domain.engine.ping(client, domain.now)
    with pytest.raises(NotRegistered, match="register again"):
        domain.retrieve(client, "r", 0, 1)
    again = domain.register()
    domain.store_prompt(again, "w", tokens(1))
    assert domain.hit(tokens(1)) == 1


def test_bl34_a_layout_lives_as_long_as_its_last_user(domain: Domain) -> None:
    first, second = domain.register("a"), domain.register("b")
    domain.store_prompt(first, "w", tokens(2))
    other_layout = layout(2)
    assert domain.engine.unregister(first, domain.now)
    assert domain.lookup(second, "r", tokens(2)).hit_chunks == 2
    assert not domain.engine.unregister(first, domain.now)
    with pytest.raises(LayoutConflict, match="client 2") as conflict:
        domain.register("c", kv_layout=other_layout)
    assert conflict.value.metadata["engine_id"] == "b"
    assert domain.lookup(second, "r", tokens(2)).hit_chunks == 2
    domain.engine.unregister(second, domain.now)
    assert domain.engine.status().namespaces == ()
    third = domain.register("c", kv_layout=other_layout)
    # What the former layout left behind is never read through the new one.
    assert domain.lookup(third, "r", tokens(2)).hit_chunks == 0
    assert states(domain.store(third, "r", 0, 2)) == [SlotState.RESERVED] * 2
    domain.check()


def test_bl34_the_same_layout_finds_what_was_stored_before(domain: Domain) -> None:
    first = domain.register("a")
    domain.store_prompt(first, "w", tokens(3))
    domain.engine.unregister(first, domain.now)
    domain.engine.expire(domain.now)
    second = domain.register("b")
    assert domain.lookup(second, "r", tokens(3)).hit_chunks == 3


def test_bl35_crashes_leave_nothing_behind() -> None:
    domain = Domain(pool=16)
    other = domain.register("other")
    domain.store_prompt(other, "kept", tokens(2, seed=9))
    baseline = domain.engine.status()
    for crash in range(5):
        doomed = domain.register(f"engine {crash}", role="scheduler")
        worker = domain.register(f"engine {crash}", role="worker")
        domain.lookup(doomed, "r", tokens(4, seed=crash))
        grant = domain.begin(worker, "r", 0, 4)
        assert states(grant) == [SlotState.RESERVED] * 4
        domain.lookup(doomed, "reads", tokens(2, seed=9))
        for registration in (worker, doomed):
            domain.engine.disconnect(registration, domain.now)
            domain.engine.owner_dead(registration)
        domain.check()
    for crash in range(5):
        domain.engine.disconnect(domain.register(f"warming up {crash}"), domain.now)
    after = domain.engine.status()
    assert after.l1 == baseline.l1
    assert (after.sessions, after.leases, after.registrations) == (0, baseline.leases, baseline.registrations)
    assert domain.lookup(other, "r", tokens(2, seed=9)).hit_chunks == 2


def test_bl55_tenants_never_see_each_other(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(3), with_salt("t1"))
    found = [
        domain.lookup(client, f"r{name}", tokens(3), with_salt(name)).hit_chunks for name in ("t2", "", "t1")
    ]
    assert found == [0, 0, 3]
    status = (
        repr(domain.engine.status()) + repr(list(domain.engine._state.sessions)) + repr(domain.events.log)
    )
    assert "'t1'" not in status
    (space,) = domain.engine.status().spaces
    assert (space.model, len(space.tenant), space.chunks) == ("model", 16, 3)


def test_bl55_keys_of_another_tenant_are_of_no_use(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(2), with_salt("t1"))
    stolen = tuple(domain.events.stored)
    prompt = Prompt(with_salt("t2"), keys=stolen)
    assert domain.engine.lookup(client, "r", prompt, domain.now).hit_chunks == 0
    read = domain.retrieve(client, KeyedChunks(with_salt("t2"), stolen))
    assert (read.lease_id, len(read.missing)) == (0, 2)
    # Nor can they be overwritten.
    assert states(domain.begin(client, KeyedChunks(with_salt("t2"), stolen))) == [SlotState.NO_SPACE] * 2
    assert domain.hit(tokens(2), with_salt("t1")) == 2


def test_bl67_hits_and_misses_add_up_and_count_once_per_request(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(4))
    counters = domain.engine.counters
    before = counters.asked_tokens
    for number in range(10):
        prompt = (
            tokens(4) if number < 5 else tokens(2) + tokens(2, seed=3) if number < 8 else tokens(4, seed=4)
        )
        for _ in range(20):
            domain.lookup(client, f"r{number}", prompt)
    asked = counters.asked_tokens - before
    assert asked == 10 * 4 * CHUNK
    assert counters.hit_tokens == (5 * 4 + 3 * 2) * CHUNK
    assert counters.hit_tokens + counters.miss_tokens == counters.asked_tokens


def test_a_batch_fails_item_by_item(domain: Domain) -> None:
    client = domain.register()
    domain.lookup(client, "r", tokens(2))
    items = [
        StoreItem(SessionRange("r", 0, 2)),
        StoreItem(SessionRange("nobody", 0, 2)),
        StoreItem(SessionRange("r", 1, 2)),
    ]
    good, unknown, outside = domain.engine.begin_store(client, items, domain.now)
    assert len(good.reserved) == 2
    assert unknown.error is not None
    assert unknown.error.reason == "SESSION_UNKNOWN"
    assert outside.error is not None
    assert outside.error.reason == "RANGE_INVALID"
    results = domain.engine.commit_store(
        client,
        [CommitItem(999), CommitItem(good.lease_id, (0, 7)), CommitItem(good.lease_id)],
        domain.now,
    )
    assert [result.error.reason if result.error else "" for result in results] == [
        "LEASE_UNKNOWN", "RANGE_INVALID", "",
    ]  # fmt: skip
    assert results[2].committed == 2
