"""What may go wrong between an engine and its server. The engine never notices more than a miss."""

from __future__ import annotations

import threading
import time

import pytest

from e2e.harness import engine, prompt

MODELS = ["llama", "gemma3"]
PROMPTS = [prompt(length, seed=length) for length in (200, 137, 96, 65)]
FOUND = [192, 128, 64, 64]


def fill(server, model, prompts=PROMPTS):
    with engine(model, server) as first:
        first.run(*prompts)


def spoil_one_load(running, monkeypatch):
    """Of the first load one block is destroyed, and its failure told, as by a server that has dropped it."""
    worker = running.worker_connector._worker
    adapter, spoiled = worker.adapter, []
    submit, blocks, requests = (
        adapter.submit_retrieve_request,
        adapter.get_block_ids_with_load_errors,
        adapter.failed_requests,
    )

    def submit_and_spoil(request_id, op, event=None):
        transfer = submit(request_id, op, event)
        if not spoiled:
            assert transfer.wait(10)
            group = op.groups[-1]
            block = group.block_ids[-1]
            for view in worker.views[group.group_index]:
                view[block] = 0
            spoiled.append((request_id, block))
        return transfer

    def told(real, index):
        told_before = []

        def call():
            found = real()
            if spoiled and not told_before:
                told_before.append(True)
                found = found | {spoiled[0][index]}
            return found

        return call

    monkeypatch.setattr(adapter, "submit_retrieve_request", submit_and_spoil)
    monkeypatch.setattr(adapter, "failed_requests", told(requests, 0))
    monkeypatch.setattr(adapter, "get_block_ids_with_load_errors", told(blocks, 1))


@pytest.mark.parametrize("model", MODELS)
def test_bl22_a_failed_load_is_computed_again(model, server, baseline, monkeypatch):
    right = baseline(model, *PROMPTS)
    fill(server, model)
    with engine(model, server, policy="recompute") as second:
        free = second.free_blocks()
        spoil_one_load(second, monkeypatch)
        answers = second.run(*PROMPTS)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers][1:] == FOUND[1:]
        assert second.free_blocks() == free
        assert [answer.cached for answer in second.run(*PROMPTS)] == FOUND


@pytest.mark.parametrize("model", MODELS)
def test_bl22_or_the_request_fails(model, server, baseline, monkeypatch):
    right = baseline(model, *PROMPTS)
    fill(server, model)
    with engine(model, server, policy="fail") as second:
        free = second.free_blocks()
        spoil_one_load(second, monkeypatch)
        answers = second.run(*PROMPTS)
        assert [answer.reason for answer in answers] == ["error", "length", "length", "length"]
        assert [answer.tokens for answer in answers][1:] == right[1:]
        assert second.free_blocks() == free
        assert [answer.tokens for answer in second.run(*PROMPTS)] == right


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("own_cache", [False, True])
def test_bl20_preemption(model, own_cache, server, baseline):
    """24 blocks for 8 requests: blocks of preempted requests are given away while they are being stored."""
    prompts = [prompt(length, seed=length) for length in (150, 120, 100, 90, 80, 70, 66, 65)]
    right = baseline(model, *prompts, num_tokens=80)
    options = {"num_gpu_blocks_override": 24, "max_model_len": 256, "enable_prefix_caching": own_cache}
    cached = []
    for _ in range(2):
        with engine(model, server, extra={"save_decode": True}, **options) as running:
            preempted = count_preemptions(running)
            answers = running.run(*prompts, num_tokens=80)
            assert [answer.tokens for answer in answers] == right
            assert preempted
            assert running.free_blocks() == 23
            cached.append(sum(answer.cached for answer in answers))
    assert cached[1] >= 128 + 7 * 64
    with engine(model, server) as roomy:
        answers = roomy.run(*prompts, num_tokens=80)
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


def test_bl20_a_store_that_is_too_slow_is_never_published(server, baseline, monkeypatch):
    """Copies that begin only after the blocks have another owner: nothing of it may be found afterwards."""
    prompts = [prompt(length, seed=length) for length in (150, 120, 100, 90, 80, 70, 66, 65)]
    right = baseline("llama", *prompts, num_tokens=80)
    options = {"num_gpu_blocks_override": 24, "max_model_len": 256}
    with engine("llama", server, extra={"store_wait": 0.0}, **options) as running:
        slow_down_stores(running, monkeypatch)
        answers = running.run(*prompts, num_tokens=80)
        assert [answer.tokens for answer in answers] == right
    with engine("llama", server) as second:
        answers = second.run(*prompts, num_tokens=80)
        assert [answer.tokens for answer in answers] == right


def slow_down_stores(running, monkeypatch):
    cache = running.worker_connector._worker.adapter._cache
    run_stores = cache.run_stores

    def slow(transfers):
        time.sleep(0.1)
        return run_stores(transfers)

    monkeypatch.setattr(cache, "run_stores", slow)


@pytest.mark.parametrize("model", MODELS)
def test_the_server_is_killed_in_the_middle(model, server, baseline):
    prompts = [prompt(length, seed=length) for length in (300, 200, 137, 129, 96, 90, 80, 65)]
    right = baseline(model, *prompts, num_tokens=60)
    fill(server, model, prompts[:4])
    with engine(model, server, max_num_batched_tokens=64) as running:
        killer = threading.Timer(0.1, server.kill)
        killer.start()
        answers = running.run(*prompts, num_tokens=60)
        killer.join()
        assert [answer.tokens for answer in answers] == right
        assert {answer.reason for answer in answers} == {"length"}
        begin = time.monotonic()
        answers = running.run(*prompts, num_tokens=60)
        assert [(answer.tokens, answer.cached) for answer in answers] == [(tokens, 0) for tokens in right]
        away = time.monotonic() - begin

        server.start()
        wait_until_healthy(running)
        running.run(*prompts, num_tokens=60)
        answers = running.run(*prompts, num_tokens=60)
        assert [answer.tokens for answer in answers] == right
        assert all(answer.cached for answer in answers)
        assert away < 10


def wait_until_healthy(running, timeout=10.0):
    parts = (running.scheduler_connector._scheduler, running.worker_connector._worker)
    deadline = time.monotonic() + timeout
    while not all(part.adapter.is_healthy for part in parts):
        assert time.monotonic() < deadline, [part.adapter.degraded_reason for part in parts]
        time.sleep(0.02)
    # The worker tells the scheduler of its health with the next step.
    running.run(prompt(3), num_tokens=1)


def test_an_engine_starts_without_its_server(serve, baseline):
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    server = serve()
    server.kill()
    with engine("llama", server) as running:
        assert running.run(tokens)[0].tokens == right
        server.start()
        wait_until_healthy(running)
        running.run(tokens)
        (answer,) = running.run(tokens)
    assert (answer.tokens, answer.cached) == (right, 192)


def test_bl31_an_idle_engine_stays_registered(serve, baseline):
    server = serve("--registration-ttl", "1", "--session-ttl", "1", "--lookup-lease", "1")
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    with engine("llama", server) as running:
        running.run(tokens)
        time.sleep(2.5)
        (answer,) = running.run(tokens)
        assert (answer.tokens, answer.cached) == (right, 192)


def test_bl32_a_server_that_hangs_costs_one_timeout(server, baseline):
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    with engine("llama", server) as running:
        running.run(tokens)
        server.pause()
        times = []
        for _ in range(3):
            begin = time.monotonic()
            (answer,) = running.run(tokens)
            times.append(time.monotonic() - begin)
            assert answer.tokens == right
        server.resume()
        assert times[0] < 10
        assert max(times[1:]) < 1
        wait_until_healthy(running)
        running.run(tokens)
        (answer,) = running.run(tokens)
        assert (answer.tokens, answer.cached) == (right, 192)
