"""One trace joins an engine's request, its lookup, its store and retrieve, and the bytes that moved."""

from __future__ import annotations

import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvwire import telemetry
from kvwire.cli.bench.processes import kvwire_server, work_folder
from kvwire.client import Client
from kvwire.telemetry import tracing
from kvwire.vllm.adapters import LoadStoreOp, SchedulerAdapter, WorkerAdapter
from support.waiting import eventually

TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C
HEADERS = {"traceparent": f"00-{TRACE_ID:032x}-b7ad6b7169203331-01"}
BLOCK_TOKENS = 16
TOKENS = list(range(512))
BLOCKS = list(range(32))


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = tracing.make_provider("engine")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    on = tracing.activate(tracing.Tracing(provider))
    yield exporter.get_finished_spans
    on.shutdown()


@pytest.fixture
def server():
    with work_folder() as folder, kvwire_server(folder, ["--l1-size", "64MiB"]) as address:
        yield address


def of_trace(spans):
    """{name: spans} of the request's trace, RPCs by their method."""
    found = {}
    for span in spans():
        if span.context.trace_id == TRACE_ID:
            found.setdefault(span.name.rpartition("/")[2], []).append(span)
    return found


def test_one_trace_from_request_to_bytes(server, spans):
    layers = [np.zeros((len(BLOCKS), 4096), np.uint8) for _ in range(2)]
    with (
        Client(server) as client,
        client.register_kv_caches(layers, model="m", block_size=BLOCK_TOKENS) as cache,
        telemetry.attached(telemetry.context_from_headers(HEADERS)),
    ):
        with cache.session(TOKENS) as session:
            assert session.store(BLOCKS).ok
        with cache.session(TOKENS) as session:
            assert session.retrieve(BLOCKS).ok
        # Sent behind the caller's back.
        eventually(lambda: "EndRetrieve" in of_trace(spans))
    found = of_trace(spans)
    assert len(found["Lookup"]) == 2
    for run, calls in (
        # On shared memory a store is committed without a call.
        ("kvwire.store", ("BeginStore",)),
        ("kvwire.retrieve", ("BeginRetrieve", "EndRetrieve")),
    ):
        (span,) = found[run]
        (transfer,) = (
            each for each in found["kvwire.transfer"] if each.parent.span_id == span.context.span_id
        )
        assert transfer.attributes["kvwire.size_bytes"] == sum(layer.nbytes for layer in layers)
        assert transfer.attributes["kvwire.data_path"] == "shm"
        assert transfer.attributes["kvwire.direction"] == run.removeprefix("kvwire.")
        assert [found[call][0].parent.span_id for call in calls] == [span.context.span_id] * len(calls)


def test_the_adapters_carry_a_request_over_their_threads(server, spans):
    layers = [np.zeros((len(BLOCKS), 4096), np.uint8) for _ in range(2)]
    scheduler = SchedulerAdapter(server, None, "m", 1, 0, BLOCK_TOKENS)
    worker = WorkerAdapter(server, None, "m", 1, 0, BLOCK_TOKENS)
    try:
        worker.register_kv_caches([layers])
        with telemetry.attached(telemetry.context_from_headers(HEADERS)):
            transfer = worker.submit_store_request(
                "r1", LoadStoreOp([bytes([n]) * 32 for n in range(32)], BLOCKS)
            )
        assert transfer.wait(10)
        assert not transfer.failed
    finally:
        worker.shutdown()
        scheduler.shutdown()
    found = of_trace(spans)
    assert {"kvwire.store", "BeginStore", "kvwire.transfer"} <= set(found)
