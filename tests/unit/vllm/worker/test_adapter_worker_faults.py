from __future__ import annotations

import threading
import time

import pytest

from kvwire import errors
from kvwire.vllm.adapters import (
    GroupBlocks,
    LoadStoreOp,
    WorkerAdapter,
)
from support.worker_adapter import (
    BLOCKS,
    CHUNK,
    DEADLINES,
    SENTINEL,
    Event,
    finished,
    hashes,
    op,
    wait_until,
)

pytestmark = pytest.mark.leakcheck("threads")


def test_bl22_failed_loads_name_their_blocks_with_the_request(server, make):
    adapter = make()
    adapter.submit_store_request("w", op(3, seed=1), None).wait(5)
    server.missing = {(1, 0)}
    load = adapter.submit_retrieve_request("r", op(3, 20, seed=1), None)
    assert load.wait(5)
    assert load.failed
    assert load.failed_block_ids == {22, 23}
    # Not before the load itself is reported.
    assert adapter.failed_requests() == set()
    assert adapter.get_finished(set()) == (None, {"r"})
    assert adapter.failed_requests() == {"r"}
    assert adapter.get_block_ids_with_load_errors() == {22, 23}
    assert adapter.failed_requests() == set()
    assert adapter.get_block_ids_with_load_errors() == set()


def test_a_load_that_fails_as_a_whole_names_all_its_blocks(server, make):
    adapter = make()
    server.fail["BeginRetrieve"] = errors.Internal("no")
    load = adapter.submit_retrieve_request("r", op(2, 20), None)
    assert load.wait(5)
    assert load.failed_block_ids == {20, 21, 22, 23}


def test_bl20_a_store_that_is_given_up_is_never_published(server, make, kv):
    adapter = make()
    gate = Event()
    store = adapter.submit_store_request("r", op(1), gate)
    assert not adapter.wait_for_stores({"r"}, 0.05)
    for layer in kv.values():
        layer[:2] = SENTINEL
    gate.happened.set()
    assert store.wait(5)
    assert store.failed
    assert not server.objects
    finished(adapter, {"r"}, stores={"r"})


def test_bl20_a_store_that_is_waited_for_is_published(server, make):
    adapter = make()
    server.delay["WriteChunks"] = 0.2
    adapter.submit_store_request("r", op(1), None)
    assert adapter.wait_for_stores({"r", "unknown"}, 5)
    assert len(server.objects) == 1
    assert adapter.wait_for_stores({"r"}, 0)


def test_bl20_cancelling_between_copy_and_commit(server, make):
    adapter = make()
    server.hold["WriteChunks"] = threading.Event()
    store = adapter.submit_store_request("r", op(1), None)
    wait_until(lambda: server.calls["WriteChunks"])
    store.cancel()
    server.hold["WriteChunks"].set()
    assert store.wait(5)
    assert not server.objects
    wait_until(lambda: not server.leases)
    store.cancel()


def test_cancelling_a_load_fails_it(server, make):
    adapter = make(copy_threads=1)
    gate = Event()
    adapter.submit_store_request("w", op(1), gate)
    assert gate.awaited.wait(5)
    load = adapter.submit_retrieve_request("r", op(1, 20), None)
    load.cancel()
    gate.happened.set()
    assert load.wait(5)
    assert load.failed_block_ids == {20, 21}


def test_a_degraded_server_drops_stores_and_fails_loads_at_once(server, make):
    adapter = make()
    server.stop()
    wait_until(lambda: not adapter.is_healthy)
    start = time.monotonic()
    for i in range(50):
        assert adapter.submit_store_request(f"s{i}", op(1), Event()).done()
        load = adapter.submit_retrieve_request(f"l{i}", op(1, 20), Event())
        assert load.done()
        assert load.failed_block_ids == {20, 21}
    assert time.monotonic() - start < 1.0
    assert adapter.get_finished({"s1"})[0] == {"s1"}
    server.start()
    wait_until(lambda: adapter.is_healthy)
    assert not adapter.submit_store_request("again", op(1), None).done() or server.objects
    assert adapter.wait_for_stores({"again"}, 5)
    assert len(server.objects) == 1


def test_without_a_server_nothing_is_raised(short_tmp, kv):
    start = time.monotonic()
    adapter = WorkerAdapter(f"unix:{short_tmp}/none", None, "m", 1, 0, 4, deadlines=DEADLINES)
    adapter.register_kv_caches(kv)
    assert time.monotonic() - start < 2.0
    assert (adapter.chunk_size, adapter.num_blocks_per_chunk(), adapter.data_path) == (None, 0, "")
    assert adapter.submit_store_request("r", op(1), None).failed
    assert adapter.submit_retrieve_request("r", op(1, 20), None).failed_block_ids == {20, 21}
    adapter.shutdown()
    adapter.shutdown()


def test_ops_that_make_no_sense_fail_without_an_exception(server, make):
    adapter = make()
    for bad in (
        LoadStoreOp(block_hashes=hashes(1), block_ids=[0]),
        LoadStoreOp(block_hashes=hashes(1)[:1], block_ids=[0, 1, 2, 3]),
        LoadStoreOp(block_hashes=hashes(1), block_ids=[0, BLOCKS]),
        LoadStoreOp(keys=(b"short",), groups=(GroupBlocks(7, 0, 1, (0, 1)),)),
        LoadStoreOp(),
    ):
        assert adapter.submit_store_request("r", bad, None).failed
    assert server.calls["BeginStore"] == 0
    assert adapter.is_healthy


def test_shutdown_ends_what_waits_and_leaves_the_server(server, make):
    adapter = make()
    gate = Event()
    running = adapter.submit_store_request("r", op(1, seed=1), gate)
    waiting = adapter.submit_store_request("r", op(1, seed=2), None)
    assert gate.awaited.wait(5)
    threading.Timer(0.1, gate.happened.set).start()
    adapter.shutdown()
    assert running.done()
    assert waiting.done()
    assert waiting.failed
    assert not server.registrations
    assert adapter.submit_store_request("late", op(1), None).failed


def test_a_worker_that_met_another_server_takes_the_schedulers_chunk_size(server, make):
    server.chunk_size = 2 * CHUNK
    adapter = make()
    assert adapter.chunk_size == 2 * CHUNK
    adapter.require_chunk_size(2 * CHUNK)
    assert adapter.is_healthy
    adapter.require_chunk_size(CHUNK)
    assert not adapter.is_healthy
    wait_until(lambda: f"--chunk-size {CHUNK}" in adapter.degraded_reason)
    assert adapter.submit_store_request("s", op(1)).failed
    server.chunk_size = CHUNK
    server.restart()
    wait_until(lambda: adapter.is_healthy)
    assert adapter.chunk_size == CHUNK
    assert adapter.submit_store_request("t", op(1)).wait(5)
    assert len(server.objects) == 1


def test_a_worker_that_has_met_no_server_yet_takes_the_schedulers_chunk_size(server, make):
    server.stop()
    adapter = make(start_wait=0.2)
    adapter.require_chunk_size(CHUNK)
    server.chunk_size = 2 * CHUNK
    server.start()
    wait_until(lambda: f"--chunk-size {CHUNK}" in adapter.degraded_reason)
