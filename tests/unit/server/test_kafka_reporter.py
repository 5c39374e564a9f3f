"""The reporter's own part: order, refusals, what is sent again. librdkafka is played."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest

from kvwire.errors import MissingExtra
from kvwire.server.config import ServerConfig
from kvwire.server.journal import Closed, Entry, EventKind, Journal, JournalLimits
from kvwire.server.reporting import kafka as module
from kvwire.server.reporting.batches import BatchEncoder
from kvwire.server.reporting.kafka import RECORD_BYTES, WINDOW, KafkaReporter, record
from kvwire.v1 import event_pb2

confluent_kafka = pytest.importorskip("confluent_kafka")


class Refusal(str):
    """As `confluent_kafka.KafkaError`."""

    __slots__ = ()

    def str(self):
        return self


class Broker:
    """`refuse` errors come first, one a record. `hold`: no reports come."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.keys: set[bytes] = set()
        self.producers = 0
        self.refuse: list[str] = []
        self.hold = False
        self.away = False
        self.on_error = None

    def producer(self, _settings, *, error_cb, **_):
        self.on_error = error_cb
        self.producers += 1
        return Producer(self)


class Producer:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.waiting: list = []

    def produce(self, _topic, *, key, value, on_delivery):
        self.broker.keys.add(key)
        self.waiting.append((event_pb2.CacheEventBatch.FromString(value).sequence, on_delivery))

    def poll(self, _timeout=0):
        while self.waiting and not self.broker.hold:
            sequence, tell = self.waiting.pop(0)
            if self.broker.refuse:
                tell(Refusal(self.broker.refuse.pop(0)), None)
            else:
                self.broker.taken.append(sequence)
                tell(None, None)

    flush = poll

    def list_topics(self, _topic, *, timeout):
        if self.broker.away:
            raise confluent_kafka.KafkaException("away")

    def purge(self):
        self.waiting.clear()


@pytest.fixture
def broker(monkeypatch):
    made = Broker()
    monkeypatch.setattr(confluent_kafka, "Producer", made.producer)
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    return made


@contextlib.asynccontextmanager
async def reporting(**limits):
    journal = Journal(BatchEncoder("a", bytes(16)), lambda: None, JournalLimits(**limits))
    reporter = KafkaReporter(ServerConfig(report_events="kafka", kafka="127.0.0.1:9"))
    reporter.start(journal.reader(), "a")
    task = asyncio.create_task(reporter.run())
    yield journal, reporter
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await reporter.stop()


def batches(journal, count: int = 1) -> None:
    for _ in range(count):
        journal.note(Entry(EventKind.STORE, 1, "memory", bytes(32), 10, b"1234"))
        journal.close()


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.asyncio
async def test_batches_arrive_in_order_and_are_forgotten(broker):
    async with reporting() as (journal, reporter):
        batches(journal, 2 * WINDOW + 3)
        await until(lambda: not journal.held_batches)
        assert broker.taken == list(range(1, 2 * WINDOW + 4))
        assert broker.keys == {b"a"}
        assert (reporter.arrived, reporter.problem) == (2 * WINDOW + 3, "")


@pytest.mark.asyncio
async def test_what_was_refused_is_sent_again_by_a_new_producer_and_nothing_is_left_out(broker):
    broker.refuse = ["no right to write"] * 2
    async with reporting() as (journal, reporter):
        batches(journal, 3)
        await until(lambda: reporter.problem == "no right to write")
        await until(lambda: not journal.held_batches)
        assert sorted(set(broker.taken)) == [1, 2, 3]
        assert broker.taken[-3:] == [1, 2, 3]
        assert broker.producers > 1
        assert not reporter.problem


@pytest.mark.asyncio
async def test_a_problem_is_over_when_brokers_answer_though_there_is_nothing_to_send(broker, monkeypatch):
    monkeypatch.setattr(module, "_IDLE_S", 0.01)
    broker.away = True
    async with reporting() as (_, reporter):
        broker.on_error(Refusal("all brokers are down"))
        await asyncio.sleep(0.05)
        assert reporter.problem == "all brokers are down"
        broker.away = False
        await until(lambda: not reporter.problem)


@pytest.mark.asyncio
async def test_no_more_than_a_window_is_on_the_way_and_the_journal_keeps_its_bounds(broker):
    broker.hold = True
    async with reporting(held_bytes=20_000) as (journal, _):
        batches(journal, 3 * WINDOW)
        await asyncio.sleep(0.05)
        assert journal.held_batches
        batches(journal, 1000)
        assert journal.held_bytes <= 20_000
        broker.hold = False
        await until(lambda: not journal.held_batches)
        assert broker.taken == sorted(set(broker.taken))
        assert broker.taken[-1] == journal.closed_sequence


@pytest.mark.asyncio
async def test_what_is_noted_last_is_sent_at_a_stop(broker):
    async with reporting() as (journal, _):
        broker.hold = True
        batches(journal, 2)
        await asyncio.sleep(0.02)
        broker.hold = False
    assert broker.taken == [1, 2]


def test_without_the_package_the_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(MissingExtra, match="kafka"):
        KafkaReporter(ServerConfig(report_events="kafka", kafka="127.0.0.1:9"))


def test_a_record_that_is_too_large_goes_without_its_tokens():
    entry = Entry(EventKind.STORE, 1, "memory", bytes(32), 10, bytes(RECORD_BYTES))
    payload = BatchEncoder("a", bytes(16))(7, [entry])
    batch = event_pb2.CacheEventBatch.FromString(record(Closed(7, payload, 2)))
    assert (batch.sequence, batch.lost, batch.server_id) == (7, 2, "a")
    assert (batch.events[0].chunk_key, batch.events[0].tokens) == (bytes(32), b"")


def test_what_a_journal_closes_is_no_larger_than_a_record():
    closed = []
    journal = Journal(lambda _, entries: closed.append(encoder(1, entries)) or b"", lambda: None)
    encoder = BatchEncoder("a" * 128, bytes(16))
    for number in range(3000):
        key = number.to_bytes(32, "big")
        journal.note(Entry(EventKind.STORE, 1, "memory", key, 1 << 40, bytes(4096), key, key))
        journal.note_accesses(1, "memory", [key])
    journal.close()
    assert len(closed) > 1
    assert max(map(len, closed)) <= RECORD_BYTES
