"""The demo's processes besides the engines: `kvwire server` on a socket file, and what its status says."""

from __future__ import annotations

import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from kvwire.cli.demo import children
from kvwire.v1 import admin_service_pb2, admin_service_pb2_grpc, transfer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

START_S = 20.0
STOP_S = 10.0


@dataclass(frozen=True)
class Traffic:
    """Bytes since the server's start, by data path ("shm", "ucx-local", ...)."""

    stored: dict[str, int]
    retrieved: dict[str, int]


@contextmanager
def serving(work: Path, l1_size: str, name: str = "kvwire", flags: Sequence[str] = ()) -> Iterator[str]:
    """The address of a server that lives as long as the context."""
    address = f"unix:{work / name}.sock"
    log = work / ("server.log" if name == "kvwire" else f"{name}.log")
    command = ("server", "--listen", address, "--l1-size", l1_size, *flags)
    with running(command, log, lambda: traffic(address, timeout_s=1.0)):
        yield address


@contextmanager
def running(command: Sequence[str], log: Path, ask: Callable[[], object]) -> Iterator[None]:
    """A process `kvwire COMMAND` that lives as long as the context, and answers `ask` from its beginning."""
    with log.open("w") as output:
        process = subprocess.Popen(
            children.tethered("-m", "kvwire.cli", *command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            wait_until_serving(process, command[0], log, ask)
            yield
        finally:
            stop(process)


def wait_until_serving(
    process: subprocess.Popen[bytes], name: str, log: Path, ask: Callable[[], object]
) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        status = process.poll()
        if status is not None:
            raise children.ChildFailed(f"kvwire {name}", status, log)
        try:
            ask()
        except grpc.RpcError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(f"kvwire {name} did not answer within {START_S:.0f} s; its log: {log}")


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            children.end(process)


def traffic(address: str, timeout_s: float = 10.0) -> Traffic:
    paths = status_of(address, timeout_s).counters.paths
    return Traffic(
        stored={path_name(p.path): p.stored_bytes for p in paths if p.stored_bytes},
        retrieved={path_name(p.path): p.retrieved_bytes for p in paths if p.retrieved_bytes},
    )


def status_of(address: str, timeout_s: float = 10.0) -> admin_service_pb2.GetStatusResponse:
    with grpc.insecure_channel(address) as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        return admin.GetStatus(admin_service_pb2.GetStatusRequest(), timeout=timeout_s)


def path_name(path: transfer_pb2.DataPath.ValueType) -> str:
    return transfer_pb2.DataPath.Name(path).removeprefix("DATA_PATH_").lower().replace("_", "-")
