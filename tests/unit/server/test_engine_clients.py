"""Registrations, sessions and the ends of leases, by data path."""

from __future__ import annotations

import pytest

from kvwire.errors import (
    ChunkSizeIncompatible,
    ChunkSizeNotNegotiated,
    Internal,
    InvalidArgument,
    LayoutUnsupported,
    LeaseLost,
    LeaseUnknown,
    NotRegistered,
    ResizeRefused,
    TooManySessions,
)
from kvwire.keys import Namespace
from kvwire.server.engine import CacheEngine, make_store
from kvwire.server.leases import MAX_LEASE_ID, WriteLease
from kvwire.server.messages import ClientInfo, EndReason, LeaseKind, Prompt, SlotState
from kvwire.server.state import EngineConfig
from support.domain import CHUNK, NAMESPACE, OBJECT_BYTES, Domain, layout, states, tokens


@pytest.fixture
def domain() -> Domain:
    return Domain()


def begin(domain: Domain, client: int, chunks: int = 2, seed: int = 0) -> int:
    domain.lookup(client, f"s{seed}", tokens(chunks, seed))
    grant = domain.begin(client, f"s{seed}", 0, chunks)
    assert grant.lease_id
    return grant.lease_id


def test_nothing_works_before_the_chunk_size_is_bound() -> None:
    engine = CacheEngine(make_store(4096))
    client = ClientInfo(b"c" * 16, "e", "n", "standalone")
    with pytest.raises(ChunkSizeNotNegotiated):
        engine.register(client, NAMESPACE, layout(), CHUNK, "shm", now=0.0)
    with pytest.raises(ChunkSizeNotNegotiated):
        engine.lookup(None, "", Prompt(NAMESPACE, b""), 0.0)
    for size in (8, 4):
        engine.bind_chunk_size(size)
    with pytest.raises(InvalidArgument):
        engine.bind_chunk_size(0)
    engine.register(client, NAMESPACE, layout(), 4, "shm", now=0.0)
    engine.bind_chunk_size(4)
    with pytest.raises(ResizeRefused):
        engine.bind_chunk_size(8)


def test_the_first_session_is_reported_once() -> None:
    told: list[int] = []
    engine = CacheEngine(make_store(4096), on_first_session=lambda: told.append(1))
    engine.bind_chunk_size(CHUNK)
    client = ClientInfo(b"c" * 16, "e", "n", "standalone")
    registration = engine.register(client, NAMESPACE, layout(), CHUNK, "shm", now=0.0).registration_id
    engine.lookup(None, "", Prompt(NAMESPACE, tokens(1)), 0.0)
    assert not told
    for name in ("a", "b"):
        engine.lookup(registration, name, Prompt(NAMESPACE, tokens(1)), 0.0)
    assert told == [1]


def test_a_registration_that_is_refused_changes_nothing(domain: Domain) -> None:
    kept = domain.register(client_id=b"k" * 16)
    write = begin(domain, kept)
    before = domain.engine.status()
    refusals = [
        (LayoutUnsupported, {"kv_layout": layout(0)}),
        (InvalidArgument, {"namespace": Namespace("m", adapter="lora")}),
        (InvalidArgument, {"namespace": Namespace("m", salt="t")}),
        (InvalidArgument, {"namespace": Namespace("")}),
        (InvalidArgument, {"rank": 1}),
        (InvalidArgument, {"rank": -1}),
        (InvalidArgument, {"engine_id": ""}),
        (InvalidArgument, {"role": "janitor"}),
    ]
    for error, change in refusals:
        with pytest.raises(error):
            domain.register(client_id=b"k" * 16, **change)
    info = ClientInfo(b"k" * 16, "engine", "n", "worker")
    with pytest.raises(ChunkSizeIncompatible):
        domain.engine.register(info, NAMESPACE, layout(), 2 * CHUNK, "shm", now=domain.now)
    assert domain.engine.status() == before
    assert domain.commit(kept, write).committed == 2


def test_registering_again_replaces_the_former_registration_and_keeps_sessions(domain: Domain) -> None:
    former = domain.register(client_id=b"k" * 16)
    write = begin(domain, former)
    again = domain.register(client_id=b"k" * 16)
    assert again != former
    assert not domain.engine.is_registered(former)
    assert domain.engine.status().sessions == 1
    assert domain.engine.store.quarantined_bytes == 2 * OBJECT_BYTES
    # The same process may still write; it can say under its new registration that it does not.
    late = domain.commit(again, write)
    assert isinstance(late.error, LeaseLost)
    assert late.lost == 2
    assert domain.used == 0
    domain.check()


def test_a_client_may_change_the_layout_that_it_alone_uses(domain: Domain) -> None:
    domain.register(client_id=b"k" * 16)
    domain.register(client_id=b"k" * 16, kv_layout=layout(2))
    (namespace,) = domain.engine.status().namespaces
    assert (namespace.layout.world_size, namespace.registrations) == (2, 1)


def test_limits_on_registrations_and_sessions() -> None:
    domain = Domain(config=EngineConfig(max_registrations=2, max_sessions=1))
    first = domain.register(client_id=b"k" * 16)
    domain.register()
    with pytest.raises(TooManySessions):
        domain.register()
    assert domain.register(client_id=b"k" * 16) != first
    client = domain.register(client_id=b"k" * 16)
    domain.lookup(client, "a", tokens(1))
    domain.lookup(client, "a", tokens(2))
    with pytest.raises(TooManySessions):
        domain.lookup(client, "b", tokens(1))


def test_sessions_end_with_the_last_scheduler_of_their_engine(domain: Domain) -> None:
    scheduler, worker = domain.register(role="scheduler"), domain.register(role="worker")
    other = domain.register("other", role="scheduler")
    domain.lookup(scheduler, "r", tokens(1))
    domain.lookup(other, "r", tokens(1))
    domain.engine.disconnect(worker, domain.now)
    assert domain.engine.status().sessions == 2
    second = domain.register(role="scheduler")
    domain.engine.disconnect(scheduler, domain.now)
    assert domain.engine.status().sessions == 2
    domain.engine.unregister(second, domain.now)
    assert domain.engine.status().sessions == 1


@pytest.mark.parametrize("path", ["shm", "inproc"])
def test_slots_of_a_client_that_copies_itself_wait_for_its_word(path: str) -> None:
    for end in ("abort", "late commit", "unregister", "dead"):
        domain = Domain(pool=4)
        client = domain.register(path=path, client_id=b"k" * 16)
        write = begin(domain, client)
        domain.engine.disconnect(client, domain.now)
        assert domain.engine.drain_ended() == ()
        assert not domain.engine.confirm_cancelled(write)
        assert domain.engine.store.quarantined_bytes == 2 * OBJECT_BYTES
        again = domain.register(path=path, client_id=b"k" * 16)
        if end == "abort":
            assert domain.engine.abort_store(again, [write, write], domain.now) == (2, 0)
        elif end == "late commit":
            assert domain.commit(again, write).lost == 2
        elif end == "unregister":
            assert domain.engine.unregister(again, domain.now)
        else:
            assert domain.engine.owner_dead(client) == 1
        assert domain.used == 0
        domain.check()


def test_leaving_after_having_expired_counts_as_leaving(domain: Domain) -> None:
    client = domain.register()
    begin(domain, client)
    domain.now += 500
    assert domain.engine.expire(domain.now).registration_ids == (client,)
    assert domain.used == 2
    assert not domain.engine.unregister(client, domain.now)
    assert domain.used == 0


def test_proof_of_death_ends_a_registration_that_is_still_there(domain: Domain) -> None:
    client = domain.register()
    begin(domain, client)
    assert domain.engine.owner_dead(client) == 1
    assert not domain.engine.is_registered(client)
    assert domain.used == 0
    assert domain.engine.owner_dead(client) == 0


@pytest.mark.parametrize("path", ["ucx-local", "ucx-remote", "inline"])
@pytest.mark.parametrize("end", ["abort", "expired", "unregister", "disconnect", "replace", "shutdown"])
def test_slots_that_the_server_fills_wait_for_the_data_path(path: str, end: str) -> None:
    domain = Domain(pool=4)
    client = domain.register(path=path, client_id=b"k" * 16)
    write = begin(domain, client)
    reason = {
        "abort": EndReason.ABORTED,
        "expired": EndReason.EXPIRED,
        "unregister": EndReason.UNREGISTERED,
        "disconnect": EndReason.DISCONNECTED,
        "replace": EndReason.REPLACED,
        "shutdown": EndReason.SHUTDOWN,
    }[end]
    if end == "abort":
        assert domain.engine.abort_store(client, [write], domain.now) == (2,)
    elif end == "expired":
        domain.now += 30
        domain.engine.expire(domain.now)
    elif end == "replace":
        domain.register(path=path, client_id=b"k" * 16)
    elif end == "shutdown":
        domain.engine.shutdown()
    else:
        getattr(domain.engine, end)(client, domain.now)
    domain.engine.owner_dead(client)
    assert domain.engine.quarantined_owners() == ()
    (ended,) = domain.engine.drain_ended()
    assert (ended.lease_id, ended.kind, ended.data_path) == (write, LeaseKind.WRITE, path)
    assert ended.reason is reason
    assert domain.engine.drain_ended() == ()
    assert domain.used == 2
    assert domain.engine.confirm_cancelled(write)
    assert not domain.engine.confirm_cancelled(write)
    assert domain.used == 0
    domain.check()


def test_only_what_was_not_published_of_a_transfer_waits(domain: Domain) -> None:
    client = domain.register(path="ucx-local")
    write = begin(domain, client, chunks=3)
    assert domain.commit(client, write, 0, 2).aborted == 1
    (ended,) = domain.engine.drain_ended()
    assert ended.reason is EndReason.ABORTED
    assert domain.engine.store.quarantined_bytes == OBJECT_BYTES
    domain.engine.confirm_cancelled(write)
    write = begin(domain, client, seed=2)
    assert domain.commit(client, write).committed == 2
    assert domain.engine.drain_ended() == ()


def test_chunks_that_are_being_sent_are_not_evicted(domain: Domain) -> None:
    domain = Domain(pool=3)
    client = domain.register(path="ucx-local")
    domain.store_prompt(client, "w", tokens(3))
    domain.lookup(client, "r", tokens(3))
    grant = domain.retrieve(client, "r", 0, 3)
    domain.engine.end_session(client, ["r"], domain.now)
    domain.now += 30
    domain.engine.expire(domain.now)
    (ended,) = domain.engine.drain_ended()
    assert (ended.lease_id, ended.kind, ended.reason) == (grant.lease_id, LeaseKind.READ, EndReason.EXPIRED)
    assert domain.engine.evict_to(0.0) == 0
    domain.lookup(client, "x", tokens(1, seed=1))
    assert states(domain.begin(client, "x", 0, 1)) == [SlotState.NO_SPACE]
    domain.check()
    assert domain.engine.confirm_cancelled(grant.lease_id)
    assert states(domain.begin(client, "x", 0, 1)) == [SlotState.RESERVED]
    domain.check()


def test_a_reader_that_copies_itself_holds_nothing_after_its_lease(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(2))
    domain.lookup(client, "r", tokens(2))
    grant = domain.retrieve(client, "r", 0, 2)
    domain.engine.end_session(client, ["r"], domain.now)
    assert domain.engine.evict_to(0.0) == 0
    domain.now += grant.ttl
    domain.engine.expire(domain.now)
    assert domain.engine.evict_to(0.0) == 2 * OBJECT_BYTES
    assert not domain.end(client, grant.lease_id)


def test_a_deadline_counts_whether_or_not_it_was_swept(domain: Domain) -> None:
    client = domain.register()
    domain.store_prompt(client, "w", tokens(2))
    found = domain.lookup(client, "r", tokens(2))
    domain.now += found.lease_ttl
    domain.engine.ping(client, domain.now)
    domain.lookup(client, "other", tokens(1, seed=1))
    assert domain.engine.status().leases[LeaseKind.LOOKUP] == 0
    assert domain.engine.counters.expired_leases == 1


def test_live_leases_are_shown_to_their_owner_alone(domain: Domain) -> None:
    owner, stranger = domain.register("a"), domain.register("b")
    write = begin(domain, owner)
    live = domain.engine.live_lease(owner, write, domain.now + 10)
    assert (live.kind, live.data_path, live.expires_in) == (LeaseKind.WRITE, "shm", 20.0)
    assert [(ref.rank, ref.group_index, ref.size) for ref in live.objects] == [(0, 0, OBJECT_BYTES)] * 2
    with pytest.raises(LeaseUnknown):
        domain.engine.live_lease(stranger, write, domain.now)
    with pytest.raises(LeaseUnknown):
        domain.engine.live_lease(owner, write + 1, domain.now)
    domain.now += 30
    with pytest.raises(LeaseLost):
        domain.engine.live_lease(owner, write, domain.now)
    with pytest.raises(NotRegistered):
        domain.engine.live_lease(12345, write, domain.now)


def test_lease_ids_are_never_used_twice_and_run_out_cleanly(domain: Domain) -> None:
    client = domain.register()
    ids = [begin(domain, client, seed=seed) for seed in range(3)]
    assert ids == [1, 2, 3]
    leases = domain.engine._state.leases
    leases._given = MAX_LEASE_ID
    domain.lookup(client, "r", tokens(1, seed=9))
    with pytest.raises(Internal, match="restart"):
        domain.begin(client, "r", 0, 1)
    domain.check()


def test_lease_ids_go_round_from_wherever_they_begin(domain: Domain) -> None:
    client = domain.register()
    leases = domain.engine._state.leases
    leases._first = MAX_LEASE_ID - 1
    ids = [begin(domain, client, seed=seed) for seed in range(3)]
    assert ids == [MAX_LEASE_ID - 1, MAX_LEASE_ID, 1]
    owner = leases._live[1].owner
    assert domain.engine.abort_store(client, [1], domain.now) == (2,)
    assert isinstance(leases.missing(1), LeaseLost)
    assert [type(leases.missing(never)) for never in (0, 2, MAX_LEASE_ID - 2, MAX_LEASE_ID + 1)] == [
        LeaseUnknown
    ] * 4
    assert leases.get(MAX_LEASE_ID, WriteLease, owner)
    domain.check()


def test_shutdown_publishes_nothing_and_ends_everything(domain: Domain) -> None:
    shm, ucx = domain.register("a"), domain.register("b", path="ucx-local")
    domain.store_prompt(shm, "w", tokens(2))
    begin(domain, shm, seed=1)
    begin(domain, ucx, seed=2)
    domain.lookup(shm, "r", tokens(2))
    stored = len(domain.events.stored)
    domain.engine.shutdown()
    status = domain.engine.status()
    assert (status.sessions, status.registrations, sum(status.leases.values())) == (0, (), 0)
    assert status.waiting_leases == 2
    assert len(domain.events.stored) == stored
    domain.check()


def test_status_shows_who_is_there_and_never_a_salt(domain: Domain) -> None:
    client = domain.register("engine-7", role="worker", path="ucx-local")
    domain.now += 5
    domain.engine.ping(client, domain.now)
    secret = Namespace(NAMESPACE.model, layout_fingerprint=b"fp", salt="very-secret")
    domain.store_prompt(client, "w", tokens(2), secret)
    status = domain.engine.status()
    (seen,) = status.registrations
    assert (seen.engine_id, seen.role, seen.data_path, seen.last_seen) == (
        "engine-7", "worker", "ucx-local", domain.now,
    )  # fmt: skip
    assert "very-secret" not in repr(status)
    assert status.l1.used_bytes == status.l1.resident_bytes == 2 * OBJECT_BYTES
    assert status.counters.stored_bytes == {"ucx-local": 2 * OBJECT_BYTES}
    assert status.counters is not domain.engine.status().counters
