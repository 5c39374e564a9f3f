"""Both adapters of an engine against a real server: what they promise, release, drop and end."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvwire.client import Client
from kvwire.keys import Namespace
from kvwire.vllm.adapters import LoadStoreOp, SchedulerAdapter, WorkerAdapter
from support.server_process import server_process

BLOCKS, BLOCK_SIZE, CHUNK = 64, 16, 64


@pytest.fixture
def server(short_tmp):
    with server_process(short_tmp, "--chunk-size=64", "--l1-size=4MiB") as running:
        yield running


def random_kv(layers=2, page=4096):
    random = np.random.default_rng(1)
    return {f"l{i}": random.integers(0, 255, (BLOCKS, page), dtype=np.uint8) for i in range(layers)}


def wait_until(check, seconds=10.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.02)


def idle(client) -> bool:
    status = client.status()
    leases = status.leases
    return not (leases.lookup or leases.read or leases.write or status.memory.quarantined_bytes)


class Event:
    def __init__(self):
        self.happened = threading.Event()

    def synchronize(self):
        assert self.happened.wait(20)


@pytest.fixture
def engine(server):
    """Both adapters of one engine, named by block hashes, and the tensors."""
    kv = random_kv()
    options = {"engine_id": "engine", "heartbeat_interval": 0.3}
    worker = WorkerAdapter(server.address, None, "m", 1, 0, BLOCK_SIZE, **options)
    worker.register_kv_caches(kv)
    layout = worker._cache.layout
    scheduler = SchedulerAdapter(server.address, None, "m", 1, 0, BLOCK_SIZE, layout=layout, **options)
    yield scheduler, worker, kv
    scheduler.shutdown()
    worker.shutdown()


def found(scheduler, request_id, tokens):
    scheduler.maybe_submit_lookup_request(request_id, tokens=tokens)
    wait_until(lambda: scheduler.check_lookup_result(request_id) is not None)
    return scheduler.check_lookup_result(request_id)


def store(worker, request_id, chunks, event=None, first_chunk=0, session_id=""):
    ids = list(range(first_chunk * 4, (first_chunk + chunks) * 4))
    op = LoadStoreOp(block_ids=ids, first_chunk=first_chunk, chunk_count=chunks, session_id=session_id)
    return worker.submit_store_request(request_id, op, event)


def crowd_out(worker):
    """Store other chunks until whatever nobody holds is evicted."""
    for prompt in range(20):
        keys = tuple(bytes([prompt, chunk]) * 16 for chunk in range(16))
        op = LoadStoreOp(keys=keys, block_ids=list(range(BLOCKS)), session_id=f"other-{prompt}")
        assert worker.submit_store_request(f"other-{prompt}", op).wait(10)


def test_bl11_tokens_loaded_are_the_tokens_promised(server, engine):
    scheduler, worker, kv = engine
    assert found(scheduler, "a", range(128)) == 0
    assert store(worker, "a", 2).wait(10)
    promised = found(scheduler, "b", range(140))
    assert promised == 128
    for layer in kv.values():
        layer[20:40] = 0xEE
    op = LoadStoreOp(block_ids=list(range(20, 28)), chunk_count=promised // CHUNK)
    load = worker.submit_retrieve_request("b", op)
    assert load.wait(10)
    assert not load.failed
    assert all((layer[20:28] == layer[:8]).all() for layer in kv.values())
    assert all((layer[28:40] == 0xEE).all() for layer in kv.values())


def test_bl13_what_the_engine_has_itself_is_released(server, engine):
    scheduler, worker, _kv = engine
    found(scheduler, "a", range(256))
    assert store(worker, "a", 4).wait(10)
    scheduler.end_session("a")
    assert found(scheduler, "r", range(256)) == 256
    scheduler.release_lookup("r", 0, 3)
    load = worker.submit_retrieve_request(
        "r", LoadStoreOp(block_ids=[60, 61, 62, 63], first_chunk=3, chunk_count=1)
    )
    assert load.wait(10)
    assert not load.failed
    scheduler.end_session("r")
    with Client(server.address) as client:
        wait_until(lambda: idle(client) and not client.status().sessions)


def test_bl14_releasing_twice_touches_nobody_else(server, engine):
    scheduler, worker, kv = engine
    found(scheduler, "a", range(192))
    assert store(worker, "a", 3).wait(10)
    assert found(scheduler, "r1", range(192)) == 192
    assert found(scheduler, "r2", range(192)) == 192
    for _ in range(2):
        scheduler.release_lookup("r1", 0, 3)
    scheduler.release_lookup("r1", 7, 4)
    scheduler.end_session("r1")
    crowd_out(worker)
    with Client(server.address) as client:
        wait_until(lambda: client.status().counters.surplus_releases > 0)
        load = worker.submit_retrieve_request("r2", LoadStoreOp(block_ids=list(range(20, 32)), chunk_count=3))
        assert load.wait(10)
        assert not load.failed, load.error
        assert all((layer[20:32] == layer[:12]).all() for layer in kv.values())
        scheduler.end_session("r2")
        scheduler.end_session("a")
        wait_until(lambda: idle(client) and not client.status().sessions)


def test_bl17_a_session_that_ends_before_its_store_does_not_come_back(server, engine):
    scheduler, worker, _kv = engine
    found(scheduler, "r", range(128))
    first, second = Event(), Event()
    store(worker, "r", 1, first)
    store(worker, "r", 1, second, first_chunk=1)
    first.happened.set()
    wait_until(lambda: worker.wait_for_any(0.1) or len(worker._stores) == 1)
    assert worker.get_finished({"r"}) == (None, None)
    scheduler.end_session("r")
    scheduler.end_session("r")
    with Client(server.address) as client:
        wait_until(lambda: not client.status().sessions)
        second.happened.set()
        wait_until(lambda: not worker._stores)
        assert worker.get_finished(set()) == ({"r"}, None)
        assert not client.status().sessions
        wait_until(lambda: idle(client))
        assert client.lookup(Namespace("m"), range(128)).hit_tokens >= CHUNK


def test_bl20_a_store_that_was_given_up_leaves_a_miss(server, engine):
    scheduler, worker, kv = engine
    found(scheduler, "r", range(64))
    event = Event()
    store(worker, "r", 1, event)
    assert not worker.wait_for_stores({"r"}, 0.1)
    for layer in kv.values():
        layer[:4] = 0xEE
    event.happened.set()
    wait_until(lambda: not worker._stores)
    with Client(server.address) as client:
        assert client.lookup(Namespace("m"), range(64)).hit_tokens == 0
        wait_until(lambda: client.status().leases.write == 0)


def test_bl22_what_was_dropped_between_lookup_and_load_is_named(server, engine):
    scheduler, worker, _kv = engine
    found(scheduler, "a", range(256))
    assert store(worker, "a", 4).wait(10)
    scheduler.end_session("a")
    assert found(scheduler, "r", range(256)) == 256
    scheduler.release_lookup("r")
    with Client(server.address) as client:
        wait_until(lambda: client.status().leases.lookup == 0)
    crowd_out(worker)
    load = worker.submit_retrieve_request("r", LoadStoreOp(block_ids=list(range(20, 36)), chunk_count=4))
    assert load.wait(10)
    assert load.failed
    assert load.failed_block_ids == set(range(20, 36))
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.failed_requests() == {"r"}
    assert worker.get_block_ids_with_load_errors() == set(range(20, 36))


def test_the_cache_is_emptied_of_what_nobody_uses(engine, server):
    scheduler, worker, _ = engine
    prompt = list(range(4 * CHUNK))
    assert found(scheduler, "r", prompt) == 0
    assert store(worker, "r", 4).wait(10)
    scheduler.end_session("r")
    assert found(scheduler, "s", prompt) == 4 * CHUNK
    # The lookup's lease keeps them; when it is given back there is nothing in the way.
    assert scheduler.clear(0.2) == 4
    scheduler.release_lookup("s")
    assert scheduler.clear(5.0) == 0
    scheduler.end_session("s")
    assert found(scheduler, "t", prompt) == 0
    with Client(server.address) as other:
        assert other.clear(Namespace("another")).cleared_chunks == 0


def test_a_server_that_is_gone_is_not_emptied(engine, server):
    scheduler, _, _ = engine
    server.process.kill()
    server.process.wait()
    assert scheduler.clear(5.0) is None
    assert scheduler.clear(0.0) is None


def test_how_long_lookups_and_transfers_take_is_told(server):
    answers, ends = [], []
    kv = random_kv()
    worker = WorkerAdapter(
        server.address,
        None,
        "m",
        1,
        0,
        BLOCK_SIZE,
        engine_id="engine",
        on_end=lambda *what: ends.append(what),
    )
    worker.register_kv_caches(kv)
    scheduler = SchedulerAdapter(
        server.address,
        None,
        "m",
        1,
        0,
        BLOCK_SIZE,
        engine_id="engine",
        layout=worker._cache.layout,
        on_answer=answers.append,
    )
    assert found(scheduler, "r", list(range(2 * CHUNK))) == 0
    assert store(worker, "r", 2).wait(10)
    assert store(worker, "r", 2).wait(10)
    wait_until(lambda: len(ends) == 2)
    size = 2 * 4 * 2 * 4096
    # The second time they are there already: well done, and nothing moved.
    assert [(kind.value, well, moved) for kind, well, moved, _ in ends] == [
        ("store", True, size),
        ("store", True, 0),
    ]
    assert all(seconds > 0 for *_, seconds in ends)
    assert len(answers) == 1
    scheduler.shutdown()
    worker.shutdown()
