"""/metrics and /healthz over HTTP, for scrapers and probes. GET and HEAD only, one request per connection."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prometheus_client import CollectorRegistry

    Route = Callable[[Mapping[str, str]], "Response"]

log = logging.getLogger("kvwire.serving")

MAX_HEAD_BYTES: Final = 8192
MAX_CONNECTIONS: Final = 32
REQUEST_S: Final = 5.0
"""For a client to send its request, and to take the answer."""


@dataclass(frozen=True, slots=True)
class Response:
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK


class HttpServer:
    """Serves `routes` (path -> function of the request's headers, names in lower case)."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> str:
        """Listen on HOST:PORT and return the address with its real port. Raises ConfigError."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"--http {address}: write HOST:PORT.", setting="http")
        try:
            self._server = await asyncio.start_server(
                self._accept, host.strip("[]"), int(port), limit=MAX_HEAD_BYTES
            )
        except OSError as error:
            raise ConfigError(
                f"--http {address}: the address is in use or not on this host ({error.strerror}).",
                setting="http",
            ) from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        # From Python 3.12 on wait_closed also waits for the connections.
        for connection in tuple(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="kvwire-http")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                writer.write(self._answer(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except asyncio.LimitOverrunError:
            writer.write(encode(_plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), with_body=True))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        request, _, rest = head.decode("latin-1").partition("\r\n")
        try:
            method, target, version = request.split(" ")
        except ValueError:
            return encode(_plain(HTTPStatus.BAD_REQUEST), with_body=True)
        if not version.startswith("HTTP/1."):
            return encode(_plain(HTTPStatus.BAD_REQUEST), with_body=True)
        if method not in {"GET", "HEAD"}:
            return encode(_plain(HTTPStatus.METHOD_NOT_ALLOWED), with_body=True)
        return encode(self._route(target.partition("?")[0], parse_headers(rest)), with_body=method == "GET")

    def _route(self, path: str, headers: Mapping[str, str]) -> Response:
        route = self._routes.get(path)
        if route is None:
            return Response(
                f"Not found. There are {' and '.join(self._routes)}.\n".encode(), status=HTTPStatus.NOT_FOUND
            )
        try:
            return route(headers)
        except Exception:
            # A metric that cannot be read must never be more than a failed scrape.
            log.exception("GET %s failed", path)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR)


def server_routes(registry: CollectorRegistry, health: Callable[[], str]) -> dict[str, Route]:
    """`health` returns why the server does not serve, or an empty string."""
    from prometheus_client.exposition import choose_encoder

    def metrics(headers: Mapping[str, str]) -> Response:
        encoder, content_type = choose_encoder(headers.get("accept", ""))
        return Response(encoder(registry), content_type)

    def healthz(_headers: Mapping[str, str]) -> Response:
        problem = health()
        if problem:
            return Response(f"{problem}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
        return Response(b"ok\n")

    return {"/metrics": metrics, "/healthz": healthz}


def parse_headers(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.split("\r\n") if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def encode(response: Response, *, with_body: bool) -> bytes:
    status = response.status
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {response.content_type}\r\n"
        f"Content-Length: {len(response.body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (response.body if with_body else b"")


def _plain(status: HTTPStatus) -> Response:
    return Response(f"{status.phrase}\n".encode(), status=status)
