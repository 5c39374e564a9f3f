"""The coordinator that is measured: a process of its own, kept to one core where there are several."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvwire.cli.bench.echo import open_channel
from kvwire.cli.bench.processes import LOG_TAIL_BYTES, BenchError, stop
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import coordinator_service_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_S: Final = 30.0
_TICK: Final = os.sysconf("SC_CLK_TCK")


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


CORES: Final = cores()
"""The coordinator and what it is compared with run on the first, everything else on the others."""
MEASURED: Final = CORES[:1]
REST: Final = CORES[1:]


@contextlib.contextmanager
def on_cores(numbers: list[int]) -> Iterator[None]:
    """This thread, and what it starts; no promise where there is only one."""
    if not REST:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, numbers)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Target:
    """A running `kvwire coordinator`. `kill` and `start` are its faults."""

    def __init__(self, folder: Path, flags: Sequence[str], name: str = "coordinator") -> None:
        self.address = f"unix:{folder / name}.sock"
        self._argv = ["-m", "kvwire.cli", "coordinator", "--listen", self.address, "--log-level", "warning"]
        self._argv += flags
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> None:
        with self._log.open("ab") as log, on_cores(MEASURED):
            self._process = subprocess.Popen(
                [sys.executable, *self._argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if wait:
            self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(grpc.RpcError), open_channel(self.address) as channel:
                stub(channel).GetDirectoryStats(pb.GetDirectoryStatsRequest(), timeout=1)
                return
            time.sleep(0.02)
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        raise BenchError(f"The coordinator did not get ready. Its log:\n{tail}")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("not started")
        return self._process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self._process is not None:
            stop(self._process)

    def memory(self) -> int:
        """Resident bytes."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK


@contextlib.contextmanager
def coordinator(folder: Path, *flags: str, name: str = "coordinator") -> Iterator[Target]:
    target = Target(folder, flags, name)
    try:
        target.start()
        yield target
    finally:
        target.close()


def stub(channel: grpc.Channel) -> Any:
    return coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
