"""A real `kvwire server` process: started, waited for, stopped, and looked at for what it leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from support import leaks
from support.waiting import eventually

START_S = 30.0
STOP_S = 5.0
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass
class ServerProcess:
    """`address` is what `kvwire` and gRPC take; `started_in` the seconds until SERVING."""

    address: str
    process: subprocess.Popen
    log: Path
    started_in: float = 0.0
    arena: str = ""
    channels: list[grpc.Channel] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def channel(self, **options) -> grpc.Channel:
        """Closed with the server. Clients of one process never share a connection here."""
        channel = open_channel(self.address, **options)
        self.channels.append(channel)
        return channel

    def terminate(self, number: int = signal.SIGTERM, *, within: float = STOP_S) -> float:
        """Stop it as an operator would; it must go well, in time, and leave nothing. Returns the seconds."""
        started = time.monotonic()
        self.process.send_signal(number)
        code = self.process.wait(within + 10)
        took = time.monotonic() - started
        assert code == 0, f"exit code {code}\n{self.output()}"
        assert took < within, f"it took {took:.1f} s to stop\n{self.output()}"
        self.check_nothing_left()
        return took

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def shm_entries(self) -> list[str]:
        """What there is in /dev/shm of this server: its arena and its clients' lock files."""
        return sorted(name for name in leaks.shm_entries() if self.arena and name.startswith(self.arena))

    def check_nothing_left(self) -> None:
        left = self.shm_entries()
        assert not left, f"left in /dev/shm: {sorted(left)}"
        if self.address.startswith("unix:"):
            assert not Path(self.address.removeprefix("unix:")).exists(), "the socket file is left"
        assert "Traceback" not in self.output(), self.output()


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "kvwire.cli", "server", *flags]


@contextlib.contextmanager
def server_process(
    folder: Path, *flags: str, listen: str = "", prefix=(), stop: bool = True, credentials=None
):
    """A server that serves. It is stopped and checked at the end, unless the test has ended it.

    `credentials` are for asking a TLS server whether it serves.
    """
    address = listen or f"unix:{folder / 'kvwire.sock'}"
    log = folder / f"server-{time.monotonic_ns()}.log"
    sizes = () if any(flag.startswith("--l1-size") for flag in flags) else ("--l1-size=16MiB",)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*prefix, *command("--listen", address, *sizes, *flags)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    server = ServerProcess(address, process, log)
    try:
        server.started_in = wait_serving(server, credentials)
        server.arena = mapped_arena(process.pid)
        yield server
        if stop and process.poll() is None:
            server.terminate()
    finally:
        for channel in server.channels:
            channel.close()
        if process.poll() is None:
            process.kill()
        process.wait(10)


def run_server(*flags: str, prefix=(), timeout: float = START_S) -> subprocess.CompletedProcess:
    """A server that is expected to refuse to start. `stderr` has what it says."""
    before = leaks.shm_entries()
    done = subprocess.run(
        [*prefix, *command(*flags)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(),
    )
    eventually(lambda: not ownerless(leaks.shm_entries() - before))
    return done


def ownerless(names) -> list[str]:
    """Arenas whose server is gone. Other test runs of this machine may have some for a moment."""
    return [name for name in names if "." not in name and not is_locked(leaks.SHM / name)]


def is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        return True
    return False


def mapped_arena(pid: int) -> str:
    """The name of the arena that a server has mapped, empty if it is a private one."""
    found = re.search(r"/dev/shm/(kvwire-\w+)", Path(f"/proc/{pid}/maps").read_text())
    return found.group(1) if found else ""


def environment() -> dict[str, str]:
    """The test's own, without settings of kvwire and with proxies that lead nowhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVWIRE_")}
    dead = "http://127.0.0.1:9"
    return {**kept, "http_proxy": dead, "https_proxy": dead, "grpc_proxy": dead}


def wait_serving(server: ServerProcess, credentials=None) -> float:
    """Until grpc.health.v1 says SERVING. The real port of HOST:0 comes from the banner."""
    started = time.monotonic()
    while True:
        took = time.monotonic() - started
        assert server.process.poll() is None, f"the server has ended\n{server.output()}"
        assert took < START_S, f"the server does not serve\n{server.output()}"
        if server.address.endswith(":0"):
            server.address = bound_address(server.output()) or server.address
        elif is_serving(server.address, credentials=credentials):
            return time.monotonic() - started
        time.sleep(0.02)


def bound_address(banner: str) -> str:
    lines = [line.split() for line in banner.splitlines()]
    return next((words[1] for words in lines if words[:1] == ["address"]), "")


def is_serving(address: str, service: str = "", *, credentials=None) -> bool:
    options = [("grpc.ssl_target_name_override", "localhost")] if credentials else []
    with contextlib.closing(open_channel(address, credentials=credentials, options=options)) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=2
            )
        except grpc.RpcError:
            return False
        return reply.status == SERVING


def open_channel(address: str, *, credentials=None, options=()) -> grpc.Channel:
    every = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0), *options]
    if credentials is not None:
        return grpc.secure_channel(address, credentials, every)
    return grpc.insecure_channel(address, every)
