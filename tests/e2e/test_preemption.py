"""BL-20: too few blocks for all requests. Blocks are given away while they are being stored."""

from __future__ import annotations

import logging
import time

import pytest

from e2e.harness import engine, prompt

MODELS = ["llama", "gemma3"]
PROMPTS = [prompt(length, seed=length) for length in (150, 120, 100, 90, 80, 70, 66, 65)]
TIGHT = {"num_gpu_blocks_override": 24, "max_model_len": 256}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("own_cache", [False, True])
def test_bl20_preemption(model, own_cache, server, baseline):
    right = baseline(model, *PROMPTS, num_tokens=80)
    cached = []
    for _ in range(2):
        with engine(
            model, server, extra={"save_decode": True}, enable_prefix_caching=own_cache, **TIGHT
        ) as running:
            preempted = count_preemptions(running)
            answers = running.run(*PROMPTS, num_tokens=80)
            assert [answer.tokens for answer in answers] == right
            assert preempted
            assert running.free_blocks() == 23
            cached.append(sum(answer.cached for answer in answers))
        server.assert_at_rest()
    assert cached[1] >= 128 + 7 * 64
    with engine(model, server) as roomy:
        answers = roomy.run(*PROMPTS, num_tokens=80)
        assert [answer.tokens for answer in answers] == right
        assert all(answer.cached for answer in answers)


def count_preemptions(running):
    preempted = []
    scheduler = running.core.scheduler
    preempt = scheduler._preempt_request

    def counted(request, *args, **kwargs):
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counted
    return preempted


def test_bl20_a_store_that_is_too_slow_is_never_published(server, baseline, monkeypatch, caplog):
    """Copies that begin only when the blocks have another owner: nothing of it may be found afterwards."""
    right = baseline("llama", *PROMPTS, num_tokens=80)
    extra = {"store_wait": 0.0, "save_decode": True}
    with engine("llama", server, extra=extra, **TIGHT) as running:
        slow_down_stores(running, monkeypatch)
        with caplog.at_level(logging.WARNING, "kvwire"):
            answers = running.run(*PROMPTS, num_tokens=80)
        assert [answer.tokens for answer in answers] == right
        assert "was given up for its blocks" in caplog.text
    with engine("llama", server) as second:
        answers = second.run(*PROMPTS, num_tokens=80)
        assert [answer.tokens for answer in answers] == right


def slow_down_stores(running, monkeypatch):
    cache = running.worker_connector._worker.adapter._cache
    run_stores = cache.run_stores

    def slow(transfers):
        time.sleep(0.5)
        return run_stores(transfers)

    monkeypatch.setattr(cache, "run_stores", slow)
