"""A real `kvwire coordinator` process: started, waited for, stopped."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
import urllib.request

from kvwire.v1 import coordinator_service_pb2_grpc
from support.server_process import ServerProcess, environment, wait_serving

FAST = ("--heartbeat=0.2", "--expire-after=1", "--silent-after=0.4", "--snapshot-timeout=1")
"""Settings for tests that wait for what time brings about."""


class CoordinatorProcess(ServerProcess):
    def stub(self) -> coordinator_service_pb2_grpc.CoordinatorServiceStub:
        return coordinator_service_pb2_grpc.CoordinatorServiceStub(self.channel())

    def get(self, path: str) -> tuple[int, str]:
        """Status and body, of a coordinator with `--http`."""
        found = re.search(r"http://(\S+)/", self.output())
        assert found, self.output()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{found.group(1)}{path}", timeout=5) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


@contextlib.contextmanager
def coordinator_process(folder, *flags: str, listen: str = "", stop: bool = True, credentials=None):
    """A coordinator that serves, on a socket file unless told. Stopped at the end, unless the test has."""
    address = listen or f"unix:{folder / 'coordinator.sock'}"
    log = folder / f"coordinator-{time.monotonic_ns()}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command(), "--listen", address, *flags],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    coordinator = CoordinatorProcess(address, process, log)
    try:
        coordinator.started_in = wait_serving(coordinator, credentials)
        yield coordinator
        if stop and process.poll() is None:
            coordinator.terminate()
    finally:
        for channel in coordinator.channels:
            channel.close()
        if process.poll() is None:
            process.kill()
        process.wait(10)


def command() -> list[str]:
    return [sys.executable, "-m", "kvwire.cli", "coordinator"]
