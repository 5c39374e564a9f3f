"""The bearer token as metadata: call credentials are refused without TLS, which a unix socket needs not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable


class _CallDetails(grpc.ClientCallDetails):
    def __init__(self, details: Any, metadata: Any) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = metadata
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


def token_interceptors(token: str) -> list[Any]:
    if not token:
        return []
    header = _header(token)

    def call(_self: Any, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(_CallDetails(details, [*(details.metadata or ()), header]), request)

    kinds = {
        "intercept_unary_unary": grpc.UnaryUnaryClientInterceptor,
        "intercept_unary_stream": grpc.UnaryStreamClientInterceptor,
        "intercept_stream_unary": grpc.StreamUnaryClientInterceptor,
        "intercept_stream_stream": grpc.StreamStreamClientInterceptor,
    }
    return [type("TokenInterceptor", tuple(kinds.values()), dict.fromkeys(kinds, call))()]


def aio_token_interceptors(token: str) -> list[Any]:
    """One per kind of call: gRPC files an interceptor that is of several kinds under the first only."""
    if not token:
        return []
    header = _header(token)

    async def call(_self: Any, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add(*header)
        return await continuation(details._replace(metadata=metadata), request)

    kinds: dict[str, type] = {
        "intercept_unary_unary": grpc.aio.UnaryUnaryClientInterceptor,
        "intercept_unary_stream": grpc.aio.UnaryStreamClientInterceptor,
        "intercept_stream_unary": grpc.aio.StreamUnaryClientInterceptor,
        "intercept_stream_stream": grpc.aio.StreamStreamClientInterceptor,
    }
    return [type("TokenInterceptor", (kind,), {name: call})() for name, kind in kinds.items()]


def _header(token: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {token}")
