from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading

import grpc
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvwire.errors import ConfigError, TransferFailed
from kvwire.telemetry import tracing

SERVICE = "kvwire.v1.CacheService"
LOOKUP = f"/{SERVICE}/Lookup"


class RichStatus(grpc.Status):
    def __init__(self, code, details):
        self.code = code
        self.details = details
        self.trailing_metadata = (("grpc-status-details-bin", b"\x08\x09"),)


async def answer(request, context):
    if request == b"rich":
        await context.abort_with_status(RichStatus(grpc.StatusCode.FAILED_PRECONDITION, "register again"))
    if request == b"abort":
        await context.abort(grpc.StatusCode.DATA_LOSS, "checksum")
    if request == b"raise":
        raise ValueError(request)
    if request == b"hang":
        await asyncio.sleep(30)
    with tracing.data_plane_span("shm", "retrieve", 4096, 2**63 + 7):
        return request


async def count_up(request, context):
    for number in range(int(request)):
        with tracing.span("kvwire.step"):
            pass
        yield str(number).encode()
    if request == b"3":
        await context.abort_with_status(RichStatus(grpc.StatusCode.ABORTED, "lost"))


async def concatenate(requests, context):
    return b"".join([request async for request in requests])


async def echo_all(requests, context):
    async for request in requests:
        yield request


HANDLERS = {
    "Lookup": grpc.unary_unary_rpc_method_handler(answer),
    "Ping": grpc.unary_unary_rpc_method_handler(answer),
    "ReadChunks": grpc.unary_stream_rpc_method_handler(count_up),
    "WriteChunks": grpc.stream_unary_rpc_method_handler(concatenate),
    "Echo": grpc.stream_stream_rpc_method_handler(echo_all),
}


@pytest.fixture
def spans():
    """Tracing that is on, and the spans it finished."""
    exporter = InMemorySpanExporter()
    provider = tracing.make_provider("kvwire-test")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    on = tracing.activate(tracing.Tracing(provider))
    yield exporter.get_finished_spans
    on.shutdown()


@contextlib.asynccontextmanager
async def serving():
    server = grpc.aio.server(interceptors=tracing.active().server_interceptors())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, HANDLERS),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def aio_channel():
    async with serving() as address:
        interceptors = tracing.aio_client_interceptors(address)
        async with grpc.aio.insecure_channel(address, interceptors=interceptors) as channel:
            yield channel


async def in_sync_channel(use):
    """Run `use(channel)` of a synchronous client in a thread, against the server on this loop."""
    async with serving() as address:

        def run():
            with grpc.insecure_channel(address) as plain:
                return use(grpc.intercept_channel(plain, *tracing.client_interceptors(address)))

        return await asyncio.to_thread(run)


async def by_kind(spans, count):
    """{kind: span} of a single call, once all its spans have ended."""
    for _ in range(200):
        if len(spans()) >= count:
            break
        await asyncio.sleep(0.01)
    found = {span.kind: span for span in spans()}
    assert len(spans()) == count, [span.name for span in spans()]
    return found


@pytest.mark.asyncio
async def test_one_trace_from_client_to_transfer(spans):
    async with aio_channel() as channel:
        assert await channel.unary_unary(LOOKUP)(b"x", metadata=(("mine", "kept"),)) == b"x"
        found = await by_kind(spans, 3)
    client, server, transfer = (found[kind] for kind in (SpanKind.CLIENT, SpanKind.SERVER, SpanKind.INTERNAL))
    assert client.name == server.name == f"{SERVICE}/Lookup"
    assert server.parent.span_id == client.context.span_id
    assert transfer.parent.span_id == server.context.span_id
    assert len({span.context.trace_id for span in spans()}) == 1
    for span in (client, server):
        assert span.attributes["rpc.system.name"] == "grpc"
        assert span.attributes["rpc.method"] == f"{SERVICE}/Lookup"
        assert span.attributes["rpc.response.status_code"] == "OK"
        assert "error.type" not in span.attributes
        assert "rpc.grpc.status_code" not in span.attributes
    assert client.attributes["server.address"] == "127.0.0.1"
    assert client.attributes["server.port"] > 0
    assert dict(transfer.attributes) == {
        "kvwire.data_path": "shm",
        "kvwire.direction": "retrieve",
        "kvwire.size_bytes": 4096,
        "kvwire.lease_id": str(2**63 + 7),
    }


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("request_", "code", "server_error"),
    [
        (b"rich", "FAILED_PRECONDITION", False),
        (b"abort", "DATA_LOSS", True),
        (b"raise", "UNKNOWN", True),
    ],
)
async def test_status_of_failed_calls(spans, request_, code, server_error):
    async with aio_channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(LOOKUP)(request_)
        found = await by_kind(spans, 2)
    client, server = found[SpanKind.CLIENT], found[SpanKind.SERVER]
    assert client.attributes["rpc.response.status_code"] == code
    assert client.attributes["error.type"] == code
    assert client.status.status_code is StatusCode.ERROR
    assert server.attributes["rpc.response.status_code"] == code
    assert (server.status.status_code is StatusCode.ERROR) == server_error
    assert ("error.type" in server.attributes) == server_error


@pytest.mark.asyncio
async def test_synchronous_client_records_the_same(spans):
    def use(channel):
        call = channel.unary_unary(LOOKUP)
        call(b"x")
        with pytest.raises(grpc.RpcError):
            call(b"rich")
        call.future(b"y").result(5)
        return list(channel.unary_stream(f"/{SERVICE}/ReadChunks")(b"2"))

    assert await in_sync_channel(use) == [b"0", b"1"]
    clients = [span for span in spans() if span.kind is SpanKind.CLIENT]
    codes = [span.attributes["rpc.response.status_code"] for span in clients]
    assert codes == ["OK", "FAILED_PRECONDITION", "OK", "OK"]
    servers = {span.parent.span_id for span in spans() if span.kind is SpanKind.SERVER}
    assert servers == {span.context.span_id for span in clients}


@pytest.mark.asyncio
async def test_streams_of_every_kind(spans):
    async def pieces():
        for piece in (b"a", b"b"):
            yield piece

    async with aio_channel() as channel:
        read = channel.unary_stream(f"/{SERVICE}/ReadChunks")
        assert [reply async for reply in read(b"2")] == [b"0", b"1"]
        with pytest.raises(grpc.aio.AioRpcError):
            [reply async for reply in read(b"3")]
        assert await channel.stream_unary(f"/{SERVICE}/WriteChunks")(pieces()) == b"ab"
        assert [r async for r in channel.stream_stream(f"/{SERVICE}/Echo")(pieces())] == [b"a", b"b"]
        await by_kind(spans, 8 + 5)
    servers = [span for span in spans() if span.kind is SpanKind.SERVER]
    assert [span.attributes["rpc.response.status_code"] for span in servers] == ["OK", "ABORTED", "OK", "OK"]
    steps = [span for span in spans() if span.name == "kvwire.step"]
    assert {step.parent.span_id for step in steps} == {span.context.span_id for span in servers[:2]}


@pytest.mark.asyncio
async def test_cancelled_and_late_calls(spans):
    async with aio_channel() as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(LOOKUP)(b"hang", timeout=0.1)
        pending = asyncio.ensure_future(channel.unary_unary(LOOKUP)(b"hang"))
        await asyncio.sleep(0.1)
        pending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pending
        await by_kind(spans, 4)
    clients = [span for span in spans() if span.kind is SpanKind.CLIENT]
    codes = [span.attributes["rpc.response.status_code"] for span in clients]
    assert codes == ["DEADLINE_EXCEEDED", "CANCELLED"]
    servers = [span for span in spans() if span.kind is SpanKind.SERVER]
    assert {span.attributes["rpc.response.status_code"] for span in servers} == {"CANCELLED"}


@pytest.mark.asyncio
async def test_life_signs_and_unknown_methods_make_no_server_span(spans):
    async with aio_channel() as channel:
        await channel.unary_unary(f"/{SERVICE}/Ping")(b"x")
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary(f"/{SERVICE}/Nothing")(b"x")
    assert [span.kind for span in spans()] == [SpanKind.INTERNAL, SpanKind.CLIENT]


def test_a_request_of_the_engine_continues_in_worker_threads(spans):
    headers = {"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    parent = tracing.context_from_headers(headers)
    assert tracing.current_context() is None
    with tracing.span("kvwire.retrieve", parent=parent, request_id="r1"):
        handed_over = tracing.current_context()

    def work():
        assert tracing.current_ids() is None
        with tracing.attached(handed_over):
            assert tracing.headers_from_context()["traceparent"].startswith("00-0af76519")
        with tracing.data_plane_span("inline", "store", 1, 2, parent=handed_over) as transfer:
            transfer.set(moved_bytes=1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    retrieve, transfer = spans()
    assert retrieve.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert retrieve.parent.span_id == 0xB7AD6B7169203331
    assert transfer.parent.span_id == retrieve.context.span_id
    assert transfer.attributes["kvwire.moved_bytes"] == 1


def test_a_batch_links_to_the_requests_it_serves(spans):
    contexts = [tracing.context_from_headers({"traceparent": f"00-{n:032x}-{n:016x}-01"}) for n in (1, 2)]
    with tracing.span("kvwire.store", links=[*contexts, None]):
        pass
    assert [link.context.trace_id for link in spans()[0].links] == [1, 2]


def test_a_batch_continues_the_first_trace_and_links_the_others(spans):
    first, second = (
        tracing.context_from_headers({"traceparent": f"00-{n:032x}-{n:016x}-01"}) for n in (1, 2)
    )
    with tracing.batch_span("kvwire.store", [None, first, second], jobs=3):
        pass
    with tracing.batch_span("kvwire.store", [None]):
        pass
    joined, alone = spans()
    assert joined.context.trace_id == 1
    assert [link.context.trace_id for link in joined.links] == [2]
    assert joined.attributes["kvwire.jobs"] == 3
    assert alone.parent is None
    assert not alone.links


def test_a_failure_is_told_and_passes_through(spans):
    with (
        pytest.raises(TransferFailed),
        tracing.data_plane_span("ucx-local", "store", 1, 1),
    ):
        raise TransferFailed("The peer is gone.", path="ucx-local", cause="reset")
    assert spans()[0].attributes["error.type"] == "TRANSFER_FAILED"
    assert spans()[0].status.status_code is StatusCode.ERROR
    assert not spans()[0].events


def test_an_unsampled_parent_records_nothing(spans):
    parent = tracing.context_from_headers({"traceparent": f"00-{7:032x}-{7:016x}-00"})
    with tracing.span("kvwire.store", parent=parent):
        assert tracing.headers_from_context()["traceparent"].endswith("-00")
    assert not spans()


def test_off_imports_nothing_and_installs_nothing():
    program = """
import sys
from kvwire import telemetry
assert telemetry.client_interceptors("h:1") == [] and telemetry.aio_client_interceptors() == []
assert telemetry.current_context() is None and telemetry.context_from_headers({"traceparent": "x"}) is None
with telemetry.span("a"), telemetry.batch_span("b", [None]), telemetry.attached(None):
    with telemetry.data_plane_span("shm", "store", 1, 1) as handle:
        handle.set(bytes=1)
assert telemetry.headers_from_context() == {}
loaded = [name for name in sys.modules if name.split(".")[0] in ("opentelemetry", "grpc", "google")]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_without_the_extra_the_error_names_it():
    program = """
import sys
sys.modules["opentelemetry.sdk.trace.export"] = None
from kvwire.errors import MissingExtra
from kvwire.telemetry import setup_tracing
try:
    setup_tracing("kvwire", "http://127.0.0.1:1")
except MissingExtra as error:
    assert "kvwire[otel]" in str(error), error
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_an_endpoint_without_scheme_is_refused():
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        tracing.setup_tracing("kvwire", "localhost:4317")
