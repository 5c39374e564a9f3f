from __future__ import annotations

import io
import json
import logging

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvwire.errors import ConfigError
from kvwire.telemetry import setup_logging, tracing


@pytest.fixture
def lines():
    """Switches logging on into a buffer; call for what was written so far."""
    logger = logging.getLogger("kvwire")
    before = (logger.handlers[:], logger.level, logger.propagate)
    buffer = io.StringIO()

    def start(level="info", **options):
        setup_logging(level, stream=buffer, **options)
        return lambda: buffer.getvalue().splitlines()

    yield start
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_json_lines_name_server_and_fields(lines):
    written = lines(json_lines=True, server_id="host-1")
    try:
        int("bad\nvalue")
    except ValueError:
        logging.getLogger("kvwire.server").exception("lost %d", 3, extra={"lease_id": 7, "level": "shout"})
    logging.getLogger("kvwire.server").debug("not this one")
    (line,) = [json.loads(line) for line in written()]
    assert line["message"] == "lost 3"
    assert line["level"] == "error"
    assert line["logger"] == "kvwire.server"
    assert line["server_id"] == "host-1"
    assert line["lease_id"] == 7
    assert line["time"].endswith("+00:00")
    assert "ValueError" in line["exception"]
    assert "trace_id" not in line


def test_json_lines_name_the_trace(lines):
    provider = tracing.make_provider("kvwire-test")
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    on = tracing.activate(tracing.Tracing(provider))
    written = lines(json_lines=True)
    with tracing.span("kvwire.store"):
        logging.getLogger("kvwire").info("inside")
    on.shutdown()
    context = exporter.get_finished_spans()[0].context
    line = json.loads(written()[0])
    assert int(line["trace_id"], 16) == context.trace_id
    assert int(line["span_id"], 16) == context.span_id


def test_plain_lines_and_second_setup_replaces_the_first(lines):
    lines()
    written = lines("warning")
    logging.getLogger("kvwire.client").info("quiet")
    logging.getLogger("kvwire.client").warning("loud")
    (line,) = written()
    assert line.endswith("WARNING kvwire.client: loud")


def test_unknown_level_is_refused(lines):
    with pytest.raises(ConfigError, match=r"loud.*debug, info"):
        lines("loud")
