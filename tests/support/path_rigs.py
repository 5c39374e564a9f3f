"""A server's part in a transfer, played for each data path: it leases slots and says what is in them."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kvwire.errors import (
    TransferFailed,
)
from kvwire.transfer.arena import HEADER_BYTES
from kvwire.transfer.arena_path import InprocPath, ShmPath
from kvwire.transfer.base import Slot, Ticket, pieces
from kvwire.transfer.shm import LivenessLock, PrivateArena, SharedArena

MIB = 1 << 20
ARENA = 24 * MIB


class Rig:
    """One path between a client and a server's arena."""

    path = None
    piece_bytes = 0

    def __init__(self, stack, arena):
        self.arena = arena
        self._next = HEADER_BYTES
        self._leases = 0
        stack.callback(arena.close)
        stack.callback(arena.unlink)

    def places(self, sizes):
        places = []
        for size in sizes:
            places.append(self.arena.array(self._next, size))
            self._next += size
        return places

    def ticket(self, places, checksums, slots, first_tags=()):
        offsets = [
            int(place.ctypes.data) - int(self.arena.array(HEADER_BYTES, 1).ctypes.data) for place in places
        ]
        return Ticket(
            lease_id=self._leases,
            path=self.path.name,
            piece_bytes=self.piece_bytes,
            slots=tuple(
                Slot(
                    index=i,
                    chunk_index=chunk,
                    group_index=group,
                    size_bytes=place.size,
                    arena_offset=HEADER_BYTES + offsets[i],
                    first_tag=first_tags[i] if first_tags else 0,
                    checksum=checksums[i],
                )
                for i, ((chunk, group), place) in enumerate(zip(slots, places, strict=True))
            ),
        )

    def begin_store(self, slots, sizes):
        self._leases += 1
        places = self.places(sizes)
        first_tags = self.expect(places)
        return self.ticket(places, [b""] * len(slots), slots, first_tags), places

    def begin_retrieve(self, slots, places, checksums):
        self._leases += 1
        first_tags = self.offer(places)
        return self.ticket(places, checksums, slots, first_tags)

    def expect(self, places):
        return ()

    def offer(self, places):
        return ()

    def received(self, slot):
        """Raises when the slot's bytes have not arrived whole."""

    def end(self):
        """The lease ends."""


class ShmRig(Rig):
    def __init__(self, stack):
        super().__init__(stack, SharedArena.create(ARENA))
        self.arena.ensure(self.arena.size)
        lock = LivenessLock.create(self.arena.name)
        stack.callback(lock.close)
        self.path = ShmPath.open(self.arena.name, self.arena.nonce, lock.name, check_share=1.0)
        stack.callback(self.path.close)


class InprocRig(Rig):
    def __init__(self, stack):
        super().__init__(stack, PrivateArena.create(ARENA))
        self.arena.ensure(self.arena.size)
        self.path = InprocPath(self.arena)


class InlineRig(Rig):
    """The client library's inline path over a server in memory."""

    piece_bytes = 192 << 10

    def __init__(self, stack):
        from kvwire.client.inline import InlinePath

        super().__init__(stack, PrivateArena.create(ARENA))
        self.arena.ensure(self.arena.size)
        self._places = []
        self._done = []
        self.path = InlinePath(self, 1)

    def expect(self, places):
        self._places, self._done = places, [0] * len(places)
        return ()

    def offer(self, places):
        self._places = places
        return ()

    def received(self, slot):
        if self._done[slot] != self._places[slot].size:
            raise TransferFailed("incomplete")

    def write_chunks(self, requests, *, timeout):
        """In a thread of its own, as gRPC does it."""
        written = [0]

        def take():
            for request in requests:
                data = np.frombuffer(request.data, dtype=np.uint8)
                self._places[request.slot][request.offset : request.offset + len(data)] = data
                self._done[request.slot] += len(data)
                written[0] += len(data)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return written[0]

    def read_chunks(self, registration_id, lease_ids, *, timeout):
        for slot, place in enumerate(self._places):
            for start, stop in pieces(place.size, self.piece_bytes):
                yield SimpleNamespace(
                    lease_id=lease_ids[0], slot=slot, offset=start, data=place[start:stop].tobytes()
                )


class UcxRig(Rig):
    piece_bytes = 192 << 10

    def __init__(self, stack, kind, lanes=1):
        pytest.importorskip("ucxx")
        from kvwire.transfer.server_ucx import UcxServerPlane
        from kvwire.transfer.ucx import UcxEngine, UcxOptions
        from kvwire.transfer.ucx_path import UcxPath

        super().__init__(stack, PrivateArena.create(ARENA))
        self.arena.ensure(self.arena.size)
        devices = ("lo",) if kind == "remote" else ()
        self.server = UcxEngine(UcxOptions(kind, "server", devices, lanes=lanes))
        stack.callback(self.server.close)
        self.client = UcxEngine(UcxOptions(kind, "client", devices))
        stack.callback(self.client.close)
        self.plane = UcxServerPlane(self.server)
        self.peer = self.server.connect(self.client.address, "client")
        server = self.client.connect(self.server.address, "server")
        self.path = UcxPath(f"ucx-{kind}", self.client, server, check_share=1.0, staging_pieces=2)
        stack.callback(self.path.close)

    def expect(self, places):
        return self.plane.expect_store(self.peer, self._leases, places, self.piece_bytes).first_tags

    def offer(self, places):
        return self.plane.send_retrieve(self.peer, self._leases, places, self.piece_bytes).first_tags

    def received(self, slot):
        self.plane.opened(self._leases).slots[slot].result(5)

    def end(self):
        self.plane.cancel(self._leases).result(5)


class Beside:
    """A fill that says that other threads may run it."""

    threads = 2

    def __init__(self, fill):
        self._fill = fill

    def __call__(self, *args):
        return self._fill(*args)

    def __getattr__(self, name):
        return getattr(self._fill, name)


class AheadRig(UcxRig):
    """Pieces are gathered on another thread while one is sent."""

    def __init__(self, stack):
        super().__init__(stack, "remote")
        write = self.path.write
        self.path.write = lambda ticket, fill, deadline, **more: write(ticket, Beside(fill), deadline, **more)


RIGS = {
    "inproc": InprocRig,
    "shm": ShmRig,
    "inline": InlineRig,
    "ucx-local": lambda stack: UcxRig(stack, "local"),
    "ucx-remote": lambda stack: UcxRig(stack, "remote"),
    "ucx-ahead": AheadRig,
    "ucx-lanes": lambda stack: UcxRig(stack, "local", lanes=3),
}
