"""UCX: tagged messages straight into and out of the leased slots. The engine starts with the first client."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Final

from kvwire.errors import KvwireError, LeaseLost, TransferFailed, TransferTimeout
from kvwire.server.dataplane.base import Admission, Opened, Received, UcxGrant
from kvwire.transfer import tags, ucx_arrival
from kvwire.transfer.server_ucx import UcxServerPlane
from kvwire.transfer.ucx import UcxEngine
from kvwire.transfer.ucx_path import DEFAULT_PIECE_BYTES
from kvwire.transfer.ucx_probe import PROBE_BYTES, ProbeServer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from kvwire.server.dataplane.base import PathOffer, SlotMemory
    from kvwire.transfer.arena import GrowingArena
    from kvwire.transfer.base import ByteArray
    from kvwire.transfer.ucx import Peer
    from kvwire.transfer.ucx_options import UcxOptions

REASONS: Final = {
    "local": "messages between processes of one host",
    "remote": "messages between hosts",
}
PEER_PIECE_BYTES: Final = {"local": 16 << 20, "remote": 4 << 20}
"""Between servers. Nothing is staged there: within a host only the number of messages counts, and between
hosts a piece is hashed while it is in the cache."""


@dataclass(frozen=True, slots=True)
class _Client:
    peer: Peer
    probe: ProbeServer


class UcxPath:
    """One kind of UCX path. Only this server's own thread ever writes into its slots.

    So a slot is free for others as soon as no operation on it is left here, whatever the client does.
    """

    def __init__(self, options: UcxOptions, arena: GrowingArena, host_id: str) -> None:
        self._options = options
        self._arena = arena
        self._host_id = host_id
        self._starting = asyncio.Lock()
        self._plane: UcxServerPlane | None = None
        self._clients: dict[int, _Client] = {}
        self.publish: Callable[[int, int], bool] = lambda _registration_id, _lease_id: False
        """Commits a registration's write lease, all slots of it. False: it is none any more."""
        # Elsewhere in each run, as lease ids: a client may have two servers.
        self._probes = count(1 + secrets.randbelow(tags.MAX_LEASE // 2))

    @property
    def name(self) -> str:
        return f"ucx-{self._options.kind}"

    @property
    def engine(self) -> UcxEngine | None:
        """None before the path has started."""
        return self._plane.engine if self._plane is not None else None

    async def admit(self, offer: PathOffer) -> Admission | str:
        if self._options.kind == "local" and offer.host_id != self._host_id:
            return "the client is on another host"
        if not offer.address:
            return "the offer has no UCX address"
        try:
            plane = await self.started()
            peer = await self._connect(plane, offer.address, "client")
        except KvwireError as error:
            return str(error)
        tag = tags.encode(tags.Kind.PROBE, next(self._probes))
        client = _Client(peer, ProbeServer(plane.engine, peer, tag))
        grant = UcxGrant(plane.engine.address, tag, PROBE_BYTES)
        return Admission(self.name, REASONS[self._options.kind], grant, client)

    def bind(self, registration_id: int, admission: Admission) -> None:
        if isinstance(admission.token, _Client):
            self._clients[registration_id] = admission.token

    def withdraw(self, admission: Admission) -> None:
        if isinstance(admission.token, _Client):
            _let_go(admission.token)

    def leave(self, registration_id: int) -> None:
        client = self._clients.pop(registration_id, None)
        if client is not None:
            _let_go(client)

    def open_store(self, registration_id: int, lease_id: int, slots: Sequence[SlotMemory]) -> Opened:
        plane, peer = self._of(registration_id)
        loop = asyncio.get_running_loop()

        def arrived(whole: bool) -> None:
            """On the engine's thread, which may end after the loop."""
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._arrived, registration_id, lease_id, whole)

        found = plane.expect_store(peer, lease_id, self._memory(slots), DEFAULT_PIECE_BYTES, arrived)
        return Opened(DEFAULT_PIECE_BYTES, found.first_tags, found.word)

    def open_retrieve(self, registration_id: int, lease_id: int, slots: Sequence[SlotMemory]) -> Opened:
        plane, peer = self._of(registration_id)
        found = plane.send_retrieve(peer, lease_id, self._memory(slots), DEFAULT_PIECE_BYTES)
        return Opened(DEFAULT_PIECE_BYTES, found.first_tags)

    async def connect(self, address: bytes, name: str) -> Peer:
        """Another server, by the address of its engine of this kind. Raises as `started`."""
        return await self._connect(await self.started(), address, name)

    def send_peer(self, peer: Peer, lease_id: int, transfer_id: int, slots: Sequence[SlotMemory]) -> Opened:
        """Begin to give another server the bytes of its lease."""
        if self._plane is None:
            raise TransferFailed("The path has no connection yet.", path=self.name, cause="gone")
        memory = self._memory(slots)
        piece_bytes = PEER_PIECE_BYTES[self._options.kind]
        found = self._plane.send_peer(peer, lease_id, transfer_id, memory, piece_bytes)
        return Opened(piece_bytes, found.first_tags)

    async def received(self, lease_id: int, slots: Sequence[int], seconds: float) -> Received:
        opened = self._plane.opened(lease_id) if self._plane else None
        if opened is None:
            lost = LeaseLost(f"Lease {lease_id} has ended.", lease_id=lease_id)
            return Received(dict.fromkeys(slots, lost))
        opened.expect_no_arrival()
        late = [opened.slots[slot] for slot in slots if not opened.slots[slot].done()]
        if late:
            arrivals = [asyncio.wrap_future(each) for each in late]
            for arrival in arrivals:
                arrival.add_done_callback(_note)
            await asyncio.wait(arrivals, timeout=seconds)
        failed = {slot: self._failure(opened.slots[slot], seconds) for slot in slots}
        return Received({slot: error for slot, error in failed.items() if error is not None})

    async def cancel(self, lease_id: int) -> None:
        if self._plane is not None:
            done: Future[None] = self._plane.cancel(lease_id)
            if not done.done():
                await asyncio.wrap_future(done)

    async def close(self) -> None:
        for registration_id in list(self._clients):
            self.leave(registration_id)
        if self._plane is not None:
            await asyncio.to_thread(self._plane.engine.close, 2.0)

    async def started(self) -> UcxServerPlane:
        """Raises DataPathUnavailable, MissingExtra, ConfigError."""
        async with self._starting:
            if self._plane is None:
                self._plane = UcxServerPlane(await asyncio.to_thread(UcxEngine, self._options))
                await asyncio.to_thread(self._map_arena)
            return self._plane

    @staticmethod
    async def _connect(plane: UcxServerPlane, address: bytes, name: str) -> Peer:
        connecting = asyncio.ensure_future(asyncio.to_thread(plane.engine.connect, address, name))
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            # The client has given up; the connection that it asked for would stay for ever.
            connecting.add_done_callback(_close_late)
            raise

    def _map_arena(self) -> None:
        """This server writes into the arena itself now: no transfer shall wait for pages to be mapped."""
        self._arena.maps_ahead = True
        self._arena.prefault(self._arena.base, self._arena.allocated - self._arena.base)

    def _of(self, registration_id: int) -> tuple[UcxServerPlane, Peer]:
        client = self._clients.get(registration_id)
        if client is None or self._plane is None:
            raise TransferFailed("The client has no UCX connection any more.", path=self.name, cause="gone")
        return self._plane, client.peer

    def _arrived(self, registration_id: int, lease_id: int, whole: bool) -> None:
        """The client waits for the answer. Where it is no, it calls CommitStore, which tells more."""
        client = self._clients.get(registration_id)
        if client is None or self._plane is None:
            return
        committed = whole and self.publish(registration_id, lease_id)
        if committed:
            self._plane.forget(lease_id)
        ucx_arrival.answer(client.peer, lease_id, committed=committed)

    def _memory(self, slots: Sequence[SlotMemory]) -> list[ByteArray]:
        return [self._arena.array(slot.offset, slot.size) for slot in slots]

    def _failure(self, arrival: Future[None], seconds: float) -> KvwireError | None:
        if not arrival.done():
            # Only this wait is over: the transfer itself ends when its lease is cancelled.
            return TransferTimeout(
                f"The bytes did not arrive within {seconds:.1f} s.", path=self.name, seconds=f"{seconds:.1f}"
            )
        error = arrival.exception()
        if error is None or isinstance(error, KvwireError):
            return error
        return TransferFailed(f"The transfer failed: {error}.", path=self.name, cause=type(error).__name__)


def _note(arrival: asyncio.Future[None]) -> None:
    """Its error may come after everyone has stopped waiting."""
    if not arrival.cancelled():
        arrival.exception()


def _close_late(connecting: asyncio.Future[Peer]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


def _let_go(client: _Client) -> None:
    client.probe.cancel()
    client.peer.close()
