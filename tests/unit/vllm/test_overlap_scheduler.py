"""The scheduler's side when loads belong to the step that admits their request."""

from __future__ import annotations

import pytest

from kvwire.vllm.metadata import WorkerReport
from support.fake_engine import Blocks, FakeLookups, Request, scheduler_side, step_output, worker_output

TABLE = list(range(1, 9))
"""Eight blocks of 32 tokens: four chunks, of which two are found."""


@pytest.fixture
def lookups():
    return FakeLookups()


def admitted(side, lookups, name="r", table=TABLE, promised=128, **request):
    asked = Request(name, range(256), **request)
    side.matched_tokens(asked, 0)
    lookups.hits[name] = 128
    assert side.matched_tokens(asked, 0) == 128
    side.allocated(asked, Blocks(table), promised)
    asked.num_computed_tokens = 128
    return asked


def step(side, request, num_tokens, table=TABLE):
    name = request.request_id
    made = side.step(step_output({name: num_tokens}, tables={name: [table]}))
    request.num_computed_tokens += num_tokens
    return made


def stored(made):
    return [(job.request_id, job.plan.chunks) for job in made.stores]


def test_what_is_computed_behind_a_load_is_stored_when_the_load_is_proven(lookups):
    side = scheduler_side(lookups, overlap=True)
    request = admitted(side, lookups)
    first = step(side, request, 128)
    assert [job.plan.block_ids for job in first.loads] == [{1, 2, 3, 4}]
    assert stored(first) == []
    side.worker_output(worker_output(report=WorkerReport(ended_loads={"r": 1})))
    assert stored(step(side, request, 1)) == [("r", range(2, 4))]


def test_every_rank_has_to_prove_it(lookups):
    side = scheduler_side(lookups, overlap=True, world_size=2)
    request = admitted(side, lookups)
    step(side, request, 128)
    side.worker_output(worker_output(report=WorkerReport(ended_loads={"r": 1})))
    assert stored(step(side, request, 1)) == []
    side.worker_output(worker_output(report=WorkerReport(ended_loads={"r": 1})))
    assert stored(step(side, request, 1)) == [("r", range(2, 4))]


def test_who_shares_the_blocks_of_a_load_waits_for_it_too(lookups):
    """The engine's prefix cache hands them out before they are loaded."""
    side = scheduler_side(lookups, overlap=True)
    admitted(side, lookups)
    other = Request("other", range(256))
    lookups.hits["other"] = 128
    side.matched_tokens(other, 128)
    side.matched_tokens(other, 128)
    table = [1, 2, 3, 4, 20, 21, 22, 23]
    side.allocated(other, Blocks(table), 0)
    other.num_computed_tokens = 128
    assert stored(step(side, other, 128, table)) == []
    side.worker_output(worker_output(report=WorkerReport(ended_loads={"r": 1})))
    assert stored(step(side, other, 1, table)) == [("other", range(2, 4))]


def test_a_load_that_fails_is_stored_again_from_the_start(lookups):
    side = scheduler_side(lookups, overlap=True)
    request = admitted(side, lookups)
    step(side, request, 128)
    report = WorkerReport(ended_loads={"r": 1})
    side.worker_output(worker_output(bad_blocks={3}, report=report))
    request.num_computed_tokens = 64
    assert stored(step(side, request, 192)) == [("r", range(4))]


def test_a_load_that_cannot_be_planned_names_all_that_it_was_for(lookups):
    side = scheduler_side(lookups, overlap=True)
    request = admitted(side, lookups, promised=96)
    (job,) = step(side, request, 128).loads
    assert not job.plan.groups
    assert job.doomed == set(TABLE)
    side.worker_output(worker_output(bad_blocks={1}, report=WorkerReport(ended_loads={"r": 1})))
    request.num_computed_tokens = 0
    assert stored(step(side, request, 256)) == [("r", range(4))]


def test_a_request_that_ends_with_the_step_of_its_load_is_let_go(lookups):
    """The engine does not wait for such a load, so only open stores hold its blocks."""
    side = scheduler_side(lookups, overlap=True)
    request = admitted(side, lookups)
    step(side, request, 128)
    assert side.finished(request) is False
    side.worker_output(worker_output(report=WorkerReport(ended_loads={"r": 1})))
    assert not side._open_loads.touch([TABLE])
