"""A wire between client and server that a test can cut, or make as silent as one that drops everything."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

PIECE = 64 << 10


class Proxy:
    """Socket file to socket file. Use it in a `with` block."""

    def __init__(self, path: Path, server: str) -> None:
        self.address = f"unix:{path}"
        self._path = path
        self._server = server.removeprefix("unix:")
        self._flowing = threading.Event()
        self._lock = threading.Lock()
        self._ends: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> Self:
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def cut(self) -> None:
        """Every connection ends in the middle of what it carries, and no new one is taken."""
        with self._lock:
            listener, self._listener = self._listener, None
            ends, self._ends = self._ends, set()
        if listener is not None:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._flowing.set()

    def stall(self) -> None:
        """Nothing arrives any more, on either side, and nobody is told."""
        self._flowing.clear()

    def heal(self) -> None:
        """What is stalled goes on; what was cut may connect anew."""
        self._flowing.set()
        if self._listener is None:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self._path))
            listener.listen()
            self._listener = listener
            self._run(self._accept, listener)

    def _run(self, function, *args) -> None:
        thread = threading.Thread(target=function, args=args, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self._server)
            except OSError:
                near.close()
                far.close()
                continue
            with self._lock:
                self._ends |= {near, far}
            self._run(self._carry, near, far)

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        try:
            while True:
                for source in select.select([near, far], [], [])[0]:
                    piece = source.recv(PIECE)
                    self._flowing.wait()
                    if not piece:
                        return
                    other[source].sendall(piece)
        except OSError:
            return
        finally:
            with self._lock:
                self._ends -= {near, far}
            near.close()
            far.close()
