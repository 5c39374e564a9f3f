"""Loads ahead of the forward pass: what is proven at the end of a step, and what depends on it until then."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvwire.client.jobs import GroupBlocks
from kvwire.client.layout import GroupKind
from kvwire.vllm.layerwise import LayerLoads, OpenLoads, blocks_behind, why_not
from kvwire.vllm.layout import CacheGroup, EngineLayout
from kvwire.vllm.metadata import Job, Prompt, WorkerReport
from kvwire.vllm.plan import BlockPlan

NAMES = ("layer.0", "layer.1", "layer.2")
GROUP = CacheGroup(0, GroupKind.FULL_ATTENTION, 16, NAMES, (64,) * 3)
LAYOUT = EngineLayout((GROUP,), 1, 64, 1, block_major=False)


class FakeTransfer:
    def __init__(self, watch, *, ends=True, failed_blocks=frozenset(), failed=False):
        self.watch, self.ends = watch, ends
        self.failed, self.failed_block_ids = failed, failed_blocks
        self.cancelled = False

    def wait(self, timeout):
        return self.ends

    def cancel(self):
        self.cancelled = True


class FakeTransfers:
    """Its loads arrive at once, up to `layers`, and end as told."""

    def __init__(self, layers=3, **how):
        self.layers, self.how = layers, how
        self.started = []

    def submit_watched_retrieve_request(self, request_id, op, watch, event=None):
        for layer in range(self.layers):
            watch.arrived(layer, op)
        self.started.append(FakeTransfer(watch, **self.how))
        return self.started[-1]


def job(name="r", chunks=2, doomed=frozenset()):
    groups = (GroupBlocks(0, 0, chunks, tuple(range(1, chunks + 1))),) if chunks else ()
    return Job(name, Prompt(name), BlockPlan(groups), doomed=doomed)


def loads(transfers, wait=0.05):
    return LayerLoads(transfers, lambda job: len(job.plan.groups[0].block_ids), NAMES, wait)


def run_step(layers, *jobs, names=NAMES):
    layers.start(jobs)
    for name in names:
        layers.wait_for_layer(name)
    return layers.finish()


def test_loads_that_end_well_leave_nothing_to_compute():
    assert run_step(loads(FakeTransfers()), job("a"), job("b")) == (set(), {"a": 1, "b": 1})


def test_a_step_without_loads_waits_for_nothing():
    layers = loads(FakeTransfers())
    layers.wait_for_layer("layer.0")
    assert layers.finish() == (set(), {})


def test_a_load_that_fails_names_its_blocks():
    transfers = FakeTransfers(failed=True, failed_blocks=frozenset({2}))
    assert run_step(loads(transfers), job()) == ({2}, {"r": 1})
    transfers = FakeTransfers(failed=True)
    assert run_step(loads(transfers), job()) == ({1, 2}, {"r": 1})


def test_a_layer_that_comes_too_late_fails_the_load_though_it_ends_well():
    """The forward pass has read something else by then."""
    assert run_step(loads(FakeTransfers(layers=1)), job()) == ({1, 2}, {"r": 1})


def test_a_load_that_does_not_end_is_given_up_and_writes_no_more():
    transfers = FakeTransfers(layers=1, ends=False)
    assert run_step(loads(transfers), job()) == ({1, 2}, {"r": 1})
    assert transfers.started[0].cancelled
    with pytest.raises(Exception, match="withdrawn"), transfers.started[0].watch.writing():
        pass


def test_a_load_that_cannot_be_started_fails(caplog):
    class Broken:
        def submit_watched_retrieve_request(self, *args):
            raise RuntimeError("no thread")

    assert run_step(loads(Broken()), job()) == ({1, 2}, {"r": 1})
    assert "could not be started" in caplog.text


def test_a_load_without_a_plan_fails_with_all_that_it_was_for():
    transfers = FakeTransfers()
    assert run_step(loads(transfers), job(chunks=0, doomed=frozenset({7, 8}))) == ({7, 8}, {"r": 1})
    assert not transfers.started


def test_a_model_whose_layers_do_not_wait_is_not_believed(caplog):
    with caplog.at_level(logging.ERROR, "kvwire"):
        assert run_step(loads(FakeTransfers()), job(), names=NAMES[:2]) == ({1, 2}, {"r": 1})
    assert "1 of 3 layers did not wait" in caplog.text


def test_a_layer_that_shares_anothers_kv_waits_for_all_of_it():
    layers = loads(FakeTransfers(layers=2), wait=0.01)
    layers.start([job()])
    layers.wait_for_layer("layer.0")
    assert not layers._loads[0].missed
    layers.wait_for_layer("shares.one")
    assert layers._loads[0].missed


def test_a_load_has_ended_when_it_has_on_every_rank():
    loads = OpenLoads(world_size=2)
    loads.begin("a", frozenset({1, 2}))
    loads.begin("b", frozenset({5}))
    assert loads.touch([[9, 2]])
    assert loads.end({"a": 1}) == []
    assert loads.touch([[9, 2]])
    both = WorkerReport(ended_loads={"a": 1}).aggregate(WorkerReport(ended_loads={"b": 2}))
    assert sorted(loads.end(both.ended_loads)) == ["a", "b"]
    assert not loads.touch([[9, 2, 5]])
    assert not loads.touch(None)


def test_the_same_request_may_load_again_before_its_first_end_is_told():
    loads = OpenLoads(world_size=1)
    loads.begin("a", frozenset({1}))
    loads.begin("a", frozenset({2}))
    assert loads.end({"a": 1}) == []
    assert loads.touch([[1]])
    assert loads.end({"a": 1}) == ["a"]


def test_the_blocks_behind_a_token():
    assert blocks_behind(LAYOUT, ([4, 5, 0, 6],), 16) == {5, 6}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"num_engine_groups": 2}, "several KV groups"),
        ({"block_major": True}, "all layers of a block together"),
        ({"groups": (replace(GROUP, kind=GroupKind.RECURRENT),)}, "recurrent"),
    ],
)
def test_engines_that_cannot(change, why):
    found = why_not(replace(LAYOUT, **change))
    assert "draft model" in why_not(LAYOUT, drafts=True)
    assert why in found
    assert bool(found) is bool(why)


def test_the_worker_reports_what_the_step_has_shown():
    from kvwire.vllm.metadata import StepMetadata
    from kvwire.vllm.worker import WorkerSide

    adapter = SimpleNamespace(
        is_healthy=True,
        get_finished=lambda held: (None, None),
        failed_requests=set,
        get_block_ids_with_load_errors=set,
        wait_for_any=lambda timeout: False,
        require_chunk_size=lambda size: None,
    )
    layers = loads(FakeTransfers(failed=True))
    side = WorkerSide(adapter, None, rank=0, single_group=True, store_wait=1, layers=layers)
    side.start_loads([job()])
    results = side.results(StepMetadata())
    # Nobody waits for a load of the step itself.
    assert results.received == set()
    assert results.failed == set()
    assert side.take_failed_blocks() == {1, 2}
    assert side.take_report().ended_loads == {"r": 1}
    assert side.take_report() is None
