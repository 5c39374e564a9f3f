from __future__ import annotations

import threading

import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvwire import telemetry
from kvwire.telemetry import tracing
from kvwire.vllm.adapters import LoadStoreOp, WorkerAdapter
from support.fake_server import fake_server


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = tracing.make_provider("test")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    active = tracing.activate(tracing.Tracing(provider))
    yield exporter
    active.shutdown()


class Event:
    def __init__(self):
        self.awaited, self.happened = threading.Event(), threading.Event()

    def synchronize(self):
        self.awaited.set()
        assert self.happened.wait(10)


def trace_of(number: int):
    return telemetry.context_from_headers({"traceparent": f"00-{number:032x}-{number:016x}-01"})


def test_one_trace_joins_a_request_its_calls_and_its_transfer(spans, socket_path):
    kv = {"l0": np.zeros((16, 64), np.uint8)}
    with fake_server(f"unix:{socket_path}") as server:
        adapter = WorkerAdapter(server.address, None, "m", 1, 0, 4, data_path="inline", copy_threads=1)
        adapter.register_kv_caches(kv)
        ops = [LoadStoreOp(keys=(bytes([i]) * 32,), block_ids=[2 * i, 2 * i + 1]) for i in range(3)]
        with telemetry.attached(trace_of(7)):
            assert adapter.submit_store_request("r", ops[0]).wait(5)
        # Two that share a batch: both wait behind one that the test holds.
        gate = Event()
        held = adapter.submit_store_request("held", ops[0], gate)
        assert gate.awaited.wait(5)
        batch = []
        for number, op in ((8, ops[1]), (9, ops[2])):
            with telemetry.attached(trace_of(number)):
                batch.append(adapter.submit_store_request(f"r{number}", op))
        gate.happened.set()
        assert all(each.wait(5) for each in [held, *batch])
        adapter.shutdown()
    found = {}
    for span in spans.get_finished_spans():
        found.setdefault(span.context.trace_id, []).append(span.name.rpartition("/")[2])
    assert sorted(found[7]) == ["BeginStore", "CommitStore", "WriteChunks", "kvwire.store", "kvwire.transfer"]
    assert "kvwire.transfer" in found[8]
    assert "kvwire.transfer" in found[9]
