"""/metrics, /healthz and pages over HTTP, for scrapers, probes and people.

GET and HEAD only, one request per connection. A route may answer with a stream, such as server-sent events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from typing import TypeAlias

    from prometheus_client import CollectorRegistry

    Answer: TypeAlias = "Response | Stream"
    Route: TypeAlias = Callable[[Mapping[str, str]], Answer]

log = logging.getLogger("kvwire.serving")

MAX_HEAD_BYTES: Final = 8192
MAX_CONNECTIONS: Final = 32
"""Without the streams: open pages leave room for scrapers and probes."""
MAX_STREAMS: Final = 16
REQUEST_S: Final = 5.0
"""For a client to send its request, and to take the answer or the next piece of a stream."""


@dataclass(frozen=True, slots=True)
class Response:
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stream:
    """Pieces are made for as long as the client takes them, and a client that is gone is noticed by the next.

    No length is told: the end of it all is the end.
    """

    pieces: Callable[[], AsyncGenerator[bytes, None]]
    content_type: str = "text/event-stream"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


class HttpServer:
    """Serves `routes` (path -> function of the request's headers, names in lower case)."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes = routes
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._streams = 0

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
        if len(self._connections) - self._streams >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name="kvwire-http")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_S):
                answer, method = self._answer(await reader.readuntil(b"\r\n\r\n"))
                writer.write(encode(answer, with_body=method != "HEAD"))
                await writer.drain()
            if isinstance(answer, Stream) and method == "GET":
                await self._stream(answer, writer)
        except asyncio.LimitOverrunError:
            writer.write(encode(_plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), with_body=True))
        except TimeoutError:
            # Closing would wait until the client has taken the rest.
            writer.transport.abort()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _stream(self, stream: Stream, writer: asyncio.StreamWriter) -> None:
        self._streams += 1
        try:
            async with contextlib.aclosing(stream.pieces()) as pieces:
                async for piece in pieces:
                    writer.write(piece)
                    async with asyncio.timeout(REQUEST_S):
                        await writer.drain()
        except (TimeoutError, ConnectionError):
            raise
        except Exception:
            log.exception("a stream failed")
        finally:
            self._streams -= 1

    def _answer(self, head: bytes) -> tuple[Answer, str]:
        """What to send, and the method."""
        request, _, rest = head.decode("latin-1").partition("\r\n")
        try:
            method, target, version = request.split(" ")
        except ValueError:
            return _plain(HTTPStatus.BAD_REQUEST), ""
        if not version.startswith("HTTP/1."):
            return _plain(HTTPStatus.BAD_REQUEST), ""
        if method not in {"GET", "HEAD"}:
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED), ""
        answer = self._route(target.partition("?")[0], parse_headers(rest))
        if isinstance(answer, Stream) and self._streams >= MAX_STREAMS:
            return _plain(HTTPStatus.SERVICE_UNAVAILABLE), method
        return answer, method

    def _route(self, path: str, headers: Mapping[str, str]) -> Answer:
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


def encode(answer: Answer, *, with_body: bool) -> bytes:
    """The head, and the body of what is no stream."""
    body = answer.body if isinstance(answer, Response) else b""
    fields = {"Content-Type": answer.content_type, **answer.headers}
    if isinstance(answer, Response):
        fields["Content-Length"] = str(len(body))
    fields |= {"Cache-Control": "no-store", "Connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    first = f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
    return f"{first}{head}\r\n".encode("latin-1") + (body if with_body else b"")


def _plain(status: HTTPStatus) -> Response:
    return Response(f"{status.phrase}\n".encode(), status=status)
