"""The yardstick of the control plane: a bare grpc.aio server that sends 64 bytes back.

Run as a program with the address to serve; it ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvwire.cli.bench.processes import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

METHOD: Final = "/kvwire.bench.Echo/Echo"
PAYLOAD: Final = b"x" * 64
OPTIONS: Final = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, OPTIONS)


def echo_call(channel: grpc.Channel) -> Callable[[bytes], bytes]:
    """One echo, without any code of ours: identity for serializers."""
    call: Any = channel.unary_unary(METHOD)
    return call  # type: ignore[no-any-return]


@contextlib.contextmanager
def echo_server(folder: Path) -> Iterator[str]:
    address = f"unix:{folder / 'echo.sock'}"
    with running("echo server", ["-m", "kvwire.cli.bench.echo", address], folder, lambda: echoes(address)):
        yield address


def echoes(address: str) -> bool:
    with open_channel(address) as channel:
        try:
            return echo_call(channel)(PAYLOAD) == PAYLOAD
        except grpc.RpcError:
            return False


async def _echo(request: bytes, _context: Any) -> bytes:
    return request


async def serve(address: str) -> None:
    server = grpc.aio.server(options=OPTIONS)
    service, _, method = METHOD.lstrip("/").partition("/")
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(address)
    await server.start()
    await asyncio.to_thread(sys.stdin.buffer.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
