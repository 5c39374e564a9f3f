"""Spans on their way to a collector: one that takes them, one that never answers, one that is not there."""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvwire.telemetry import tracing


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.requests = []

    def Export(self, request, context):
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector():
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"http://127.0.0.1:{port}", collector.requests
    server.stop(0).wait()


@pytest.fixture(params=["never answers", "nobody listens"])
def dead_endpoint(request):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "never answers":
            listener.listen(8)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_shutdown_sends_what_is_queued(collector):
    endpoint, requests = collector
    on = tracing.setup_tracing("kvwire-server", endpoint, instance_id="server-a", version="1.2.3")
    with tracing.data_plane_span("shm", "store", 5, 6):
        pass
    on.shutdown()
    assert tracing.active() is None
    (resource_spans,) = requests[0].resource_spans
    told = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    assert told["service.name"] == "kvwire-server"
    assert told["service.instance.id"] == "server-a"
    assert told["service.version"] == "1.2.3"
    assert resource_spans.scope_spans[0].spans[0].name == "kvwire.transfer"


@pytest.mark.leakcheck("fds", "threads")
def test_a_dead_collector_costs_neither_calls_nor_shutdown(dead_endpoint, caplog):
    caplog.set_level(logging.CRITICAL, logger="opentelemetry")
    on = tracing.setup_tracing("kvwire-server", dead_endpoint)
    slowest = 0.0
    for lease in range(1, 3 * tracing.QUEUE_SPANS):
        started = time.perf_counter()
        with tracing.data_plane_span("shm", "store", 1, lease):
            pass
        slowest = max(slowest, time.perf_counter() - started)
    assert slowest < tracing.EXPORT_TIMEOUT_S / 2
    started = time.perf_counter()
    on.shutdown()
    assert time.perf_counter() - started < tracing.SHUTDOWN_S + 1.5


def test_a_second_setup_ends_the_first(collector):
    endpoint, _requests = collector
    first = tracing.setup_tracing("one", endpoint)
    second = tracing.setup_tracing("two", endpoint)
    assert tracing.active() is second
    first.shutdown()
    assert tracing.active() is second
    second.shutdown()
    assert tracing.active() is None
