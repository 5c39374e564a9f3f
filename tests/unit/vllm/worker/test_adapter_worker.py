from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from kvwire.client import GroupKind, KvGroup, KvLayout
from kvwire.keys import Namespace, keys_from_block_hashes, root
from kvwire.vllm.adapters import (
    GroupBlocks,
    LoadStoreOp,
    striding_block_hashes,
    wrap_kv_caches,
)
from support.worker_adapter import BLOCKS, CHUNK, SENTINEL, Event, finished, hashes, op

pytestmark = pytest.mark.leakcheck("threads")


def test_what_was_stored_is_loaded(server, make, kv):
    adapter = make()
    assert adapter.is_healthy
    assert (adapter.num_blocks_per_chunk(), adapter.data_path) == (2, "inline")
    before = {name: layer[:6].copy() for name, layer in kv.items()}
    adapter.submit_store_request("r", op(3), None)
    finished(adapter, {"r"}, stores={"r"})
    load = adapter.submit_retrieve_request("s", op(3, first_block=20), None)
    finished(adapter, set(), loads={"s"})
    assert load.done()
    assert not load.failed
    assert all((layer[20:26] == before[name]).all() for name, layer in kv.items())
    assert adapter.failed_requests() == set()
    assert adapter.get_block_ids_with_load_errors() == set()


def test_keys_are_those_that_the_scheduler_asks_for(server, make):
    adapter = make()
    adapter.submit_store_request("r", op(2), None)
    finished(adapter, {"r"}, stores={"r"})
    wanted = keys_from_block_hashes(root(Namespace("m"), CHUNK), striding_block_hashes(hashes(2), 2))
    assert {key for key, _group in server.objects} == set(wanted)


def test_hashes_may_be_given_per_chunk(server, make):
    adapter = make()
    per_chunk = list(striding_block_hashes(hashes(2), 2))
    adapter.submit_store_request("r", LoadStoreOp(block_hashes=per_chunk, block_ids=[0, 1, 2, 3]), None)
    finished(adapter, {"r"}, stores={"r"})
    wanted = keys_from_block_hashes(root(Namespace("m"), CHUNK), per_chunk)
    assert {key for key, _group in server.objects} == set(wanted)


def test_bl17_finished_once_when_all_stores_of_the_request_are_done(server, make):
    adapter = make()
    slow, quick = Event(), Event()
    adapter.submit_store_request("r", op(1, 0, seed=1), slow)
    adapter.submit_store_request("q", op(1, 2, seed=2), quick)
    adapter.submit_store_request("r", op(1, 4, seed=3), quick)
    quick.happened.set()
    finished(adapter, {"q", "r"}, stores={"q"})
    time.sleep(0.1)
    assert adapter.get_finished(set()) == (None, None)
    slow.happened.set()
    finished(adapter, set(), stores={"r"})
    assert len(server.objects) == 3


def test_a_finished_request_without_stores_is_reported_at_once(make):
    adapter = make()
    assert adapter.get_finished({"never stored"}) == ({"never stored"}, None)
    assert adapter.get_finished(set()) == (None, None)


def test_a_store_before_the_engine_is_done_is_not_reported(server, make):
    adapter = make()
    store = adapter.submit_store_request("r", op(1), None)
    assert store.wait(5)
    assert adapter.get_finished(set()) == (None, None)
    assert adapter.get_finished({"r"}) == ({"r"}, None)


def test_a_batch_is_many_requests(server, make, kv):
    adapter = make()
    ids = [f"r{i}" for i in range(10)]
    adapter.batched_submit_store_requests(ids, [op(1, 2 * i, seed=i) for i in range(10)], None)
    finished(adapter, set(ids), stores=set(ids))
    assert len(server.objects) == 10
    assert server.calls["BeginStore"] < 10
    before = {name: layer[:20].copy() for name, layer in kv.items()}
    adapter.batched_submit_retrieve_requests(ids, [op(1, 30 + 2 * i, seed=i) for i in range(10)], None)
    finished(adapter, set(), loads=set(ids))
    assert all((layer[30:50] == before[name]).all() for name, layer in kv.items())


def test_blocks_are_read_after_the_event_and_not_before(server, make, kv):
    adapter = make()
    event = Event()
    store = adapter.submit_store_request("r", op(1), event)
    time.sleep(0.1)
    for layer in kv.values():
        layer[:2] = 7
    event.happened.set()
    assert store.wait(5)
    assert set(b"".join(server.objects.values())) == {7}


def test_loads_go_before_stores(server, make):
    adapter = make(copy_threads=1)
    adapter.submit_store_request("w", op(1, seed=9), None).wait(5)
    order = []
    enter = server._enter
    server._enter = lambda method, *rest: (order.append(method), enter(method, *rest))
    gate = Event()
    first = adapter.submit_store_request("a", op(1, seed=1), gate)
    assert gate.awaited.wait(5)
    others = [adapter.submit_store_request(f"s{i}", op(1, seed=2 + i), None) for i in range(3)]
    load = adapter.submit_retrieve_request("l", op(1, 20, seed=9), None)
    gate.happened.set()
    assert all(each.wait(5) for each in [first, *others, load])
    begins = [method for method in order if method.startswith("Begin")]
    assert begins[:2] == ["BeginStore", "BeginRetrieve"]


def test_a_load_of_a_request_waits_for_its_earlier_store(server, make, kv):
    adapter = make()
    gate = Event()
    adapter.submit_store_request("r", op(1, 0, seed=1), gate)
    load = adapter.submit_retrieve_request("r", op(1, 20, seed=1), None)
    assert not load.wait(0.2)
    gate.happened.set()
    assert load.wait(5)
    assert not load.failed
    assert all((layer[20:22] == layer[:2]).all() for layer in kv.values())


def test_groups_and_sessions(server, make):
    """What the connector sends: tables per group, chunks of a session, rows that a load leaves alone."""

    def layout(chunk_size):
        full = KvGroup(GroupKind.FULL_ATTENTION, 4, 2, 32, chunk_size // 4)
        return KvLayout((full, KvGroup(GroupKind.SLIDING_WINDOW, 4, 1, 16, 1, window_tokens=5)))

    random = np.random.default_rng(5)
    full = [random.integers(0, 255, (BLOCKS, 16), dtype=np.uint8) for _ in range(2)]
    window = [random.integers(0, 255, (BLOCKS, 16), dtype=np.uint8)]
    adapter = make(register=False, layout=layout, alignment=4, namespace=Namespace("n"), engine_id="e")
    adapter.register_kv_caches([full, window])
    server.sessions["e", "prompt"] = [bytes([i]) * 32 for i in range(4)]
    stored = adapter.submit_store_request(
        "r",
        LoadStoreOp(
            groups=(GroupBlocks(0, 1, 2, (2, 3, 4, 5)), GroupBlocks(1, 2, 1, (9,))),
            first_chunk=1,
            chunk_count=2,
            session_id="prompt",
        ),
    )
    assert stored.wait(5)
    assert not stored.failed, stored.error
    assert {(key[0], group) for key, group in server.objects} == {(1, 0), (2, 0), (2, 1)}
    before = full[0][[3, 4, 5]].copy()
    for each in (*full, *window):
        each[20:30] = SENTINEL
    load = adapter.submit_retrieve_request(
        "r",
        LoadStoreOp(
            groups=(GroupBlocks(0, 1, 2, (-1, 21, 22, 23)), GroupBlocks(1, 2, 1, (29,))),
            first_chunk=1,
            chunk_count=2,
            session_id="prompt",
        ),
    )
    assert load.wait(5)
    assert not load.failed, load.error
    assert (full[0][[21, 22, 23]] == before).all()
    assert (full[0][20] == SENTINEL).all()
    assert (window[0][29] == window[0][9]).all()
    assert (window[0][20:29] == SENTINEL).all()


def test_wrap_kv_caches_keeps_order_and_takes_the_inner_tensor():
    first, second = object(), object()
    assert wrap_kv_caches({"a": first, "b": [second]}) == [first, second]


def test_striding_keeps_the_last_hash_of_whole_chunks():
    assert list(striding_block_hashes([b"0", b"1", b"2", b"3", b"4"], 2)) == [b"1", b"3"]


LIGHT = """
import sys
import kvwire.vllm
from kvwire.vllm import LoadStoreOp, SchedulerAdapter, WorkerAdapter, striding_block_hashes, wrap_kv_caches
print(*({"vllm", "torch", "ucxx"} & set(sys.modules)))
"""


def test_the_adapters_need_neither_vllm_nor_torch():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_names_are_listed():
    import kvwire.vllm

    assert {"SchedulerAdapter", "WorkerAdapter", "KvwireConnector"} <= set(dir(kvwire.vllm))
    with pytest.raises(AttributeError, match="Nothing"):
        kvwire.vllm.Nothing  # noqa: B018
