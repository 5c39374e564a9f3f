"""Switching tracing on, and the spans that are not RPCs.

While tracing is off every helper here returns at once, and OpenTelemetry is not imported. A context is
OpenTelemetry's, an opaque object here: a worker thread does not inherit its caller's, so it is handed over.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvwire.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import grpc
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

QUEUE_SPANS: Final = 2048
BATCH_SPANS: Final = 256
EXPORT_INTERVAL_S: Final = 2.0
EXPORT_TIMEOUT_S: Final = 2.0
SHUTDOWN_S: Final = 1.5

Attribute = str | int | float | bool


class SpanHandle(Protocol):
    """The part of a span that a caller may fill in while it runs."""

    def set(self, **attributes: Attribute) -> None: ...


class _Off:
    __slots__ = ()

    def set(self, **attributes: Attribute) -> None:
        """Tracing is off."""


_OFF: Final = nullcontext(_Off())


class _Recording:
    __slots__ = ("_span",)

    def __init__(self, recording: Span) -> None:
        self._span = recording

    def set(self, **attributes: Attribute) -> None:
        for name, value in attributes.items():
            self._span.set_attribute(f"kvwire.{name}", value)


class Tracing:
    """One process's tracing: a tracer, interceptors for both sides of gRPC, a shutdown that never hangs."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter | None = None) -> None:
        from kvwire.telemetry import interceptors

        self.tracer: Tracer = provider.get_tracer("kvwire")
        self._provider = provider
        self._exporter = exporter
        self._interceptors = interceptors

    def server_interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """For grpc.aio.server(interceptors=...), before those that may refuse a call."""
        return [self._interceptors.ServerTracing(self.tracer)]

    def client_interceptors(self, address: str = "") -> list[Any]:
        """For grpc.intercept_channel. `address` is the target, told in each span."""
        return [self._interceptors.ClientTracing(self.tracer, address)]

    def aio_client_interceptors(self, address: str = "") -> list[grpc.aio.ClientInterceptor]:
        """For grpc.aio.insecure_channel(interceptors=...)."""
        return self._interceptors.aio_client_tracing(self.tracer, address)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Send what is queued, for at most `timeout_s`; a collector that does not answer loses it."""
        if _state.tracing is self:
            _state.tracing = None
        atexit.unregister(self.shutdown)
        flush = threading.Thread(target=self._provider.shutdown, name="kvwire-trace-flush", daemon=True)
        flush.start()
        flush.join(timeout_s)
        if flush.is_alive() and self._exporter is not None:
            # Closes the exporter's channel under the export in flight, which ends it.
            self._exporter.shutdown()
            flush.join(1.0)


class _State:
    """What is on in this process."""

    tracing: Tracing | None = None


_state: Final = _State()


def active() -> Tracing | None:
    """The process's tracing, or None while it is off."""
    return _state.tracing


def setup_tracing(
    service_name: str, endpoint: str, *, ratio: float = 1.0, instance_id: str = "", version: str = ""
) -> Tracing:
    """Send spans to an OTLP/gRPC collector, for example "http://127.0.0.1:4317" (https:// for TLS).

    `ratio` is the share of traces recorded among those that no caller has decided on. The process's global
    tracer provider, which may belong to an engine, is left alone. Raises MissingExtra (`otel`), ConfigError.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingExtra("Tracing", "otel") from error
    if "://" not in endpoint:
        raise ConfigError(
            f"The OTLP endpoint {endpoint!r} is not a URL: write http://HOST:PORT or https://HOST:PORT.",
            setting="otlp_endpoint",
        )
    exporter = OTLPSpanExporter(
        endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S
    )
    provider = make_provider(service_name, ratio=ratio, instance_id=instance_id, version=version)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=QUEUE_SPANS,
            max_export_batch_size=BATCH_SPANS,
            schedule_delay_millis=EXPORT_INTERVAL_S * 1000,
            export_timeout_millis=EXPORT_TIMEOUT_S * 1000,
        )
    )
    return activate(Tracing(provider, exporter))


def make_provider(
    service_name: str, *, ratio: float = 1.0, instance_id: str = "", version: str = ""
) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    told = {"service.name": service_name, "service.instance.id": instance_id, "service.version": version}
    return TracerProvider(
        resource=Resource.create({name: value for name, value in told.items() if value}),
        sampler=ParentBased(TraceIdRatioBased(ratio)),
        # Its own handler waits for the exporter without limit.
        shutdown_on_exit=False,
    )


def activate(tracing: Tracing) -> Tracing:
    """Make it the process's tracing; an earlier one is shut down."""
    before, _state.tracing = _state.tracing, tracing
    if before is not None:
        before.shutdown()
    atexit.register(tracing.shutdown)
    return tracing


def client_interceptors(address: str = "") -> list[Any]:
    """What a synchronous channel is to be wrapped with: nothing while tracing is off."""
    return [] if _state.tracing is None else _state.tracing.client_interceptors(address)


def aio_client_interceptors(address: str = "") -> list[grpc.aio.ClientInterceptor]:
    return [] if _state.tracing is None else _state.tracing.aio_client_interceptors(address)


def current_context() -> Context | None:
    """What a worker thread needs to continue this thread's trace. None while there is no trace."""
    if current_ids() is None:
        return None
    from opentelemetry import context

    return context.get_current()


def context_from_headers(headers: Mapping[str, str] | None) -> Context | None:
    """The context in W3C headers (`traceparent`, `tracestate`), such as vLLM's `Request.trace_headers`."""
    if _state.tracing is None or not headers:
        return None
    from kvwire.telemetry.interceptors import PROPAGATOR

    return PROPAGATOR.extract({name.lower(): value for name, value in headers.items()})


def headers_from_context(context: Context | None = None) -> dict[str, str]:
    """W3C headers that continue the trace elsewhere; empty while tracing is off. None: current context."""
    headers: dict[str, str] = {}
    if _state.tracing is not None:
        from kvwire.telemetry.interceptors import PROPAGATOR

        PROPAGATOR.inject(headers, context)
    return headers


def attached(context: Context | None) -> AbstractContextManager[None]:
    """Make a context current in this thread, so that RPCs made inside it join its trace."""
    if context is None or _state.tracing is None:
        return nullcontext()
    return _attached(context)


@contextlib.contextmanager
def _attached(context: Context) -> Iterator[None]:
    from opentelemetry import context as api

    token = api.attach(context)
    try:
        yield
    finally:
        api.detach(token)


def span(
    name: str, *, parent: Context | None = None, links: Sequence[Context | None] = (), **attributes: Attribute
) -> AbstractContextManager[SpanHandle]:
    """A span that is current inside the block. Attributes are told as `kvwire.NAME`.

    `parent` None is the current context. `links` name other traces that this work also serves, such as the
    requests of a batch. An exception ends the span as failed and passes through.
    """
    if _state.tracing is None:
        return _OFF
    return _span(_state.tracing.tracer, name, parent, links, attributes)


def batch_span(
    name: str, contexts: Sequence[Context | None], **attributes: Attribute
) -> AbstractContextManager[SpanHandle]:
    """A span for work that serves several requests: a child of the first one's trace, linked to the others.

    RPCs inside the block are its children. Contexts that are None (no trace was handed over) do not count.
    """
    if _state.tracing is None:
        return _OFF
    known = [context for context in contexts if context is not None]
    return _span(_state.tracing.tracer, name, known[0] if known else None, known[1:], attributes)


def data_plane_span(
    path: str, direction: str, size_bytes: int, lease_id: int, *, parent: Context | None = None
) -> AbstractContextManager[SpanHandle]:
    """The span of one transfer, in any thread. path: "shm", "inline", ...; direction: "store", "retrieve"."""
    if _state.tracing is None:
        return _OFF
    attributes: dict[str, Attribute] = {
        "data_path": path,
        "direction": direction,
        "size_bytes": size_bytes,
        # A 64-bit id may exceed what OTLP's signed integers hold.
        "lease_id": str(lease_id),
    }
    return _span(_state.tracing.tracer, "kvwire.transfer", parent, (), attributes)


@contextlib.contextmanager
def _span(
    tracer: Tracer,
    name: str,
    parent: Context | None,
    links: Sequence[Context | None],
    attributes: Mapping[str, Attribute],
) -> Iterator[SpanHandle]:
    from opentelemetry import trace
    from opentelemetry.trace import Link, StatusCode

    linked = [trace.get_current_span(context).get_span_context() for context in links if context is not None]
    named = {f"kvwire.{key}": value for key, value in attributes.items()}
    started = tracer.start_span(
        name, parent, attributes=named, links=[Link(target) for target in linked if target.is_valid]
    )
    with trace.use_span(started, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield _Recording(started)
        except Exception as error:
            started.set_attribute("error.type", getattr(error, "reason", type(error).__qualname__))
            started.set_status(StatusCode.ERROR)
            raise


def current_ids() -> tuple[str, str] | None:
    """Trace id and span id of the current span in hex, for log lines. None while there is none."""
    if _state.tracing is None:
        return None
    from opentelemetry import trace

    found = trace.get_current_span().get_span_context()
    if not found.is_valid:
        return None
    return trace.format_trace_id(found.trace_id), trace.format_span_id(found.span_id)
