"""What every data path owes its callers, on each of them.

A `Rig` plays the server's part: it leases slots in an arena and says what is in them.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from kvwire.errors import (
    ChecksumMismatch,
    DataPathUnavailable,
    InvalidArgument,
    TransferFailed,
    TransferTimeout,
)
from kvwire.transfer import tags
from kvwire.transfer.arena import HEADER_BYTES
from kvwire.transfer.arena_path import InprocPath, ShmPath
from kvwire.transfer.base import Slot, Ticket, pieces
from kvwire.transfer.checksum import checksum
from kvwire.transfer.pages import PageMover, pages_from_arrays
from kvwire.transfer.shm import LivenessLock, PrivateArena, SharedArena

pytestmark = [pytest.mark.leakcheck("shm", "fds", "threads"), pytest.mark.timeout(120)]

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


@pytest.fixture(params=RIGS)
def rig(request):
    with ExitStack() as stack:
        yield RIGS[request.param](stack)


@pytest.fixture(params=["ucx-local", "ucx-remote", "ucx-ahead", "ucx-lanes"])
def ucx_rig(request):
    with ExitStack() as stack:
        yield RIGS[request.param](stack)


def soon(seconds=20.0):
    return time.monotonic() + seconds


def random_pages(layers, blocks, page, seed):
    return list(np.random.default_rng(seed).integers(0, 256, (layers, blocks, page), dtype=np.uint8))


class Kv:
    """Two KV groups of one worker, of different shape, and a chunk layout over shuffled blocks."""

    def __init__(self, page=4096, blocks_per_chunk=5, chunks=3):
        self.layers = [random_pages(3, 64, page, 1), random_pages(2, 64, page // 2 + 1, 2)]
        self.pages = [pages_from_arrays(layers) for layers in self.layers]
        ids = np.random.default_rng(3).permutation(64)
        self.blocks = {}
        for chunk in range(chunks):
            for group in range(2):
                first = (2 * chunk + group) * blocks_per_chunk
                self.blocks[chunk, group] = ids[first : first + blocks_per_chunk].tolist()
        self.slots = sorted(self.blocks)
        self.sizes = [self.pages[group].block_bytes * blocks_per_chunk for _, group in self.slots]
        self.mover = PageMover(self.pages, self.blocks)

    def object(self, slot):
        out = np.zeros(self.sizes[self.slots.index(slot)], dtype=np.uint8)
        self.pages[slot[1]].gather_into(self.blocks[slot], out)
        return out

    def snapshot(self):
        return [[layer.copy() for layer in layers] for layers in self.layers]

    def clear(self):
        for layers in self.layers:
            for layer in layers:
                layer[:] = 0xEE


def store(rig, kv, **options):
    ticket, places = rig.begin_store(kv.slots, kv.sizes)
    results = rig.path.write(ticket, kv.mover.fill, soon(), **options)
    return ticket, places, results


def stored(rig, kv):
    """What is stored, and its checksums."""
    _, places, results = store(rig, kv)
    assert [result.error for result in results] == [None] * len(kv.slots)
    for slot in range(len(kv.slots)):
        rig.received(slot)
    rig.end()
    return places, [checksum(place) for place in places]


@pytest.mark.parametrize(("page", "blocks"), [(4096, 5), (1, 1), (65536, 7), (98304, 3)])
def test_round_trip_of_shuffled_blocks(rig, page, blocks):
    kv = Kv(page, blocks)
    expected = [kv.object(slot) for slot in kv.slots]
    places, checksums = stored(rig, kv)
    for place, bytes_ in zip(places, expected, strict=True):
        assert (place == bytes_).all()
    before = kv.snapshot()
    kv.clear()
    ticket = rig.begin_retrieve(kv.slots, places, checksums)
    results = rig.path.read(ticket, kv.mover.drain, soon())
    rig.end()
    assert [(result.index, result.error) for result in results] == [(i, None) for i in range(len(kv.slots))]
    for group, layers in enumerate(kv.layers):
        used = sorted({block for (_, g), ids in kv.blocks.items() if g == group for block in ids})
        for layer, old in zip(layers, before[group], strict=True):
            assert (layer[used] == old[used]).all()
            assert (np.delete(layer, used, axis=0) == 0xEE).all()


def test_bl23_only_the_missing_blocks_are_written(rig):
    kv = Kv()
    places, checksums = stored(rig, kv)
    before = kv.snapshot()
    kv.clear()
    wanted = {slot: [None, *ids[1:3], None, ids[4]] for slot, ids in kv.blocks.items()}
    ticket = rig.begin_retrieve(kv.slots, places, checksums)
    results = rig.path.read(ticket, PageMover(kv.pages, wanted).drain, soon())
    rig.end()
    assert all(result.ok for result in results)
    for group, layers in enumerate(kv.layers):
        used = sorted({i for (_, g), ids in wanted.items() if g == group for i in ids if i is not None})
        for layer, old in zip(layers, before[group], strict=True):
            assert (layer[used] == old[used]).all()
            assert (np.delete(layer, used, axis=0) == 0xEE).all()


def test_checksum_while_writing(rig):
    kv = Kv()
    _, _, results = store(rig, kv, with_checksum=True)
    assert [result.checksum for result in results] == [checksum(kv.object(slot)) for slot in kv.slots]
    for slot in range(len(kv.slots)):
        rig.received(slot)
    rig.end()


def test_damaged_object_fails_alone(rig):
    kv = Kv()
    places, checksums = stored(rig, kv)
    places[2][77] ^= 1
    ticket = rig.begin_retrieve(kv.slots, places, checksums)
    results = rig.path.read(ticket, kv.mover.drain, soon())
    rig.end()
    assert isinstance(results[2].error, ChecksumMismatch)
    assert [result.index for result in results if result.ok] == [0, 1, 3, 4, 5]


def test_fill_that_fails_fails_its_own_slot(rig):
    kv = Kv()

    def fill(slot, start, stop, out):
        if slot.index == 1:
            raise InvalidArgument("block_ids", "a block without an id cannot be stored")
        kv.mover.fill(slot, start, stop, out)

    ticket, places = rig.begin_store(kv.slots, kv.sizes)
    results = rig.path.write(ticket, fill, soon())
    assert isinstance(results[1].error, InvalidArgument)
    good = [0, 2, 3, 4, 5]
    assert [result.index for result in results if result.ok] == good
    for slot in good:
        rig.received(slot)
        assert (places[slot] == kv.object(kv.slots[slot])).all()
    rig.end()


def test_drain_that_fails_fails_its_own_slot_and_the_next_read_works(rig):
    kv = Kv()
    places, checksums = stored(rig, kv)

    def drain(slot, start, stop, data):
        if slot.index in {0, 3}:
            raise ValueError("blocks are gone")
        kv.mover.drain(slot, start, stop, data)

    ticket = rig.begin_retrieve(kv.slots, places, checksums)
    results = rig.path.read(ticket, drain, soon())
    rig.end()
    assert [result.index for result in results if result.ok] == [1, 2, 4, 5]
    assert "blocks are gone" in str(results[0].error)
    ticket = rig.begin_retrieve(kv.slots, places, checksums)
    assert all(result.ok for result in rig.path.read(ticket, kv.mover.drain, soon()))
    rig.end()


def test_deadline_that_has_passed(rig):
    kv = Kv()
    places, checksums = stored(rig, kv)
    ticket = rig.begin_retrieve(kv.slots, places, checksums)
    results = rig.path.read(ticket, kv.mover.drain, time.monotonic() - 1)
    if rig.path.name != "inline":  # there gRPC itself watches the deadline
        assert all(isinstance(result.error, TransferTimeout) for result in results)
    rig.end()
    ticket, _ = rig.begin_store(kv.slots, kv.sizes)
    results = rig.path.write(ticket, kv.mover.fill, time.monotonic() - 1)
    assert all(isinstance(result.error, (TransferTimeout, TransferFailed)) for result in results)
    rig.end()
    stored(rig, kv)


def test_object_of_another_size_than_here(rig):
    kv = Kv()
    ticket, _ = rig.begin_store(kv.slots[:2], [kv.sizes[0] - 1, kv.sizes[1]])
    results = rig.path.write(ticket, kv.mover.fill, soon())
    assert isinstance(results[0].error, TransferFailed)
    assert results[1].ok
    rig.end()


def test_closed_path_is_dead(rig):
    if rig.path.name == "inline":
        pytest.skip("the connection belongs to the client")
    kv = Kv()
    ticket, _ = rig.begin_store(kv.slots, kv.sizes)
    rig.path.close()
    wait_until(lambda: rig.path.name in {"shm", "inproc"} or rig.path._peer.lost)
    with pytest.raises(DataPathUnavailable):
        rig.path.write(ticket, kv.mover.fill, soon())
    with pytest.raises(DataPathUnavailable):
        rig.path.read(ticket, kv.mover.drain, soon())


def wait_until(condition):
    deadline = soon(5)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_two_threads_use_one_path(rig):
    if rig.path.name == "inline":
        pytest.skip("the server in memory knows one lease at a time")
    kv = Kv(65536, 3)
    places, checksums = stored(rig, kv)
    reading = rig.begin_retrieve(kv.slots, places, checksums)
    read_lease = rig._leases
    writing, new_places = rig.begin_store(kv.slots, kv.sizes)
    other = Kv(65536, 3)
    results = {}
    threads = [
        threading.Thread(
            target=lambda: results.update(read=rig.path.read(reading, other.mover.drain, soon()))
        ),
        threading.Thread(target=lambda: results.update(write=rig.path.write(writing, kv.mover.fill, soon()))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result.ok for each in results.values() for result in each)
    for slot, place in zip(kv.slots, new_places, strict=True):
        rig.received(kv.slots.index(slot))
        assert (place == kv.object(slot)).all()
    rig.end()
    if hasattr(rig, "plane"):
        rig.plane.cancel(read_lease).result(5)


def test_message_of_another_length_fails_its_slot(ucx_rig):
    kv = Kv()
    ticket, places = ucx_rig.begin_store(kv.slots[:1], kv.sizes[:1])
    places[0][:] = 7
    first = ticket.slots[0].first_tag
    wrong = np.zeros(kv.sizes[0] - 1, dtype=np.uint8)
    ucx_rig.path._peer.send(first, wrong)
    with pytest.raises(TransferFailed, match="bytes came"):
        ucx_rig.received(0)
    assert (places[0] == 7).all()
    ucx_rig.end()


def test_server_that_sends_nothing_is_a_timeout_and_the_staging_memory_is_whole_again(ucx_rig):
    kv = Kv()
    places, checksums = stored(ucx_rig, kv)
    ucx_rig._leases += 1
    made_up = tags.first_tags(tags.Kind.RETRIEVE, ucx_rig._leases, kv.sizes, ucx_rig.piece_bytes)
    ticket = ucx_rig.ticket(places, checksums, kv.slots, made_up)
    began = time.monotonic()
    results = ucx_rig.path.read(ticket, kv.mover.drain, soon(0.3))
    assert time.monotonic() - began < 3
    assert all(isinstance(result.error, TransferTimeout) for result in results)
    ticket = ucx_rig.begin_retrieve(kv.slots, places, checksums)
    assert all(result.ok for result in ucx_rig.path.read(ticket, kv.mover.drain, soon()))
    ucx_rig.end()


def test_client_that_has_gone_fails_what_the_server_waits_for(ucx_rig):
    kv = Kv()
    ucx_rig.begin_store(kv.slots, kv.sizes)
    ucx_rig.peer.mark_gone()
    with pytest.raises(TransferFailed, match="lost"):
        ucx_rig.received(0)
    ucx_rig.end()
