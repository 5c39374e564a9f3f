"""Asking coordinators where chunks are: the first good answer within the deadline, or what is known."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvwire.server.peers import directory as directory_module
from kvwire.server.peers.directory import PATIENCE, Directory
from kvwire.server.peers.hints import Hints
from kvwire.v1 import coordinator_service_pb2 as pb

A, B = ("a", b"1" * 16), ("b", b"2" * 16)
KEYS = [bytes([number]) * 32 for number in range(3)]


class Coordinator:
    """Knows `places` by key. `delay` None: never answers."""

    def __init__(self, places=None, delay: float | None = 0.0, error: Exception | None = None) -> None:
        self.places = places or {}
        self.delay = delay
        self.error = error
        self.asked = 0

    async def LocateChunks(self, request, **_call):
        self.asked += 1
        if self.error is not None:
            raise self.error
        if self.delay is None:
            await asyncio.sleep(60)
        await asyncio.sleep(self.delay)
        reply = pb.LocateChunksResponse()
        for key in request.chunk_keys.keys:
            chunk = reply.chunks.add(chunk_key=key)
            for name, incarnation, tier in self.places.get(key, ()):
                chunk.placements.add(server_id=name, incarnation=incarnation, tier=tier)
        return reply


def made(*stubs, seconds=20.0, knows=lambda _place: True):
    return Directory(lambda: list(stubs), knows, Hints(), seconds)


def locate(directory, keys=KEYS):
    return asyncio.run(directory.locate(keys, time.monotonic() + 5))


def known(places):
    return {key: [(*place, 1) for place in there] for key, there in zip(KEYS, places, strict=False)}


def test_places_in_memory_are_told_in_the_order_of_the_keys():
    coordinator = Coordinator({KEYS[0]: [(*A, 1), (*B, 2)], KEYS[2]: [(*B, 1)]})
    asked = made(coordinator)
    assert locate(asked) == [(A,), (), (B,)]
    counters = asked.counters
    assert (counters.questions, counters.failures) == (1, 0)
    assert (counters.asked_chunks, counters.located_chunks) == (3, 2)


def test_runs_that_are_not_known_are_left_out():
    asked = made(Coordinator(known([(A, B), (B,)])), knows=lambda place: place == A)
    assert locate(asked) == [(A,), (), ()]


@pytest.mark.parametrize("bad", [None, "fails"], ids=["hangs", "fails"])
def test_the_next_one_is_asked_and_stays_the_first(bad, monkeypatch):
    monkeypatch.setattr(directory_module, "HEDGE_SHARE", 0.001)
    first = Coordinator(delay=None) if bad is None else Coordinator(error=OSError("away"))
    second = Coordinator(known([(A,)]))
    asked = made(first, second)

    async def twice():
        until = time.monotonic() + 5
        return [await asked.locate(KEYS, until), await asked.locate(KEYS, until)]

    assert asyncio.run(twice()) == [[(A,), (), ()]] * 2
    assert (first.asked, second.asked) == (1, 2)


def test_without_an_answer_in_time_the_hints_are_used():
    coordinator = Coordinator(known([(A,), (B,)]))
    asked = made(coordinator, seconds=0.05)

    async def later():
        until = time.monotonic() + 5
        await asked.locate(KEYS, until)
        coordinator.delay = None
        started = time.monotonic()
        found = await asked.locate(KEYS, until)
        assert time.monotonic() - started < 5
        return found

    assert asyncio.run(later()) == [(A,), (B,), ()]
    assert asked.counters.failures == 1


def test_one_that_is_silent_rests_for_a_while(monkeypatch):
    monkeypatch.setattr(directory_module, "REST_S", 60.0)
    coordinator = Coordinator(delay=None)
    asked = made(coordinator, seconds=0.01)

    async def often():
        for _ in range(PATIENCE + 5):
            await asked.locate(KEYS, time.monotonic() + 5)

    asyncio.run(often())
    assert coordinator.asked == PATIENCE
    assert asked.counters.failures == PATIENCE + 5


def test_an_answer_to_another_question_is_none():
    class Confused(Coordinator):
        async def LocateChunks(self, request, **_call):
            return pb.LocateChunksResponse(chunks=[pb.ChunkPlacements(chunk_key=KEYS[1])])

    assert locate(made(Confused())) == [(), (), ()]


def test_without_a_coordinator_nothing_is_waited_for():
    asked = made(seconds=60)
    assert locate(asked) == [(), (), ()]
    assert asked.counters.failures == 1
