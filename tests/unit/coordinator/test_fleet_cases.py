"""Faults that other projects have had, by their numbers, and what the coordinator does about them."""

from __future__ import annotations

import pytest

from kvwire.coordinator.fleet import Fleet, FleetConfig
from kvwire.coordinator.messages import Admission
from kvwire.errors import ChunkSizeNotNegotiated, InvalidArgument, ServerNotRegistered, TooManyItems
from kvwire.keys import Namespace, chunk_keys, root
from kvwire.v1 import event_pb2
from support.fleet_model import (
    L1,
    L2,
    FakeBatch,
    FakeEvent,
    FakeServer,
    FleetRun,
    access,
    chunk,
    clear,
    delete,
    store,
)

A, B, K2, K3, M = (chunk(name) for name in "ab23m")


def test_bl37_a_batch_that_comes_late_brings_nothing_back():
    run = FleetRun("one")
    run.tell("one", store(A))
    withheld = FakeBatch("one", run.servers["one"].incarnation, 2, (store(M),))
    assert run.tell("one", delete(M), sequence=3).admission is Admission.GAP
    assert run.fleet.report(withheld, run.now).admission is Admission.DUPLICATE
    assert not run.holders(M)
    assert run.tell("one", delete(M), sequence=3).admission is Admission.DUPLICATE
    assert run.reporting("one") == "resyncing"
    run.tell("one", store(B), sequence=4)
    assert run.holders(B) == {("one", L1)}
    assert not run.holders(M)
    assert run.fleet.stats.gaps == 1


def test_bl37_after_a_resync_events_go_on_from_its_position():
    run = FleetRun("one")
    run.tell("one", store(A), sequence=4 - 3)
    assert run.tell("one", store(M), sequence=10).admission is Admission.GAP
    server = run.servers["one"]
    server.sequence = 12
    server.held = {(L1, B): 7}
    assert run.heal() == 1
    view = run.fleet.view("one", run.now)
    assert (view.applied_sequence, view.reporting) == (12, "current")
    assert run.held() == {"one": {(L1, B): 7}}
    late = run.tell("one", store(A), sequence=11)
    assert (late.admission, late.sequence) == (Admission.DUPLICATE, 12)
    assert run.tell("one", store(A), sequence=13).admission is Admission.ADMITTED
    assert (run.fleet.stats.gaps, run.fleet.stats.resyncs) == (1, 2)
    assert run.heal() == 0


def test_bl38_clear_takes_one_servers_placements_and_no_others():
    run = FleetRun("one", "two")
    for name in ("one", "two"):
        run.tell(name, store(A), store(B), store(M, tier=L2))
    run.tell("one", clear(L1))
    assert run.holders(A) == {("two", L1)}
    assert run.holders(M) == {("one", L2), ("two", L2)}
    run.tell("one", clear(L2), store(A, 5))
    assert run.held()["one"] == {(L1, A): 5}
    run.fleet.directory.check_integrity()


def test_bl38_events_of_a_server_that_left_are_refused():
    run = FleetRun("one", "two", config=FleetConfig(blend_bytes=1 << 20))
    run.tell("one", store(A))
    run.tell("two", store(A), store(M, tier=L2), store(B, tokens=b"t" * 16, namespace_root=b"r" * 32))
    assert B in run.fleet.blend
    queued = [FakeBatch("two", run.servers["two"].incarnation, 2 + i, (store(chunk(i)),)) for i in range(100)]
    assert run.fleet.deregister("two", run.servers["two"].incarnation)
    for batch in queued:
        with pytest.raises(ServerNotRegistered):
            run.fleet.report(batch, run.now)
    assert set(run.held()) == {"one"}
    assert run.fleet.stats.refused == 100
    assert run.fleet.sweep() == 0
    assert B not in run.fleet.blend
    assert run.fleet.directory.stats().keys == 1


def test_bl40_a_new_coordinator_knows_everything_again_without_new_events():
    run = FleetRun("one", "two")
    for name in ("one", "two"):
        server = run.servers[name]
        for number in range(50):
            server.store(chunk((name, number)), 3, L2 if number < 10 else L1)
        run.fleet.report(server.close(), run.now)
    before = run.held()
    run.fleet = Fleet()
    with pytest.raises(ServerNotRegistered):
        run.beat("one")
    for server in run.servers.values():
        assert run.fleet.register(server.info, run.now).next_sequence == 1
        run.beat(server.server_id)
        assert run.reporting(server.server_id) == "resyncing"
    assert run.heal() == 2
    assert run.held() == before
    assert run.reporting("one") == run.reporting("two") == "current"
    assert run.fleet.register(run.servers["one"].info, run.now).next_sequence == 2


def test_bl41_one_unknown_key_stops_nothing():
    run = FleetRun("one", "two")
    run.tell("one", store(K2), store(K3))
    run.tell("two", store(K2))
    reported = run.tell("one", delete(chunk("unknown")), delete(K2), delete(K3))
    assert reported.applied.missed == 1
    assert run.holders(K2) == {("two", L1)}
    assert not run.holders(K3)
    assert run.tell("one").admission is Admission.ADMITTED


@pytest.mark.parametrize("stored_last", [True, False])
def test_bl41_order_inside_a_batch_decides(stored_last):
    run = FleetRun("one")
    events = [delete(A), store(A)] if stored_last else [store(A), delete(A)]
    run.tell("one", *events)
    assert bool(run.holders(A)) == stored_last


def test_bl41_others_join_and_beat_while_a_large_server_is_swept():
    run = FleetRun("large", "two")
    run.tell("large", *(store(chunk(number)) for number in range(5000)))
    run.tell("two", store(chunk(0)))
    run.fleet.deregister("large", run.servers["large"].incarnation)
    assert run.fleet.locate([chunk(0)]).prefixes == (("two", 1),)
    assert not run.holders(chunk(1))
    left = 5000
    while left:
        before, left = left, run.fleet.sweep(100)
        assert before - left == 100
        run.beat("two")
        run.fleet.register(run.servers["large"].info, run.now)
    run.fleet.directory.check_integrity()


def test_bl44_content_of_other_namespaces_is_never_matched():
    run = FleetRun("one", config=FleetConfig(blend_bytes=1 << 20))
    tokens = bytes(range(16))
    spaces = [Namespace("A", salt="1"), Namespace("A", salt="2"), Namespace("B", salt="1")]
    keys = [chunk_keys(root(space, 4), tokens, 4)[0] for space in spaces]
    stores = [
        store(key, tokens=tokens, namespace_root=root(space, 4))
        for key, space in zip(keys, spaces, strict=True)
    ]
    run.tell("one", *stores)
    for key, space in zip(keys, spaces, strict=True):
        ((hit, placements),) = run.fleet.match_blend(space, bytes(12) + tokens)
        assert (hit.key, hit.cached_position, hit.prompt_position) == (key, 0, 3)
        assert [placement.server_id for placement in placements] == ["one"]
    assert run.fleet.match_blend(Namespace("C"), tokens) == []
    run.tell("one", delete(keys[0]))
    assert run.fleet.match_blend(spaces[0], tokens) == []


def test_blend_lookup_without_a_match_or_without_an_index_answers_with_nothing():
    run = FleetRun("one", config=FleetConfig(blend_bytes=1 << 20))
    assert run.fleet.match_blend(Namespace("A"), bytes(64)) == []
    assert FleetRun("one").fleet.match_blend(Namespace("A"), bytes(64)) == []


def test_bl43_each_position_has_one_candidate_whoever_holds_it():
    run = FleetRun("one", "two", config=FleetConfig(blend_bytes=1 << 20))
    tokens, space = bytes(range(16)), Namespace("A")
    (key,) = chunk_keys(root(space, 4), tokens, 4)
    for name in ("one", "two", "one"):
        run.tell(name, store(key, tokens=tokens, namespace_root=root(space, 4)))
    ((hit, placements),) = run.fleet.match_blend(space, tokens)
    assert hit.key == key
    assert {placement.server_id for placement in placements} == {"one", "two"}


def test_who_does_not_fit_the_fleet_is_shown_and_kept_apart():
    run = FleetRun("one", config=FleetConfig(blend_bytes=1 << 20))
    run.servers["odd"] = odd = FakeServer("odd", chunk_size=8)
    run.join(odd)
    run.tell("odd", store(A, tokens=bytes(16), namespace_root=b"r" * 32))
    assert "chunk size is 8" in run.fleet.view("odd", run.now).sharing_problem
    assert (run.fleet.view("odd", run.now).placements, run.holders(A)) == (1, {("odd", L1)})
    assert run.fleet.locate([A]).combined == 0
    assert A not in run.fleet.blend
    run.fleet.deregister("one", run.servers["one"].incarnation)
    assert run.fleet.view("odd", run.now).sharing_problem == ""
    assert run.fleet.locate([A]).prefixes == (("odd", 1),)


def test_tokens_need_a_chunk_size_in_the_fleet():
    run = FleetRun()
    with pytest.raises(ChunkSizeNotNegotiated):
        run.fleet.keys_of(Namespace("A"), bytes(64))
    run.servers["one"] = one = FakeServer("one")
    run.join(one)
    assert run.fleet.keys_of(Namespace("A"), bytes(64)) == chunk_keys(root(Namespace("A"), 4), bytes(64), 4)


def test_a_lost_server_without_l2_is_forgotten_at_once():
    run = FleetRun("one")
    run.tell("one", store(A))
    run.now += 31
    run.fleet.tick(run.now)
    assert run.fleet.directory.servers() == []
    assert run.fleet.views(run.now) == []
    assert list(run.fleet.take_changes().left) == ["one"]


def test_a_restart_fences_l1_and_keeps_l2():
    run = FleetRun("one")
    server = run.servers["one"]
    run.tell("one", store(A), store(B, tier=L2))
    old = server.incarnation
    server.restart()
    server.held = {(L2, B): 100}
    run.fleet.register(server.info, run.now)
    assert run.held() == {"one": {(L2, B): 100}}
    (placement,) = run.fleet.directory.placements(B)
    assert placement.incarnation == old
    stale = run.fleet.report(FakeBatch("one", old, 2, (store(M),)), run.now)
    assert (stale.admission, stale.sequence) == (Admission.STALE, 0)
    assert run.fleet.stats.stale == 1
    run.heal()
    (placement,) = run.fleet.directory.placements(B)
    assert placement.incarnation == server.incarnation


def test_a_lost_server_keeps_its_l2_listed_and_is_not_located():
    run = FleetRun("one", config=FleetConfig(keep_l2=100))
    run.tell("one", store(A), store(B, tier=L2))
    run.now += 31
    run.fleet.tick(run.now)
    assert run.held() == {"one": {(L2, B): 100}}
    assert run.fleet.locate([B]).prefixes == ()
    run.now += 101
    run.fleet.tick(run.now)
    assert run.held() == {}


def test_a_server_that_was_expired_wrongly_is_whole_again():
    run = FleetRun("one")
    server = run.servers["one"]
    server.store(A)
    run.fleet.report(server.close(), run.now)
    run.now += 31
    run.fleet.tick(run.now)
    assert not run.holders(A)
    run.join(server)
    assert run.holders(A) == {("one", L1)}


def test_lost_batches_make_a_gap_also_without_a_jump():
    run = FleetRun("one")
    assert run.tell("one", store(A), lost=3).admission is Admission.GAP
    assert run.reporting("one") == "resyncing"


def test_kinds_of_the_future_are_skipped_and_counted():
    run = FleetRun("one")
    applied = run.tell(
        "one", FakeEvent(17, A), store(A), store(b"short"), store(B, 0), store(M, tier=9)
    ).applied
    assert (applied.unknown, applied.invalid) == (1, 3)
    assert run.held() == {"one": {(L1, A): 100}}


def test_a_server_cannot_have_stores_without_end():
    run = FleetRun("one")
    events = [FakeEvent(1, A, L2, f"disk{number}", 1) for number in range(100)]
    assert run.tell("one", *events).applied.invalid == 36


def test_uses_are_counted_once():
    run = FleetRun("one")
    run.tell("one", store(A), access(A, 3), access(B, 1))
    run.tell("one", access(A, 2**32 - 1))
    (placement,) = run.fleet.directory.placements(A)
    assert placement.uses == 2**32 - 1


def test_batches_outside_the_contract_are_refused():
    run = FleetRun("one")
    incarnation = run.servers["one"].incarnation
    with pytest.raises(InvalidArgument, match="sequence"):
        run.fleet.report(FakeBatch("one", incarnation, 0, ()), run.now)
    with pytest.raises(TooManyItems):
        run.fleet.report(FakeBatch("one", incarnation, 1, (store(A),) * 10_001), run.now)
    with pytest.raises(InvalidArgument, match="31 bytes"):
        run.fleet.locate([A, b"x" * 31])


def test_batches_of_the_schema_are_taken_as_they_are():
    run = FleetRun("one", config=FleetConfig(blend_bytes=1 << 20))
    tokens, space = bytes(range(16)), Namespace("A")
    (key,) = chunk_keys(root(space, 4), tokens, 4)
    batch = event_pb2.CacheEventBatch(
        server_id="one",
        incarnation=run.servers["one"].incarnation,
        sequence=1,
        events=[
            event_pb2.CacheEvent(
                kind=event_pb2.CACHE_EVENT_KIND_STORE,
                chunk_key=key,
                tier=event_pb2.STORAGE_TIER_L2,
                backend="disk",
                size_bytes=77,
                tokens=tokens,
                namespace_root=root(space, 4),
            ),
            event_pb2.CacheEvent(
                kind=event_pb2.CACHE_EVENT_KIND_ACCESS,
                chunk_key=key,
                tier=event_pb2.STORAGE_TIER_L2,
                backend="disk",
                access_count=2,
            ),
            event_pb2.CacheEvent(kind=event_pb2.CACHE_EVENT_KIND_DELETE, chunk_key=A, tier=L1),
            event_pb2.CacheEvent(kind=event_pb2.CACHE_EVENT_KIND_CLEAR, tier=L1),
        ],
    )
    reported = run.fleet.report(event_pb2.CacheEventBatch.FromString(batch.SerializeToString()), run.now)
    assert (reported.applied.unknown, reported.applied.invalid, reported.applied.missed) == (0, 0, 1)
    ((hit, (placement,)),) = run.fleet.match_blend(space, tokens)
    assert hit.key == key
    assert (placement.tier, placement.backend, placement.size_bytes, placement.uses) == (L2, "disk", 77, 2)


def test_what_was_told_before_there_was_a_chunk_size_is_asked_for_again():
    run = FleetRun(config=FleetConfig(blend_bytes=1 << 20))
    server = run.servers["one"] = FakeServer("one", chunk_size=0)
    run.join(server)
    run.tell("one", store(A))
    assert (run.fleet.blend, run.reporting("one")) == (None, "current")
    server.held = {(L1, A): 100}
    server.chunk_size = 4
    run.fleet.register(server.info, run.now)
    assert run.fleet.blend is not None
    assert run.reporting("one") == "resyncing"
    assert run.heal() == 1
    assert (run.holders(A), run.reporting("one")) == ({("one", L1)}, "current")
