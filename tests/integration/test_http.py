from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Counter

from kvwire.errors import ConfigError
from kvwire.serving import http

pytestmark = [pytest.mark.asyncio, pytest.mark.leakcheck("fds", "tasks")]


class Probe:
    """A server with one metric, and a problem that a test may set."""

    def __init__(self):
        self.registry = CollectorRegistry()
        Counter("kvwire_test", "A test.", registry=self.registry).inc(3)
        self.problem = ""
        routes = http.server_routes(self.registry, lambda: self.problem)
        self.open_streams = 0
        self.server = http.HttpServer(
            {
                **routes,
                "/broken": lambda headers: 1 / 0,
                "/numbers": lambda headers: http.Stream(self.numbers, "text/event-stream"),
                "/flood": lambda headers: http.Stream(self.flood, "text/event-stream"),
                "/fails": lambda headers: http.Stream(self.fails, "text/event-stream"),
            }
        )

    async def __aenter__(self):
        self.address = await self.server.start("127.0.0.1:0")
        return self

    async def __aexit__(self, *_):
        await self.server.close()

    async def numbers(self):
        self.open_streams += 1
        try:
            for number in range(1_000_000):
                yield f"data: {number}\n\n".encode()
                await asyncio.sleep(0.01)
        finally:
            self.open_streams -= 1

    async def flood(self):
        self.open_streams += 1
        try:
            while True:
                yield b"x" * (1 << 20)
        finally:
            self.open_streams -= 1

    async def fails(self):
        yield b"data: 1\n\n"
        raise RuntimeError("no more")

    async def connect(self, path):
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return reader, writer

    async def ended(self):
        for _ in range(1000):
            if not self.open_streams:
                return
            await asyncio.sleep(0.01)
        pytest.fail("a stream goes on")

    async def send(self, raw, *, half_open=False):
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw)
        if not half_open and not raw.endswith(b"\r\n\r\n"):
            writer.write_eof()
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer.decode()

    async def get(self, path, headers=""):
        return await self.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n".encode())


async def test_metrics_in_both_formats():
    async with Probe() as probe:
        plain = await probe.get("/metrics")
        assert plain.startswith("HTTP/1.1 200 OK\r\n")
        assert "Content-Type: text/plain; version=" in plain
        assert "\nkvwire_test_total 3.0\n" in plain
        open_metrics = await probe.get(
            "/metrics?x=1", "Accept: application/openmetrics-text; version=1.0.0\r\n"
        )
        assert "application/openmetrics-text" in open_metrics
        assert open_metrics.endswith("# EOF\n")


async def test_health_tells_why():
    async with Probe() as probe:
        assert (await probe.get("/healthz")).endswith("\r\n\r\nok\n")
        probe.problem = "draining"
        answer = await probe.get("/healthz")
        assert answer.startswith("HTTP/1.1 503 ")
        assert answer.endswith("draining\n")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"HEAD /healthz HTTP/1.1\r\n\r\n", "200"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"GET /secret HTTP/1.1\r\n\r\n", "404"),
        (b"GET /broken HTTP/1.1\r\n\r\n", "500"),
        (b"GET /healthz\r\n\r\n", "400"),
        (b"GET /healthz SPDY/3\r\n\r\n", "400"),
        (b"\xff\xfe\x00 x y\r\n\r\n", "400"),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n\r\n", "431"),
    ],
)
async def test_other_requests(raw, status):
    async with Probe() as probe:
        answer = await probe.send(raw)
        assert answer.split(" ")[1] == status
        assert "Content-Length:" in answer
        assert not answer.startswith("HTTP/1.1 200") or answer.endswith("\r\n\r\n")
        assert (await probe.get("/healthz")).endswith("ok\n")


async def test_slow_and_broken_clients_are_dropped(monkeypatch):
    monkeypatch.setattr(http, "REQUEST_S", 0.1)
    async with Probe() as probe:
        assert await probe.send(b"GET /hea") == ""
        assert await probe.send(b"GET /hea", half_open=True) == ""
        assert (await probe.get("/healthz")).endswith("ok\n")


async def test_close_ends_open_connections():
    async with Probe() as probe:
        host, _, port = probe.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await probe.get("/healthz")
    assert await reader.read() == b""
    writer.close()


async def test_a_stream_sends_pieces_until_the_client_goes():
    async with Probe() as probe:
        reader, writer = await probe.connect("/numbers")
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert "Content-Type: text/event-stream\r\n" in head
        assert "Content-Length" not in head
        assert await reader.readuntil(b"data: 2\n\n") == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
        assert (await probe.send(b"HEAD /numbers HTTP/1.1\r\n\r\n")).endswith("\r\n\r\n")
        assert probe.open_streams == 1
        writer.close()
        await probe.ended()


async def test_close_ends_streams():
    async with Probe() as probe:
        reader, writer = await probe.connect("/numbers")
        await reader.readuntil(b"data: 1\n\n")
    assert probe.open_streams == 0
    await reader.read()
    writer.close()


async def test_streams_are_limited_and_leave_room_for_probes(monkeypatch):
    monkeypatch.setattr(http, "MAX_STREAMS", 2)
    monkeypatch.setattr(http, "MAX_CONNECTIONS", 1)
    async with Probe() as probe:
        opened = [await probe.connect("/numbers")]
        await opened[0][0].readuntil(b"data: 0\n\n")
        opened.append(await probe.connect("/numbers"))
        await opened[1][0].readuntil(b"data: 0\n\n")
        assert (await probe.get("/numbers")).startswith("HTTP/1.1 503 ")
        assert (await probe.get("/healthz")).endswith("ok\n")
        for _, writer in opened:
            writer.close()
        await probe.ended()


async def test_a_viewer_that_takes_nothing_is_dropped(monkeypatch):
    monkeypatch.setattr(http, "REQUEST_S", 0.1)
    async with Probe() as probe:
        reader, writer = await probe.connect("/flood")
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()
        await probe.ended()
        assert (await probe.get("/healthz")).endswith("ok\n")
        writer.transport.abort()


async def test_a_stream_that_fails_ends():
    async with Probe() as probe:
        assert (await probe.get("/fails")).endswith("data: 1\n\n")
        assert (await probe.get("/healthz")).endswith("ok\n")


async def test_an_address_in_use_and_a_bad_one_are_refused():
    async with Probe() as probe:
        for address, problem in (
            (probe.address, "in use"),
            ("nowhere", "HOST:PORT"),
            ("h:99999", "HOST:PORT"),
        ):
            with pytest.raises(ConfigError, match=problem):
                await http.HttpServer({}).start(address)
