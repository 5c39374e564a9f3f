"""Child processes that report back.

Reports are one JSON object per line over a pipe of their own: whatever a library prints on standard output
ends in the log and is never taken for a report.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Event = dict[str, Any]


# PR_SET_PDEATHSIG: whoever kills the demo, even with -9, ends its server and engines too.
TETHER = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def tethered(*arguments: str) -> list[str]:
    """The command that runs this Python with these arguments and gets SIGTERM when its parent ends."""
    return [sys.executable, "-S", "-c", TETHER, sys.executable, *arguments]


class ChildFailed(Exception):
    """A process of the demo ended with an error. The text holds the last line that it printed."""

    def __init__(self, what: str, status: int, log: Path) -> None:
        ended = "was killed, out of memory perhaps," if status == -signal.SIGKILL else "ended"
        super().__init__(f"{what} {ended} with status {status}: {last_words(log)} (all of it: {log})")


class Reporter:
    """The child's end of the pipe."""

    def __init__(self, fd: int) -> None:
        self._stream = os.fdopen(fd, "w")

    def tell(self, **event: object) -> None:
        self._stream.write(json.dumps(event) + "\n")
        self._stream.flush()


def arguments() -> tuple[Reporter, Event]:
    """What `run` handed to this child."""
    return Reporter(int(sys.argv[1])), json.loads(sys.argv[2])


def run(
    module: str,
    task: Mapping[str, object],
    log: Path,
    on_event: Callable[[Event], None],
    environment: Mapping[str, str],
) -> None:
    """Runs `python -m module` to its end and hands its events over as they come.

    Raises ChildFailed when it does not exit with 0. An exception of on_event, or Ctrl-C, ends the child too.
    """
    read_fd, write_fd = os.pipe()
    command = tethered("-m", module, str(write_fd), json.dumps(task))
    with log.open("w") as output, os.fdopen(read_fd) as events:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write_fd,),
                env={**os.environ, **environment},
            )
        finally:
            os.close(write_fd)
        try:
            for line in events:
                on_event(json.loads(line))
            status = child.wait()
        finally:
            end(child)
    if status:
        raise ChildFailed(module, status, log)


def end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()


def last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing."
