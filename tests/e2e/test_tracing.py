"""One trace joins a request of the engine with its lookup, its load or store, and the bytes that moved."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from e2e.harness import engine, prompt
from kvwire.telemetry import tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def spans():
    exporter = InMemorySpanExporter()
    provider = tracing.make_provider("engine")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    on = tracing.activate(tracing.Tracing(provider))
    yield exporter
    on.shutdown()
    tracing._state.tracing = None


def traces(spans):
    found = {}
    for span in spans.get_finished_spans():
        found.setdefault(format(span.context.trace_id, "032x"), set()).add(span.name.rpartition("/")[2])
    spans.clear()
    return found


def test_a_request_is_one_trace(server, spans):
    tokens = prompt(200)
    with engine("llama", server) as running:
        running.run(tokens)
        (stored,) = [names for names in traces(spans).values() if "Lookup" in names]
        assert stored >= {"kvwire.request", "Lookup", "kvwire.store", "BeginStore", "kvwire.transfer"}
        running.run(tokens)
        (loaded,) = [names for names in traces(spans).values() if "Lookup" in names]
        assert loaded >= {"kvwire.request", "Lookup", "kvwire.retrieve", "BeginRetrieve", "kvwire.transfer"}


def test_it_joins_the_trace_of_the_engines_request(server, spans, monkeypatch):
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    with engine("llama", server) as running:
        side = running.scheduler_connector._scheduler.side
        track = side._track

        def with_headers(request):
            request.trace_headers = headers
            return track(request)

        monkeypatch.setattr(side, "_track", with_headers)
        running.run(prompt(200))
        joined = traces(spans)[TRACE]
    # On shared memory a store is committed without a call.
    assert joined >= {"Lookup", "kvwire.store", "BeginStore", "kvwire.transfer"}
    assert "kvwire.request" not in joined
