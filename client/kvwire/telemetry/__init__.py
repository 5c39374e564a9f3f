"""Traces, logs and call metrics. Nothing here imports OpenTelemetry until tracing is switched on."""

from __future__ import annotations

from kvwire.telemetry.logging import setup_logging
from kvwire.telemetry.tracing import (
    Tracing,
    active,
    aio_client_interceptors,
    attached,
    batch_span,
    client_interceptors,
    context_from_headers,
    current_context,
    data_plane_span,
    headers_from_context,
    setup_tracing,
    span,
)

__all__ = [
    "Tracing",
    "active",
    "aio_client_interceptors",
    "attached",
    "batch_span",
    "client_interceptors",
    "context_from_headers",
    "current_context",
    "data_plane_span",
    "headers_from_context",
    "setup_logging",
    "setup_tracing",
    "span",
]
