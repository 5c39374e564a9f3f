"""The server's arena in POSIX shared memory, and the locks that prove whether a client's process still lives.

The first page of the file is a header (little-endian):

    bytes 0..7     magic "KVWARENA"
    bytes 8..15    size of the file in bytes
    bytes 16..23   how far the file has memory behind it (grows)
    bytes 24..39   incarnation of the server, padded with zeros
    bytes 40..71   nonce: 32 random bytes. Whoever reads the right ones is on the server's host
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import mmap
import os
import secrets
import struct
from pathlib import Path
from typing import Final

from kvwire.errors import ConfigError, DataPathUnavailable
from kvwire.transfer.arena import DEFAULT_STEP, HEADER_BYTES, Arena, GrowingArena, PrivateArena
from kvwire.transfer.liveness import LivenessLock, lock_names

__all__ = ["HEADER_BYTES", "LivenessLock", "MappedArena", "PrivateArena", "SharedArena", "sweep_dead"]

FOLDER: Final = Path("/dev/shm")  # noqa: S108  where POSIX shared memory lives on Linux
PREFIX: Final = "kvwire-"
MAGIC: Final = b"KVWARENA"
NONCE_BYTES: Final = 32
_HEADER: Final = struct.Struct("<8sQQ16s32s")
_ALLOCATED_AT: Final = 16
_U64: Final = struct.Struct("<Q")


class SharedArena(GrowingArena):
    """The server's side. `name` and `nonce` go to the clients; the file's lock says that the server lives."""

    def __init__(self, name: str, fd: int, mapping: mmap.mmap, nonce: bytes, step: int) -> None:
        super().__init__(mapping, len(mapping), step)
        self.name: Final = name
        self.nonce: Final = nonce
        self._fd = fd

    @classmethod
    def create(
        cls,
        size: int,
        name_prefix: str = PREFIX,
        *,
        incarnation: bytes = b"",
        step: int = DEFAULT_STEP,
        setting: str = "--l1-size",
    ) -> SharedArena:
        """A new arena with `size` bytes for slots, of which none is allocated yet.

        Raises ConfigError, naming `setting`, when /dev/shm has not that much room.
        """
        _check_room(size + HEADER_BYTES, setting)
        name, fd = _create_locked(name_prefix)
        try:
            os.ftruncate(fd, size + HEADER_BYTES)
            os.posix_fallocate(fd, 0, HEADER_BYTES)
            mapping = mmap.mmap(fd, size + HEADER_BYTES)
        except OSError as error:
            os.close(fd)
            (FOLDER / name).unlink(missing_ok=True)
            raise ConfigError(f"{setting}: shared memory of {size} bytes cannot be had: {error}.") from error
        nonce = secrets.token_bytes(NONCE_BYTES)
        arena = cls(name, fd, mapping, nonce, step)
        arena._allocated = HEADER_BYTES
        mapping[: _HEADER.size] = _HEADER.pack(MAGIC, arena.size, HEADER_BYTES, incarnation[:16], nonce)
        return arena

    @staticmethod
    def attach(name: str, nonce: bytes) -> MappedArena:
        """The client's side of an arena. Raises DataPathUnavailable when it is not the server's arena."""
        return MappedArena.open(name, nonce)

    def unlink(self) -> None:
        """Take the name away. Clients that have mapped it keep what they have."""
        (FOLDER / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            self._fd, fd = -1, self._fd
            os.close(fd)

    def _allocate(self, target: int) -> bool:
        try:
            os.posix_fallocate(self._fd, self._allocated, target - self._allocated)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT}:
                return False
            raise
        self._allocated = target
        _U64.pack_into(self._open(self._map), _ALLOCATED_AT, target)
        return True


class MappedArena(Arena):
    """A client's mapping of the server's arena."""

    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        super().__init__(mapping, len(mapping))
        self.name: Final = name
        self._seen = 0

    @classmethod
    def open(cls, name: str, nonce: bytes) -> MappedArena:
        """Map `name` and compare the nonce. Raises DataPathUnavailable with what is wrong."""
        try:
            mapping = _map_existing(name)
        except (OSError, ValueError) as error:
            raise _not_here(name, str(error)) from error
        magic, size, _, _, found = _HEADER.unpack_from(mapping)
        if magic != MAGIC or size != len(mapping) or not hmac.compare_digest(found, nonce):
            mapping.close()
            raise _not_here(name, "it is another arena of the same name, on another host or of another run")
        return cls(name, mapping)

    @property
    def allocated(self) -> int:
        """As far as the server has said in the header."""
        mapping = self._open(self._map)
        self._seen = min(int(_U64.unpack_from(mapping, _ALLOCATED_AT)[0]), self.size)
        return self._seen


def sweep_dead(prefix: str = PREFIX) -> list[str]:
    """Remove what dead servers have left in /dev/shm and return the names. What is in use stays."""
    removed = [
        path.name for path in FOLDER.glob(f"{prefix}*") if "." not in path.name and _remove_if_dead(path)
    ]
    orphans = [path for path in lock_names(FOLDER, prefix) if not _arena_of(path).exists()]
    return removed + [path.name for path in orphans if _remove_if_dead(path)]


def _arena_of(lock: Path) -> Path:
    return FOLDER / lock.name.split(".", 1)[0]


def _remove_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_uid != os.geteuid():
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and flock its owner may have removed it, and somebody made another of this name.
        if not _same_file(path, fd):
            return False
        path.unlink()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _create_locked(prefix: str) -> tuple[str, int]:
    """A new file, locked. A sweep may remove it before it is locked: then once more."""
    while True:
        name = prefix + secrets.token_hex(8)
        fd = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(FOLDER / name, fd):
                return name, fd
        except OSError:
            pass
        os.close(fd)


def _same_file(path: Path, fd: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def _map_existing(name: str) -> mmap.mmap:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no name of shared memory")
    fd = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES:
            raise ValueError("the file is too small")
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _check_room(size: int, setting: str) -> None:
    room = os.statvfs(FOLDER)
    free = room.f_bavail * room.f_frsize
    if size > free:
        raise ConfigError(
            f"{setting}: {size >> 20} MiB do not fit into {FOLDER}, which has {free >> 20} MiB free. Choose a"
            f" smaller {setting}, or a larger {FOLDER} (docker run --shm-size; emptyDir of medium Memory).",
            setting=setting,
            needed=size,
            free=free,
        )


def _not_here(name: str, cause: str) -> DataPathUnavailable:
    return DataPathUnavailable(
        f"Shared memory {name} of the server cannot be used here: {cause}.", path="shm", cause=cause
    )
