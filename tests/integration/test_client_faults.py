"""The client library when a real server stops, restarts, forgets, hangs, or is guarded."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest
import trustme

from kvwire import errors
from kvwire.client import Client, TlsConfig
from kvwire.client.binding import LivePath
from kvwire.vllm.adapters import LoadStoreOp, WorkerAdapter
from support.proxy import Proxy
from support.server_process import server_process

BLOCKS, BLOCK_SIZE, CHUNK = 64, 16, 64
FLAGS = ("--chunk-size=64", "--l1-size=4MiB")
DEADLINES = {"Ping": 0.3, "Lookup": 1.0, "NegotiateChunkSize": 1.0, "RegisterKvCache": 10.0, "Attach": 1.0}

needs_ucx = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")
every_path = pytest.mark.parametrize("data_path", ["shm", pytest.param("ucx", marks=needs_ucx), "inline"])


@pytest.fixture
def server(short_tmp):
    with server_process(short_tmp, *FLAGS, stop=False) as running:
        yield running
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGCONT)


def random_kv(layers=2, page=4096):
    random = np.random.default_rng(1)
    return {f"l{i}": random.integers(0, 255, (BLOCKS, page), dtype=np.uint8) for i in range(layers)}


def register(client, kv, model="m", **options):
    return client.register_kv_caches(
        kv, model=model, block_size=BLOCK_SIZE, **{"heartbeat_interval": 0.3, **options}
    )


def wait_until(check, seconds=10.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.02)


def idle(client) -> bool:
    status = client.status()
    leases = status.leases
    return not (leases.lookup or leases.read or leases.write or status.memory.quarantined_bytes)


def test_bl32_a_stopped_server_costs_one_timeout_and_then_nothing(server):
    with Client(server.address, deadlines=DEADLINES) as client, register(client, random_kv()) as cache:
        with cache.session(range(64)) as session:
            assert session.store(range(4)).ok
        os.kill(server.pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises((errors.DeadlineExceeded, errors.Unavailable)):
            cache.session(range(64))
        assert time.monotonic() - start < 1.5
        start = time.monotonic()
        for _ in range(50):
            with pytest.raises(errors.Unavailable):
                cache.session(range(64))
        assert time.monotonic() - start < 0.3
        time.sleep(1.0)
        assert not cache.is_healthy
        os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: cache.is_healthy, 5.0)
        with cache.session(range(64)) as session:
            assert session.hit_tokens == 64


@every_path
def test_bl58_back_after_a_restart_of_the_server(short_tmp, data_path):
    kv = random_kv()
    with server_process(short_tmp, *FLAGS) as first:
        client = Client(first.address, deadlines=DEADLINES)
        cache = register(client, kv, data_path=data_path)
        with cache.session(range(64)) as session:
            assert session.store(range(4)).ok
        first.kill()
    until = time.monotonic() + 2
    while time.monotonic() < until:
        with pytest.raises(errors.KvwireError):
            cache.session(range(64))
        time.sleep(0.1)
    with server_process(short_tmp, *FLAGS), client, cache:
        wait_until(lambda: cache.is_healthy, 3.0)
        with cache.session(range(64)) as session:
            assert session.hit_tokens == 0
            assert session.store(range(4)).ok
        with cache.session(range(64)) as session:
            assert session.retrieve(range(10, 14)).ok
        assert (kv["l0"][10:14] == kv["l0"][:4]).all()


def test_another_chunk_size_after_a_restart_is_not_used(short_tmp):
    with server_process(short_tmp, *FLAGS) as first:
        client = Client(first.address, deadlines=DEADLINES)
        cache = register(client, random_kv())
        first.kill()
    with server_process(short_tmp, "--chunk-size=128"), client, cache:
        wait_until(lambda: "--chunk-size 64" in cache.degraded_reason, 5.0)
        with pytest.raises(errors.Unavailable, match="--chunk-size 64"):
            cache.session(range(64))


@every_path
def test_a_killed_server_fails_what_is_under_way_and_nothing_else(short_tmp, data_path):
    """kill -9 while stores run: every one of them ends, none is called a success that is not."""
    kv = random_kv(4, page=64 << 10)
    with server_process(short_tmp, "--chunk-size=64", "--l1-size=64MiB", stop=False) as server:
        client = Client(server.address, deadlines={**DEADLINES, "CommitStore": 5.0})
        cache = register(client, kv, data_path=data_path)
        results = []
        stop = threading.Event()

        def work():
            for prompt in range(10_000):
                if stop.is_set():
                    return
                try:
                    with cache.session([prompt] * 256) as session:
                        results.append(session.store(range(16)))
                except errors.KvwireError:
                    return

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(results) > 3)
        server.kill()
        for thread in threads:
            thread.join(10)
        stop.set()
        assert not any(thread.is_alive() for thread in threads)
        there = [each.stored + each.already_stored + each.being_written for each in results]
        assert [each.ok for each in results] == [count == 4 for count in there]
        assert sum(each.ok for each in results) > 3
        assert not cache.is_healthy
    cache.close()
    client.close()


def test_bl31_idle_but_pinging_stays_and_a_removed_client_comes_back(short_tmp):
    flags = (*FLAGS, "--registration-ttl=1s", "--sweep-interval=0.2s")
    with server_process(short_tmp, *flags) as server, Client(server.address) as client:
        cache = register(client, random_kv(), heartbeat_interval=0.3)
        before = cache.link.registration_id
        time.sleep(2.5)
        assert cache.is_healthy
        assert cache.link.registration_id == before
        client.unregister(before)
        wait_until(lambda: cache.is_healthy and cache.link.registration_id != before, 3.0)
        with cache, cache.session(range(64)) as session:
            assert session.store(range(4)).ok


def test_a_polite_stop_of_the_server_is_heard(short_tmp):
    with server_process(short_tmp, *FLAGS) as server:
        client = Client(server.address)
        cache = register(client, random_kv(), heartbeat_interval=30)
        server.terminate()
    with client, cache:
        wait_until(lambda: not cache.is_healthy, 1.0)
        with pytest.raises(errors.Unavailable):
            cache.session(range(64))


FORK = """
import os, sys, time
import numpy as np
from kvwire.client import Client
from kvwire.keys import Namespace

def use(what):
    with cache.session(range(64)) as session:
        return session.hit_tokens, session.store(range(4)).ok

client = Client(sys.argv[1])
kv = {"l0": np.zeros((16, 4096), np.uint8)}
cache = client.register_kv_caches(kv, model="m", block_size=16, data_path=sys.argv[2])
print("parent", use("parent"), client.lookup(Namespace("m"), range(64)).asked_chunks, flush=True)
mine = cache.link.registration_id
child = os.fork()
if not child:
    print("child", use("child"), client.lookup(Namespace("m"), range(64)).asked_chunks, flush=True)
    assert cache.link.registration_id != mine
    assert cache.is_healthy
    cache.close()
    client.close()
    sys.stdout.flush()
    os._exit(0)
print("again", use("again"), client.lookup(Namespace("m"), range(64)).asked_chunks, flush=True)
assert os.waitpid(child, 0)[1] == 0
assert cache.link.registration_id == mine
print("after", use("after"), flush=True)
cache.close()
client.close()
"""


@every_path
def test_bl61_parent_and_child_of_a_fork_go_on(server, data_path):
    done = subprocess.run(
        [sys.executable, "-c", FORK, server.address, data_path],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == ["after (64, True)", "again (64, True) 1", "child (64, True) 1", "parent (0, True) 1"]
    assert len(done.stderr.splitlines()) <= 2, done.stderr
    with Client(server.address) as client:
        wait_until(lambda: not client.status().registrations)


@pytest.fixture
def certificates(short_tmp):
    ca = trustme.CA()
    server, user = ca.issue_cert("localhost", "127.0.0.1"), ca.issue_cert("engine@example.com")
    paths = {}
    for name, blob in {
        "ca": ca.cert_pem,
        "server_cert": server.cert_chain_pems[0],
        "server_key": server.private_key_pem,
        "cert": user.cert_chain_pems[0],
        "key": user.private_key_pem,
    }.items():
        paths[name] = str(short_tmp / f"{name}.pem")
        blob.write_to_path(paths[name])
    (short_tmp / "token").write_text("s3cret")
    return paths


def test_tls_with_client_certificates_and_a_token(short_tmp, certificates):
    flags = (
        f"--tls-cert={certificates['server_cert']}",
        f"--tls-key={certificates['server_key']}",
        f"--tls-client-ca={certificates['ca']}",
        f"--token-file={short_tmp / 'token'}",
    )
    mutual = TlsConfig(certificates["ca"], certificates["cert"], certificates["key"])
    credentials = mutual.credentials()
    options = {"listen": "127.0.0.1:0", "credentials": credentials}
    with server_process(short_tmp, *FLAGS, *flags, **options) as server:
        address = server.address
        with Client(address, tls=mutual, token="s3cret") as client:
            cache = register(client, random_kv(), data_path="inline")
            with cache, cache.session(range(64)) as session:
                assert session.store(range(4)).ok
        with Client(address, tls=mutual, token="wrong") as client, pytest.raises(errors.Unauthenticated):
            client.negotiate(16)
        only_ca = TlsConfig(certificates["ca"])
        for tls in (only_ca, None):
            with Client(address, tls=tls, token="s3cret") as client, pytest.raises(errors.Unavailable):
                client.negotiate(16)


def test_bl58_a_network_that_drops_packets_costs_no_more_than_the_deadline():
    # Reserved for documentation: nobody answers, where there is a route at all.
    with Client("192.0.2.1:7470", deadlines={"NegotiateChunkSize": 1.0}) as client:
        start = time.monotonic()
        with pytest.raises(errors.KvwireError):
            client.negotiate(16)
        assert time.monotonic() - start < 2.5


def test_a_program_that_is_no_kvwire_server_is_named(short_tmp):
    from concurrent.futures import ThreadPoolExecutor

    other = grpc.server(ThreadPoolExecutor(1))
    other.add_insecure_port(f"unix:{short_tmp}/other")
    other.start()
    with (
        Client(f"unix:{short_tmp}/other") as client,
        pytest.raises(errors.NotImplementedYet, match="another program"),
    ):
        client.negotiate(16)
    other.stop(0).wait()


@every_path
def test_bl32_transfers_in_a_server_that_stops_end_in_time(short_tmp, data_path):
    """SIGSTOP while an engine loads and stores: it never blocks, every transfer ends, and all of it comes
    back."""
    kv = random_kv(4, page=64 << 10)
    options = {"heartbeat_interval": 0.3, "data_path": data_path, "deadlines": DEADLINES}
    with server_process(short_tmp, "--chunk-size=64", "--l1-size=256MiB") as server:
        worker = WorkerAdapter(server.address, None, "m", 1, 0, BLOCK_SIZE, **options)
        worker.register_kv_caches(kv)

        def op(prompt, first_block=0):
            keys = tuple(bytes([prompt, chunk]) * 16 for chunk in range(4))
            return LoadStoreOp(keys=keys, block_ids=list(range(first_block, first_block + 16)))

        stored = [worker.submit_store_request(f"s{prompt}", op(prompt)) for prompt in range(6)]
        assert all(each.wait(20) for each in stored)
        os.kill(server.pid, signal.SIGSTOP)
        start = time.monotonic()
        loads = [worker.submit_retrieve_request(f"l{prompt}", op(prompt, 16)) for prompt in range(6)]
        stores = [worker.submit_store_request(f"t{prompt}", op(10 + prompt)) for prompt in range(6)]
        assert time.monotonic() - start < 0.5
        worker.wait_for_stores({"t0", "t1"}, 0.2)
        assert time.monotonic() - start < 1.0
        assert all(each.wait(5) for each in loads)
        assert all(each.wait(5) for each in stores)
        assert all(load.failed_block_ids == set(range(16, 32)) for load in loads if load.failed)
        assert all(store.failed for store in stores)
        assert any(load.failed for load in loads)
        os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: worker.is_healthy, 8.0)
        again = worker.submit_retrieve_request("again", op(0, 32))
        assert again.wait(10)
        assert not again.failed, again.error
        with Client(server.address) as client:
            wait_until(lambda: idle(client))
        worker.shutdown()


@every_path
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.timeout(25)
def test_bl32_nobody_waits_for_the_rest_of_a_load(short_tmp, data_path, number, monkeypatch):
    """The server dies or hangs between the first bytes and the others: leases of 30 s are not waited for."""
    kv = random_kv(4, page=128 << 10)
    with (
        server_process(short_tmp, "--chunk-size=64", "--l1-size=64MiB", stop=False) as server,
        Client(server.address, deadlines={"Ping": 0.5}) as client,
    ):
        cache = register(client, kv, data_path=data_path)
        with cache.session(range(512)) as session:
            assert session.store(range(32)).ok
        read, drained = LivePath.read, []

        def read_and_strike(path, ticket, drain, deadline):
            def strike_and_drain(slot, start, stop, data):
                if not drained:
                    os.kill(server.pid, number)
                drained.append(slot.index)
                drain(slot, start, stop, data)

            return read(path, ticket, strike_and_drain, deadline)

        monkeypatch.setattr(LivePath, "read", read_and_strike)
        session = cache.session(range(512))
        result = session.retrieve(range(32, 64))
        assert drained
        for chunk in range(8):
            if (chunk, 0) not in result.failed:
                mine, theirs = slice(chunk * 4, chunk * 4 + 4), slice(32 + chunk * 4, 36 + chunk * 4)
                assert all((layer[theirs] == layer[mine]).all() for layer in kv.values())
        assert result.ok == (not result.failed)
        assert data_path == "shm" or not result.ok
        cache.close()


@pytest.mark.leakcheck("threads")
def test_bl32_a_wire_that_takes_no_more_bytes_holds_nobody_up(short_tmp, monkeypatch):
    """In the middle of a store: its own deadline ends it, or the next heartbeats do."""
    deadlines = {**DEADLINES, "WriteChunks": 1.0}
    with (
        server_process(short_tmp, "--chunk-size=64", "--l1-size=64MiB") as server,
        Proxy(short_tmp / "wire.sock", server.address) as wire,
    ):
        client = Client(wire.address, deadlines=deadlines)
        cache = register(client, random_kv(4, page=256 << 10), data_path="inline")
        real, copied = LivePath.write, []

        def write(path, ticket, fill, deadline):
            def stall_and_fill(slot, start, stop, data):
                copied.append(slot.index)
                if len(copied) == 3:
                    wire.stall()
                fill(slot, start, stop, data)

            return real(path, ticket, stall_and_fill, deadline)

        monkeypatch.setattr(LivePath, "write", write)
        with cache.session(range(512)) as session:
            result = session.store(range(32))
            assert result.error.reason in {"DEADLINE_EXCEEDED", "SERVER_UNAVAILABLE"}
        assert len(copied) >= 3
        monkeypatch.undo()
        wait_until(lambda: not cache.is_healthy)
        wire.heal()
        wait_until(lambda: cache.is_healthy)
        with cache.session(range(512)) as session:
            assert session.hit_tokens == 0
            assert session.store(range(32)).ok
        wait_until(lambda: idle(client))
        cache.close()
        client.close()
