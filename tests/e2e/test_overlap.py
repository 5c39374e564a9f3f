"""`kvwire.overlap`: loads layer by layer ahead of the forward pass, and what becomes of those that fail."""

from __future__ import annotations

import threading
from contextlib import closing

import numpy as np
import pytest

from e2e.harness import BLOCK, CHUNK, LENGTHS, SHELF, engine, prompt, transfer_config, wait_until_healthy
from e2e.processes import EngineProcess
from kvwire.client.layered import LayeredRead
from kvwire.errors import TransferFailed, Unavailable

OVERLAP = {"overlap": True}
LONGER = [[*tokens, *prompt(150, seed=3)] for tokens in SHELF[:2]]
"""They go on where two prompts of the shelf end: a load, and whole chunks to compute behind it."""


def expected(length):
    found = length // CHUNK * CHUNK
    return found if found < length else found - BLOCK


def texts(answers):
    return [answer.tokens for answer in answers]


def store(server, *prompts):
    with engine("llama", server) as first:
        first.run(*prompts)


def test_a_fresh_engine_finds_what_another_one_stored(library, baseline):
    right = baseline("llama", *SHELF)
    with engine("llama", library("llama"), extra=OVERLAP) as second:
        assert second.scheduler_connector._scheduler.side.overlap
        free = second.free_blocks()
        answers = second.run(*SHELF)
        assert texts(answers) == right
        assert [answer.cached for answer in answers] == [expected(length) for length in LENGTHS]
        assert second.free_blocks() == free
        assert second.run(*SHELF) == answers
    library("llama").assert_at_rest()


def test_loaded_bytes_matter(library, baseline, monkeypatch):
    """The test of the tests: with zeroes in the place of what was loaded, every answer is another one."""
    right = baseline("llama", *SHELF[:4])
    note = LayeredRead._note

    def note_zeroes(self, slot, start, stop, data):
        note(self, slot, start, stop, np.zeros_like(data))

    monkeypatch.setattr(LayeredRead, "_note", note_zeroes)
    with engine("llama", library("llama"), extra=OVERLAP) as second:
        answers = second.run(*SHELF[:4])
    assert all(answer.cached > 0 for answer in answers)
    assert all(said != tokens for said, tokens in zip(texts(answers), right, strict=True))


@pytest.mark.parametrize("path", ["shm", "ucx", "inline"])
def test_every_data_path(path, server, baseline):
    right = baseline("llama", *LONGER)
    for cached in ([0, 0], [320, 256]):
        with engine("llama", server, extra={**OVERLAP, "data_path": path}) as running:
            answers = running.run(*LONGER)
        assert texts(answers) == right
        assert [answer.cached for answer in answers] == cached
    server.assert_at_rest()


def test_chunked_prefill_beside_the_engines_own_prefix_cache(library, baseline):
    options = {"max_num_batched_tokens": 48, "enable_prefix_caching": True}
    right = baseline("llama", *LONGER)
    with engine("llama", library("llama"), extra=OVERLAP, **options) as second:
        heads = [tokens[:110] for tokens in LONGER]
        assert [answer.cached for answer in second.run(*heads)] == [CHUNK, CHUNK]
        assert texts(second.run(*LONGER)) == right
        assert texts(second.run(*LONGER)) == right


def test_what_is_computed_behind_a_load_is_stored(server, baseline):
    right = baseline("llama", *LONGER)
    store(server, *SHELF[:2])
    for cached in ([192, 128], [320, 256]):
        with engine("llama", server, extra=OVERLAP) as running:
            answers = running.run(*LONGER)
        assert texts(answers) == right
        assert [answer.cached for answer in answers] == cached


def fail_all(running, monkeypatch):
    def fail(tasks):
        raise Unavailable("the server is gone")

    monkeypatch.setattr(running.worker_connector._worker.adapter._cache, "run_retrieves", fail)


def fail_one_chunk_behind_the_first_layer(running, monkeypatch):
    copy = LayeredRead._copy_slot

    def copy_some(self, slot, layer):
        if slot.chunk_index == 1 and layer == 1:
            raise TransferFailed("no more", cause="a test")
        copy(self, slot, layer)

    monkeypatch.setattr(LayeredRead, "_copy_slot", copy_some)


def come_late(running, monkeypatch):
    """The load goes on when nobody waits for it any more, and has its blocks no more."""
    cache = running.worker_connector._worker.adapter._cache
    retrieve = cache.run_retrieves
    given_up = threading.Event()
    running.worker_connector._worker.side.layers._wait = 0.2

    def wait(tasks):
        given_up.wait(0.6)
        return retrieve(tasks)

    monkeypatch.setattr(cache, "run_retrieves", wait)


FAULTS = [fail_all, fail_one_chunk_behind_the_first_layer, come_late]


@pytest.mark.parametrize("fault", FAULTS)
def test_bl22_a_load_that_fails_is_computed_and_nothing_wrong_is_stored(fault, server, baseline, monkeypatch):
    right = baseline("llama", *LONGER)
    store(server, *SHELF[:2])
    with engine("llama", server, extra=OVERLAP) as second, monkeypatch.context() as patch:
        free = second.free_blocks()
        fault(second, patch)
        assert texts(second.run(*LONGER)) == right
        assert second.free_blocks() == free
    server.assert_at_rest()
    # Whoever finds what it stored says the same.
    with engine("llama", server, extra=OVERLAP) as third:
        answers = third.run(*LONGER)
    assert texts(answers) == right
    assert [answer.cached for answer in answers] == [320, 256]


@pytest.mark.parametrize("fault", FAULTS)
def test_bl22_a_load_that_fails_ends_its_request_where_that_is_the_policy(
    fault, library, baseline, monkeypatch
):
    short = SHELF[-1]
    (right,) = baseline("llama", short)
    with engine("llama", library("llama"), policy="fail", extra=OVERLAP) as second:
        free = second.free_blocks()
        with monkeypatch.context() as patch:
            fault(second, patch)
            answers = second.run(SHELF[0], short)
        assert answers[0].reason == "error"
        assert answers[1].tokens == right
        assert second.free_blocks() == free


def test_several_groups_load_as_without_it(library, baseline, caplog):
    right = baseline("gemma3", *SHELF[:2])
    with engine("gemma3", library("gemma3"), extra=OVERLAP) as second:
        answers = second.run(*SHELF[:2])
    assert texts(answers) == right
    assert [answer.cached for answer in answers] == [192, 128]
    assert "several KV groups" in caplog.text


def test_bl22_a_server_that_hangs_delays_one_step_and_no_more(server, baseline, monkeypatch):
    """It stops between the lookup and the load."""
    right = baseline("llama", *LONGER)
    store(server, *SHELF[:2])
    with engine("llama", server, extra={**OVERLAP, "overlap_wait": 0.5}) as second:
        cache = second.worker_connector._worker.adapter._cache
        retrieve = cache.run_retrieves

        def hang(tasks):
            server.pause()
            return retrieve(tasks)

        with monkeypatch.context() as patch:
            patch.setattr(cache, "run_retrieves", hang)
            try:
                answers = second.run(*LONGER)
            finally:
                server.resume()
        assert texts(answers) == right
        wait_until_healthy(second)
        assert texts(second.run(*LONGER)) == right
    server.assert_at_rest()


PREEMPTED = [prompt(length, seed=length) for length in (150, 120, 100, 90, 80, 70, 66, 65)]


@pytest.mark.parametrize("own_cache", [False, True])
def test_bl20_preempted_requests_load_again(own_cache, server, baseline):
    right = baseline("llama", *PREEMPTED, num_tokens=80)
    options = {"num_gpu_blocks_override": 24, "max_model_len": 256, "enable_prefix_caching": own_cache}
    for _ in range(2):
        with engine("llama", server, extra={**OVERLAP, "save_decode": True}, **options) as running:
            answers = running.run(*PREEMPTED, num_tokens=80)
            assert texts(answers) == right
            assert running.free_blocks() == 23
        server.assert_at_rest()
    assert sum(answer.cached for answer in answers) >= 128 + 7 * CHUNK
    # Nothing wrong was stored on the way.
    with engine("llama", server) as roomy:
        assert texts(roomy.run(*PREEMPTED, num_tokens=80)) == right


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tensor_parallel_engine_waits_on_every_rank(server, baseline):
    """And stores behind a load only what both ranks have proven."""
    right = [list(tokens) for tokens in baseline("llama", *LONGER)]
    transfer = transfer_config(server.address, **OVERLAP)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with closing(EngineProcess("llama", transfer, **options)) as running:
        running.start()
        heads = [tokens[: CHUNK * 2] for tokens in LONGER]
        assert running.run(*heads)["cached"] == [0, 0]
        for cached in ([128, 128], [320, 256]):
            assert running.run(*LONGER) == {"tokens": right, "cached": cached}
