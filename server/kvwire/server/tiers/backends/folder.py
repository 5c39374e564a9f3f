"""Values as files of a local folder: read straight into the caller's memory, written beside and renamed.

Nothing is synced: a file that was renamed outlives the death of the server, and what the death of the machine
damages is found by its checksum. Links are not followed to values.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvwire.errors import ConfigError
from kvwire.server.tiers.threads import Threads

from .base import BackendError, Entry, Full, NotFound, Refused, Room, Unavailable, WrongSize, checked, total

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from kvwire.server.tiers.threads import Result, Wanted

    from .base import Buffer, Place

THREADS: Final = 4
PIECE: Final = 4 << 20
"""Bytes of one system call: how much a cancelled call still moves."""

PAGE: Final = 1000
LOCK: Final = ".lock"
UNFINISHED: Final = ".unfinished"
"""Where files are written. Both names begin with a dot, which no value's name does."""

_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED: Final = {errno.EACCES, errno.EPERM, errno.EROFS}
_MISPLACED: Final = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


class FolderBackend:
    """The files below `location/prefix`, which belongs to one server at a time."""

    scheme = "file"
    max_size = 1 << 40

    def __init__(self, place: Place) -> None:
        self.root = Path(place.location) / place.prefix
        self._lock: int | None = None
        self._known: set[str] = set()
        self._numbers = itertools.count()
        self._threads = Threads(THREADS, "kvwire-folder")

    async def open(self) -> None:
        await self._run(lambda _: self._open())

    async def write(self, name: str, parts: Sequence[Buffer]) -> None:
        checked(name)
        try:
            await self._run(lambda wanted: self._write(name, parts, wanted))
        except NotFound as error:
            raise Unavailable(str(error)) from error

    async def read(self, name: str, parts: Sequence[memoryview]) -> None:
        checked(name)
        await self._run(lambda wanted: self._read(name, parts, wanted))

    async def delete(self, names: Sequence[str]) -> None:
        paths = [self.root / checked(name) for name in names]
        await self._run(lambda wanted: _unlink_all(paths, wanted))

    async def list(self, prefix: str = "") -> AsyncIterator[Sequence[Entry]]:
        entries = _entries(self.root, prefix)
        while page := await self._run(lambda _: list(itertools.islice(entries, PAGE))):
            yield page

    async def room(self) -> Room:
        facts = await self._run(lambda _: os.statvfs(self.root))
        free = facts.f_bavail * facts.f_frsize
        return Room((facts.f_blocks - facts.f_bfree) * facts.f_frsize, free)

    async def close(self) -> None:
        self._threads.close()
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    async def _run(self, work: Callable[[Wanted], Result]) -> Result:
        try:
            return await self._threads.run(work)
        except OSError as error:
            raise _told(error) from error

    def _open(self) -> None:
        self.root.mkdir(0o700, parents=True, exist_ok=True)
        (self.root / UNFINISHED).mkdir(0o700, exist_ok=True)
        if self._lock is None:
            self._lock = _locked(self.root)
        for left in (self.root / UNFINISHED).iterdir():
            left.unlink(missing_ok=True)
        _prune(self.root)
        self._known.clear()

    def _write(self, name: str, parts: Sequence[Buffer], wanted: Wanted) -> None:
        try:
            self._write_once(name, parts, wanted)
        except FileNotFoundError:  # somebody has cleared the folder
            self._known.clear()
            self._write_once(name, parts, wanted)

    def _write_once(self, name: str, parts: Sequence[Buffer], wanted: Wanted) -> None:
        self._need(UNFINISHED)
        self._need(name.rpartition("/")[0])
        unfinished = self.root / UNFINISHED / str(next(self._numbers))
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _pour(file, parts, wanted)
            finally:
                os.close(file)
            unfinished.rename(self.root / name)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def _need(self, folder: str) -> None:
        if folder not in self._known:
            (self.root / folder).mkdir(0o700, parents=True, exist_ok=True)
            self._known.add(folder)

    def _read(self, name: str, parts: Sequence[memoryview], wanted: Wanted) -> None:
        file = os.open(self.root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            facts = os.fstat(file)
            if not stat.S_ISREG(facts.st_mode):
                raise Refused(f"{self.root / name} is no file")
            if facts.st_size != total(parts):
                raise WrongSize(f"{self.root / name} has {facts.st_size} bytes, not {total(parts)}")
            _fill(file, parts, wanted)
        finally:
            os.close(file)


def _pour(file: int, parts: Sequence[Buffer], wanted: Wanted) -> None:
    at = 0
    for pieces in _batches(parts):
        wanted.check()
        size = total(pieces)
        written = os.pwritev(file, pieces, at)
        if written < size:  # a disk that has become full: the next attempt says so
            _pour_rest(file, b"".join(pieces)[written:], at + written)
        at += size


def _pour_rest(file: int, rest: bytes, at: int) -> None:
    while rest:
        written = os.pwrite(file, rest, at)
        rest, at = rest[written:], at + written


def _fill(file: int, parts: Sequence[memoryview], wanted: Wanted) -> None:
    at = 0
    for pieces in _batches(parts):
        wanted.check()
        size = total(pieces)
        got = os.preadv(file, pieces, at)
        if got < size:
            raise WrongSize(f"the file ended after {at + got} bytes while it was read")
        at += size


def _batches(parts: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """The parts in groups of up to PIECE bytes, each for one system call."""
    batch: list[memoryview] = []
    room = PIECE
    for part in parts:
        view = memoryview(part).cast("B")
        while view.nbytes:
            head, view = view[:room], view[room:]
            batch.append(head)
            room -= head.nbytes
            if room == 0 or len(batch) == 64:
                yield batch
                batch, room = [], PIECE
    if batch:
        yield batch


def _unlink_all(paths: Sequence[Path], wanted: Wanted) -> None:
    for path in paths:
        wanted.check()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def _entries(root: Path, prefix: str) -> Iterator[Entry]:
    """Every value below the prefix. What comes or goes meanwhile may be told or not."""
    folders = [prefix.rstrip("/")]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(root / folder) as found:
                inside = [entry for entry in found if not entry.name.startswith(".")]
        except FileNotFoundError:
            continue
        for entry in inside:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(name)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    yield Entry(name, entry.stat(follow_symlinks=False).st_size)


def _prune(root: Path) -> None:
    """Folders of which all values are gone go too."""
    for folder, _, _ in os.walk(root, topdown=False):
        path = Path(folder)
        if path not in {root, root / UNFINISHED}:
            with contextlib.suppress(OSError):
                path.rmdir()


def _locked(root: Path) -> int:
    lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"--l2: another server uses the folder {root}", folder=root) from None
    return lock


def _told(error: OSError) -> BackendError:
    where = f"{error.filename}: " if error.filename else ""
    text = f"{where}{error.strerror}"
    if error.errno in {errno.ENOENT, errno.ESTALE}:
        return NotFound(text)
    if error.errno in _FULL:
        return Full(text)
    return Refused(text) if error.errno in _DENIED | _MISPLACED else Unavailable(text)
