"""The test's side of a victim process."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

from support.server_process import environment

PROGRAM = Path(__file__).with_name("victim.py")


class Victim:
    def __init__(self, address: str, path: str = "inline") -> None:
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, address, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        self.registration_id = self._answer()["registration"]

    def do(self, method: str, *arguments) -> dict:
        self.send(method, *arguments)
        return self._answer()

    def send(self, method: str, *arguments) -> None:
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        assert line, f"the victim has ended with {self.process.wait(10)}"
        return json.loads(line)


@contextlib.contextmanager
def victim(address: str, path: str = "inline"):
    started = Victim(address, path)
    try:
        yield started
    finally:
        started.close()
