"""`kvwire.overlap`: loads layer by layer ahead of the forward pass, and what becomes of those that fail."""

from __future__ import annotations

import pytest

from e2e.harness import BLOCK, CHUNK, LENGTHS, SHELF, engine, prompt

OVERLAP = {"overlap": True}


def expected(length):
    found = length // CHUNK * CHUNK
    return found if found < length else found - BLOCK


def test_a_fresh_engine_finds_what_another_one_stored(library, baseline):
    right = baseline("llama", *SHELF)
    with engine("llama", library("llama"), extra=OVERLAP) as second:
        assert second.scheduler_connector._scheduler.side.overlap
        free = second.free_blocks()
        answers = second.run(*SHELF)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers] == [expected(length) for length in LENGTHS]
        assert second.free_blocks() == free
        assert second.run(*SHELF) == answers
    library("llama").assert_at_rest()
