"""Starts a server on this host for an engine that finds none: one for each address, whoever comes first.

The server belongs to nobody: it has a session of its own, is no child of the engine, and stays when the
engine stops, until it is told to end or has been idle for long enough.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvwire.client.client import Client
from kvwire.errors import ConfigError, KvwireError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

START_WAIT_S: Final = 20.0
"""An engine starts with or without a server: it waits no longer than this for one to come up."""
_PING_S: Final = 1.0
_POLL_S: Final = 0.05
_LAUNCH_S: Final = 10.0
_TOLD_LINES: Final = 3
# A process between the engine and the server: who ends an engine with all its descendants spares the server.
_LAUNCHER: Final = """
import os, subprocess, sys
with open(sys.argv[1], "ab") as log:
    child = subprocess.Popen(
        sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
    )
sys.stdout.write(str(child.pid))
sys.stdout.flush()
os._exit(0)
"""


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """Of the server at one address. The lock is held while it is started, and says its process id."""

    lock: Path
    log: Path

    @classmethod
    def of(cls, folder: Path, address: str) -> ServerFiles:
        readable = re.sub(r"[^A-Za-z0-9]+", "-", address).strip("-")[-40:]
        name = f"{readable}-{sha256(address.encode()).hexdigest()[:8]}"
        return cls(folder / f"{name}.lock", folder / f"{name}.log")


def default_folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "kvwire"
    return Path(tempfile.gettempdir()) / f"kvwire-{os.geteuid()}"


def ensure_server(address: str, flags: Sequence[str], folder: Path, wait: float = START_WAIT_S) -> None:
    """Have a server at the address, started now if there is none, and wait for it, at most `wait` seconds.

    Raises nothing: without a server the engine runs uncached, and the log says why there is none.
    """
    deadline = time.monotonic() + wait
    try:
        if not is_free(address, wait):
            return
        files = ServerFiles.of(_private(folder), _absolute(address))
        with _locked(files.lock, deadline) as lock:
            # Another process of this engine may have started it meanwhile.
            if is_free(address):
                _start(address, flags, files, lock, deadline)
    except (OSError, subprocess.SubprocessError, KvwireError, TimeoutError) as error:
        logger.warning("kvwire: no server was started at %s: %s", address, error)


def is_free(address: str, wait: float = 0.0) -> bool:
    """Nobody is there. A server that hangs or refuses is somebody: it is never replaced.

    One that is shutting down is given `wait` seconds to be gone.
    """
    deadline = time.monotonic() + wait
    with Client(address, client_name="kvwire autostart") as client:
        while True:
            try:
                leaving = client.ping(timeout=_PING_S).draining
            except Unavailable:
                return True
            except KvwireError:
                return False
            if not leaving or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)


def _start(address: str, flags: Sequence[str], files: ServerFiles, lock: int, deadline: float) -> None:
    if files.log.exists():
        files.log.replace(files.log.with_suffix(".log.old"))
    pid = _launch([*_server(), "--listen", _absolute(address), *flags], files.log)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{pid}\n".encode(), 0)
    while is_free(address):
        if not is_running(pid):
            raise ConfigError(f"it ended at once: {_last_words(files.log)} (log: {files.log})")
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} does not serve yet (log: {files.log})")
        time.sleep(_POLL_S)
    logger.info("kvwire: started a server at %s (process %d, log %s)", address, pid, files.log)


def _launch(command: Sequence[str], log: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-I", "-c", _LAUNCHER, str(log), *command],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_LAUNCH_S,
    )
    return int(done.stdout)


def _server() -> list[str]:
    return [sys.executable, "-m", "kvwire.cli", "server"]


def is_running(pid: int) -> bool:
    """A process that nobody has reaped yet has ended all the same."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in {"Z", "X"}


def _last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " / ".join(line.strip() for line in lines[-_TOLD_LINES:]) or "it said nothing"


def _absolute(address: str) -> str:
    if not address.startswith("unix:"):
        return address
    return f"unix:{Path(address.removeprefix('unix:')).absolute()}"


def _private(folder: Path) -> Path:
    """The folder, made if it is missing. Others may neither write there nor have made it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{folder} must be a folder of this user that nobody else can write to")
    return folder


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[int]:
    """Hold the lock, which ends with the process however it ends. Raises TimeoutError."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has been starting one for long ({path})") from None
                time.sleep(_POLL_S)
        yield lock
    finally:
        os.close(lock)
