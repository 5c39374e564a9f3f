"""A worker adapter over a fake server, and what its tests wait for."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvwire.vllm.adapters import LoadStoreOp, WorkerAdapter
from support.fake_server import fake_server

CHUNK, BLOCKS = 8, 64
DEADLINES = {"Ping": 0.2, "NegotiateChunkSize": 0.4, "RegisterKvCache": 0.4, "Attach": 0.4, "CommitStore": 2}
SENTINEL = 0xEE


def wait_until(check, seconds=5.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)


def hashes(chunks, seed=0):
    """One per block, two blocks to a chunk."""
    return [bytes([seed, i]) * 16 for i in range(2 * chunks)]


def op(chunks, first_block=0, seed=0):
    blocks = range(first_block, first_block + 2 * chunks)
    return LoadStoreOp(block_hashes=hashes(chunks, seed), block_ids=list(blocks))


@pytest.fixture
def server(socket_path):
    with fake_server(f"unix:{socket_path}", chunk_size=CHUNK) as running:
        yield running


@pytest.fixture
def kv():
    random = np.random.default_rng(1)
    return {f"layer{i}": random.integers(0, 255, (BLOCKS, 48), dtype=np.uint8) for i in range(3)}


@pytest.fixture
def make(server, kv):
    made = []

    def adapter(register=True, **options):
        settings = {"heartbeat_interval": 0.2, "data_path": "inline", "deadlines": DEADLINES}
        made.append(WorkerAdapter(server.address, None, "m", 1, 0, 4, **{**settings, **options}))
        if register:
            made[-1].register_kv_caches(kv)
        return made[-1]

    yield adapter
    for each in made:
        each.shutdown()


class Event:
    """A CUDA event that the test sets off."""

    def __init__(self):
        self.happened = threading.Event()
        self.awaited = threading.Event()

    def synchronize(self):
        self.awaited.set()
        assert self.happened.wait(10)


def finished(adapter, ids, *, stores=(), loads=(), seconds=5.0):
    """Polls as an engine does until exactly these have been reported, each once."""
    sent, received = [], []
    until = time.monotonic() + seconds
    while set(sent) != set(stores) or set(received) != set(loads):
        assert time.monotonic() < until, (sent, received)
        more_sent, more_received = adapter.get_finished(ids)
        ids = set()
        sent += more_sent or ()
        received += more_received or ()
        adapter.wait_for_any(0.02)
    assert len(sent) == len(set(sent))
    assert len(received) == len(set(received))
    assert adapter.get_finished(set()) == (None, None)
