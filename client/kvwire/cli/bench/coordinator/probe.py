"""A process that calls Heartbeat and LocateChunks all the time and notes how long each took.

Run as a program with the coordinator's address and a server id. Each line on its standard input ends a
period; the answer is the samples of that period. It ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

from kvwire.cli.bench import stats
from kvwire.cli.bench.coordinator.target import REST, on_cores, stub
from kvwire.cli.bench.echo import open_channel
from kvwire.cli.bench.processes import BenchError, let_end
from kvwire.v1 import coordinator_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

PAUSE_S: Final = 0.002
KINDS: Final = ("heartbeat", "lookup")

Samples = dict[str, list[float]]


class Probe:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def take(self) -> Samples:
        """Seconds of each call since the last `take`."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")
        self._process.stdin.write("take\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("The probe died; what it said is above.")
        found: Samples = json.loads(line)
        return found


@contextlib.contextmanager
def probing(address: str, server_id: str = "probe") -> Iterator[Probe]:
    argv = [sys.executable, "-m", "kvwire.cli.bench.coordinator.probe", address, server_id]
    with on_cores(REST):
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        probe = Probe(process)
        probe.take()
        yield probe
    finally:
        let_end(process)


def summary(samples: list[float]) -> dict[str, float]:
    """Milliseconds."""
    if not samples:
        return {"p50_ms": 0.0, "p99_ms": 0.0, "max_ms": 0.0}
    marks = {"p50_ms": stats.median(samples), "p99_ms": stats.percentile(samples, 0.99)}
    return {name: round(value * 1e3, 3) for name, value in {**marks, "max_ms": max(samples)}.items()}


def main(address: str, server_id: str) -> None:
    incarnation = os.urandom(16)
    coordinator = stub(open_channel(address))
    coordinator.RegisterServer(
        pb.RegisterServerRequest(server=pb.ServerInfo(server_id=server_id, incarnation=incarnation))
    )
    beat = pb.HeartbeatRequest(server_id=server_id, incarnation=incarnation)
    keys = [os.urandom(32) for _ in range(512)]
    ask = pb.LocateChunksRequest(chunk_keys=pb.LocateKeys(keys=keys))
    calls = ((coordinator.Heartbeat, beat), (coordinator.LocateChunks, ask))
    samples: Samples = {kind: [] for kind in KINDS}
    while True:
        for kind, (call, request) in zip(KINDS, calls, strict=True):
            started = time.perf_counter()
            call(request)
            samples[kind].append(time.perf_counter() - started)
        if select.select([sys.stdin], [], [], PAUSE_S)[0]:
            if not sys.stdin.readline():
                return
            print(json.dumps(samples), flush=True)
            samples = {kind: [] for kind in KINDS}


if __name__ == "__main__":
    main(*sys.argv[1:])
