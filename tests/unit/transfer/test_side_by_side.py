"""Slots of one transfer in several threads."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from kvwire.transfer.arena import PrivateArena
from kvwire.transfer.arena_path import InprocPath
from kvwire.transfer.base import Slot, Ticket
from kvwire.transfer.checksum import checksum
from kvwire.transfer.crew import SPLIT_BYTES, crew

SIZE = SPLIT_BYTES


class Mover:
    """Moves slot i from or to `data[i]`, and notes on which threads."""

    def __init__(self, data, threads):
        self.data = data
        self.threads = threads
        self.seen: set[int] = set()
        self.side_by_side = threading.Barrier(threads)

    def __call__(self, slot, start, stop, part):
        if slot.index < self.threads and start == 0:
            self.side_by_side.wait(10)  # broken, if they come one after the other
        self.seen.add(threading.get_ident())
        self.move(self.data[slot.index][start:stop], part)


class Fill(Mover):
    def move(self, mine, part):
        part[:] = mine


class Drain(Mover):
    def move(self, mine, part):
        mine[:] = part


@pytest.fixture
def path():
    arena = PrivateArena.create(8 * SIZE)
    arena.ensure(arena.size)
    yield InprocPath(arena)
    arena.close()


def ticket_of(path, data, checksums=None):
    base = path._arena.base
    slots = [
        Slot(i, i, 0, each.size, base + i * SIZE, checksum=checksums[i] if checksums else b"")
        for i, each in enumerate(data)
    ]
    return Ticket(1, path.name, tuple(slots))


def random_data(count):
    return [np.random.default_rng(i).integers(0, 256, SIZE, np.uint8) for i in range(count)]


@pytest.mark.parametrize(("count", "threads"), [(2, 2), (5, 2), (3, 3), (7, 3)])
@pytest.mark.parametrize("with_checksum", [False, True])
def test_every_slot_comes_and_comes_back_in_the_order_of_the_ticket(path, count, threads, with_checksum):
    data = random_data(count)
    fill = Fill(data, threads)
    results = path.write(ticket_of(path, data), fill, time.monotonic() + 20, with_checksum=with_checksum)
    assert [each.index for each in results] == list(range(count))
    assert all(each.ok for each in results)
    if with_checksum:
        assert [each.checksum for each in results] == [checksum(each) for each in data]
    assert len(fill.seen) == threads
    back = Drain([np.zeros_like(each) for each in data], threads)
    ticket = ticket_of(path, data, [checksum(each) for each in data])
    assert all(each.ok for each in path.read(ticket, back, time.monotonic() + 20))
    assert all((one == other).all() for one, other in zip(back.data, data, strict=True))


def test_a_mover_that_fails_fails_its_own_slot(path):
    data = random_data(4)

    class Broken(Fill):
        def move(self, mine, part):
            if (mine[:9] == data[1][:9]).all():
                raise OSError("no")
            part[:] = mine

    results = path.write(ticket_of(path, data), Broken(data, 2), time.monotonic() + 20)
    assert [each.ok for each in results] == [True, False, True, True]


def test_a_deadline_that_has_passed_moves_nothing(path):
    data = random_data(4)
    fill = Fill(data, 2)
    results = path.write(ticket_of(path, data), fill, time.monotonic() - 1)
    assert not any(each.ok for each in results)
    assert not fill.seen


def test_one_who_does_not_say_how_many_is_called_by_one(path):
    data = random_data(3)
    seen = set()

    def fill(slot, start, stop, out):
        seen.add(threading.get_ident())
        out[:] = data[slot.index][start:stop]

    assert all(each.ok for each in path.write(ticket_of(path, data), fill, time.monotonic() + 20))
    assert seen == {threading.get_ident()}


def test_who_is_at_work_is_known():
    inside = []
    crew.run([lambda: inside.append(crew.is_at_work)] * 3)
    assert inside == [True] * 3
    assert not crew.is_at_work


def test_nobody_is_at_work_after_a_failure():
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        crew.run([fail, fail])
    assert not crew.is_at_work
    inside = []
    crew.run([lambda: inside.append(threading.get_ident())] * 4)
    assert len(inside) == 4
