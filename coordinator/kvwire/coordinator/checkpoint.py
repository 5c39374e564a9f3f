"""The soft state in a file, so that a coordinator that comes back need not ask everybody anew.

The file is frames of a length, a checksum and a body: a head (JSON), rows of placements, and an end that
counts them. Blend entries are not in it: they come again with snapshots and events. Whatever is wrong with
the file, the coordinator begins without it.

How it is consistent: the positions of the feeds (and of Kafka) are those of one moment, before the rows,
while no batch is half applied. Rows may be younger. All that happened after that moment is told again, in
order, by the server, by Kafka, or by a snapshot if neither has it any more; and what happened to a key last
wins, a DELETE too, whether the row was written before it or after. A key that moved past the writer was
stored after that moment.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_NAME: Final = "checkpoint"
MAGIC: Final = b"kvwire checkpoint 1\n"
"""With the version of the format."""
MAX_FRAME: Final = 64 << 20
_FRAME: Final = struct.Struct("<cII")
HEAD, ROWS, END = b"H", b"R", b"E"


class DamagedError(Exception):
    """The file is not one that this version wrote to its end."""


class CheckpointWriter:
    """Writes under a temporary name; `finish` publishes it. All methods block: call them in a thread."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, as every method."""
        self._path = path
        self._draft = path.with_suffix(".new")
        self._file = self._draft.open("wb")
        self._frames = 0
        self.finished = False
        self.size = self._file.write(MAGIC)

    def head(self, content: dict[str, Any]) -> None:
        self.frame(HEAD, json.dumps(content, separators=(",", ":")).encode())

    def frame(self, kind: bytes, body: bytes) -> None:
        self.size += self._file.write(_FRAME.pack(kind, len(body), zlib.crc32(body, ord(kind))))
        self.size += self._file.write(body)
        self._frames += 1

    def finish(self) -> None:
        self.frame(END, struct.pack("<I", self._frames))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._draft.replace(self._path)
        self.finished = True
        descriptor = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def abandon(self) -> None:
        self._file.close()
        self._draft.unlink(missing_ok=True)


def read_frames(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Kind and body, without the end. Raises OSError, DamagedError."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DamagedError("it is not a checkpoint of this version")
        frames = 0
        while True:
            head = file.read(_FRAME.size)
            if len(head) < _FRAME.size:
                raise DamagedError("it ends too early")
            kind, size, checksum = _FRAME.unpack(head)
            body = file.read(size) if size <= MAX_FRAME else b""
            if len(body) < size or zlib.crc32(body, ord(kind)) != checksum:
                raise DamagedError(f"frame {frames} does not match its checksum")
            if kind == END:
                if body != struct.pack("<I", frames) or file.read(1):
                    raise DamagedError("its end does not match")
                return
            yield kind, body
            frames += 1
