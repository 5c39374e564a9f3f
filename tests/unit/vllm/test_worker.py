from __future__ import annotations

import pytest

from kvwire.client.jobs import GroupBlocks
from kvwire.vllm.metadata import Job, Prompt, StepMetadata
from kvwire.vllm.plan import BlockPlan
from kvwire.vllm.worker import WorkerSide
from support.fake_engine import FakeTransfers


def job(request_id, *blocks):
    groups = (GroupBlocks(0, 0, 1, blocks),) if blocks else ()
    return Job(request_id, Prompt(request_id), BlockPlan(groups))


def worker(transfers, *, single_group=True, store_wait=0.0):
    return WorkerSide(transfers, lambda job: job, rank=0, single_group=single_group, store_wait=store_wait)


@pytest.fixture
def transfers():
    return FakeTransfers()


class TestLoads:
    def test_the_end_is_told_once(self, transfers):
        side = worker(transfers)
        side.start_loads([job("r", 1, 2)])
        assert transfers.loads == ["r"]
        assert not side.results(StepMetadata())
        transfers.received = {"r"}
        assert side.results(StepMetadata()).received == {"r"}
        assert not side.results(StepMetadata())
        assert not side.take_failed_blocks()

    def test_the_schedulers_chunk_size_is_the_workers(self, transfers):
        side = worker(transfers)
        side.results(StepMetadata())
        assert transfers.chunk_size == 0
        side.results(StepMetadata(chunk_size=64))
        assert transfers.chunk_size == 64

    def test_bl22_one_group_tells_the_failed_blocks(self, transfers):
        side = worker(transfers)
        transfers.received, transfers.failed, transfers.failed_blocks = {"r"}, {"r"}, {2}
        results = side.results(StepMetadata())
        assert (results.received, results.failed) == ({"r"}, set())
        assert side.take_failed_blocks() == {2}
        assert not side.take_failed_blocks()

    def test_bl22_several_groups_tell_the_failed_request(self, transfers):
        side = worker(transfers, single_group=False)
        transfers.received, transfers.failed, transfers.failed_blocks = {"r"}, {"r"}, {2}
        results = side.results(StepMetadata())
        assert (results.received, results.failed) == ({"r"}, {"r"})
        assert not side.take_failed_blocks()

    @pytest.mark.parametrize("single_group", [True, False])
    def test_a_load_that_cannot_start_ends_at_once_and_has_failed(self, transfers, single_group):
        side = worker(transfers, single_group=single_group)
        transfers.raises = True
        side.start_loads([job("r", 1, 2), job("s")])
        results = side.results(StepMetadata())
        assert results.received == results.failed == {"r", "s"}
        assert not side.take_failed_blocks()
        assert not side.results(StepMetadata())

    def test_an_idle_step_waits_a_moment(self, transfers):
        side = worker(transfers)
        side.results(StepMetadata())
        assert transfers.waited == 0
        assert not side.results(StepMetadata(idle=True))
        assert transfers.waited == 1
        transfers.ends_while_waiting = "r"
        assert side.results(StepMetadata(idle=True)).received == {"r"}
        transfers.received = {"s"}
        assert side.results(StepMetadata(idle=True)).received == {"s"}
        assert transfers.waited == 2


class TestStores:
    def test_a_held_request_is_told_when_all_its_stores_have_ended(self, transfers):
        side = worker(transfers)
        side.start_stores([job("r", 1), job("r", 2), job("s", 3)])
        assert not side.results(StepMetadata(held=frozenset({"r"})))
        transfers.stores[0][2].ended = True
        assert not side.results(StepMetadata())
        assert side.take_report().ended_stores == {"r": 1}
        transfers.stores[1][2].ended = True
        assert side.results(StepMetadata()).sent == {"r"}
        assert not side.results(StepMetadata())
        assert side.take_report().ended_stores == {"r": 1}
        assert side.take_report() is None

    def test_stores_of_requests_that_nobody_holds_are_not_told(self, transfers):
        side = worker(transfers)
        side.start_stores([job("r", 1)])
        transfers.stores[0][2].ended = True
        assert not side.results(StepMetadata())

    def test_a_held_request_whose_stores_ended_before_is_told_at_once(self, transfers):
        side = worker(transfers)
        side.start_stores([job("r", 1)])
        transfers.stores[0][2].ended = True
        side.results(StepMetadata())
        assert side.results(StepMetadata(held=frozenset({"r"}))).sent == {"r"}

    def test_a_store_that_cannot_start_counts_as_ended(self, transfers):
        side = worker(transfers)
        transfers.raises = True
        side.start_stores([job("r", 1)])
        assert side.results(StepMetadata(held=frozenset({"r"}))).sent == {"r"}
        assert side.take_report().ended_stores == {"r": 1}

    def test_bl20_blocks_are_not_overwritten_under_a_store(self, transfers):
        side = worker(transfers, store_wait=1.0)
        side.start_stores([job("r", 7, 8), job("s", 9)])
        transfers.stores[0][2].ends_while_waiting = True
        side.make_room(StepMetadata(overwritten=frozenset({7, 11})))
        assert 0.5 < transfers.stores[0][2].waits[0] <= 1.0
        assert not transfers.stores[0][2].cancelled
        assert not transfers.stores[1][2].waits

    def test_bl20_a_store_that_does_not_end_in_time_is_never_published(self, transfers):
        side = worker(transfers)
        side.start_stores([job("r", 7, 8)])
        side.make_room(StepMetadata(overwritten=frozenset({7})))
        assert transfers.stores[0][2].cancelled

    def test_bl20_without_knowing_the_blocks_all_stores_are_waited_for(self, transfers):
        side = worker(transfers)
        side.start_stores([job("r", 7), job("s", 9)])
        side.make_room(StepMetadata(overwritten=None))
        assert all(transfer.cancelled for _, _, transfer in transfers.stores)

    def test_stopping_lets_stores_end(self, transfers):
        side = worker(transfers)
        side.start_stores([job("r", 7), job("s", 9)])
        transfers.stores[0][2].ends_while_waiting = True
        side.finish_stores(0.0)
        assert [transfer.cancelled for _, _, transfer in transfers.stores] == [False, True]


def test_health_is_told_when_it_changes(transfers):
    side = worker(transfers)
    assert side.take_report() is None
    transfers.is_healthy = False
    assert side.take_report().healthy == {0: False}
    assert side.take_report() is None
    transfers.is_healthy = True
    assert side.take_report().healthy == {0: True}
