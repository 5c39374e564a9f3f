"""Retrieves layer by layer: the order of the copies, who is woken when, and what a closed watch keeps out."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from kvwire.client.layered import LayeredRead, LayeredWrite, LayerWatch, copy_by_layer
from kvwire.errors import TransferFailed, TransferTimeout
from kvwire.transfer.base import Slot, Ticket
from kvwire.transfer.pages import PageMover, pages_from_arrays

LAYERS, BLOCKS, PAGE, ROWS = 3, 8, 16, 2
OBJECT = LAYERS * ROWS * PAGE


class Rig:
    """Two tickets of one batch: objects of two blocks each, with layers that tell themselves apart."""

    def __init__(self, *, lends=True, deadline=None):
        self.layers = [np.zeros((BLOCKS, PAGE), np.uint8) for _ in range(LAYERS)]
        self.pages = pages_from_arrays(self.layers)
        self.log = []
        self.failures = []
        self.deadline = time.monotonic() + 10 if deadline is None else deadline
        self.lane = SimpleNamespace(
            path=SimpleNamespace(name="shm"),
            pages=[self.pages],
            is_layered=lends,
            drain=self.drain_of,
            fill=lambda task: PageMover([self.pages], task.blocks).fill,
        )

    def drain_of(self, task):
        mover = PageMover([self.pages], task.blocks)

        def drain(slot, start, stop, data):
            self.log.append((start // (ROWS * PAGE), task.name, slot.chunk_index))
            mover.drain(slot, start, stop, data)

        return drain

    def write(self, blocks):
        """A store while the engine computes: its watch is told of layers by the test."""
        slots = tuple(Slot(i, chunk, 0, OBJECT) for i, chunk in enumerate(blocks))
        task = SimpleNamespace(name="w", blocks={(c, 0): ids for c, ids in blocks.items()})
        ticket = Ticket(1, "shm", slots)
        return LayeredWrite(self.lane, task, LayerWatch(LAYERS, 1), ticket, self.deadline)

    def compute(self, layer, watch):
        self.layers[layer][:] = layer + 1
        watch.arrived(layer, 1)

    def read(self, name, blocks):
        slots = tuple(Slot(i, chunk, 0, OBJECT) for i, chunk in enumerate(blocks))
        watch = LayerWatch(LAYERS, len(slots))
        task = SimpleNamespace(name=name, watch=watch, blocks={(c, 0): ids for c, ids in blocks.items()})
        return LayeredRead(self.lane, task, watch, Ticket(1, "shm", slots), self.deadline)

    def failed(self, task, ticket, slot, error):
        self.failures.append((task.name, slot.chunk_index, error))


def content(chunk):
    return np.random.default_rng(chunk).integers(1, 256, OBJECT, np.uint8)


def hand_out(read, *, pieces=1):
    for slot in read.ticket.slots:
        data = content(slot.chunk_index)
        for part in range(pieces):
            start, stop = OBJECT * part // pieces, OBJECT * (part + 1) // pieces
            read.mover(slot, start, stop, data[start:stop])


def assert_moved(rig, chunk, blocks):
    for layer, rows in enumerate(content(chunk).reshape(LAYERS, ROWS, PAGE)):
        assert np.array_equal(rig.layers[layer][list(blocks)], rows)


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_layer_of_all_objects_comes_before_the_next_layer(pieces):
    """Also where the path hands an object out in pieces that do not end where layers do."""
    rig = Rig()
    one, two = rig.read("one", {0: (1, 3), 1: (2, 7)}), rig.read("two", {5: (6, 0)})
    for read in (one, two):
        hand_out(read, pieces=pieces)
        read.settle([slot.index for slot in read.ticket.slots])
    assert not rig.log
    copy_by_layer([one, two], rig.failed)
    assert [layer for layer, *_ in rig.log] == sorted(layer for layer, *_ in rig.log)
    assert {(name, chunk) for layer, name, chunk in rig.log if layer == 0} == {
        *(("one", 0), ("one", 1), ("two", 5))
    }
    for chunk, blocks in ((0, (1, 3)), (1, (2, 7)), (5, (6, 0))):
        assert_moved(rig, chunk, blocks)
    assert not rig.failures
    assert one.watch.has(LAYERS - 1)
    assert two.watch.has(LAYERS - 1)


def test_objects_that_could_not_be_read_are_not_copied_and_their_layers_never_arrive():
    rig = Rig()
    read = rig.read("one", {0: (1, 3), 1: (2, 7)})
    hand_out(read)
    read.settle([0])
    copy_by_layer([read], rig.failed)
    assert_moved(rig, 0, (1, 3))
    assert not any(layer[[2, 7]].any() for layer in rig.layers)
    assert not read.watch.has(0)


def test_a_copy_that_fails_fails_its_object_and_no_other_one():
    rig = Rig()
    read = rig.read("one", {0: (1, 3), 1: (BLOCKS, 7)})
    hand_out(read)
    read.settle([0, 1])
    copy_by_layer([read], rig.failed)
    assert [(name, chunk) for name, chunk, _error in rig.failures] == [("one", 1)]
    assert_moved(rig, 0, (1, 3))
    assert not read.watch.has(0)


def test_after_the_deadline_nothing_is_copied():
    rig = Rig(deadline=0.0)
    read = rig.read("one", {0: (1, 3)})
    hand_out(read)
    read.settle([0])
    copy_by_layer([read], rig.failed)
    assert isinstance(rig.failures[0][2], TransferTimeout)
    assert not rig.log


def test_a_path_that_lends_nothing_is_copied_at_once_and_arrives_as_a_whole():
    rig = Rig(lends=False)
    read = rig.read("one", {0: (1, 3), 1: (2, 7)})
    hand_out(read)
    assert_moved(rig, 1, (2, 7))
    assert not read.watch.has(0)
    read.settle([0, 1])
    copy_by_layer([read], rig.failed)
    assert read.watch.has(LAYERS - 1)
    assert len(rig.log) == 2


@pytest.mark.parametrize("lends", [True, False])
def test_a_closed_watch_keeps_late_bytes_out(lends):
    """The engine has given the blocks to somebody else."""
    rig = Rig(lends=lends)
    read = rig.read("one", {0: (1, 3)})
    read.watch.close()
    if lends:
        hand_out(read)
        read.settle([0])
        copy_by_layer([read], rig.failed)
        assert len(rig.failures) == 1
    else:
        with pytest.raises(TransferFailed, match="withdrawn"):
            hand_out(read)
    assert not any(layer.any() for layer in rig.layers)


def test_closing_waits_for_the_copy_that_runs():
    watch = LayerWatch(1, 1)
    copying, may_end, closed = threading.Event(), threading.Event(), threading.Event()

    def copy():
        with watch.writing():
            copying.set()
            may_end.wait(10)

    def close():
        watch.close()
        closed.set()

    threads = [threading.Thread(target=copy), threading.Thread(target=close)]
    threads[0].start()
    assert copying.wait(10)
    threads[1].start()
    assert not closed.wait(0.05)
    may_end.set()
    assert closed.wait(10)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("event", "there", "within"),
    [
        (lambda watch: watch.arrived(0, 2), True, 10),
        (lambda watch: watch.end(), False, 10),
        (lambda watch: watch.close(), False, 10),
        # These decide nothing: the deadline does.
        (lambda watch: watch.arrived(0, 1), False, 0.05),
        (lambda watch: watch.arrived(1, 2), False, 0.05),
    ],
)
def test_who_waits_for_a_layer_is_woken_by_what_decides_it(event, there, within):
    watch = LayerWatch(2, 2)
    decider = threading.Thread(target=event, args=(watch,))
    decider.start()
    begin = time.monotonic()
    assert watch.wait_for(0, begin + within) is there
    assert time.monotonic() - begin < 9
    decider.join()


@pytest.mark.parametrize("lends", [True, False])
def test_a_store_takes_each_layer_after_it_is_computed(lends):
    rig = Rig(lends=lends)
    write = rig.write({0: (1, 3), 1: (2, 7)})
    arena = np.zeros((2, LAYERS, ROWS * PAGE), np.uint8)

    def store():
        for slot in write.ticket.slots:
            write.mover(slot, 0, OBJECT, arena[slot.index].reshape(-1))
        write.settle([0, 1])
        copy_by_layer([write], rig.failed)

    storing = threading.Thread(target=store)
    storing.start()
    for layer in range(LAYERS):
        assert not arena[:, layer:].any()
        rig.compute(layer, write.watch)
        deadline = time.monotonic() + 10
        while lends and not arena[:, layer].all() and time.monotonic() < deadline:
            time.sleep(0.001)
    storing.join()
    assert (arena == np.arange(1, LAYERS + 1)[None, :, None]).all()
    assert not rig.failures


@pytest.mark.parametrize("lends", [True, False])
def test_a_store_of_a_layer_that_never_comes_fails(lends):
    rig = Rig(lends=lends, deadline=time.monotonic() + 0.05)
    write = rig.write({0: (1, 3)})
    rig.compute(0, write.watch)
    slot = write.ticket.slots[0]
    place = np.zeros(OBJECT, np.uint8)
    if not lends:
        with pytest.raises(TransferTimeout):
            write.mover(slot, 0, OBJECT, place)
        return
    write.mover(slot, 0, OBJECT, place)
    write.settle([0])
    copy_by_layer([write], rig.failed)
    assert [chunk for _name, chunk, _error in rig.failures] == [0]
