"""What every data path owes its callers, on each of them.

A `Rig` plays the server's part: it leases slots in an arena and says what is in them.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

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
from kvwire.transfer.checksum import checksum
from kvwire.transfer.pages import PageMover, pages_from_arrays
from support.path_rigs import RIGS

pytestmark = [pytest.mark.leakcheck("shm", "fds", "threads"), pytest.mark.timeout(120)]


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
