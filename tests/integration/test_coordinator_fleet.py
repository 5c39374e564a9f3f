"""A real coordinator process, and servers that come, report, go silent and die."""

from __future__ import annotations

import grpc
import pytest

from kvwire.client.status import from_rpc_error
from kvwire.errors import IncarnationStale, ServerNotRegistered
from kvwire.keys import Namespace, chunk_keys, pack_tokens, root
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2, namespace_pb2
from support.coordinator_process import FAST, coordinator_process
from support.fleet_member import Member, gone, store
from support.waiting import eventually

CURRENT, LAGGING, RESYNCING, SILENT = range(1, 5)


@pytest.fixture
def coordinator(short_tmp):
    with coordinator_process(short_tmp, "--http=127.0.0.1:0", *FAST) as started:
        yield started


def error_of(call):
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc_error(caught.value, address="", method="", seconds=None)


def whole(member: Member) -> None:
    def is_whole():
        member.beat()
        return member.me().reporting == CURRENT

    eventually(is_whole)


def test_a_gap_is_healed_by_a_snapshot_while_events_go_on(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as a:
        a.register()
        whole(a)
        assert a.tell(store(1)).admission == pb.EVENT_ADMISSION_ADMITTED
        assert a.holders(1) == [("a", 1)]
        a.held = [store(2), store(3)]
        assert a.tell(store(3), sequence=5).admission == pb.EVENT_ADMISSION_GAP
        whole(a)
        assert (a.holders(1), a.holders(2), a.holders(3)) == ([], [("a", 1)], [("a", 1)])
        assert a.me().applied_sequence == 5
        assert a.tell(store(4), sequence=3).admission == pb.EVENT_ADMISSION_DUPLICATE


def test_a_server_without_life_sign_loses_its_memory_and_keeps_its_l2(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as a:
        a.register()
        whole(a)
        a.tell(store(1), store(2, tier=2))
        assert a.holders(1) == [("a", 1)]
        eventually(lambda: a.me() is None)
        assert (a.holders(1), a.holders(2)) == ([], [("a", 2)])
        assert isinstance(error_of(a.beat), ServerNotRegistered)
        a.held = [store(1)]
        a.register()
        whole(a)
        assert (a.holders(1), a.holders(2)) == ([("a", 1)], [])


def test_a_newer_run_fences_and_the_old_one_has_no_say(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as a:
        a.register()
        whole(a)
        a.tell(store(1))
        old = a.batch(store(9))
        a.run = 2
        a.sequence = 0
        a.register()
        assert a.holders(1) == []
        late = a.send(old)
        assert (late.admission, late.sequence) == (pb.EVENT_ADMISSION_STALE_INCARNATION, 0)
        assert a.holders(9) == []
        a.run = 1
        assert isinstance(error_of(a.beat), IncarnationStale)
        assert isinstance(error_of(a.register), IncarnationStale)
        a.run = 2
        whole(a)


def test_bl_37_a_late_batch_brings_nothing_back(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as a:
        a.register()
        whole(a)
        a.tell(store("a"))
        a.hang = True
        late = a.batch(store("m"))
        last = a.batch(gone("m"))
        assert a.send(last).admission == pb.EVENT_ADMISSION_GAP
        for again in (late, last):
            assert a.send(again).admission == pb.EVENT_ADMISSION_DUPLICATE
            assert a.holders("m") == []
        a.tell(store("b"))
        assert a.me().reporting == RESYNCING
        a.held = [store("a"), store("b"), store("c")]
        a.sequence = 12
        a.hang = False
        whole(a)
        assert a.me().applied_sequence == 12
        gaps = a.stub.GetDirectoryStats(pb.GetDirectoryStatsRequest()).gaps
        assert a.tell(store("d")).admission == pb.EVENT_ADMISSION_ADMITTED
        assert a.stub.GetDirectoryStats(pb.GetDirectoryStatsRequest()).gaps == gaps
        assert [a.holders(name) for name in "mabcd"] == [[], *[[("a", 1)]] * 4]


def test_bl_41_each_entry_of_a_batch_is_for_itself(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as a, Member(coordinator, "b", short_tmp) as b:
        for each in (a, b):
            each.register()
            whole(each)
            each.tell(store(2), store(3))
        assert a.tell(gone("unknown"), gone(2), gone(3)).admission == pb.EVENT_ADMISSION_ADMITTED
        assert (a.holders(2), a.holders(3)) == ([("b", 1)], [("b", 1)])
        assert a.tell().admission == pb.EVENT_ADMISSION_ADMITTED
        a.tell(store(4), gone(4), gone(5), store(5))
        assert (a.holders(4), a.holders(5)) == ([], [("a", 1)])
        for first in range(0, 50_000, 10_000):
            b.tell(*[store(("b", n)) for n in range(first, first + 10_000)])
        b.stub.DeregisterServer(pb.DeregisterServerRequest(server_id="b", incarnation=b.incarnation))
        a.beat()
        assert a.register().sharing
        assert (a.holders(2), a.holders(("b", 1)), a.holders(5)) == ([], [], [("a", 1)])


def test_bl_38_clear_and_leave_with_batches_on_their_way(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as a, Member(coordinator, "b", short_tmp) as b:
        for each in (a, b):
            each.register()
            whole(each)
            each.tell(*[store(n) for n in range(20)])
        a.tell(event_pb2.CacheEvent(kind=4, tier=1))
        assert a.holders(1) == [("b", 1)]
        queued = [b.batch(store(("late", n))) for n in range(100)]
        b.stub.DeregisterServer(pb.DeregisterServerRequest(server_id="b", incarnation=b.incarnation))
        for batch in queued:
            assert isinstance(error_of(lambda batch=batch: b.send(batch)), ServerNotRegistered)
        stats = a.stub.GetDirectoryStats(pb.GetDirectoryStatsRequest())
        assert (stats.placements, stats.refused_batches) == (0, 100)


def test_bl_38_who_left_is_not_brought_back_by_what_was_on_its_way(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as a:
        a.register()
        whole(a)
        late = a.batch(store(1))
        a.stub.DeregisterServer(pb.DeregisterServerRequest(server_id="a", incarnation=a.incarnation))
        assert isinstance(error_of(lambda: a.send(late)), ServerNotRegistered)
        assert a.holders(1) == []
        stats = a.stub.GetDirectoryStats(pb.GetDirectoryStatsRequest())
        assert (stats.keys, stats.refused_batches) == (0, 1)


def test_a_member_whose_events_do_not_arrive_is_shown(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as a:
        a.register()
        whole(a)
        a.sequence = 7
        a.hang = True

        def is_silent():
            a.beat()
            return a.me().reporting == SILENT

        eventually(is_silent)
        status, body = coordinator.get("/healthz")
        assert status == 200
        assert "events do not arrive from: a" in body
        assert 'kvwire_coordinator_members{reporting="silent"} 1.0' in coordinator.get("/metrics")[1]
        a.tell(store(1), sequence=8)
        a.hang = False
        whole(a)
        assert coordinator.get("/healthz") == (200, "ok\n")


def test_a_server_that_hangs_at_its_snapshot_delays_nobody(coordinator, short_tmp):
    with Member(coordinator, "hangs", short_tmp) as bad, Member(coordinator, "b", short_tmp) as good:
        bad.hang = True
        bad.register()
        eventually(lambda: bad.snapshots)
        good.held = [store(1)]
        good.register()
        whole(good)
        assert good.holders(1) == [("b", 1)]
        assert bad.tell(store(2)).sequence == 1
        assert bad.me().reporting == RESYNCING
        assert bad.holders(2) == [("hangs", 1)]


def test_a_coordinator_that_was_killed_is_told_everything_again(short_tmp):
    with coordinator_process(short_tmp, *FAST, stop=False) as first, Member(first, "a", short_tmp) as a:
        before = a.register().coordinator_incarnation
        whole(a)
        a.held = [store(1)]
        a.tell(store(1))
        first.kill()
        with coordinator_process(short_tmp, *FAST) as second:
            a.stub = second.stub()
            assert isinstance(error_of(a.beat), ServerNotRegistered)
            assert isinstance(error_of(lambda: a.tell(store(2))), ServerNotRegistered)
            assert a.register().coordinator_incarnation != before
            whole(a)
            assert a.holders(1) == [("a", 1)]


def test_watchers_see_all_members_and_then_every_change(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as a, Member(coordinator, "b", short_tmp) as b:
        a.register()
        watches = [coordinator.stub().WatchServers(pb.WatchServersRequest()) for _ in range(3)]
        for watch in watches:
            assert next(watch).joined.server.server_id == "a"
            assert next(watch).synced
        idle = coordinator.stub().WatchEvents(pb.WatchEventsRequest())
        events = coordinator.stub().WatchEvents(pb.WatchEventsRequest(server_id="b"))
        eventually(lambda: 'kvwire_coordinator_watchers{kind="events"} 2.0' in coordinator.get("/metrics")[1])
        b.register()
        b.tell(store(1), store(2))
        told = next(events)
        assert (told.server_id, told.stored_chunks, told.source) == ("b", 2, "rpc")
        b.stub.DeregisterServer(pb.DeregisterServerRequest(server_id="b", incarnation=b.incarnation))
        for watch in watches:
            assert any(change.left == "b" for change in watch)
        idle.cancel()
        # Streams are open while it stops: it ends them, and in time.
        took = coordinator.terminate()
        assert took < 5
        with pytest.raises(grpc.RpcError) as caught:
            next(events)
        assert caught.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def test_a_mixed_fleet_is_shown_and_kept_apart(coordinator, short_tmp):
    with Member(coordinator, "a", short_tmp) as a, Member(coordinator, "b", short_tmp, chunk_size=8) as b:
        assert a.register().sharing
        joined = b.register()
        assert not joined.sharing
        assert "--chunk-size 4" in joined.sharing_problem
        whole(a)
        whole(b)
        a.tell(store(1))
        b.tell(store(1))
        found = a.stub.LocateChunks(
            pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=[store(1).chunk_key]))
        )
        assert [each.server_id for each in found.servers] == ["a"]
        assert found.servers[0].addresses == [a.address]


def test_chunks_are_found_at_other_positions_and_by_tokens(short_tmp):
    model = namespace_pb2.Namespace(model="m")
    space = root(Namespace(model="m"), 4)
    old = pack_tokens(range(100, 108))
    first, second = chunk_keys(space, old, 4)
    events = [
        store("unused", tokens=old[:16], namespace_root=space),
        store("unused", tokens=old[16:], namespace_root=space, parent_key=first),
    ]
    events[0].chunk_key, events[1].chunk_key = first, second
    with (
        coordinator_process(short_tmp, "--enable-blend-lookup", *FAST) as coordinator,
        Member(coordinator, "a", short_tmp) as a,
    ):
        # Tokens come with snapshots, too.
        a.held = events
        a.register()
        whole(a)
        prompt = pack_tokens([1, 2, 3, *range(104, 108), 4])
        (match,) = a.stub.MatchBlend(pb.MatchBlendRequest(namespace=model, tokens=prompt)).matches
        assert (match.chunk_key, match.cached_position, match.prompt_position) == (second, 4, 3)
        assert match.placements[0].server_id == "a"
        found = a.stub.LocateChunks(pb.LocateChunksRequest(namespace=model, tokens=old + prompt))
        assert (found.asked_chunks, found.combined_prefix_chunks) == (4, 2)
        a.tell(event_pb2.CacheEvent(kind=3, chunk_key=second, tier=1, backend="memory"))
        assert not a.stub.MatchBlend(pb.MatchBlendRequest(namespace=model, tokens=prompt)).matches
