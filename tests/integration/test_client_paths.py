"""The client library over every data path of a real server."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvwire import errors
from kvwire.client import Client
from kvwire.keys import Namespace
from support.server_process import server_process

BLOCKS, BLOCK_SIZE = 256, 16
PAGE = 8 << 10
SENTINEL = 0xEE
PATHS = {"shm": "shm", "ucx": "ucx-local", "inline": "inline"}

needs_ucx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")
every_path = pytest.mark.parametrize("data_path", ["shm", pytest.param("ucx", marks=needs_ucx), "inline"])


@pytest.fixture(scope="module")
def server():
    folder = Path(tempfile.mkdtemp(prefix="kvw-", dir="/tmp"))
    with server_process(folder, "--l1-size=128MiB", "--chunk-size=64", "--max-slots=64") as running:
        yield running
    shutil.rmtree(folder)


@pytest.fixture
def client(server):
    with Client(server.address, client_name="integration") as made:
        yield made


def random_kv(layers=4, seed=0):
    random = np.random.default_rng(seed)
    return {f"layer{i}": random.integers(0, 255, (BLOCKS, PAGE), dtype=np.uint8) for i in range(layers)}


def permuted(count, seed):
    return [int(each) for each in np.random.default_rng(seed).permutation(BLOCKS)[:count]]


def no_leases(client, seconds=5.0):
    until = time.monotonic() + seconds
    while True:
        leases = client.status().leases
        if not (leases.lookup or leases.read or leases.write):
            return
        assert time.monotonic() < until, leases
        time.sleep(0.02)


@every_path
def test_bytes_come_back_through_shuffled_blocks(client, data_path, request):
    kv = random_kv()
    tokens = range(4096)
    table, target = permuted(256, 1), permuted(256, 2)
    with client.register_kv_caches(
        kv, model=request.node.name, block_size=BLOCK_SIZE, data_path=data_path
    ) as cache:
        assert cache.data_path == PATHS[data_path]
        assert cache.chunk_size == 64
        with cache.session(tokens) as session:
            assert session.hit_tokens == 0
            stored = session.store(table)
            assert stored.ok, stored.error
            assert (stored.stored, stored.stored_bytes) == (64, 256 * 4 * PAGE)
        wanted = {name: layer[table].copy() for name, layer in kv.items()}
        for layer in kv.values():
            layer[:] = SENTINEL
        with cache.session(tokens) as session:
            assert session.hit_tokens == 4096
            loaded = session.retrieve(target)
            assert loaded.ok, loaded.error
        assert all((kv[name][target] == wanted[name]).all() for name in kv)
        no_leases(client)


@every_path
def test_many_threads_retrieve_at_once(client, data_path, request):
    """Each of them more objects than UCX has messages under way."""
    kv = random_kv()
    with (
        client.register_kv_caches(
            kv, model=request.node.name, block_size=BLOCK_SIZE, data_path=data_path
        ) as cache,
        cache.session(range(4096)) as session,
    ):
        assert session.store(range(256)).ok
        with ThreadPoolExecutor(4) as pool:
            loading = [pool.submit(session.retrieve, range(256)) for _ in range(12)]
            assert all(each.result(20).ok for each in loading)


@every_path
def test_bl23_a_partial_load_writes_only_its_blocks(client, data_path, request):
    kv = random_kv(2)
    with client.register_kv_caches(
        kv, model=request.node.name, block_size=BLOCK_SIZE, data_path=data_path
    ) as cache:
        with cache.session(range(64)) as session:
            assert session.store(range(4)).ok
        last = kv["layer0"][3].copy()
        for layer in kv.values():
            layer[:] = SENTINEL
        with cache.session(range(64)) as session:
            assert session.retrieve(range(10, 14), skip_tokens=48).ok
        assert (kv["layer0"][13] == last).all()
        assert (kv["layer0"][:13] == SENTINEL).all()
        assert (kv["layer0"][14:] == SENTINEL).all()


@every_path
def test_two_clients_of_one_namespace_share(server, client, data_path, request):
    """Engine A stores, a fresh engine B with other memory finds it."""
    stored, loaded = random_kv(seed=1), random_kv(seed=2)
    options = {"model": request.node.name, "block_size": BLOCK_SIZE, "data_path": data_path}
    engine_a = client.register_kv_caches(stored, **options)
    with engine_a, engine_a.session(range(640), salt="tenant") as session:
        assert session.store(range(40)).ok
    with Client(server.address) as other, other.register_kv_caches(loaded, **options) as engine_b:
        with engine_b.session(range(640)) as session:
            assert session.hit_tokens == 0
        with engine_b.session(range(640), salt="tenant") as session:
            assert session.hit_tokens == 640
            assert session.retrieve(range(100, 140)).ok
    assert all((loaded[name][100:140] == stored[name][:40]).all() for name in stored)


def test_torch_tensors_and_their_types(client):
    torch = pytest.importorskip("torch")
    kv = {f"l{i}": torch.randn(64, 2, 16, 8, dtype=torch.bfloat16) for i in range(3)}
    with client.register_kv_caches(kv, model="torch", block_size=BLOCK_SIZE) as cache:
        assert cache.spec.namespace.kv_dtype == "bfloat16"
        with cache.session(range(128)) as session:
            assert session.store(range(8)).ok
        wanted = [layer[:8].clone() for layer in kv.values()]
        with cache.session(range(128)) as session:
            assert session.retrieve(range(40, 48)).ok
        assert all(torch.equal(layer[40:48], was) for layer, was in zip(kv.values(), wanted, strict=True))


def test_unlike_memory_is_another_namespace(client):
    one, other = random_kv(2), random_kv(3)
    with client.register_kv_caches(one, model="same", block_size=BLOCK_SIZE) as first:
        with first.session(range(64)) as session:
            assert session.store(range(4)).ok
        second = client.register_kv_caches(other, model="same", block_size=BLOCK_SIZE)
        with second, second.session(range(64)) as session:
            assert session.hit_tokens == 0


def test_several_threads_over_one_cache(client, request):
    kv = random_kv(2)
    problems = []
    with client.register_kv_caches(kv, model=request.node.name, block_size=BLOCK_SIZE) as cache:

        def work(index):
            tokens = [index] * 256
            with cache.session(tokens) as session:
                stored = session.store(range(16 * index, 16 * index + 16))
            with cache.session(tokens) as session:
                loaded = session.retrieve(range(128 + 16 * index, 128 + 16 * index + 16))
            if not (stored.ok and loaded.ok):
                problems.append((stored, loaded))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not problems
        assert all((layer[128:] == layer[:128]).all() for layer in kv.values())
        no_leases(client)


def test_a_full_server_says_so_and_keeps_its_promises(client, request):
    """More than the memory tier holds: everything is evicted or refused, nothing is wrong."""
    kv = random_kv(8, seed=5)
    with client.register_kv_caches(kv, model=request.node.name, block_size=BLOCK_SIZE) as cache:
        for prompt in range(10):
            with cache.session([prompt] * 4096) as session:
                result = session.store(range(256))
                assert result.stored + result.no_space + len(result.failed) == 64
        with cache.session([9] * 4096) as session:
            hit = session.hit_tokens
            assert hit > 0
            before = {name: layer[: hit // 16].copy() for name, layer in kv.items()}
            assert session.retrieve(range(256)).ok
        assert all((kv[name][: hit // 16] == before[name]).all() for name in kv)
        no_leases(client)


def test_bl59_two_million_tokens_and_more(server, client):
    with Client(server.address) as other:
        other.negotiate(64)  # `client` has not, so it knows no limits yet
    found = client.lookup(Namespace("nobody"), b"\x07\x00\x00\x00" * 2_000_000)
    assert (found.asked_chunks, found.hit_chunks) == (31_250, 0)
    with pytest.raises(errors.MessageTooLarge) as caught:
        client.lookup(Namespace("nobody"), b"\x07\x00\x00\x00" * 4_300_000)
    assert int(caught.value.metadata["actual"]) > int(caught.value.metadata["allowed"])
    client.negotiate(64)
    with pytest.raises(errors.TooManyItems):
        client.lookup(Namespace("nobody"), b"\x07\x00\x00\x00" * 4_300_000)
    assert client.ping().chunk_size == 64


def test_the_status_shows_the_client_and_its_path(client, request):
    with client.register_kv_caches(random_kv(1), model=request.node.name, block_size=BLOCK_SIZE):
        mine = [each for each in client.status().registrations if each.client_name == "integration"]
        assert [each.attached for each in mine] == [True]
    assert not [each for each in client.status().registrations if each.client_name == "integration"]
