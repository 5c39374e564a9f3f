"""Events over Kafka, against librdkafka's mock broker."""

from __future__ import annotations

import os

import pytest

from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2
from support.coordinator_process import coordinator_process
from support.fleet_model import chunk
from support.kafka_broker import kafka_broker
from support.waiting import eventually

kafka = pytest.importorskip("confluent_kafka")
TOPIC = "kvwire-events"


def record(server_id, incarnation, sequence):
    event = event_pb2.CacheEvent(kind=1, chunk_key=chunk((server_id, sequence)), tier=1, size_bytes=8)
    return event_pb2.CacheEventBatch(
        server_id=server_id, incarnation=incarnation, sequence=sequence, events=[event]
    )


def produce(producer, batch, key=None):
    producer.produce(TOPIC, key=key or batch.server_id, value=batch.SerializeToString())
    assert producer.flush(10) == 0


def offsets(broker) -> list[int]:
    """What Kafka's tools show of the coordinator."""
    consumer = kafka.Consumer({"bootstrap.servers": broker.address, "group.id": "tools"})
    try:
        places = consumer.committed([kafka.TopicPartition(TOPIC, number) for number in range(4)], timeout=5)
        return [place.offset for place in places if place.offset >= 0]
    finally:
        consumer.close()


def test_records_are_applied_once_held_until_the_server_joins_and_bad_ones_are_skipped(tmp_path):
    run = os.urandom(16)
    with kafka_broker() as broker:
        producer = kafka.Producer({"bootstrap.servers": broker.address})
        with coordinator_process(
            tmp_path, "--kafka", broker.address, "--kafka-group=tools", "--http=127.0.0.1:0"
        ) as program:
            stub = program.stub()
            stats = lambda: stub.GetDirectoryStats(pb.GetDirectoryStatsRequest(), timeout=5)  # noqa: E731
            assert "kafka" in stats().sources
            eventually(lambda: "does not exist yet" in program.output())
            produce(producer, record("a", run, 1))
            produce(producer, record("a", run, 1))
            produce(producer, record("b", run, 1), key="another")
            eventually(lambda: stats().refused_batches > 0)
            info = pb.ServerInfo(server_id="a", incarnation=run, addresses=["127.0.0.1:9"])
            stub.RegisterServer(pb.RegisterServerRequest(server=info), timeout=5)
            eventually(lambda: stats().duplicate_batches == 1)
            assert stats().refused_batches == 1
            produce(producer, record("a", run, 2))
            eventually(lambda: stats().placements == 2)
            eventually(lambda: offsets(broker))
            assert "kvwire_coordinator_kafka_lag_records" in program.get("/metrics")[1]


def test_a_coordinator_reads_on_from_its_checkpoint(tmp_path):
    run = os.urandom(16)
    info = pb.ServerInfo(server_id="a", incarnation=run)
    state = f"--state={tmp_path / 'state'}"
    with kafka_broker() as broker:
        producer = kafka.Producer({"bootstrap.servers": broker.address})
        produce(producer, record("a", run, 1))
        with coordinator_process(tmp_path, "--kafka", broker.address, state) as program:
            stub = program.stub()
            eventually(lambda: "reading 4 partitions" in program.output())
            stub.RegisterServer(pb.RegisterServerRequest(server=info), timeout=5)
            produce(producer, record("a", run, 2))
            eventually(lambda: placements(stub) == 1)
        produce(producer, record("a", run, 3))
        with coordinator_process(tmp_path, "--kafka", broker.address, state) as program:
            stub = program.stub()
            eventually(lambda: placements(stub) == 1)
            stub.RegisterServer(pb.RegisterServerRequest(server=info), timeout=5)
            eventually(lambda: placements(stub) == 2)


def placements(stub) -> int:
    return stub.GetDirectoryStats(pb.GetDirectoryStatsRequest(), timeout=5).placements
