"""UCX connections to other servers, made when they are needed and kept. Both directions use the same ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kvwire.errors import DataPathUnavailable, KvwireError
from kvwire.server import convert
from kvwire.server.dataplane.ucx import UcxPath
from kvwire.v1 import transfer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvwire.server.dataplane import DataPlane, PathOffer, ServerPath
    from kvwire.transfer.ucx import Peer

MAX_LINKS: Final = 256
PATHS: Final = ("ucx-local", "ucx-remote")
"""Best first."""


class Link:
    """A connection. `users` counts leases and loans that move bytes over it, `name` is the other server.

    `proven`: something has come over it. UCX connects without waiting, so before that it may lead nowhere.
    """

    def __init__(self, name: str, path: UcxPath, address: bytes, peer: Peer) -> None:
        self.name = name
        self.path = path
        self.address = address
        self.peer = peer
        self.users = 0
        self.proven = False
        self.closed = False

    @property
    def usable(self) -> bool:
        return not self.closed and not self.peer.lost

    def close(self) -> None:
        """What is under way fails; a send is given up, and a receive that has begun ends when UCX ends it."""
        if not self.closed:
            self.closed = True
            self.peer.close()


class Links:
    """Of one server. `seconds` is how long a connection may take, until something has come over it."""

    def __init__(self, plane: DataPlane, host_id: str, seconds: float) -> None:
        self._paths: dict[str, ServerPath] = {
            name: plane.paths[name] for name in PATHS if name in plane.paths
        }
        self._off = plane.off
        self._host_id = host_id
        self.seconds = seconds
        self._links: dict[tuple[str, bytes], Link] = {}
        self._making: dict[tuple[str, bytes], asyncio.Task[Link]] = {}
        self._failed: dict[str, str] = {}

    @property
    def problem(self) -> str:
        """Why no bytes can move between this server and others. Empty: they can."""
        if self._ready():
            return ""
        why = {**{name: self._off.get(name, "switched off") for name in PATHS}, **self._failed}
        causes = "; ".join(f"{name}: {cause}" for name, cause in why.items())
        return f"this server has no UCX path ({causes})"

    async def offers(self) -> list[transfer_pb2.DataPathOffer]:
        """Of all paths that bytes can be received on here. Starts them."""
        found = []
        for name in self._ready():
            path = self.path(name)
            try:
                plane = await path.started()
            except KvwireError as error:
                self._failed[name] = str(error)
                continue
            found.append(
                transfer_pb2.DataPathOffer(
                    path=convert.PATHS[name], host_id=self._host_id, ucx_address=plane.engine.address
                )
            )
        return found

    def path(self, name: str) -> UcxPath:
        path = self._paths[name]
        if not isinstance(path, UcxPath):
            raise TypeError(f"{name} is no UCX path")
        return path

    async def choose(self, offers: Sequence[PathOffer], name: str) -> Link:
        """A connection over the best path that a peer offers. Raises DataPathUnavailable."""
        offered = {offer.path: offer for offer in offers}
        skipped: dict[str, str] = {}
        for path in PATHS:
            offer = offered.get(path)
            if offer is None:
                skipped[path] = "not offered by the peer"
            elif path not in self._paths:
                skipped[path] = self._off.get(path, "switched off here")
            elif path == "ucx-local" and (offer.host_id != self._host_id or not self._host_id):
                skipped[path] = "the peer is on another host"
            else:
                try:
                    return await self.connect(path, offer.address, name)
                except KvwireError as error:
                    skipped[path] = str(error)
        causes = "; ".join(f"{path}: {why}" for path, why in skipped.items())
        raise DataPathUnavailable(f"No UCX path in common ({causes}).", **skipped)

    async def connect(self, path: str, address: bytes, name: str) -> Link:
        """The connection to the engine of that address. Raises KvwireError."""
        key = (path, address)
        link = self._links.get(key)
        if link is not None and link.usable:
            self._links[key] = self._links.pop(key)
            return link
        making = self._making.get(key)
        if making is None:
            making = asyncio.get_running_loop().create_task(self._make(key, name), name="kvwire-link")
            self._making[key] = making
            making.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(making)

    def keep(self, names: Collection[str]) -> None:
        """Close what leads to other servers, unless it is in use."""
        self._close(lambda link: link.name not in names)

    def discard(self, tag: int) -> None:
        """Drop messages of this tag's transfer from now on, on every path."""
        for name in self._paths:
            engine = self.path(name).engine
            if engine is not None:
                engine.discard(tag)

    def close(self) -> None:
        for making in self._making.values():
            making.cancel()
        for link in self._links.values():
            link.close()
        self._links.clear()

    async def _make(self, key: tuple[str, bytes], name: str) -> Link:
        path, address = self.path(key[0]), key[1]
        try:
            async with asyncio.timeout(self.seconds):
                peer = await path.connect(address, name)
        except TimeoutError:
            raise DataPathUnavailable(
                f"{name} could not be connected to over {path.name} within {self.seconds:g} s.",
                path=path.name,
            ) from None
        former = self._links.pop(key, None)
        if former is not None:
            former.close()
        # A server has one address of a kind: another one was of a former run.
        self._close(lambda link: link.name == name and link.path is path)
        link = self._links[key] = Link(name, path, address, peer)
        idle = [each for each in self._links.values() if not each.users]
        surplus = set(idle[: max(0, len(self._links) - MAX_LINKS)])
        self._close(lambda each: each in surplus)
        return link

    def _close(self, chosen: Callable[[Link], bool]) -> None:
        """Those of them that nobody uses."""
        for key in [key for key, link in self._links.items() if not link.users and chosen(link)]:
            self._links.pop(key).close()

    def _ready(self) -> list[str]:
        return [name for name in self._paths if name not in self._failed]
