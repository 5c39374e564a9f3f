"""A consumer of events is never told of what is not there, whatever is lost on the way."""

from __future__ import annotations

import random
import threading
from array import array
from types import SimpleNamespace

import pytest

from kvwire.client.types import EventKind, KvEvent, KvEvents
from kvwire.errors import Unavailable
from kvwire.keys import chunk_keys, root
from kvwire.vllm.adapters_common import hash_keys
from kvwire.vllm.announce import MEDIUM, Announcer, vllm_events
from kvwire.vllm.events import Chunk, EventBook, EventReader, Gone
from kvwire.vllm.requests import TrackerFactory
from kvwire.vllm.servers import Share
from support.fake_engine import CHUNK, NAMESPACE, Request

BLOCK = 32


def chunk(number):
    return Chunk((number * 2, number * 2 + 1), None, array("I", [number]), BLOCK)


def key(number):
    return bytes([number]) * 32


def stored(*numbers):
    return [KvEvent(EventKind.STORE, key(number)) for number in numbers]


def deleted(*numbers):
    return [KvEvent(EventKind.DELETE, key(number)) for number in numbers]


class Consumer:
    """What somebody believes who reads all events."""

    def __init__(self, book):
        self._book = book
        self.believed = set()

    def read(self):
        for each in self._book.take():
            if isinstance(each, Gone):
                self.believed -= set(each.hashes)
            else:
                self.believed |= set(each.hashes)
        return self.believed


class TestBook:
    @pytest.mark.parametrize("first", ["named", "announced"])
    def test_told_when_it_is_there_and_named(self, first):
        book = EventBook()
        steps = [lambda: book.name((key(1),), chunk(1)), lambda: book.announced(0, stored(1))]
        for step in steps if first == "named" else reversed(steps):
            assert not book.take()
            step()
        assert book.take() == [chunk(1)]
        assert not book.take()
        book.name((key(1),), chunk(1))
        book.announced(0, stored(1))
        assert not book.take()

    def test_removed_is_told_once_and_may_be_stored_again(self):
        book = EventBook()
        book.name((key(1),), chunk(1))
        book.announced(0, stored(1))
        book.announced(0, deleted(1))
        book.announced(0, deleted(1, 2))
        assert book.take() == [chunk(1), Gone(chunk(1).hashes)]
        book.announced(0, stored(1))
        assert not book.take()
        book.name((key(1),), chunk(1))
        assert book.take() == [chunk(1)]

    @pytest.mark.parametrize("end", ["clear", "lost"])
    def test_a_cleared_server_and_a_lost_one_have_nothing(self, end):
        book = EventBook()
        book.announced(0, stored(1, 2))
        book.name((key(1),), chunk(1))
        assert book.take() == [chunk(1)]
        if end == "clear":
            book.announced(0, [KvEvent(EventKind.CLEAR, b"")])
        else:
            book.lost(0)
        assert book.take() == [Gone(chunk(1).hashes)]
        book.name((key(2),), chunk(2))
        assert not book.take()

    def test_unknown_kinds_are_skipped(self):
        book = EventBook()
        book.name((key(1),), chunk(1))
        book.announced(0, [KvEvent(EventKind.UNKNOWN, key(1)), KvEvent(EventKind.ACCESS, key(1))])
        assert not book.take()

    def test_every_server_has_to_have_it(self):
        book = EventBook(2)
        book.name((key(1), key(101)), chunk(1))
        book.announced(0, stored(1))
        assert not book.take()
        book.announced(1, stored(101))
        assert book.take() == [chunk(1)]
        book.announced(1, deleted(101))
        assert book.take() == [Gone(chunk(1).hashes)]

    def test_memory_is_bounded_and_what_is_forgotten_is_withdrawn(self):
        book = EventBook(max_present=4, max_pending=3, max_told=2)
        book.announced(0, stored(*range(1, 11)))
        for number in range(7, 11):
            book.name((key(number),), chunk(number))
        consumer = Consumer(book)
        assert consumer.read() == {*chunk(9).hashes, *chunk(10).hashes}
        for number in range(20, 30):
            book.name((key(number),), chunk(number))
        book.announced(0, stored(*range(20, 30)))
        assert consumer.read() == {*chunk(28).hashes, *chunk(29).hashes}
        sizes = (len(book._present[0]), len(book._pending), len(book._told), len(book._owner))
        assert sizes == (4, 0, 2, 2)

    @pytest.mark.parametrize("seed", range(20))
    def test_nothing_is_believed_that_is_not_there(self, seed):
        source = random.Random(seed)
        book = EventBook(2, max_present=6, max_pending=4, max_told=5)
        consumer = Consumer(book)
        held = [set(), set()]
        for _ in range(300):
            server, number = source.randrange(2), source.randrange(12)
            action = source.choice(["store", "store", "delete", "name", "name", "lose", "clear"])
            name = key(number + 100 * server)
            if action == "store":
                held[server].add(number)
                book.announced(server, [KvEvent(EventKind.STORE, name)])
            elif action == "delete":
                held[server].discard(number)
                book.announced(server, [KvEvent(EventKind.DELETE, name)])
            elif action == "name":
                book.name((key(number), key(number + 100)), chunk(number))
            elif source.randrange(8) == 0:
                held[server].clear()
                if action == "lose":
                    book.lost(server)
                else:
                    book.announced(server, [KvEvent(EventKind.CLEAR, b"")])
            there = {hash_ for number in held[0] & held[1] for hash_ in chunk(number).hashes}
            assert consumer.read() <= there


class FakeServer:
    """Client.subscribe_kv_events, from a script: pages, an error, or the end of the script."""

    def __init__(self, *streams):
        self._streams = list(streams)
        self.resumed = []
        self.empty = threading.Event()
        self._tries = 0

    def subscribe_kv_events(self, namespace, *, resume_after, from_oldest):
        self.resumed.append("oldest" if from_oldest else resume_after)
        if not self._streams:
            self._tries += 1
            if self._tries > 2:
                self.empty.set()
            raise Unavailable("gone")
        yield from self._play(self._streams.pop(0))

    def _play(self, stream):
        for each in stream:
            if isinstance(each, Exception):
                raise each
            yield each

    def close(self):
        pass


def page(sequence, events=(), *, lost=False, run=b"a"):
    return KvEvents(sequence, lost, tuple(events), run)


def read(*streams):
    """Reads the streams, and then meets a server that is away three times."""
    book, losses = EventBook(), []
    for number in range(1, 6):
        book.name((key(number),), chunk(number))
    server = FakeServer(*streams)
    reader = EventReader(server, NAMESPACE, book, 0, lambda: losses.append(1), retry=0.001)
    reader.start()
    assert server.empty.wait(10)
    reader.close()
    return book, server, losses


class TestReader:
    def test_a_stream_that_breaks_is_resumed_where_it_broke(self):
        book, server, _ = read([page(7, stored(1)), Unavailable("cut")], [page(8, stored(2))])
        assert server.resumed[:2] == ["oldest", 7]
        assert book.take()[:2] == [chunk(1), chunk(2)]

    def test_the_first_page_loses_nothing(self):
        book, _, _ = read([page(0, lost=True), page(1, stored(1))])
        assert book.take()[0] == chunk(1)

    def test_what_was_told_is_withdrawn_when_events_were_dropped(self, caplog):
        book, _, losses = read([page(3, stored(1, 2)), page(90, stored(3), lost=True)])
        assert book.take()[:5] == [chunk(1), chunk(2), Gone(chunk(1).hashes), Gone(chunk(2).hashes), chunk(3)]
        assert losses
        assert "dropped events" in caplog.text

    def test_another_run_of_the_server_is_read_from_its_start(self):
        book, server, losses = read(
            [page(50, stored(1)), Unavailable("killed")],
            [page(60, stored(2), run=b"b")],
            [page(61, stored(2, 3), run=b"b")],
        )
        assert server.resumed[:3] == ["oldest", 50, "oldest"]
        assert book.take()[:4] == [chunk(1), Gone(chunk(1).hashes), chunk(2), chunk(3)]
        assert losses

    def test_a_server_that_stays_away_has_nothing(self):
        book, _, losses = read([page(5, stored(1))])
        assert losses == [1]
        assert book.take() == [chunk(1), Gone(chunk(1).hashes)]


def hashed(request, size=BLOCK):
    request.block_hashes = [bytes([number]) * 32 for number in range(request.num_tokens // size)]
    return request


WHOLE = (Share("here", (0,), 1),)


def announce_all(announcer, *per_server):
    for server, keys in enumerate(per_server):
        announcer.book.announced(server, [KvEvent(EventKind.STORE, each) for each in keys])


class TestAnnouncer:
    def test_chunks_are_told_by_the_engines_block_hashes(self, monkeypatch):
        monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
        announcer = Announcer(WHOLE, BLOCK)
        tracker = TrackerFactory(NAMESPACE)(hashed(Request("r", range(200))))
        announcer.named(tracker, range(1, 3), CHUNK)
        announce_all(announcer, chunk_keys(root(NAMESPACE, CHUNK), list(range(200)), CHUNK))
        first, second = vllm_events(announcer.book)
        assert first.block_hashes == tracker.request.block_hashes[2:4]
        assert first.parent_block_hash == tracker.request.block_hashes[1]
        assert first.token_ids == list(range(64, 128))
        assert (first.block_size, first.medium) == (BLOCK, MEDIUM)
        assert second.parent_block_hash == first.block_hashes[-1]
        announcer.book.lost(0)
        removed, _ = vllm_events(announcer.book)
        assert (removed.block_hashes, removed.medium) == (first.block_hashes, MEDIUM)

    def test_each_server_has_its_own_keys(self):
        shares = (Share("a", (0,), 2), Share("b", (1,), 2))
        announcer = Announcer(shares, BLOCK)
        announcer.named(TrackerFactory(NAMESPACE)(hashed(Request("r", range(64)))), range(1), CHUNK)
        own = chunk_keys(root(NAMESPACE, CHUNK), list(range(64)), CHUNK)
        announce_all(announcer, *(hash_keys(share.namespace(NAMESPACE), CHUNK, own, 1) for share in shares))
        assert len(vllm_events(announcer.book)) == 1

    def test_a_salt_goes_into_no_event(self):
        announcer = Announcer(WHOLE, BLOCK)
        tracker = TrackerFactory(NAMESPACE)(hashed(Request("r", range(64), cache_salt="secret")))
        announcer.named(tracker, range(1), CHUNK)
        announce_all(announcer, tracker.keys(range(1), CHUNK))
        assert not vllm_events(announcer.book)

    def test_an_adapter_is_told(self, tmp_path):
        announcer = Announcer(WHOLE, BLOCK)
        lora = SimpleNamespace(
            lora_name="red", name="red", lora_int_id=1, adapter_id=1, lora_path=str(tmp_path)
        )
        tracker = TrackerFactory(NAMESPACE)(hashed(Request("r", range(64), lora_request=lora)))
        announcer.named(tracker, range(1), CHUNK)
        announce_all(announcer, tracker.keys(range(1), CHUNK))
        (event,) = vllm_events(announcer.book)
        assert (event.lora_id, event.lora_name) == (1, "red")
        assert all("red" in each for each in event.extra_keys)

    @pytest.mark.parametrize("size", [32, 48])
    def test_what_the_engine_has_not_hashed_is_not_told(self, size):
        announcer = Announcer(WHOLE, size)
        request = hashed(Request("r", range(64)))
        request.block_hashes = request.block_hashes[:1]
        tracker = TrackerFactory(NAMESPACE)(request)
        announcer.named(tracker, range(1), CHUNK)
        announce_all(announcer, tracker.keys(range(1), CHUNK))
        assert not vllm_events(announcer.book)
