"""A store that is committed by a message: what the server hears, and when."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from kvwire.transfer import tags
from kvwire.transfer.base import Mark, Slot, Ticket
from kvwire.transfer.tags import Kind

pytest.importorskip("ucxx")

from kvwire.transfer import ucx_arrival
from kvwire.transfer.server_ucx import UcxServerPlane
from kvwire.transfer.ucx import UcxEngine, UcxOptions
from kvwire.transfer.ucx_path import UcxPath

pytestmark = pytest.mark.timeout(60)

PIECE = 64 << 10
LEASE = 7


class Sides:
    """A server's plane and a client's path, in one process. `said` is what the server is told."""

    def __init__(self, stack, kind, lanes=1):
        devices = ("lo",) if kind == "remote" else ()
        server = UcxEngine(UcxOptions(kind, "server", devices, lanes=lanes))
        stack.callback(server.close)
        self.client = UcxEngine(UcxOptions(kind, "client", devices))
        stack.callback(self.client.close)
        self.plane = UcxServerPlane(server)
        self.to_client = server.connect(self.client.address, "client")
        self.to_server = self.client.connect(server.address, "server")
        self.path = UcxPath(f"ucx-{kind}", self.client, self.to_server)
        stack.callback(self.path.close)
        self.places = [np.zeros(3 * PIECE + 5, np.uint8), np.zeros(PIECE, np.uint8)]
        random = np.random.default_rng(1)
        self.data = [random.integers(0, 256, place.size, np.uint8) for place in self.places]
        self.said: list[bool] = []
        self.heard = threading.Event()

    def open(self, answers=None):
        """Expect a store; `answers` is what the client is told when all is there, None: nothing."""

        def arrived(whole):
            self.said.append(whole)
            if answers is not None:
                ucx_arrival.answer(self.to_client, LEASE, committed=answers)
            self.heard.set()

        self.opened = self.plane.expect_store(self.to_client, LEASE, self.places, PIECE, arrived)
        sizes = zip(self.opened.first_tags, self.places, strict=True)
        slots = tuple(Slot(i, i, 0, place.size, first_tag=tag) for i, (tag, place) in enumerate(sizes))
        return Ticket(LEASE, self.path.name, slots, PIECE, 30.0, self.opened.word)

    def fill(self, slot, start, stop, out):
        out[:] = self.data[slot.index][start:stop]

    def write(self, ticket):
        assert all(each.ok for each in self.path.write(ticket, self.fill, time.monotonic() + 20))

    def say(self, ticket):
        self.to_server.send(tags.encode(Kind.STORE, LEASE, ticket.arrival_word), ucx_arrival.message())

    def settled(self):
        """Both engines have done all that they were told so far."""
        self.client.connect(self.plane.engine.address).close()
        self.plane.engine.connect(self.client.address).close()

    @property
    def lane(self):
        return self.plane.engine._lanes[0].state


@pytest.fixture(params=["local", "remote"])
def sides(request):
    with ExitStack() as stack:
        yield Sides(stack, request.param)


def wait_until(check, seconds=10.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_store_is_published_by_a_message(sides):
    ticket = sides.open(answers=True)
    assert ticket.arrival_word == 5  # behind the last piece
    mark = sides.path.mark()
    sides.write(ticket)
    assert sides.path.publish(ticket, mark)
    assert sides.said == [True]
    assert all((place == data).all() for place, data in zip(sides.places, sides.data, strict=True))


class Asked:
    """A fill that is asked whether all may be published."""

    def __init__(self, sides, answer, fails_at=-1):
        self.sides, self.answer, self.fails_at, self.times = sides, answer, fails_at, 0

    def __call__(self, slot, start, stop, out):
        if slot.index == self.fails_at:
            raise OSError("no")
        self.sides.fill(slot, start, stop, out)

    def complete(self):
        self.times += 1
        return self.answer


def test_it_is_said_with_the_last_piece_where_that_is_allowed(sides):
    ticket = sides.open(answers=True)
    mark = sides.path.mark()
    fill = Asked(sides, answer=True)
    assert all(each.ok for each in sides.path.write(ticket, fill, time.monotonic() + 20))
    assert sides.heard.wait(10)
    assert sides.path.publish(ticket, mark)
    assert (fill.times, sides.said) == (1, [True])
    assert not sides.path._said


@pytest.mark.parametrize(
    "asked", [{"answer": False}, {"answer": True, "fails_at": 1}], ids=["withdrawn", "incomplete"]
)
def test_it_is_not_said_where_that_is_not_allowed(sides, asked):
    ticket = sides.open(answers=True)
    sides.path.write(ticket, Asked(sides, **asked), time.monotonic() + 20)
    assert not sides.heard.wait(0.2)
    assert not sides.path._said
    sides.plane.cancel(LEASE).result(5)


def test_near_the_end_of_the_time_it_is_left_to_publish(sides):
    ticket = sides.open(answers=True)
    fill = Asked(sides, answer=True)
    assert all(each.ok for each in sides.path.write(ticket, fill, time.monotonic() + 0.9))
    assert fill.times == 0


def test_a_piece_that_fails_behind_it_leaves_it_to_a_call(sides, monkeypatch):
    """Said too soon: the server waits for what does not come, and is asked by a call."""
    ticket = sides.open()
    last = sides.to_server.send

    def send(tag, buffer):
        if tag == ticket.slots[1].first_tag:
            return last(tag, buffer[:9])  # the server takes it for a failure
        return last(tag, buffer)

    monkeypatch.setattr(type(sides.to_server), "send", lambda _peer, tag, buffer: send(tag, buffer))
    monkeypatch.setattr("kvwire.transfer.ucx_path.ANSWER_S", 0.2)
    mark = sides.path.mark()
    sides.path.write(ticket, Asked(sides, answer=True), time.monotonic() + 20)
    assert not sides.path.publish(ticket, mark)
    assert sides.said == [False]


def test_what_nobody_asks_for_is_forgotten(sides, monkeypatch):
    monkeypatch.setattr("kvwire.transfer.ucx_path.MOST_SAID", 3)
    for lease in range(1, 9):
        sides.path._say(Ticket(lease, sides.path.name, (), PIECE, 30.0, 1))
    assert len(sides.path._said) == 3


def test_over_several_lanes():
    with ExitStack() as stack:
        sides = Sides(stack, "local", lanes=3)
        ticket = sides.open(answers=True)
        mark = sides.path.mark()
        sides.write(ticket)
        assert sides.path.publish(ticket, mark)


def test_an_arrival_that_is_refused_is_none(sides):
    ticket = sides.open(answers=False)
    mark = sides.path.mark()
    sides.write(ticket)
    assert not sides.path.publish(ticket, mark)


def test_an_arrival_before_the_pieces_waits_for_them(sides):
    ticket = sides.open()
    sides.say(ticket)
    wait_until(sides.opened.arrival.ending.done)
    assert sides.said == []
    sides.write(ticket)
    assert sides.heard.wait(10)
    assert sides.said == [True]
    assert all((place == data).all() for place, data in zip(sides.places, sides.data, strict=True))


def test_a_piece_of_another_length_is_no_whole_store(sides):
    ticket = sides.open(answers=False)
    for slot, data in zip(ticket.slots, sides.data, strict=True):
        for i, start in enumerate(range(0, slot.size_bytes, PIECE)):
            part = data[start : start + PIECE]
            sides.to_server.send(slot.first_tag + i, part[:100] if slot.index and not i else part)
    sides.say(ticket)
    assert sides.heard.wait(10)
    assert sides.said == [False]


def test_a_server_without_words_is_asked_by_a_call(sides):
    """As one of the version before: its tickets have none, and it hears nothing."""
    opened = sides.plane.expect_store(sides.to_client, LEASE, sides.places, PIECE)
    assert opened.word == 0
    ticket = Ticket(LEASE, sides.path.name, (), PIECE, 30.0, opened.word)
    assert not sides.path.publish(ticket, sides.path.mark())


def test_an_answer_that_does_not_come_is_given_up_and_a_late_one_harms_nobody(sides, monkeypatch):
    monkeypatch.setattr("kvwire.transfer.ucx_path.ANSWER_S", 0.2)
    ticket = sides.open()
    mark = sides.path.mark()
    sides.write(ticket)
    assert not sides.path.publish(ticket, mark)
    assert sides.heard.wait(10)
    ucx_arrival.answer(sides.to_client, LEASE, committed=True)
    buffer = np.zeros(100, np.uint8)
    waiting = sides.client.recv(tags.encode(Kind.RETRIEVE, LEASE + 1), buffer)
    sides.to_client.send(tags.encode(Kind.RETRIEVE, LEASE + 1), np.ones(100, np.uint8)).ending.result(5)
    waiting.ending.result(5)
    assert buffer.all()


def test_nothing_is_said_when_the_time_of_the_lease_is_up(sides):
    ticket = sides.open(answers=True)
    sides.write(ticket)
    assert not sides.path.publish(ticket, Mark(time.monotonic() - ticket.seconds + 0.5))
    assert not sides.heard.wait(0.1)


def test_a_lost_server_is_no_reason_to_wait(sides):
    ticket = sides.open()
    mark = sides.path.mark()
    sides.write(ticket)
    sides.path.give_up()
    sides.settled()
    assert not sides.path.publish(ticket, mark)


def test_a_client_that_never_says_it_leaves_nothing_behind(sides):
    """Clients of the version before commit all their stores by calls: thousands of them."""
    for _ in range(20):
        ticket = sides.open()
        sides.write(ticket)
        for slot in sides.opened.slots:
            slot.result(5)
        sides.opened.expect_no_arrival()
        assert sides.plane.cancel(LEASE).done()
        sides.settled()
    assert not sides.lane._wanted
    assert not sides.lane._discards
    assert sides.said == []


def test_an_arrival_for_a_lease_that_has_ended_is_dropped(sides):
    ticket = sides.open(answers=True)
    sides.write(ticket)
    sides.plane.cancel(LEASE).result(5)
    sides.say(ticket)
    sides.settled()
    assert not sides.heard.wait(0.2)
    assert sides.lane._look(0, sides.lane._any) is None


def test_a_lease_with_as_many_pieces_as_there_are_tags_has_no_word(sides, monkeypatch):
    monkeypatch.setattr("kvwire.transfer.tags.MAX_PIECE", 4)
    opened = sides.plane.expect_store(sides.to_client, LEASE, sides.places, PIECE, lambda _whole: None)
    assert opened.word == 0
    assert opened.arrival is None
    sides.plane.cancel(LEASE).result(5)
