"""The data paths of this process: how each is offered to a server, and how it is opened and proven."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvwire.client.engines import EngineUse, engines
from kvwire.client.inline import InlinePath
from kvwire.client.types import Offer, Path
from kvwire.errors import ConfigError, DataPathUnavailable
from kvwire.transfer.arena_path import ShmPath
from kvwire.transfer.hosts import host_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.client.client import Client
    from kvwire.client.types import Registered
    from kvwire.transfer.base import DataPath
    from kvwire.transfer.ucx_options import Kind
    from kvwire.transfer.ucx_path import UcxPath
    from kvwire.v1 import transfer_pb2

CHOICES: Final[dict[str, tuple[Path, ...]]] = {
    "auto": (Path.SHM, Path.UCX_LOCAL, Path.UCX_REMOTE, Path.INLINE),
    "shm": (Path.SHM,),
    "ucx": (Path.UCX_LOCAL, Path.UCX_REMOTE),
    "inline": (Path.INLINE,),
}
"""What is offered, one after the other: UCX costs time and memory, so it is started only where it is
needed."""

PROBE_S: Final = 5.0
_KINDS: Final[dict[Path, Kind]] = {Path.UCX_LOCAL: "local", Path.UCX_REMOTE: "remote"}


def choice(name: str) -> tuple[Path, ...]:
    found = CHOICES.get(name)
    if found is None:
        raise ConfigError(f"There is no data path {name!r}: choose one of {', '.join(CHOICES)}.")
    return found


class Candidate:
    """One path on its way from an offer to use.

    `close` it where it is not taken, and when it is done with.
    """

    def __init__(self, path: Path, devices: tuple[str, ...] = (), memory_device: str = "cpu") -> None:
        """Raises MissingExtra, ConfigError or DataPathUnavailable where this process cannot offer it.

        `memory_device` is the type of the device that the KV lies on.
        """
        self.path: Final = path
        self._memory_device = memory_device
        self._use: EngineUse | None = engines.use(_KINDS[path], devices) if path in _KINDS else None
        self._end: DataPath | None = None
        self._give_up: Callable[[], None] | None = None

    def offer(self) -> Offer:
        address = self._use.engine.address if self._use is not None else b""
        return Offer(self.path, "" if self.path is Path.INLINE else host_id(), address)

    def open(self, client: Client, registered: Registered) -> DataPath:
        """Connect and prove it. Raises DataPathUnavailable, or whatever else shows that it does not work."""
        if registered.path is not self.path:
            raise DataPathUnavailable(f"The server chose {registered.path.label}, which was not offered.")
        self._end = self._connect(client, registered)
        return self._end

    def give_up(self) -> None:
        """The server is gone or hangs. On other paths that ends calls, and with them what is under way."""
        if self._give_up is not None:
            self._give_up()

    def close(self) -> None:
        """When nothing is under way on it any more."""
        if self._end is not None:
            self._end.close()
        if self._use is not None:
            self._use.release()

    def _connect(self, client: Client, registered: Registered) -> DataPath:
        if self.path is Path.INLINE:
            return InlinePath(client, registered.registration_id)
        if self.path is Path.SHM and registered.shm is not None:
            access = registered.shm
            shm = ShmPath.open(access.arena_name, access.nonce, access.liveness_name)
            if self._memory_device == "cuda":
                from kvwire.transfer.cuda import PageLock

                shm.keep_page_locked(PageLock(shm.arena))
            return shm
        if self._use is not None and registered.ucx is not None:
            ucx = _connect_ucx(self.path.label, self._use, registered.ucx)
            self._give_up = ucx.give_up
            return ucx
        raise DataPathUnavailable(
            f"The server did not say how to use {self.path.label}.", path=self.path.label
        )


def _connect_ucx(name: str, use: EngineUse, access: transfer_pb2.UcxAccess) -> UcxPath:
    from kvwire.transfer.ucx_path import UcxPath
    from kvwire.transfer.ucx_probe import probe_client

    peer = use.engine.connect(access.address, "the kvwire server")
    try:
        probe_client(use.engine, peer, access.probe_tag, access.probe_bytes, PROBE_S)
    except BaseException:
        peer.close()
        raise
    return UcxPath(name, use.engine, peer)
