"""`kvwire.overlap`: loads layer by layer ahead of the forward pass, and what becomes of those that fail."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from e2e.harness import BLOCK, CHUNK, LENGTHS, SHELF, engine, prompt
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
