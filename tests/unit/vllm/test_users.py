"""What a user asks for, in the scheduler's side: per request, at arrival, after a reset, and in numbers."""

from __future__ import annotations

import pytest

from kvwire.vllm.metadata import WorkerReport
from kvwire.vllm.tally import MAX_DURATIONS, Tally
from support.fake_engine import Blocks, FakeLookups, Request, scheduler_side, step_output, worker_output

TABLE = [*range(1, 9)]


@pytest.fixture
def lookups():
    return FakeLookups()


def ask(side, lookups, request, hit, local=0):
    side.matched_tokens(request, local)
    lookups.hits[request.request_id] = hit
    return side.matched_tokens(request, local)


def compute(side, request, num_tokens):
    step = side.step(
        step_output({request.request_id: num_tokens}, tables={request.request_id: [list(TABLE)]})
    )
    request.num_computed_tokens += num_tokens
    return step.stores


def asking(request_id="r", length=200, **params):
    given = {f"kvwire.{name}": value for name, value in params.items()}
    return Request(request_id, range(length), kv_transfer_params=given)


def answer_of(side, request):
    return side.answer(request)["kvwire"]


class TestPerRequest:
    def test_load_off_asks_nothing_and_stores_all(self, lookups):
        side = scheduler_side(lookups)
        request = asking(load=False, stats=True)
        assert side.matched_tokens(request, 0) == 0
        side.allocated(request, Blocks(TABLE), 0)
        (job,) = compute(side, request, 200)
        assert job.plan.chunks == range(3)
        assert job.prompt.keys
        assert not lookups.calls
        assert answer_of(side, request)["reason"] == "switched off by the request"
        assert answer_of(side, request)["stored_tokens"] == 192

    def test_store_off_loads_and_stores_nothing(self, lookups):
        side = scheduler_side(lookups)
        request = asking(store=False)
        assert ask(side, lookups, request, 64) == 64
        side.allocated(request, Blocks(TABLE), 64)
        side.worker_output(worker_output(received={"r"}))
        request.num_computed_tokens = 64
        assert not compute(side, request, 136)
        assert not side.finished(request)

    @pytest.mark.parametrize(("limit", "asked"), [(1, 0), (64, 64), (191, 128), (192, 192), (5000, 192)])
    def test_a_limit_is_rounded_down_to_chunks(self, lookups, limit, asked):
        side = scheduler_side(lookups)
        request = asking(max_hit_tokens=limit)
        side.matched_tokens(request, 0)
        found = lookups.asked.get("r", {"tokens": []})
        assert len(found["tokens"]) == asked

    def test_what_lies_behind_the_limit_is_stored_by_keys(self, lookups):
        side = scheduler_side(lookups)
        request = asking(max_hit_tokens=64)
        assert ask(side, lookups, request, 64) == 64
        side.allocated(request, Blocks(TABLE), 64)
        side.worker_output(worker_output(received={"r"}))
        request.num_computed_tokens = 64
        (job,) = compute(side, request, 136)
        assert job.plan.chunks == range(1, 3)
        assert len(job.prompt.keys) == 2

    def test_decode_tokens_are_stored_for_the_request_that_says_so(self, lookups):
        side = scheduler_side(lookups)
        for request, chunks in (
            (asking("a", 120, save_decode=True), [range(1), range(1, 2)]),
            (asking("b", 120), [range(1)]),
        ):
            ask(side, lookups, request, 0)
            side.allocated(request, Blocks(TABLE), 0)
            jobs = compute(side, request, 120)
            request.all_token_ids += range(10)
            for _ in range(10):
                jobs += compute(side, request, 1)
            assert [job.plan.chunks for job in jobs] == chunks


class TestAnswer:
    def test_only_when_asked_for(self, lookups):
        side = scheduler_side(lookups)
        request = asking(stats=False)
        side.matched_tokens(request, 0)
        assert side.answer(request) is None
        assert side.answer(Request("never seen", range(10))) is None

    def test_a_loaded_prompt(self, lookups):
        side = scheduler_side(lookups)
        request = asking(stats=True)
        assert ask(side, lookups, request, 192, local=64) == 128
        side.allocated(request, Blocks(TABLE), 128)
        side.worker_output(worker_output(received={"r"}))
        side.allocated(request, Blocks(TABLE), 0)
        assert answer_of(side, request) == {
            "prompt_tokens": 200,
            "engine_cached_tokens": 64,
            "found_tokens": 192,
            "loaded_tokens": 128,
            "stored_tokens": 0,
            "reason": "",
        }

    def test_a_load_that_failed(self, lookups):
        side = scheduler_side(lookups)
        request = asking(stats=True)
        promised = ask(side, lookups, request, 128)
        side.allocated(request, Blocks(TABLE), promised)
        side.worker_output(worker_output(received={"r"}, failed={"r"}))
        assert answer_of(side, request)["loaded_tokens"] == 0
        assert answer_of(side, request)["reason"] == "the load failed"

    def test_the_reasons(self, lookups):
        side = scheduler_side(lookups)
        short = asking("short", 63, stats=True)
        side.matched_tokens(short, 0)
        assert answer_of(side, short)["reason"] == "fewer tokens than a chunk"
        missed = asking("missed", stats=True)
        ask(side, lookups, missed, 0)
        assert answer_of(side, missed)["reason"] == "nothing found"
        lookups.is_healthy = False
        degraded = asking("degraded", stats=True)
        side.matched_tokens(degraded, 32)
        side.allocated(degraded, Blocks(TABLE), 0)
        assert answer_of(side, degraded)["reason"] == "degraded: the server is not used"
        assert answer_of(side, degraded)["engine_cached_tokens"] == 32


class TestArrival:
    def test_the_answer_is_there_when_the_engine_asks(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        side.arrived(request)
        assert lookups.calls == [("ask", "r")]
        lookups.hits["r"] = 128
        assert side.matched_tokens(request, 0) == 128
        assert lookups.calls == [("ask", "r")]

    def test_only_so_many_wait_with_an_answer(self, lookups):
        side = scheduler_side(lookups, early_lookups=2)
        requests = [Request(name, range(200)) for name in "abcd"]
        for request in requests:
            side.arrived(request)
        assert lookups.calls == [("ask", "a"), ("ask", "b")]
        ask(side, lookups, requests[0], 0)
        side.allocated(requests[0], Blocks(TABLE), 0)
        side.finished(requests[1])
        for name in "ef":
            side.arrived(Request(name, range(200)))
        assert [call for call in lookups.calls if call[0] == "ask"][2:] == [("ask", "e"), ("ask", "f")]
        assert side.matched_tokens(requests[2], 0) is None

    def test_a_server_that_is_away_is_not_asked(self, lookups):
        side = scheduler_side(lookups)
        lookups.chunk_size = None
        side.arrived(Request("a", range(200)))
        lookups.chunk_size, lookups.is_healthy = 64, False
        side.arrived(Request("b", range(200)))
        assert not lookups.calls


class TestReset:
    def test_leases_of_waiting_requests_end_first(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        assert ask(side, lookups, request, 128) == 128
        lookups.calls.clear()
        assert side.reset(1.5)
        assert lookups.calls == [("release", "r", 0, 0), ("cleanup", "r"), ("clear", 1.5)]
        lookups.hits.clear()
        assert side.matched_tokens(request, 0) is None

    @pytest.mark.parametrize("kept", [1, None])
    def test_what_stays_is_no_reset(self, lookups, kept):
        side = scheduler_side(lookups)
        lookups.kept = kept
        assert not side.reset(1.0)

    def test_a_store_under_way_is_no_reset(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        ask(side, lookups, request, 0)
        side.allocated(request, Blocks(TABLE), 0)
        assert compute(side, request, 200)
        assert not side.reset(1.0)
        side.worker_output(worker_output(report=WorkerReport({"r": 1})))
        assert side.reset(1.0)

    def test_kv_of_before_is_not_stored_after_it(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        ask(side, lookups, request, 0)
        side.allocated(request, Blocks(TABLE), 0)
        assert not compute(side, request, 40)
        assert side.reset(1.0)
        assert not compute(side, request, 160)
        # Preempted, it is computed anew: with the weights of now.
        request.num_preemptions, request.num_computed_tokens = 1, 0
        ask(side, lookups, request, 0)
        side.allocated(request, Blocks(TABLE), 0)
        assert compute(side, request, 200)


class TestTally:
    def test_the_scheduler_counts_when_a_request_is_admitted(self, lookups):
        side = scheduler_side(lookups)
        request = Request("r", range(200))
        promised = ask(side, lookups, request, 128)
        side.allocated(request, Blocks(TABLE), promised)
        side.worker_output(worker_output(received={"r"}))
        side.allocated(request, Blocks(TABLE), 0)
        request.num_computed_tokens = 128
        compute(side, request, 72)
        assert side.tally.take() == {
            "lookups": 1,
            "lookup_asked_tokens": 192,
            "lookup_hit_tokens": 128,
            "loaded_tokens": 128,
            "stored_tokens": 64,
        }
        assert side.tally.take() is None

    def test_bl67_each_request_is_counted_once(self, lookups):
        """Polled a hundred times, preempted and found again by more: 0.65 stays 0.65."""
        side = scheduler_side(lookups)
        hits = [512] * 5 + [256] * 3 + [0] * 2
        requests = [Request(f"r{number}", range(512)) for number in range(10)]
        for request, hit in zip(requests, hits, strict=True):
            for _ in range(100):
                assert side.matched_tokens(request, 0) is None
            promised = ask(side, lookups, request, hit)
            side.allocated(request, Blocks([*range(1, 17)]), promised)
            side.worker_output(worker_output(received={request.request_id} if promised else ()))
            side.allocated(request, Blocks([*range(1, 17)]), 0)
        requests[9].num_preemptions = 1
        assert ask(side, lookups, requests[9], 512) > 0
        side.allocated(requests[9], Blocks([*range(1, 17)]), 480)
        side.worker_output(worker_output(received={"r9"}))
        counted = side.tally.take()
        assert counted["lookups"] == 10
        assert counted["lookup_hit_tokens"] / counted["lookup_asked_tokens"] == 0.65
        assert counted["loaded_tokens"] == 5 * 480 + 3 * 256 + 480

    def test_durations_are_bounded(self):
        tally = Tally()
        for _ in range(MAX_DURATIONS + 5):
            tally.observe("load_seconds", 0.5)
        assert len(tally.take()["load_seconds"]) == MAX_DURATIONS

    def test_being_usable_is_told_when_it_changes(self):
        tally = Tally()
        tally.is_usable(True)
        assert tally.take() == {"usable": 1}
        tally.is_usable(True)
        assert tally.take() is None
        tally.is_usable(False)
        assert tally.take() == {"usable": 0}
