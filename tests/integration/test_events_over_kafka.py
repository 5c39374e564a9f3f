"""Servers and a coordinator that have only Kafka between them for events."""

from __future__ import annotations

import contextlib
import signal
from types import SimpleNamespace

import pytest

from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2
from support.coordinator_process import FAST, coordinator_process
from support.kafka_broker import kafka_broker
from support.raw_client import RawClient, tokens
from support.server_process import run_server, server_process
from support.waiting import eventually

kafka = pytest.importorskip("confluent_kafka")
TOPIC = "kvwire-events"
FOUR = tokens(4)
OTHER_FOUR = tokens(4, seed=1)
BEHIND = {pb.REPORTING_STATE_LAGGING, pb.REPORTING_STATE_SILENT}


@contextlib.contextmanager
def cache_server(folder, broker):
    flags = (
        "--server-id=a",
        "--coordinator",
        f"unix:{folder / 'coordinator.sock'}",
        "--report-events=kafka",
        "--kafka",
        broker.address,
        "--chunk-size=4",
    )
    with server_process(folder, *flags) as server:
        yield server, RawClient(server.channel()).register()


@contextlib.contextmanager
def fleet(folder, *flags):
    """Broker, coordinator, server, and a client of the server."""
    with (
        kafka_broker() as broker,
        coordinator_process(folder, *FAST, "--kafka", broker.address, *flags) as coordinator,
        cache_server(folder, broker) as (server, client),
    ):
        eventually(lambda: member(coordinator.stub()))
        yield broker, coordinator, server, client


def member(stub) -> pb.Member | None:
    return next(iter(stub.ListServers(pb.ListServersRequest(), timeout=5).members), None)


def stats(stub) -> pb.GetDirectoryStatsResponse:
    return stub.GetDirectoryStats(pb.GetDirectoryStatsRequest(), timeout=5)


def located(stub, keys) -> list[str]:
    """Where the whole prompt is."""
    request = pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=keys))
    servers = stub.LocateChunks(request, timeout=5).servers
    return [each.server_id for each in servers if each.prefix_chunks == len(keys)]


def whole(stub) -> bool:
    found = member(stub)
    return found is not None and found.reporting == pb.REPORTING_STATE_CURRENT


def test_what_is_stored_is_located_and_again_after_the_coordinator_or_the_server_is_killed(short_tmp):
    with fleet(short_tmp) as (broker, coordinator, server, client):
        stub = coordinator.stub()
        eventually(lambda: whole(stub))
        client.store("s", FOUR)
        keys = client.keys(FOUR)
        eventually(lambda: located(stub, keys) == ["a"])
        eventually(lambda: client.status().events.kafka_sequence > 0)
        status = client.status().events
        assert (status.kafka_topic, status.kafka_problem) == (TOPIC, "")
        coordinator.kill()
        with coordinator_process(short_tmp, *FAST, "--kafka", broker.address) as again:
            stub = again.stub()
            eventually(lambda: located(stub, keys) == ["a"] and whole(stub))
            client.store("t", OTHER_FOUR)
            eventually(lambda: located(stub, client.keys(OTHER_FOUR)) == ["a"])
            server.kill()
            with cache_server(short_tmp, broker) as (_, engine):
                eventually(lambda: not located(stub, keys) and whole(stub))
                engine.store("s", FOUR)
                eventually(lambda: located(stub, keys) == ["a"])


def test_events_wait_for_a_broker_that_hangs_and_the_member_is_shown_as_behind(short_tmp):
    with fleet(short_tmp) as (broker, coordinator, _, client):
        stub = coordinator.stub()
        client.store("s", FOUR)
        eventually(lambda: located(stub, client.keys(FOUR)) == ["a"] and whole(stub))
        arrived = eventually(lambda: client.status().events.kafka_sequence)
        broker.send_signal(signal.SIGSTOP)
        client.store("t", OTHER_FOUR)
        eventually(lambda: member(stub).reporting in BEHIND)
        eventually(lambda: client.status().events.kafka_problem)
        # The way is broken, and a snapshot makes up for it.
        eventually(lambda: located(stub, client.keys(OTHER_FOUR)) == ["a"])
        assert client.status().events.held_batches
        assert member(stub).reporting in BEHIND
        broker.send_signal(signal.SIGCONT)
        eventually(lambda: client.status().events.kafka_sequence > arrived and whole(stub))
        eventually(lambda: not client.status().events.held_batches)
        assert client.status().events.kafka_problem == ""


def test_a_record_that_comes_twice_changes_nothing_and_a_gap_is_healed_by_a_snapshot(short_tmp):
    with fleet(short_tmp) as (broker, coordinator, _, client):
        stub = coordinator.stub()
        client.store("s", FOUR)
        eventually(lambda: located(stub, client.keys(FOUR)) == ["a"] and whole(stub))
        reply = client.status()
        event = event_pb2.CacheEvent(kind=1, chunk_key=bytes(32), tier=1, backend="memory", size_bytes=1)
        batch = event_pb2.CacheEventBatch(
            server_id="a",
            incarnation=reply.header.incarnation,
            sequence=reply.events.closed_sequence,
            events=[event],
        )
        producer = kafka.Producer({"bootstrap.servers": broker.address, "partitioner": "murmur2_random"})
        before = stats(stub)
        producer.produce(TOPIC, key="a", value=batch.SerializeToString())
        assert producer.flush(10) == 0
        eventually(lambda: stats(stub).duplicate_batches > before.duplicate_batches)
        assert stats(stub).placements == before.placements
        # The server's own batch of that number is a duplicate now: only its snapshot can tell what was in it.
        batch.sequence += 1
        batch.lost = 1
        producer.produce(TOPIC, key="a", value=batch.SerializeToString())
        assert producer.flush(10) == 0
        eventually(lambda: stats(stub).gaps > before.gaps)
        client.store("t", OTHER_FOUR)
        eventually(lambda: located(stub, client.keys(OTHER_FOUR)) == ["a"] and whole(stub))
        eventually(lambda: stats(stub).placements == 8)


def test_both_stop_in_time_while_the_broker_hangs(short_tmp):
    with fleet(short_tmp) as (broker, coordinator, server, client):
        stub = coordinator.stub()
        client.store("s", FOUR)
        eventually(lambda: client.status().events.kafka_sequence)
        broker.send_signal(signal.SIGSTOP)
        client.store("t", OTHER_FOUR)
        assert client.hits(OTHER_FOUR) == 4
        eventually(lambda: member(stub))
        server.terminate()
        coordinator.terminate()


def test_without_a_broker_snapshots_tell_what_there_is(short_tmp):
    nowhere = SimpleNamespace(address="127.0.0.1:9")
    with (
        coordinator_process(short_tmp, *FAST, "--kafka", nowhere.address) as coordinator,
        cache_server(short_tmp, nowhere) as (_, client),
    ):
        client.store("s", FOUR)
        eventually(lambda: located(coordinator.stub(), client.keys(FOUR)) == ["a"])
        eventually(lambda: client.status().events.kafka_problem)


def test_a_setting_that_librdkafka_does_not_know_is_refused_at_the_start():
    done = run_server(
        "--report-events=kafka", "--kafka=127.0.0.1:9", "--kafka-config=no.such=1", "--l1-size=1MiB"
    )
    assert done.returncode == 2
    assert "no.such" in done.stderr
    assert "Traceback" not in done.stderr
