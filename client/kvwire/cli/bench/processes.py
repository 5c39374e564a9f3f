"""The processes that a benchmark measures: started for it, ended with it, their logs kept when they fail."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvwire.errors import DeadlineExceeded, KvwireError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

START_S: Final = 20.0
STOP_S: Final = 10.0
LOG_TAIL_BYTES: Final = 2000


class BenchError(KvwireError):
    """A benchmark cannot be run, or what it moved came back changed."""

    reason = "BENCH_FAILED"


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for sockets and logs. Its path is short: a socket's path has room for 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="kvw-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(
    name: str,
    argv: Sequence[str],
    folder: Path,
    ready: Callable[[], bool],
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this Python (`argv` follows the interpreter) that is ready, until the block ends."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *argv],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
        )
    try:
        _wait(name, process, log, ready)
        yield process
    finally:
        stop(process)


def _wait(name: str, process: subprocess.Popen[bytes], log: Path, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        if ready():
            return
        time.sleep(0.02)
    tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
    ended = f"ended with {process.returncode}" if process.poll() is not None else "did not get ready"
    raise BenchError(f"The {name} {ended}. Its log:\n{tail}")


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def kvwire_server(
    folder: Path, flags: Sequence[str], *, name: str = "server", env: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The address of a `kvwire server` of its own."""
    address = f"unix:{folder / name}.sock"
    argv = ["-m", "kvwire.cli", "server", "--listen", address, "--log-level", "warning", *flags]
    with running(f"kvwire {name}", argv, folder, lambda: answers(address), env):
        yield address


def answers(address: str) -> bool:
    from kvwire.client import Client

    with Client(address, client_name="kvwire bench") as client:
        try:
            client.ping(timeout=1)
        except (Unavailable, DeadlineExceeded):
            return False
    return True


def let_end(process: subprocess.Popen[str]) -> None:
    """Of a child that ends by itself when nobody talks to it any more; killed when it does not."""
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
