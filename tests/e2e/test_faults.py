"""What may go wrong between an engine and its server. The engine never notices more than a miss."""

from __future__ import annotations

import os
import time

import pytest

from e2e.harness import FOUND, SHELF, Answer, engine, prompt, wait_until_healthy
from kvwire.client.types import KeyRange, ReleaseItem, TransferItem
from kvwire.vllm.plan import PlanError

MODELS = ["llama", "gemma3"]
PROMPTS = SHELF[:4]


def test_bl22_a_chunk_that_is_gone_is_computed_again(serve, baseline, monkeypatch):
    """The server, which has room for 16 chunks, drops the last of three between the lookup and the load."""
    server = serve(l1_size="1MiB")
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    for policy, reason in (("recompute", "length"), ("fail", "error")):
        with engine("llama", server) as first:
            first.run(tokens)
        with engine("llama", server, policy=policy) as second:
            drop_a_chunk_before_the_load(second, monkeypatch)
            (answer,) = second.run(tokens)
            assert answer.reason == reason
            assert policy == "fail" or answer.tokens == right
            # It was stored again, or is now.
            assert second.run(tokens)[0].tokens == right
            assert second.run(tokens) == [Answer(right, 192, "length")]


def drop_a_chunk_before_the_load(running, monkeypatch):
    scheduler = running.scheduler_connector._scheduler.adapter
    worker = running.worker_connector._worker.adapter
    submit = worker.submit_retrieve_request

    def drop_and_submit(request_id, op, event=None):
        registration_id, lease_id = scheduler._leases[op.session_id]
        scheduler._client.release_lookup(registration_id, [ReleaseItem(op.session_id, lease_id, 2)])
        link = worker._cache.link
        others = KeyRange(worker._options.namespace, tuple(os.urandom(32) for _ in range(14)))
        (grant,) = link.client.begin_store(link.registration_id, [TransferItem(others)])
        assert len(grant.ticket.slots) == 14
        link.client.abort_store(link.registration_id, [grant.ticket.lease_id])
        monkeypatch.undo()
        return submit(request_id, op, event)

    monkeypatch.setattr(worker, "submit_retrieve_request", drop_and_submit)


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
def test_bl22_a_failed_load_is_computed_again(model, library, baseline, monkeypatch):
    right = baseline(model, *PROMPTS)
    with engine(model, library(model), policy="recompute") as second:
        free = second.free_blocks()
        spoil_one_load(second, monkeypatch)
        answers = second.run(*PROMPTS)
        assert [answer.tokens for answer in answers] == right
        assert [answer.cached for answer in answers][1:] == FOUND[1:]
        assert second.free_blocks() == free
        assert [answer.cached for answer in second.run(*PROMPTS)] == FOUND


@pytest.mark.parametrize("model", MODELS)
def test_bl22_or_the_request_fails(model, library, baseline, monkeypatch):
    right = baseline(model, *PROMPTS)
    with engine(model, library(model), policy="fail") as second:
        free = second.free_blocks()
        spoil_one_load(second, monkeypatch)
        answers = second.run(*PROMPTS)
        assert [answer.reason for answer in answers] == ["error", "length", "length", "length"]
        assert [answer.tokens for answer in answers][1:] == right[1:]
        assert second.free_blocks() == free
        assert [answer.tokens for answer in second.run(*PROMPTS)] == right


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("policy", "reason"), [("recompute", "length"), ("fail", "error")])
def test_a_load_that_never_begins_has_failed(model, policy, reason, library, baseline, monkeypatch):
    (right,) = baseline(model, PROMPTS[0])
    with engine(model, library(model), policy=policy) as second:
        free = second.free_blocks()
        with monkeypatch.context() as patch:
            patch.setattr("kvwire.vllm.scheduler.load_plan", unplannable)
            (answer,) = second.run(PROMPTS[0])
        assert answer.reason == reason
        assert policy == "fail" or answer.tokens == right
        assert second.free_blocks() == free
        assert second.run(PROMPTS[0]) == [Answer(right, 192, "length")]


def unplannable(*args):
    raise PlanError("not today")


@pytest.mark.parametrize("model", MODELS)
def test_the_server_is_killed_in_the_middle(model, server, baseline):
    prompts = [prompt(length, seed=length) for length in (300, 200, 137, 129, 96, 90, 80, 65)]
    right = baseline(model, *prompts, num_tokens=60)
    with engine(model, server) as first:
        first.run(*prompts[:4])
    with engine(model, server, max_num_batched_tokens=64) as running:
        killer = KillAfter(running, 6, server)
        answers = running.run(*prompts, num_tokens=60)
        assert killer.fired
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


class KillAfter:
    """Kills the server in one of the engine's steps."""

    def __init__(self, running, steps, server):
        self.fired = False
        self._steps = steps
        self._schedule = running.core.scheduler.schedule
        self._server = server
        running.core.scheduler.schedule = self

    def __call__(self, *args, **kwargs):
        self._steps -= 1
        if self._steps == 0:
            self._server.kill()
            self.fired = True
        return self._schedule(*args, **kwargs)


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


def test_bl31_a_worker_that_was_removed_registers_again(server, baseline):
    tokens = prompt(200)
    (right,) = baseline("llama", tokens)
    with engine("llama", server) as running:
        running.run(tokens)
        link = running.worker_connector._worker.adapter._cache.link
        link.client.unregister(link.registration_id)
        begin = time.monotonic()
        assert running.run(tokens)[0].tokens == right
        assert time.monotonic() - begin < 10
        wait_until_healthy(running)
        running.run(tokens)
        assert running.run(tokens) == [Answer(right, 192, "length")]


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
        # A second time-out would cost 5 s; anything less is the load of the machine.
        assert max(times[1:]) < 4
        wait_until_healthy(running)
        running.run(tokens)
        (answer,) = running.run(tokens)
        assert (answer.tokens, answer.cached) == (right, 192)
