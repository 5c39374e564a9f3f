"""One trace from an engine's request through a client to a real server, and what it must not tell."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvwire import telemetry
from kvwire.cli.bench.processes import kvwire_server, work_folder
from kvwire.cli.bench.prompts import Prompts
from kvwire.client import Client
from kvwire.errors import NotRegistered
from kvwire.keys import Namespace
from kvwire.telemetry import tracing
from kvwire.v1 import admin_service_pb2 as admin
from kvwire.v1 import admin_service_pb2_grpc

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SALT = "tenant-s3cret"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self):
        self.requests = []

    def Export(self, request, context):
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self):
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector():
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(0).wait()


@pytest.fixture
def own_spans():
    exporter = InMemorySpanExporter()
    provider = tracing.make_provider("engine")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    on = tracing.activate(tracing.Tracing(provider))
    yield exporter.get_finished_spans
    on.shutdown()


def text_of(span):
    return {item.key: item.value.string_value for item in span.attributes}


def operate(stub):
    """What operators call with a salt."""
    prompt = {"namespace": {"model": "m", "salt": SALT}, "tokens": bytes(512)}
    stub.Evict(admin.EvictRequest(selector=prompt))
    for call, request in (
        (stub.SetQuota, admin.SetQuotaRequest(salt=SALT, tier=1, limit_bytes=1)),
        (stub.Pin, admin.PinRequest(selector=prompt)),
    ):
        with pytest.raises(grpc.RpcError):
            call(request)


def test_bl55_one_trace_joins_both_sides_and_holds_no_salt(collector, own_spans):
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    with work_folder() as folder:
        flags = ["--l1-size", "16MiB", "--otlp-endpoint", collector.endpoint, "--server-id", "host-1"]
        with kvwire_server(folder, flags) as address, Client(address) as client:
            prompts = Prompts(client)
            with telemetry.attached(telemetry.context_from_headers(headers)):
                client.lookup(Namespace(prompts.namespace.model, salt=SALT), list(range(512)))
                with pytest.raises(NotRegistered):
                    client.end_sessions(12345, [os.urandom(4).hex()])
            operate(admin_service_pb2_grpc.AdminServiceStub(client.channel()))
        # The server has stopped, so it has sent what it had.
    of_trace = [span for span in collector.spans() if span.trace_id.hex() == TRACE_ID]
    assert [span.name.rpartition("/")[2] for span in of_trace] == ["Lookup", "EndSession"]
    lookup, end_session = map(text_of, of_trace)
    assert lookup["rpc.response.status_code"] == "OK"
    assert end_session["rpc.response.status_code"] == "FAILED_PRECONDITION"
    callers = {span.context.span_id for span in own_spans() if span.name.endswith(("Lookup", "EndSession"))}
    assert {int.from_bytes(span.parent_span_id, "big") for span in of_trace} <= callers
    everything = "".join(map(str, [*collector.requests, *(span.to_json() for span in own_spans())]))
    assert SALT not in everything
    assert "host-1" in everything
    assert {"Evict", "SetQuota", "Pin"} <= {span.name.rpartition("/")[2] for span in collector.spans()}


def test_a_server_whose_collector_is_dead_answers_and_stops_in_time():
    with socket.socket() as listener, work_folder() as folder:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)  # takes the connection and never answers
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        flags = ["--l1-size", "16MiB", "--otlp-endpoint", endpoint]
        with kvwire_server(folder, flags) as address, Client(address) as client:
            client.negotiate(16)
            for _ in range(300):
                client.lookup(Namespace("m"), [1, 2, 3], timeout=1.0)
            stopping = time.monotonic()
        assert time.monotonic() - stopping < 5.0


def test_a_server_without_tracing_does_not_import_it():
    program = """
import sys
import kvwire.server.app, kvwire.server.command, kvwire.client
loaded = [name for name in sys.modules if name.startswith("opentelemetry")]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
