"""Stores over UCX without a last call: committed by a message, or by the call, and never by halves."""

from __future__ import annotations

import importlib.util
import time

import numpy as np
import pytest

from kvwire.client import Client
from kvwire.client.runs import StoreRun
from kvwire.server.leases import WriteLease
from kvwire.transfer import ucx_arrival
from kvwire.transfer.server_ucx import UcxServerPlane
from support.local_server import MIB, local_server

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed"),
    pytest.mark.timeout(60),
]

BLOCKS, BLOCK_SIZE, PAGE = 32, 4, 64 << 10
KINDS = ["ucx-local", "ucx-remote"]


class Side:
    """A client and its memory."""

    def __init__(self, local):
        self.client = Client(local.address)
        random = np.random.default_rng(1)
        self.kv = [random.integers(0, 255, (BLOCKS, PAGE), dtype=np.uint8) for _ in range(2)]
        devices = ("lo",) if local.config.data_paths == ("ucx-remote",) else ()
        self.cache = self.client.register_kv_caches(
            self.kv, model="m", block_size=BLOCK_SIZE, data_path="ucx", ucx_devices=devices
        )

    def store(self, seed=0):
        with self.cache.session([seed] * (8 * BLOCK_SIZE)) as session:
            return session.store(range(8))

    def comes_back(self, seed=0):
        self.kv[0][16:24] = self.kv[1][16:24] = 0
        with self.cache.session([seed] * (8 * BLOCK_SIZE)) as session:
            assert session.hit_tokens == 8 * BLOCK_SIZE
            assert session.retrieve(range(16, 24)).ok
        return all((layer[16:24] == layer[:8]).all() for layer in self.kv)

    def close(self):
        self.cache.close()
        self.client.close()


@pytest.fixture(params=KINDS)
def local(request, short_tmp):
    settings = {"ucx_net_devices": "lo"} if request.param == "ucx-remote" else {}
    with local_server(short_tmp, data_paths=(request.param,), l1_size=64 * MIB, **settings) as started:
        yield started


@pytest.fixture
def side(local):
    made = Side(local)
    yield made
    made.close()
    local.check()


@pytest.fixture
def commits(monkeypatch):
    """The calls of CommitStore so far."""
    calls = []
    commit = Client.commit_store

    def counted(client, registration_id, items):
        calls.append(items)
        return commit(client, registration_id, items)

    monkeypatch.setattr(Client, "commit_store", counted)
    return calls


def at_rest(local):
    status = local.status()
    return not (any(status.leases.values()) or status.waiting_leases or status.l1.reserved_bytes)


def wait_until(check, seconds=10.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_store_takes_one_call(local, side, commits):
    for seed in range(20):
        stored = side.store(seed)
        assert stored.ok, stored.error
        assert stored.stored == 8
    assert commits == []
    assert all(side.comes_back(seed) for seed in range(20))
    wait_until(lambda: at_rest(local))
    assert local.engine.counters.stored_objects == 160


def test_a_client_of_the_version_before_calls(local, side, commits, monkeypatch):
    monkeypatch.setattr("kvwire.transfer.ucx_path.UcxPath.publish", lambda _path, _ticket, _mark: False)
    for seed in range(20):
        assert side.store(seed).ok
    assert len(commits) == 20
    assert side.comes_back(19)
    wait_until(lambda: at_rest(local))
    assert not discards(local)


def discards(local):
    (path,) = local.core.plane.paths.values()
    return path.engine._lanes[0].state._discards


def test_a_server_of_the_version_before_is_called(local, side, commits, monkeypatch):
    """Its tickets name no word."""
    expect = UcxServerPlane.expect_store
    monkeypatch.setattr(UcxServerPlane, "expect_store", lambda *args: expect(*args[:5]))
    assert side.store().ok
    assert len(commits) == 1
    assert side.comes_back()


def test_a_lost_answer_costs_a_call_and_no_store(local, side, commits, monkeypatch):
    """The server has committed, and nobody has heard of it."""
    monkeypatch.setattr("kvwire.transfer.ucx_path.ANSWER_S", 0.2)
    monkeypatch.setattr(ucx_arrival, "answer", lambda *_args, **_kwargs: None)
    stored = side.store()
    assert stored.ok, stored.error
    assert stored.stored == 8
    assert len(commits) == 1
    assert side.comes_back()
    wait_until(lambda: at_rest(local))
    assert local.engine.counters.stored_objects == 8


def test_an_arrival_that_is_lost_costs_a_call(local, side, commits, monkeypatch):
    monkeypatch.setattr("kvwire.transfer.ucx_path.ANSWER_S", 0.2)
    monkeypatch.setattr(
        "kvwire.transfer.ucx_path.Said",
        lambda engine, peer, lease, word: ucx_arrival.Said(engine, peer, lease, word + 9),
    )
    stored = side.store()
    assert stored.ok, stored.error
    assert len(commits) == 1
    assert side.comes_back()
    wait_until(lambda: at_rest(local))


def test_nothing_is_published_when_the_lease_is_over(local, side, monkeypatch):
    """The server has ended the lease when the arrival comes: the client calls, and is told so."""
    may_commit = StoreRun._may_commit

    def end_leases():
        for lease in [each for each in local.engine._state.leases if isinstance(each, WriteLease)]:
            local.engine.abort_store(lease.owner.id, [lease.id], local.core.now())
        local.core.settle()

    def late(run, task, ticket):
        local.run(end_leases)
        return may_commit(run, task, ticket)

    monkeypatch.setattr("kvwire.transfer.ucx_path.ANSWER_S", 0.3)
    monkeypatch.setattr(StoreRun, "_may_commit", late)
    stored = side.store()
    assert not stored.ok
    assert stored.stored == 0
    monkeypatch.setattr(StoreRun, "_may_commit", may_commit)
    with side.cache.session([0] * (8 * BLOCK_SIZE)) as session:
        assert session.hit_tokens == 0
    wait_until(lambda: at_rest(local))
    assert side.store().ok
    assert side.comes_back()


def test_a_withdrawn_store_is_never_published(local, side, monkeypatch):
    monkeypatch.setattr(StoreRun, "_may_commit", lambda _run, _task, _ticket: False)
    side.store()
    monkeypatch.undo()
    with side.cache.session([0] * (8 * BLOCK_SIZE)) as session:
        assert session.hit_tokens == 0
    wait_until(lambda: at_rest(local))
