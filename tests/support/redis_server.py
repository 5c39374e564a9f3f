"""A real Redis in a process of its own. It keeps nothing on disk: what an ended one had is gone."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass

import pytest

from support.waiting import eventually


@dataclass
class RedisServer:
    port: int
    process: subprocess.Popen

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def answers(self) -> bool:
        assert self.process.poll() is None, "redis-server has ended"
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def ask(self, *words: str) -> str:
        """What redis-cli says."""
        return self.raw(*words).decode().strip()

    def raw(self, *words: str) -> bytes:
        """The same as it comes, without the newline that redis-cli adds."""
        command = ["redis-cli", "-p", str(self.port), *words]
        done = subprocess.run(command, check=True, capture_output=True, timeout=10)
        return done.stdout[:-1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def redis_server(*flags: str, port: int = 0, tls: bool = False):
    """With `port`, one that an ended Redis had. `tls`: nothing but TLS, by the files in `flags`."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server: `scripts/programs.sh` installs it on Debian")
    server = RedisServer(port or free_port(), None)
    with tempfile.TemporaryDirectory() as folder:
        server.process = subprocess.Popen(
            [
                program,
                *(("--port", "0", "--tls-port") if tls else ("--port",)),
                *(str(server.port), "--bind", "127.0.0.1", "--dir", folder),
                *("--save", "", "--appendonly", "no"),
                *flags,
            ],
            stdout=subprocess.DEVNULL,
        )
        try:
            eventually(server.answers)
            yield server
        finally:
            server.process.kill()
            server.process.wait(10)
