from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvwire.server.fetch.prefetcher import FetchCounters
from kvwire.server.messages import LeaseKind
from kvwire.server.metrics import OPEN_STREAMS, ServerState, server_registry
from kvwire.server.status import EngineCounters, EngineStatus, L1Status
from kvwire.serving.metrics import RpcMetrics


def engine_status(**counters):
    return EngineStatus(
        chunk_size=256,
        l1=L1Status("lru", 1000, 600, 400, 150, 50, 300, 7, 9),
        leases={LeaseKind.LOOKUP: 2, LeaseKind.READ: 1, LeaseKind.WRITE: 0},
        waiting_leases=1,
        sessions=3,
        registrations=(),
        namespaces=(),
        spaces=(),
        counters=EngineCounters(**counters),
    )


def scrape(rpcs=None, **state):
    """{(name, labels as text): value} of everything that is exported."""
    state = {"engine": engine_status(), **state}
    registry = server_registry(
        rpcs or RpcMetrics(OPEN_STREAMS), lambda: ServerState(**state), version="1.2.3", server_id="host-1"
    )
    text = generate_latest(registry).decode()
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_rpcs_by_method_and_code():
    rpcs = RpcMetrics(OPEN_STREAMS)
    for seconds in (0.0001, 0.0004, 0.02, 99.0):
        rpcs("Lookup", "OK", seconds)
    rpcs("Lookup", "NOT_FOUND", 0.3)
    rpcs("Attach", "CANCELLED", 5000.0)
    found = scrape(rpcs)
    assert found["kvwire_rpc_calls_total", "code=OK,method=Lookup"] == 4
    assert found["kvwire_rpc_calls_total", "code=NOT_FOUND,method=Lookup"] == 1
    assert found["kvwire_rpc_calls_total", "code=CANCELLED,method=Attach"] == 1
    assert found["kvwire_rpc_duration_seconds_count", "method=Lookup"] == 5
    assert found["kvwire_rpc_duration_seconds_sum", "method=Lookup"] == pytest.approx(99.3205)
    assert found["kvwire_rpc_duration_seconds_bucket", "le=0.0001,method=Lookup"] == 1
    assert found["kvwire_rpc_duration_seconds_bucket", "le=0.0005,method=Lookup"] == 2
    assert found["kvwire_rpc_duration_seconds_bucket", "le=30.0,method=Lookup"] == 4
    assert found["kvwire_rpc_duration_seconds_bucket", "le=+Inf,method=Lookup"] == 5
    assert ("kvwire_rpc_duration_seconds_count", "method=Attach") not in found


def test_state_of_the_engine():
    engine = engine_status(
        lookups=10,
        asked_tokens=5120,
        hit_tokens=3328,
        l2_hit_tokens=1024,
        peer_hit_tokens=256,
        miss_tokens=1792,
        stored_bytes={"shm": 10, "inline": 2},
        failures={"LEASE_LOST": 4},
    )
    found = scrape(engine=engine, calls_in_flight=5, rejected=6, task_deaths=1, draining=True)
    asked = found["kvwire_lookup_asked_tokens_total", ""]
    assert asked == 5120
    hits = {
        tier: found["kvwire_lookup_hit_tokens_total", f"tier={tier}"] for tier in ("memory", "l2", "peer")
    }
    assert hits == {"memory": 2048, "l2": 1024, "peer": 256}
    assert sum(hits.values()) + found["kvwire_lookup_missed_tokens_total", ""] == asked
    assert found["kvwire_stored_bytes_total", "path=shm"] == 10
    assert found["kvwire_failures_total", "reason=LEASE_LOST"] == 4
    assert found["kvwire_leases", "kind=lookup"] == 2
    assert found["kvwire_memory_used_bytes", ""] == 600
    assert found["kvwire_rpc_in_flight", ""] == 5
    assert found["kvwire_rpc_rejected_total", ""] == 6
    assert found["kvwire_background_task_deaths_total", ""] == 1
    assert found["kvwire_draining", ""] == 1
    assert found["kvwire_build_info", "server_id=host-1,version=1.2.3"] == 1
    assert found["process_resident_memory_bytes", ""] > 0


def test_what_is_brought_into_memory():
    counters = FetchCounters({"l2": 3, "peer": 1}, {"l2": 300}, {"peer": 2}, faults=1)
    found = scrape(fetched=counters, fetches=4, fetching_bytes=1000)
    assert found["kvwire_fetched_objects_total", "origin=l2"] == 3
    assert found["kvwire_fetched_bytes_total", "origin=l2"] == 300
    assert found["kvwire_fetch_failed_objects_total", "origin=peer"] == 2
    assert found["kvwire_fetch_faults_total", ""] == 1
    assert found["kvwire_fetches", ""] == 4
    assert found["kvwire_fetching_bytes", ""] == 1000


def test_the_fleet_by_coordinator():
    found = scrape(
        registered={"a:1": True, "b:1": False}, reporting={"a:1": False}, journal_batches=3, dropped_batches=2
    )
    assert found["kvwire_coordinator_registered", "coordinator=a:1"] == 1
    assert found["kvwire_coordinator_registered", "coordinator=b:1"] == 0
    assert found["kvwire_coordinator_reporting", "coordinator=a:1"] == 0
    assert ("kvwire_coordinator_reporting", "coordinator=b:1") not in found
    assert found["kvwire_event_journal_batches", ""] == 3
    assert found["kvwire_event_batches_dropped_total", ""] == 2
    assert not any(name == "kvwire_coordinator_registered" for name, _ in scrape())


def test_a_state_that_cannot_be_read_yet_does_not_keep_a_server_from_starting():
    registry = server_registry(RpcMetrics(OPEN_STREAMS), lambda: 1 / 0, version="1", server_id="a")
    with pytest.raises(ZeroDivisionError):
        generate_latest(registry)
