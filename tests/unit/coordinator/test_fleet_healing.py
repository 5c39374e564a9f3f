"""How a view heals: snapshots while events go on, and members whose events do not arrive."""

from __future__ import annotations

from kvwire.coordinator.fleet import FleetConfig
from kvwire.coordinator.messages import Admission
from support.fleet_model import (
    L1,
    L2,
    FleetRun,
    access,
    chunk,
    clear,
    delete,
    store,
)

A, B, K2, K3, M = (chunk(name) for name in "ab23m")


def test_events_go_on_while_a_snapshot_is_pulled():
    run = FleetRun("one")
    server = run.servers["one"]
    server.held = {(L1, A): 1, (L1, B): 1, (L1, M): 1}
    run.tell("one", sequence=5)
    taken = server.snapshot()
    (pull,) = run.fleet.pulls(run.now)
    run.tell("one", delete(A), sequence=6)
    assert run.fleet.pull_page(pull, taken.incarnation, taken.sequence, [store(A, 1), store(B, 1)], run.now)
    assert run.holders(B)
    assert not run.holders(A)
    run.tell("one", delete(M), store(K2), sequence=7)
    assert run.fleet.pull_page(pull, taken.incarnation, taken.sequence, [store(M, 1)], run.now)
    assert run.fleet.end_pull(pull, run.now)
    assert run.held() == {"one": {(L1, B): 1, (L1, K2): 100}}
    assert run.fleet.view("one", run.now).applied_sequence == 7
    run.fleet.directory.check_integrity()


def test_a_snapshot_older_than_what_is_missing_does_not_count():
    run = FleetRun("one")
    run.tell("one", sequence=5)
    (pull,) = run.fleet.pulls(run.now)
    incarnation = run.servers["one"].incarnation
    run.tell("one", store(A), sequence=9)
    assert not run.fleet.pull_page(pull, incarnation, 7, [store(B)], run.now)
    assert run.fleet.pulls(run.now) == []
    run.now += run.fleet.config.retry_after
    (again,) = run.fleet.pulls(run.now)
    assert not run.fleet.pull_page(pull, incarnation, 9, [store(B)], run.now)
    assert run.fleet.pull_page(again, incarnation, 9, [store(B)], run.now)
    assert run.fleet.end_pull(again, run.now)
    assert run.held() == {"one": {(L1, B): 100}}


def test_a_snapshot_that_covers_a_new_hole_counts():
    run = FleetRun("one")
    run.tell("one", sequence=5)
    (pull,) = run.fleet.pulls(run.now)
    run.tell("one", store(A), sequence=9)
    assert run.fleet.pull_page(pull, run.servers["one"].incarnation, 8, [store(B)], run.now)
    assert run.fleet.end_pull(pull, run.now)
    assert run.held() == {"one": {(L1, A): 100, (L1, B): 100}}


def test_what_could_not_be_kept_makes_another_pull_needed():
    run = FleetRun("one", config=FleetConfig(max_kept_events=2))
    run.tell("one", sequence=5)
    (pull,) = run.fleet.pulls(run.now)
    run.tell("one", store(A), store(B), store(M))
    assert not run.fleet.pull_page(pull, run.servers["one"].incarnation, 5, [], run.now)
    assert run.holders(A)


def test_clear_while_pages_arrive_wins_over_later_pages():
    run = FleetRun("one")
    run.tell("one", sequence=5)
    (pull,) = run.fleet.pulls(run.now)
    incarnation = run.servers["one"].incarnation
    assert run.fleet.pull_page(pull, incarnation, 5, [store(A)], run.now)
    run.tell("one", clear(L1), store(K2))
    assert run.fleet.pull_page(pull, incarnation, 5, [store(B), store(K2, 1), store(M, tier=L2)], run.now)
    assert run.fleet.end_pull(pull, run.now)
    assert run.held() == {"one": {(L1, K2): 100, (L2, M): 100}}


def test_deletions_while_pages_arrive_are_bounded():
    run = FleetRun("one", config=FleetConfig(max_deleted_while_loading=2))
    run.tell("one", sequence=5)
    (pull,) = run.fleet.pulls(run.now)
    incarnation = run.servers["one"].incarnation
    assert run.fleet.pull_page(pull, incarnation, 5, [], run.now)
    run.tell("one", delete(A), delete(B), delete(M))
    assert not run.fleet.pull_page(pull, incarnation, 5, [store(A)], run.now)
    assert len(run.fleet.directory.holdings("one").deleted) == 0
    assert run.fleet.pulls(run.now)


def test_a_gap_while_pages_arrive_makes_the_pull_void():
    run = FleetRun("one")
    run.tell("one", sequence=5)
    (pull,) = run.fleet.pulls(run.now)
    incarnation = run.servers["one"].incarnation
    assert run.fleet.pull_page(pull, incarnation, 5, [store(B)], run.now)
    assert run.tell("one", store(A), sequence=8).admission is Admission.GAP
    assert not run.fleet.pull_page(pull, incarnation, 5, [store(M)], run.now)
    assert not run.fleet.end_pull(pull, run.now)
    assert run.reporting("one") == "resyncing"


def test_a_snapshot_of_another_run_does_not_count():
    run = FleetRun("one")
    run.tell("one", sequence=5)
    (pull,) = run.fleet.pulls(run.now)
    assert not run.fleet.pull_page(pull, b"x" * 16, 5, [store(B)], run.now)
    assert not run.holders(B)


def test_an_answer_to_a_pull_before_a_leave_does_not_count():
    run = FleetRun("one")
    server = run.servers["one"]
    run.tell("one", sequence=5)
    (old,) = run.fleet.pulls(run.now)
    run.fleet.deregister("one", server.incarnation)
    run.fleet.register(server.info, run.now)
    assert run.fleet.pulls(run.now)
    assert not run.fleet.pull_page(old, server.incarnation, 5, [store(B)], run.now)
    assert not run.fleet.end_pull(old, run.now)
    assert not run.holders(B)


def test_pages_of_two_positions_are_no_snapshot():
    run = FleetRun("one")
    run.tell("one", sequence=5)
    (pull,) = run.fleet.pulls(run.now)
    incarnation = run.servers["one"].incarnation
    assert run.fleet.pull_page(pull, incarnation, 5, [store(A)], run.now)
    assert not run.fleet.pull_page(pull, incarnation, 6, [store(B)], run.now)
    assert not run.fleet.end_pull(pull, run.now)
    assert run.reporting("one") == "resyncing"


def test_a_member_whose_events_do_not_arrive_is_silent_and_asked():
    run = FleetRun("one")
    server = run.servers["one"]
    server.store(A)
    server.close()
    run.beat("one")
    assert run.reporting("one") == "lagging"
    run.fleet.take_changes()
    run.now += run.fleet.config.silent_after + 0.1
    run.fleet.tick(run.now)
    assert run.reporting("one") == "silent"
    assert list(run.fleet.take_changes().changed) == ["one"]
    assert run.heal() == 1
    assert run.holders(A)
    assert run.reporting("one") == "silent"
    server.store(B)
    run.fleet.report(server.close(), run.now)
    assert run.reporting("one") == "current"


def test_a_silent_member_is_asked_again_and_again_but_not_all_the_time():
    run = FleetRun("one")
    server = run.servers["one"]
    pulls = 0
    for _ in range(60):
        server.close()
        run.beat("one")
        run.now += 1
        run.fleet.tick(run.now)
        pulls += run.heal()
    assert 3 <= pulls <= 5
    assert run.fleet.view("one", run.now).heartbeat_age == 1


def test_a_member_that_lags_is_not_silent_while_batches_arrive():
    run = FleetRun("one")
    for _ in range(10):
        run.beat("one", last_sequence=100)
        run.now += 2
        run.tell("one", store(A))
        run.fleet.tick(run.now)
        assert run.reporting("one") == "lagging"


def test_what_is_applied_again_on_top_of_a_snapshot_counts_uses_once():
    run = FleetRun("one")
    run.tell("one", store(A), sequence=5)
    (pull,) = run.fleet.pulls(run.now)
    run.tell("one", store(B), access(A, 3))
    assert run.fleet.pull_page(pull, run.servers["one"].incarnation, 5, [store(A)], run.now)
    assert run.fleet.end_pull(pull, run.now)
    assert run.holders(B)
    assert [placement.uses for placement in run.fleet.directory.placements(A)] == [3]
