"""A wire between client and server that a test can cut, or make as silent as one that drops everything."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from pathlib import Path
from typing import Self

PIECE = 64 << 10


class Proxy:
    """Socket file to socket file. Use it in a `with` block."""

    def __init__(self, path: Path, server: str) -> None:
        self.address = f"unix:{path}"
        self._path = path
        self._server = server.removeprefix("unix:")
        self._flowing = threading.Event()
        self._allowed: int | None = None
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
            self._gone()
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._flowing.set()

    def stall_after(self, count: int) -> None:
        """Nothing arrives any more when so many further bytes have passed, in both directions together."""
        with self._lock:
            self._allowed = count

    @property
    def stalled(self) -> bool:
        return not self._flowing.is_set()

    def stall(self) -> None:
        """Nothing arrives any more, on either side, and nobody is told."""
        self._flowing.clear()

    def heal(self) -> None:
        """What is stalled goes on; what was cut may connect anew."""
        self._flowing.set()
        if self._listener is None:
            self._listener = self._listen()
            self._run(self._accept, self._listener)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen()
        return listener

    def _dial(self) -> socket.socket:
        far = socket.socket(socket.AF_UNIX)
        try:
            far.connect(self._server)
        except OSError:
            far.close()
            raise
        return far

    def _gone(self) -> None:
        self._path.unlink(missing_ok=True)

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
            try:
                far = self._dial()
            except OSError:
                near.close()
                continue
            with self._lock:
                self._ends |= {near, far}
            self._run(self._carry, near, far)

    def _count(self, size: int) -> None:
        with self._lock:
            if self._allowed is None:
                return
            self._allowed -= size
            if self._allowed <= 0:
                self._allowed = None
                self._flowing.clear()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        try:
            while True:
                for source in select.select([near, far], [], [])[0]:
                    piece = source.recv(PIECE)
                    self._count(len(piece))
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


class TcpProxy(Proxy):
    """The same, port to port; `address` is HOST:PORT and stays over a cut."""

    def __init__(self, server: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        super().__init__(Path(), server)
        self.address = f"127.0.0.1:{self.port}"

    def _listen(self) -> socket.socket:
        return socket.create_server(("127.0.0.1", self.port))

    def _dial(self) -> socket.socket:
        host, _, port = self._server.rpartition(":")
        return socket.create_connection((host, int(port)))

    def _gone(self) -> None:
        """The port is free with its socket."""
