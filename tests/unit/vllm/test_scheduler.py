from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from kvwire.keys import ChunkHasher, root
from kvwire.vllm.metadata import WorkerReport
from support.fake_engine import (
    NAMESPACE,
    Blocks,
    FakeLookups,
    Request,
    group,
    scheduler_side,
    step_output,
    worker_output,
)


@pytest.fixture
def lookups():
    return FakeLookups()


def admit(side, lookups, request, hit, local=0, tables=None):
    """The engine's way from the first question to the allocation."""
    side.matched_tokens(request, local)
    lookups.hits[request.request_id] = hit
    promised = side.matched_tokens(request, local)
    tables = tables or [list(range(1, 1 + request.num_tokens // 32 + 1))]
    side.allocated(request, Blocks(*tables), promised)
    return promised, tables


def prefill(side, request, num_tokens, tables):
    """One step that computes `num_tokens` tokens."""
    output = step_output({request.request_id: num_tokens}, tables={request.request_id: tables})
    step = side.step(output)
    request.num_computed_tokens += num_tokens
    return step


def test_a_step_says_the_chunk_size_that_it_was_planned_for(lookups):
    side = scheduler_side(lookups)
    assert side.step(step_output({})).chunk_size == 0
    side.matched_tokens(Request("r", range(200)), 0)
    assert side.step(step_output({})).chunk_size == 64


class TestLookup:
    def test_asks_once_and_answers_none_until_the_answer_is_there(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        assert [side.matched_tokens(request, 0) for _ in range(3)] == [None, None, None]
        lookups.hits["r"] = 128
        assert [side.matched_tokens(request, 0) for _ in range(3)] == [128, 128, 128]
        assert lookups.calls == [("ask", "r")]
        assert lookups.asked["r"]["tokens"] == list(range(192))

    def test_the_answer_follows_what_the_engine_holds(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        lookups.hits["r"] = 192
        assert side.matched_tokens(request, 0) == 192
        assert side.matched_tokens(request, 64) == 128
        assert side.matched_tokens(request, 192) == 0

    @pytest.mark.parametrize(
        "request_",
        [
            Request("short", range(63)),
            Request("skips", range(200), skip_reading_prefix_cache=True),
            Request("embeds", range(200), prompt_embeds=object()),
            Request("resumable", range(200), resumable=True),
            Request("bad salt", range(200), cache_salt="a\nb"),
        ],
        ids=lambda request: request.request_id,
    )
    def test_does_not_ask_where_nothing_could_be_used(self, lookups, request_):
        side = scheduler_side(lookups)
        assert side.matched_tokens(request_, 0) == 0
        assert not lookups.calls

    def test_does_not_ask_a_server_that_is_away(self, lookups):
        side = scheduler_side(lookups)
        lookups.chunk_size = None
        assert side.matched_tokens(Request("r", range(200)), 0) == 0
        lookups.chunk_size, lookups.is_healthy = 64, False
        assert side.matched_tokens(Request("r", range(200)), 0) == 0
        assert not lookups.calls

    def test_a_server_that_fails_before_the_request_is_admitted_is_not_relied_on(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        lookups.hits["r"] = 128
        assert side.matched_tokens(request, 0) == 128
        lookups.is_healthy = False
        assert side.matched_tokens(request, 0) == 0
        lookups.is_healthy = True
        side.allocated(request, Blocks([1, 2, 3, 4, 5, 6, 7]), 0)
        (job,) = prefill(side, request, 200, [[1, 2, 3, 4, 5, 6, 7]]).stores
        assert job.plan.chunks == range(3)

    def test_does_not_promise_what_a_worker_could_not_load(self, lookups):
        side = scheduler_side(lookups, world_size=2)
        side.worker_output(worker_output(report=WorkerReport(healthy={1: False})))
        assert side.matched_tokens(Request("r", range(200)), 0) == 0
        side.worker_output(worker_output(report=WorkerReport(healthy={1: True})))
        assert side.matched_tokens(Request("r", range(200)), 0) is None

    def test_bl55_bl08_identity_goes_with_the_question(self, lookups, tmp_path):
        side = scheduler_side(lookups)
        lora = SimpleNamespace(lora_name="red", lora_int_id=1, lora_path=str(tmp_path))
        side.matched_tokens(Request("r", range(200), lora_request=lora, cache_salt="red"), 0)
        asked = lookups.asked["r"]
        assert (asked["adapter"], asked["salt"]) == ("red", "red")
        assert asked["adapter_revision"]

    def test_asks_again_after_a_preemption(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        admit(side, lookups, request, 64)
        request.num_preemptions += 1
        request.all_token_ids += range(100)
        lookups.hits.clear()
        assert side.matched_tokens(request, 0) is None
        assert len(lookups.asked["r"]["tokens"]) == 256
        lookups.hits["r"] = 256
        assert side.matched_tokens(request, 0) == 256

    def test_asks_again_before_the_lease_runs_out(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        lookups.hits["r"] = 64
        assert side.matched_tokens(request, 0) == 64
        lookups.stale.add("r")
        side.matched_tokens(request, 0)
        assert lookups.calls == [("ask", "r"), ("cleanup", "r"), ("ask", "r")]

    def test_an_idle_step_waits_a_moment_for_an_answer(self, lookups):
        side = scheduler_side(lookups)
        side.step(step_output())
        assert not lookups.calls
        side.matched_tokens(Request("r", range(200)), 0)
        side.step(step_output())
        assert lookups.calls[-1] == ("wait", 0.001)
        lookups.hits["r"] = 0
        side.matched_tokens(Request("r", range(200)), 0)
        side.step(step_output())
        assert lookups.calls.count(("wait", 0.001)) == 1


class TestLoad:
    def test_a_load_and_its_end(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        promised, _ = admit(side, lookups, request, 128)
        step = side.step(step_output())
        (job,) = step.loads
        assert promised == 128
        assert job.plan.block_ids == {1, 2, 3, 4}
        assert job.prompt.session_id == "r"
        assert not side.step(step_output()).loads
        side.worker_output(worker_output(received=["r"]))
        assert lookups.calls[-1] == ("release", "r", 0, 0)

    def test_bl23_the_second_allocation_loads_nothing_again(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        _, tables = admit(side, lookups, request, 128)
        side.step(step_output())
        side.worker_output(worker_output(received=["r"]))
        side.allocated(request, Blocks(*tables), 0)
        assert not side.step(step_output()).loads
        assert [call for call in lookups.calls if call[0] == "release"] == [("release", "r", 0, 0)]

    def test_bl13_what_the_engine_holds_is_released_before_the_load(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(300))
        promised, _ = admit(side, lookups, request, 256, local=192)
        assert promised == 64
        assert lookups.calls[-1] == ("release", "r", 0, 3)
        side.worker_output(worker_output(received=["r"]))
        assert lookups.calls[-1] == ("release", "r", 3, 0)

    def test_bl13_a_hit_that_is_not_needed_is_released(self, lookups):
        side = scheduler_side(lookups)
        promised, _ = admit(side, lookups, Request("r", range(200)), 128, local=192)
        assert promised == 0
        assert lookups.calls[-1] == ("release", "r", 0, 0)

    @pytest.mark.parametrize("blocks", [Blocks([7, 0, 9]), Blocks(), object()])
    def test_blocks_that_do_not_fit_fail_the_load_in_the_usual_way(self, lookups, blocks):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        side.matched_tokens(request, 0)
        lookups.hits["r"] = 128
        side.allocated(request, blocks, side.matched_tokens(request, 0))
        (job,) = side.step(step_output()).loads
        assert (job.request_id, job.plan.groups) == ("r", ())

    def test_a_count_that_was_not_promised_fails_the_load(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        lookups.hits["r"] = 128
        assert side.matched_tokens(request, 0) == 128
        side.allocated(request, Blocks([1, 2, 3, 4, 5, 6, 7]), 64)
        (job,) = side.step(step_output()).loads
        assert not job.plan.groups

    def test_loads_are_handed_on_whatever_a_step_looks_like(self, lookups):
        side = scheduler_side(lookups)
        admit(side, lookups, Request("r", range(200)), 128)
        step = side.step(object())
        assert [job.request_id for job in step.loads] == ["r"]
        assert step.overwritten is None

    @pytest.mark.parametrize("how", [{"bad_blocks": [3]}, {"failed": ["r"]}])
    def test_bl22_a_failed_load_is_not_promised_again(self, lookups, how):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        _, tables = admit(side, lookups, request, 128)
        side.step(step_output())
        side.worker_output(worker_output(received=["r"], **how))
        assert side.matched_tokens(request, 0) == 0
        step = prefill(side, request, 200, tables)
        assert step.stores[0].plan.chunks == range(3)

    def test_the_failure_of_one_request_is_not_that_of_another(self, lookups):
        side = scheduler_side(lookups)
        first, second = Request("a", range(200)), Request("b", range(200))
        admit(side, lookups, first, 128)
        admit(side, lookups, second, 128, tables=[list(range(11, 19))])
        side.worker_output(worker_output(received=["a", "b"], bad_blocks=[12]))
        assert side.matched_tokens(first, 0) == 128
        assert side.matched_tokens(second, 0) == 0

    def test_a_consumer_only_loads_and_a_producer_only_stores(self, lookups):
        request = Request("r", range(200))
        producer = scheduler_side(lookups, loads=False)
        lookups.hits["r"] = 128
        assert producer.matched_tokens(request, 0) == 0
        producer.allocated(request, Blocks([1, 2, 3, 4, 5, 6, 7]), 0)
        assert prefill(producer, request, 200, [[1, 2, 3, 4, 5, 6, 7]]).stores
        consumer = scheduler_side(lookups, stores=False)
        request = Request("s", range(200))
        admit(consumer, lookups, request, 64)
        consumer.worker_output(worker_output(received=["s"]))
        assert not prefill(consumer, request, 200, [[1, 2, 3, 4, 5, 6, 7]]).stores


class TestStore:
    def test_chunks_are_stored_as_they_complete(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        _, tables = admit(side, lookups, request, 0)
        ranges = []
        for num_tokens in (50, 50, 50, 50):
            ranges += [job.plan.chunks for job in prefill(side, request, num_tokens, tables).stores]
        assert ranges == [range(1), range(1, 2), range(2, 3)]

    def test_what_was_found_is_not_stored_again(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        _, tables = admit(side, lookups, request, 128)
        side.worker_output(worker_output(received=["r"]))
        request.num_computed_tokens = 128
        (job,) = prefill(side, request, 72, tables).stores
        assert job.plan.chunks == range(2, 3)

    def test_what_the_engine_has_and_the_server_lacks_is_stored(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        _, tables = admit(side, lookups, request, 64, local=160)
        request.num_computed_tokens = 160
        (job,) = prefill(side, request, 40, tables).stores
        assert job.plan.chunks == range(1, 3)

    def test_generated_tokens_are_not_stored(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(100))
        _, tables = admit(side, lookups, request, 0, tables=[list(range(1, 9))])
        assert prefill(side, request, 100, tables).stores
        for token in range(100):
            request.all_token_ids.append(token)
            assert not prefill(side, request, 1, tables).stores

    def test_generated_tokens_are_stored_by_their_keys_when_asked_for(self, lookups):
        side = scheduler_side(lookups, save_decode=True)
        request = Request("r", range(100))
        _, tables = admit(side, lookups, request, 0, tables=[list(range(1, 9))])
        jobs = list(prefill(side, request, 100, tables).stores)
        for token in range(100):
            request.all_token_ids.append(token)
            jobs += prefill(side, request, 1, tables).stores
        assert [job.plan.chunks for job in jobs] == [range(1), range(1, 2), range(2, 3)]
        hasher = ChunkHasher(root(NAMESPACE, 64), 64)
        keys = hasher.append(request.all_token_ids)
        assert [job.prompt.keys for job in jobs] == [(), (keys[1],), (keys[2],)]

    def test_tokens_in_flight_are_not_stored(self, lookups):
        side = scheduler_side(lookups, save_decode=True)
        request = Request("r", range(100))
        _, tables = admit(side, lookups, request, 0, tables=[list(range(1, 9))])
        prefill(side, request, 100, tables)
        request.all_token_ids += range(40)
        request.num_computed_tokens, request.num_in_flight_tokens = 130, 5
        assert not side.step(step_output({"r": 5}, tables={"r": tables})).stores
        request.num_in_flight_tokens = 2
        assert side.step(step_output({"r": 2}, tables={"r": tables})).stores

    def test_the_last_chunk_of_a_window_model_is_stored_by_its_key(self, lookups):
        side = scheduler_side(lookups, group(0), group(1, window=64))
        request = Request("r", range(128))
        _, tables = admit(side, lookups, request, 0, tables=[[1, 2, 3, 4], [5, 6, 7, 8]])
        assert len(lookups.asked["r"]["tokens"]) == 64
        (job,) = prefill(side, request, 128, tables).stores
        assert job.plan.chunks == range(2)
        assert len(job.prompt.keys) == 2
        assert job.prompt.namespace == NAMESPACE

    def test_a_request_that_skips_the_cache_is_stored_by_its_keys(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200), skip_reading_prefix_cache=True)
        assert side.matched_tokens(request, 0) == 0
        side.allocated(request, Blocks([1, 2, 3, 4, 5, 6, 7]), 0)
        (job,) = prefill(side, request, 200, [[1, 2, 3, 4, 5, 6, 7]]).stores
        assert len(job.prompt.keys) == 3
        assert not lookups.asked

    def test_nothing_is_stored_while_the_server_is_away(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        _, tables = admit(side, lookups, request, 0)
        lookups.is_healthy = False
        assert not prefill(side, request, 100, tables).stores
        lookups.is_healthy = True
        (job,) = prefill(side, request, 100, tables).stores
        assert job.plan.chunks == range(3)

    def test_a_request_that_cannot_be_stored_does_not_stop_the_step(self, lookups):
        side = scheduler_side(lookups)
        good, bad = Request("good", range(100)), Request("bad", [*range(99), -1])
        bad.skip_reading_prefix_cache = True
        bad.all_token_ids[3] = -1
        for request in (good, bad):
            side.matched_tokens(request, 0)
            side.allocated(request, Blocks([1, 2, 3, 4]), 0)
        tables = {"good": [[1, 2, 3, 4]], "bad": [[5, 6, 7, 8]]}
        step = side.step(step_output({"bad": 100, "good": 100}, tables=tables))
        assert [job.request_id for job in step.stores] == ["good"]
        assert not side.finished(bad)

    def test_a_step_can_be_pickled(self, lookups):
        side = scheduler_side(lookups, save_decode=True)
        request = Request("r", range(200), skip_reading_prefix_cache=True, cache_salt="s3cret")
        side.matched_tokens(request, 0)
        step = prefill(side, request, 200, [[1, 2, 3, 4, 5, 6, 7]])
        assert pickle.loads(pickle.dumps(step)) == step  # noqa: S301
        assert "s3cret" not in repr(step)


class TestBlocksInFlight:
    def start_store(self, side, lookups, request):
        _, tables = admit(side, lookups, request, 0)
        assert prefill(side, request, request.num_tokens, tables).stores

    def test_a_finished_request_keeps_its_blocks_while_they_are_stored(self, lookups):
        side = scheduler_side(lookups, world_size=2)
        request = Request("r", range(200))
        self.start_store(side, lookups, request)
        side.worker_output(worker_output(report=WorkerReport({"r": 1})))
        assert side.finished(request)
        assert ("end", "r") not in lookups.calls
        assert side.step(step_output()).held == {"r"}
        assert not side.step(step_output()).held
        side.worker_output(worker_output(sent=["r"], report=WorkerReport({"r": 1})))
        assert lookups.calls[-1] == ("end", "r")

    def test_a_finished_request_whose_stores_have_ended_keeps_nothing(self, lookups):
        side = scheduler_side(lookups, world_size=2)
        request = Request("r", range(200))
        self.start_store(side, lookups, request)
        report = WorkerReport({"r": 1}).aggregate(WorkerReport({"r": 1}))
        side.worker_output(worker_output(report=report))
        assert not side.finished(request)
        assert lookups.calls[-1] == ("end", "r")

    def test_a_request_that_is_aborted_while_loading_is_freed_by_the_load_alone(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        self.start_store(side, lookups, request)
        request.num_preemptions += 1
        admit(side, lookups, request, 128)
        assert not side.finished(request)
        assert side.step(step_output()).held == frozenset()
        side.worker_output(worker_output(received=["r"]))

    def test_requests_that_never_ran_are_forgotten(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        assert not side.finished(request)
        side.matched_tokens(request, 0)
        assert not side.finished(request)
        assert lookups.calls[-1] == ("end", "r")
        side.step(step_output())
        assert ("wait", 0.001) not in lookups.calls

    def test_bl20_blocks_that_get_a_new_owner_are_named(self, lookups):
        side = scheduler_side(lookups)
        self.start_store(side, lookups, Request("r", range(200)))
        new = SimpleNamespace(req_id="n", block_ids=[[1, 2, 9]], num_computed_tokens=64)
        cached = [("c", ([5],), 40), ("d", None, 10), ("p", ([6, 7],), 32, "resumed")]
        step = side.step(step_output({"n": 10, "c": 1, "d": 1, "p": 20}, new=[new], cached=cached))
        assert step.overwritten == {9, 5, 7}

    def test_bl20_blocks_of_a_load_are_named(self, lookups):
        side = scheduler_side(lookups)
        self.start_store(side, lookups, Request("r", range(200)))
        admit(side, lookups, Request("s", range(200)), 64, tables=[[3, 4, 5, 6, 7]])
        assert side.step(step_output()).overwritten == {3, 4}

    def test_bl20_blocks_that_are_zeroed_or_copied_to_are_named(self, lookups):
        side = scheduler_side(lookups)
        self.start_store(side, lookups, Request("r", range(200)))
        output = step_output()
        output.new_block_ids_to_zero, output.kv_cache_block_copies = [9], [(3, 4)]
        assert side.step(output).overwritten == {9, 4}

    def test_nothing_is_named_when_nothing_is_stored(self, lookups):
        side = scheduler_side(lookups)
        new = SimpleNamespace(req_id="n", block_ids=[[1, 2, 9]], num_computed_tokens=64)
        assert side.step(step_output({"n": 10}, new=[new])).overwritten == frozenset()

    def test_an_engine_that_does_not_say_what_it_overwrites_has_the_stores_waited_for(self, lookups):
        side = scheduler_side(lookups)
        self.start_store(side, lookups, Request("r", range(200)))
        assert side.step(step_output({"n": 10}, new=[object()])).overwritten is None
