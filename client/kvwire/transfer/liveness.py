"""Proof that a process is gone, also in another pid namespace: a file lock, which only the kernel gives back.

The server makes one lock file per registration. The client opens it and holds a shared flock for as long as
it may touch the arena. The lock goes when the process and all children that it forked are gone, and such
children are just those that have the arena mapped too. The file holds the registration's board.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvwire.errors import DataPathUnavailable
from kvwire.transfer.board import BOARD_BYTES, ClientBoard, ServerBoard

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER: Final = Path("/dev/shm")  # noqa: S108  beside the arena, on the same host by definition
_INFIX: Final = ".lock-"


class LivenessLock:
    """The server's side of one lock."""

    def __init__(self, name: str, fd: int) -> None:
        self.name: Final = name
        self._fd = fd
        os.posix_fallocate(fd, 0, BOARD_BYTES)
        self.board: Final = ServerBoard(fd)

    @classmethod
    def create(cls, arena_name: str) -> LivenessLock:
        """A new lock file beside the arena; `name` is what the client opens."""
        name = f"{arena_name}{_INFIX}{secrets.token_hex(8)}"
        return cls(name, os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))

    @staticmethod
    def open(name: str) -> HeldLock:
        """The client's side: open the file and hold it. Raises DataPathUnavailable."""
        return HeldLock(name)

    def is_held(self) -> bool:
        """Whether a process that opened the lock may still live. False before one has opened it."""
        if self._fd < 0:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Remove the file. Whoever holds it is not disturbed."""
        if self._fd >= 0:
            self._fd, fd = -1, self._fd
            self.board.close()
            os.close(fd)
            (FOLDER / self.name).unlink(missing_ok=True)


class HeldLock:
    """The client's side: held from here on until `close`, or until the kernel ends the process."""

    def __init__(self, name: str) -> None:
        self.name: Final = name
        if "/" in name or _INFIX not in name:
            raise _unusable(name, "no name of a lock file")
        try:
            self._fd = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise _unusable(name, str(error)) from error
        # The server takes the lock for a moment when it looks, so this may wait that moment.
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        self.board: Final = _board(self._fd)

    def close(self) -> None:
        """To be called when this process cannot touch the arena any more."""
        if self._fd >= 0:
            self._fd, fd = -1, self._fd
            if self.board is not None:
                self.board.close()
            os.close(fd)


def lock_names(folder: Path, prefix: str) -> Iterator[Path]:
    """The lock files of all arenas of this prefix."""
    return folder.glob(f"{prefix}*{_INFIX}*")


def _board(fd: int) -> ClientBoard | None:
    """None from a server that has none: everything is asked for then."""
    try:
        return ClientBoard(fd)
    except ValueError:
        return None


def _unusable(name: str, cause: str) -> DataPathUnavailable:
    return DataPathUnavailable(
        f"The server's lock file {name} cannot be used: {cause}.", path="shm", cause=cause
    )
