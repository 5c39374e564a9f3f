"""LMCache as a neighbour: in a Python environment of its own, never imported in ours."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli.bench.processes import LOG_TAIL_BYTES, BenchError
from kvwire.cli.demo import children
from kvwire.cli.demo.model import cache_dir, locked
from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGES: Final = (
    "lmcache==0.5.6",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "caio==0.12.10",
    "llvmlite==0.50.0",
    "numba==0.68.1",
    "nvtx==0.2.17",
    "opentelemetry-exporter-prometheus==0.61b0",
    "redis==8.1.0",
)
"""LMCache and what of its dependencies a vLLM on a CPU has not. The rest it takes from our environment."""

ENVIRONMENT: Final = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0",
    "PYTHONWARNINGS": "ignore",
    "VLLM_PLUGINS": "",  # kvwire's own is registered there and cannot be imported
}
START_S: Final = 120.0
STOP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class LmCache:
    """`python` runs its engine; `program` its server."""

    python: str
    program: str

    @classmethod
    def at(cls, python: Path) -> LmCache:
        """Raises ConfigError when there is no LMCache beside this interpreter."""
        program = python.parent / "lmcache"
        if not python.is_file() or not program.is_file():
            raise ConfigError(
                f"--lmcache-python {python}: no program `lmcache` lies beside it.", setting="lmcache_python"
            )
        return cls(str(python), str(program))


def set_up(progress: Callable[[str], None]) -> LmCache:
    """The environment in the cache folder, made once: LMCache over the packages of this environment.

    So both connectors run in the same vLLM on the same torch. Raises ConfigError when pip cannot.
    """
    environments = cache_dir() / "environments"
    environments.mkdir(parents=True, exist_ok=True)
    folder = environments / PACKAGES[0].replace("==", "-")
    done = folder / "kvwire-complete"
    with locked(environments / f"{folder.name}.lock"):
        if not done.exists() or done.read_text() != _stamp():
            progress(f"installing {PACKAGES[0]} into {folder}")
            shutil.rmtree(folder, ignore_errors=True)
            _make(folder)
            done.write_text(_stamp())
    return LmCache.at(folder / "bin" / "python")


def _stamp() -> str:
    return "\n".join((sys.executable, *PACKAGES))


def _make(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    ours = sysconfig.get_paths()["purelib"]
    (Path(paths["purelib"]) / "vllm-of-kvwire.pth").write_text(ours + "\n")
    log = folder / "pip.log"
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", *PACKAGES]
    with log.open("w") as output:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False)
    if done.returncode:
        raise ConfigError(
            f"pip could not install {PACKAGES[0]}: {children.last_words(log)}", setting="with_lmcache"
        )


@contextlib.contextmanager
def serving(lmcache: LmCache, folder: Path, chunk_size: int) -> Iterator[dict[str, Any]]:
    """A server of LMCache's; yields vLLM's configuration for its connector.

    Over shared memory, with the engine doing the copies: the fastest that LMCache has on a CPU. It takes one
    KV group only, so the engine's hybrid manager has to be off.
    """
    port, http_port = free_port(), free_port()
    segment = f"lmc-bench-{secrets.token_hex(6)}"
    log = folder / "lmcache-server.log"
    argv = [lmcache.program, "server", "--transport", "zmq", "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--http-host", "127.0.0.1", "--http-port", str(http_port), "--chunk-size", str(chunk_size)]
    argv += ["--l1-size-gb", "1", "--eviction-policy", "LRU"]
    argv += ["--supported-transfer-mode", "auto", "--shm-name", segment]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", children.TETHER, lmcache.python, *argv],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **ENVIRONMENT},
        )
    try:
        _wait(process, f"http://127.0.0.1:{http_port}/healthcheck", log)
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "127.0.0.1",
                "lmcache.mp.port": port,
                "lmcache.mp.mq_timeout": 20.0,
            },
        }
    finally:
        _stop(process)
        Path("/dev/shm", segment).unlink(missing_ok=True)  # noqa: S108


def free_port() -> int:
    """LMCache takes no port 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        # Our own server, on the loopback.
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=1):  # noqa: S310
            return
        time.sleep(0.1)
    tail = log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
    raise BenchError(f"LMCache's server did not get ready. Its log:\n{tail}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    for end in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        process.send_signal(end)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
