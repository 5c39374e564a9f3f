"""The engines of `kvwire bench engine`: processes that take orders and wait for the next one without work."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from kvwire.cli.bench import engine_child
from kvwire.cli.bench.processes import LOG_TAIL_BYTES, BenchError
from kvwire.cli.demo.children import TETHER
from kvwire.cli.demo.engine import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

START_S: Final = 300.0
ANSWER_S: Final = 300.0
STOP_S: Final = 20.0


class EngineProcess:
    """One engine. Between two orders it uses no processor."""

    def __init__(self, name: str, python: str, log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self._log = log
        read_fd, write_fd = os.pipe()
        script = str(Path(engine_child.__file__).resolve())
        # -P: the script's own folder is no place to import from.
        argv = [python, "-S", "-c", TETHER, python, "-P", script, str(write_fd)]
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    pass_fds=(write_fd,),
                    env={**os.environ, **ENVIRONMENT, **env},
                    text=True,
                )
            except BaseException:
                os.close(read_fd)
                raise
            finally:
                os.close(write_fd)
        self._answers = os.fdopen(read_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Asks it to end, which closes its connector; whoever does not end is ended."""
        if self._process.poll() is None:
            with contextlib.suppress(BenchError, OSError):
                self.ask("close", timeout=STOP_S)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        for end in (signal.SIGTERM, signal.SIGKILL):
            try:
                self._process.wait(STOP_S)
                break
            except subprocess.TimeoutExpired:
                self._process.send_signal(end)
        self._process.wait()
        self._answers.close()

    def start(self, task: Mapping[str, Any]) -> None:
        self.ask("start", timeout=START_S, **task)

    def ask(self, order: str, timeout: float = ANSWER_S, **words: object) -> dict[str, Any]:
        """Raises BenchError, with what it printed last, when it ends or says nothing in time."""
        stdin = self._process.stdin
        if stdin is None or self._process.poll() is not None:
            raise self._failed("ended")
        try:
            stdin.write(json.dumps({"do": order, **words}) + "\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise self._failed("ended") from error
        ready, _, _ = select.select([self._answers], [], [], timeout)
        line = self._answers.readline() if ready else ""
        if not line:
            raise self._failed("ended" if ready else f"said nothing for {timeout:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self, how: str) -> BenchError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1 if how == "ended" else 0)
        status = self._process.returncode
        told = f" with status {status}" if status is not None else ""
        tail = self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return BenchError(f"The engine {self.name} {how}{told}. Its log:\n{tail}")


@contextlib.contextmanager
def engine(
    name: str, task: Mapping[str, Any], folder: Path, *, python: str, env: Mapping[str, str]
) -> Iterator[EngineProcess]:
    """An engine that has started, until the block ends."""
    with EngineProcess(name, python, folder / f"engine-{name}.log", env) as process:
        process.start(task)
        yield process
