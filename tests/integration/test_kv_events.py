"""SubscribeKvEvents tells what a server really stores and removes, and says when something was missed."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from kvwire.client import Client
from kvwire.client.types import EventKind
from support.server_process import server_process

CHUNK, BLOCKS, PAGE = 64, 32, 64 << 10


@pytest.fixture
def server():
    folder = Path(tempfile.mkdtemp(prefix="kvw-", dir="/tmp"))
    with server_process(folder, "--l1-size=8MiB", f"--chunk-size={CHUNK}") as running:
        yield running
    shutil.rmtree(folder)


class Reader:
    """Collects events on a thread until there are `count`."""

    def __init__(self, client, count, **options):
        self._stream = client.subscribe_kv_events(**options)
        self._count = count
        self.pages = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        for page in self._stream:
            self.pages.append(page)
            if len(self.events) >= self._count:
                self._stream.close()
                return

    @property
    def events(self):
        return [event for page in self.pages for event in page.events]

    def wait(self):
        self._thread.join(20)
        assert not self._thread.is_alive(), self.events
        return self.events


def store(cache, start, chunks):
    prompt = list(range(start, start + chunks * CHUNK))
    with cache.session(prompt) as session:
        result = session.store(range(chunks * CHUNK // 16))
    assert result.ok, result.error


def test_stored_and_evicted_chunks_are_told_in_order(server):
    with Client(server.address) as client:
        cache = client.register_kv_caches(
            [np.zeros((BLOCKS, PAGE), dtype=np.uint8)], model="events", block_size=16
        )
        store(cache, 0, 1)
        reader = Reader(client, 33 + 1, from_oldest=True)
        # 8 MiB hold 31 chunks of 256 KiB beside the header: the 33rd needs room.
        for number in range(1, 33):
            store(cache, number * 100_000, 1)
        events = reader.wait()
        kinds = [event.kind for event in events]
        assert kinds.count(EventKind.STORE) >= 31
        assert EventKind.DELETE in kinds
        stored = {event.chunk_key for event in events if event.kind is EventKind.STORE}
        assert len(stored) == kinds.count(EventKind.STORE)
        assert all(event.size_bytes == 4 * PAGE for event in events if event.kind is EventKind.STORE)
        assert not any(page.lost for page in reader.pages)
        sequences = [page.sequence for page in reader.pages if page.events]
        assert sequences == sorted(sequences)
        cache.close()


def test_a_reader_that_resumes_too_far_ahead_is_told_that_it_lost_something(server):
    with Client(server.address) as client:
        page = next(client.subscribe_kv_events(resume_after=1_000_000))
        assert page.lost


def test_a_reader_that_comes_late_is_told_what_the_server_remembers(server):
    with Client(server.address) as client:
        cache = client.register_kv_caches(
            [np.zeros((BLOCKS, PAGE), dtype=np.uint8)], model="late", block_size=16
        )
        store(cache, 0, 3)
        # Once they are announced, a reader that has not asked yet finds them all.
        assert len(Reader(client, 3, from_oldest=True).wait()) == 3
        late = Reader(client, 3, from_oldest=True)
        assert [event.kind for event in late.wait()] == [EventKind.STORE] * 3
        assert not any(page.lost for page in late.pages)
        assert late.pages[-1].sequence == 3
        cache.close()
