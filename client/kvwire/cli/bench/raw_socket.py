"""The yardstick of the network path: the same bytes over a plain TCP connection on loopback, acknowledged.

Run as a program it is the receiving side: it prints its port, takes `size` bytes as often as they come, and
ends when the connection does.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from kvwire.cli.bench.processes import STOP_S, BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ACK: Final = b"k"
HOST: Final = "127.0.0.1"
LIMIT_S: Final = 60.0


@contextlib.contextmanager
def raw_socket(size: int) -> Iterator[Callable[[memoryview], float]]:
    """Call it with `size` bytes: seconds until the other process has all of them in memory."""
    argv = [sys.executable, "-m", "kvwire.cli.bench.raw_socket", str(size)]
    receiver = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        with connect(receiver) as connection:

            def send(data: memoryview) -> float:
                started = time.perf_counter()
                connection.sendall(data)
                if connection.recv(1) != ACK:
                    raise BenchError("The receiver of the raw socket went away.")
                return time.perf_counter() - started

            yield send
    finally:
        receiver.wait(STOP_S)
        if receiver.stdout is not None:
            receiver.stdout.close()


def connect(receiver: subprocess.Popen[str]) -> socket.socket:
    port = receiver.stdout.readline().strip() if receiver.stdout is not None else ""
    if not port:
        raise BenchError("The receiver of the raw socket did not start.")
    return socket.create_connection((HOST, int(port)), LIMIT_S)


def receive(size: int) -> None:
    memory = memoryview(bytearray(size))
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(LIMIT_S)
        print(listener.getsockname()[1], flush=True)
        connection, _peer = listener.accept()
    with connection:
        while receive_all(connection, memory):
            connection.sendall(ACK)


def receive_all(connection: socket.socket, memory: memoryview) -> bool:
    received = 0
    while received < len(memory):
        count = connection.recv_into(memory[received:])
        if not count:
            return False
        received += count
    return True


if __name__ == "__main__":
    receive(int(sys.argv[1]))
