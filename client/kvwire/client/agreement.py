"""The one chunk size that an engine works with, however many servers it has and however they restart."""

from __future__ import annotations

import threading

from kvwire.client import forks
from kvwire.errors import ChunkSizeIncompatible


class ChunkSizeAgreement:
    """The first server that answers says the size. From then on every server must have the same."""

    def __init__(self, size: int = 0) -> None:
        self._size = size
        self._told_by = ""
        self._lock = threading.Lock()
        forks.watch(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """In tokens; 0 until a server has told it."""
        return self._size

    @property
    def told_by(self) -> str:
        """The server that has told it."""
        return self._told_by

    def accept(self, size: int, server: str) -> None:
        """Raise ChunkSizeIncompatible when the size of a server is another one than agreed."""
        with self._lock:
            if not self._size:
                self._size, self._told_by = size, server
            wanted, told_by = self._size, self._told_by
        if size == wanted:
            return
        elsewhere = f"the engine's server at {told_by} has" if told_by not in {"", server} else ""
        raise ChunkSizeIncompatible(
            f"The server's chunk size is {size}, but {elsewhere or 'this client works with'} {wanted}: "
            f"start the server with --chunk-size {wanted}, or restart the engine.",
            bound_size=size,
            expected=wanted,
        )

    def impose(self, size: int) -> bool:
        """Agree on what the other parts of the engine work with. False: that is the size already."""
        with self._lock:
            if size == self._size:
                return False
            self._size, self._told_by = size, ""
        return True
