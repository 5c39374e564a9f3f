"""UCX over TCP: a sender that leaves right after its store lost nothing; nobody waits for ever (BL-70)."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvwire.client import Client
from kvwire.errors import DataPathUnavailable
from support.server_process import server_process

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")

BLOCKS, BLOCK_SIZE, PAGE = 64, 16, 64 << 10


@pytest.fixture(scope="module")
def server():
    folder = Path(tempfile.mkdtemp(prefix="kvw-", dir="/tmp"))
    flags = ("--l1-size=256MiB", "--chunk-size=256", "--data-paths=ucx-remote", "--ucx-net-devices=lo")
    with server_process(folder, *flags) as running:
        yield running
    shutil.rmtree(folder)


def register(client, kv):
    return client.register_kv_caches(
        kv, model="delivery", block_size=BLOCK_SIZE, data_path="ucx", ucx_devices=("lo",)
    )


@pytest.mark.timeout(120)
def test_bl70_a_sender_that_closes_at_once_has_delivered(server):
    """Each round a new connection: 16 MiB are stored and everything is closed as soon as `store` returns."""
    prompts = [list(range(start, start + BLOCKS * BLOCK_SIZE)) for start in range(0, 10_000_000, 1_000_000)]
    data = {}
    for number, prompt in enumerate(prompts):
        kv = np.random.default_rng(number).integers(0, 255, (BLOCKS, 4 * PAGE), dtype=np.uint8)
        with Client(server.address) as client:
            cache = register(client, [kv])
            assert cache.data_path == "ucx-remote"
            with cache.session(prompt) as session:
                stored = session.store(range(BLOCKS))
            cache.close()
        assert stored.ok, stored.error
        data[number] = kv
    with Client(server.address) as client:
        kv = np.zeros((BLOCKS, 4 * PAGE), dtype=np.uint8)
        cache = register(client, [kv])
        for number, prompt in enumerate(prompts):
            with cache.session(prompt) as session:
                assert session.hit_tokens == len(prompt)
                loaded = session.retrieve(range(BLOCKS))
            assert loaded.ok, loaded.error
            assert np.array_equal(kv, data[number]), f"round {number} came back with other bytes"
        cache.close()


MUTE = """
import sys, time
from kvwire.transfer.ucx import UcxEngine
from kvwire.transfer.ucx_options import UcxOptions
engine = UcxEngine(UcxOptions("remote", devices=("lo",)))
sys.stdout.write(engine.address.hex() + chr(10))
sys.stdout.flush()
time.sleep(60)
"""


@pytest.mark.timeout(60)
def test_bl70_a_peer_that_never_answers_fails_within_the_time_limit():
    """It has an address and takes connections, and is stopped: the probe gives up, and the next try works."""
    from kvwire.transfer import tags
    from kvwire.transfer.ucx import UcxEngine
    from kvwire.transfer.ucx_options import UcxOptions
    from kvwire.transfer.ucx_probe import ProbeServer, probe_client

    options = UcxOptions("remote", devices=("lo",))
    with subprocess.Popen([sys.executable, "-c", MUTE], stdout=subprocess.PIPE, text=True) as mute:
        engine, other = UcxEngine(options), UcxEngine(options)
        try:
            address = bytes.fromhex(mute.stdout.readline())
            mute.send_signal(signal.SIGSTOP)
            tag = tags.encode(tags.Kind.PROBE, 1)
            started = time.monotonic()
            with pytest.raises(DataPathUnavailable):
                probe_client(engine, engine.connect(address), tag, 1 << 20, 2.0)
            assert time.monotonic() - started < 15
            back = other.connect(engine.address)
            tag = tags.encode(tags.Kind.PROBE, 2)
            probe = ProbeServer(other, back, tag)
            probe_client(engine, engine.connect(other.address), tag, 1 << 20, 10.0)
            assert probe.future.result(10) is None
        finally:
            mute.send_signal(signal.SIGKILL)
            engine.close()
            other.close()


def test_two_servers_whose_messages_meet_in_one_process(short_tmp):
    """They count their leases and probes alike; what one sends is never taken for what the other sends."""
    with ExitStack() as stack:
        sides = []
        for name in ("a", "b"):
            folder = short_tmp / name
            folder.mkdir()
            server = stack.enter_context(server_process(folder, "--chunk-size=64", "--l1-size=32MiB"))
            random = np.random.default_rng(ord(name))
            kv = [random.integers(0, 255, (32, 64 << 10), dtype=np.uint8)]
            client = stack.enter_context(Client(server.address))
            cache = client.register_kv_caches(kv, model="m", block_size=16, data_path="ucx")
            stack.callback(cache.close)
            with cache.session(range(256)) as session:
                assert session.store(range(16)).ok
            sides.append((cache, kv[0]))

        def retrieve(side):
            cache, layer = side
            for _ in range(40):
                layer[16:] = 0
                with cache.session(range(256)) as session:
                    assert session.retrieve(range(16, 32)).ok
                assert (layer[16:] == layer[:16]).all()
            return True

        with ThreadPoolExecutor(2) as pool:
            assert all(pool.map(retrieve, sides))
