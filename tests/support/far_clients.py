"""The test's side of a client on another host."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
from pathlib import Path

from support.server_process import environment

PROGRAM = Path(__file__).with_name("far_client.py")
PATIENCE_S = 40.0


class FarClient:
    def __init__(self, host, address: str, **options) -> None:
        self.path = ""
        self.process = subprocess.Popen(
            [*host.prefix, sys.executable, PROGRAM, json.dumps({"address": address, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment(), "no_proxy": "10.77.0.0/24"},
        )

    def wait_registered(self) -> str:
        """The path that it has found."""
        return self.answer()["path"]

    def do(self, method: str, *arguments, within: float = PATIENCE_S) -> dict:
        self.send(method, *arguments)
        return self.answer(within)

    def send(self, method: str, *arguments) -> None:
        self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, within: float = PATIENCE_S) -> dict:
        """AssertionError when it hangs."""
        ready, _, _ = select.select([self.process.stdout], [], [], within)
        assert ready, f"no answer within {within} s"
        line = self.process.stdout.readline()
        assert line, f"the client has ended with {self.process.wait(10)}"
        return json.loads(line)

    def close(self) -> None:
        """As a program that ends."""
        self.process.stdin.close()
        try:
            assert self.process.wait(PATIENCE_S) in (0, -signal.SIGKILL)
        finally:
            self.process.kill()
            self.process.wait(10)
            self.process.stdout.close()


@contextlib.contextmanager
def far_client(host, address: str, **options):
    """It has registered by then."""
    started = FarClient(host, address, **options)
    try:
        started.path = started.wait_registered()
        yield started
    finally:
        started.close()
