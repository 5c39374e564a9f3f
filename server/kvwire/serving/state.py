"""The folder that keeps what outlives a process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from kvwire.errors import ConfigError, StateUnavailable

if TYPE_CHECKING:
    from types import TracebackType

LOCK_NAME: Final = "lock"


class StateFolder:
    """A folder of one process: made if it is not there (mode 0700), locked until `close`.

    Raises ConfigError when it cannot be used, or another process uses it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"--state: the folder {self.path} cannot be used: {error.strerror}.", setting="state"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"--state: the folder {self.path} is in use by another process: give each its own.",
                setting="state",
            ) from error

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def sync(self) -> None:
        """Names in the folder survive a power cut from now on. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def no_state() -> StateUnavailable:
    return StateUnavailable(
        "Nothing can be kept: this process has no state folder, start it with --state FOLDER.",
        folder="",
        cause="--state is not set",
    )
