"""Chunks at any position: this server's own, and the fleet's beside them, which never cost them anything."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from kvwire.errors import TokensInvalid
from kvwire.keys import Namespace, chunk_keys, pack_tokens, root
from kvwire.server.blending import Blending, LocalMatcher, ask_fleet, identity, merge
from kvwire.server.store import RemovedChunk, StoredChunk
from kvwire.v1 import cache_service_pb2 as cache
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import placement_pb2

SIZE = 4
ME = "a"
SPACE = Namespace("model")
COMPLETE, NOT_ASKED, NONE = (
    cache.FLEET_ANSWER_COMPLETE,
    cache.FLEET_ANSWER_NOT_ASKED,
    cache.FLEET_ANSWER_NONE,
)


def run(coroutine):
    """Ended by force long before a test that hangs would be."""
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def text(*chunks: int) -> bytes:
    return b"".join(pack_tokens(range(each * 100, each * 100 + SIZE)) for each in chunks)


class Server:
    """A matcher over chunks that are `held`."""

    def __init__(self) -> None:
        self.held: dict[bytes, SimpleNamespace] = {}
        self.matcher = LocalMatcher(1 << 20)
        self.matcher.bind_chunk_size(SIZE)
        self.blending = Blending(self.matcher, self.held, ME, bytes(16))  # type: ignore[arg-type]

    def store(self, *chunks: int, space: Namespace = SPACE) -> list[bytes]:
        start, parent = root(space, SIZE), b""
        keys = chunk_keys(start, text(*chunks), SIZE)
        for key, chunk in zip(keys, chunks, strict=True):
            self.held[key] = SimpleNamespace(announced=True, size=10)
            self.matcher.on_stored(StoredChunk(key, parent, start, start, 10, text(chunk)))
            parent = key
        return keys

    def find(self, *chunks: int, space: Namespace = SPACE):
        return self.blending.local(space, text(*chunks), SIZE)


def told(matches) -> list[tuple[int, int, bytes, list[str]]]:
    return [
        (
            each.prompt_position,
            each.cached_position,
            each.chunk_key,
            [place.server_id for place in each.placements],
        )
        for each in matches
    ]


def match(key: bytes, cached: int, prompt: int, *servers: str) -> placement_pb2.BlendMatch:
    places = [placement_pb2.Placement(server_id=each, tier=1, backend="memory") for each in servers]
    return placement_pb2.BlendMatch(
        chunk_key=key, cached_position=cached, prompt_position=prompt, placements=places
    )


class Refused(grpc.RpcError):
    pass


class Stub:
    """A coordinator that answers with `matches` after `seconds`, or raises `failure`. None: never."""

    def __init__(self, *matches, seconds: float | None = 0.0, failure: BaseException | None = None) -> None:
        self.matches, self.seconds, self.failure = matches, seconds, failure
        self.cancelled = False

    async def MatchBlend(self, request, timeout=None):  # noqa: ASYNC109
        if self.failure is not None:
            raise self.failure
        try:
            await (asyncio.Event().wait() if self.seconds is None else asyncio.sleep(self.seconds))
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return pb.MatchBlendResponse(matches=self.matches)


def ask(*stubs: Stub, seconds: float = 0.05):
    return run(ask_fleet(stubs, pb.MatchBlendRequest(tokens=text(9, 1, 2)), seconds))


KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("stub", "answer"),
    [
        (lambda _keys: Stub(), COMPLETE),
        (lambda _keys: Stub(failure=Refused()), NONE),
        (lambda _keys: Stub(seconds=None), NONE),
        (lambda keys: Stub(match(keys[0], 0, SIZE, ME), match(keys[1], SIZE, 2 * SIZE, ME)), COMPLETE),
    ],
    ids=["empty", "stopped", "late", "the same"],
)
def test_bl43_what_is_here_is_found_whatever_the_fleet_says(stub, answer):
    server = Server()
    keys = server.store(1, 2)
    local = server.find(9, 1, 2)
    fleet, got = ask(stub(keys))
    assert got == answer
    assert told(merge(local, fleet, ME)) == [(4, 0, keys[0], [ME]), (8, 4, keys[1], [ME])]


def test_other_servers_are_added_to_an_own_match_once():
    server = Server()
    keys = server.store(1)
    stubs = [Stub(match(keys[0], 0, 4, ME, "b"), match(KEY, 4, 8, "b")) for _ in range(2)]
    fleet, _ = ask(*stubs)
    merged = merge(server.find(9, 1, 2), fleet, ME)
    assert told(merged) == [(4, 0, keys[0], [ME, "b"]), (8, 4, KEY, ["b"])]


def test_what_the_fleet_believes_of_this_server_is_not_repeated():
    """It was evicted here, and the coordinator does not know yet."""
    assert merge({}, [match(KEY, 0, 0, ME)], ME) == []
    assert told(merge({}, [match(KEY, 0, 0, ME, "b")], ME)) == [(0, 0, KEY, ["b"])]


def test_of_one_position_the_own_match_comes_first():
    own = match(KEY, 8, 4, ME)
    others = [match(b"0" * 32, 0, 4, "b"), match(b"1" * 32, 0, 0, "b")]
    merged = merge({identity(own): own}, others, ME)
    assert [each.prompt_position for each in merged] == [0, 4, 4]
    assert merged[1].chunk_key == KEY


def test_one_that_answers_in_time_is_enough():
    hanging = Stub(seconds=None)
    fleet, answer = ask(hanging, Stub(match(KEY, 0, 0, "b")), Stub(failure=Refused()), seconds=0.2)
    assert (told(fleet), answer) == ([(0, 0, KEY, ["b"])], COMPLETE)
    assert hanging.cancelled


@pytest.mark.parametrize(
    "failure",
    [Refused(), RuntimeError("a test"), asyncio.CancelledError(), asyncio.InvalidStateError()],
    ids=lambda each: type(each).__name__,
)
def test_a_connection_that_fails_in_any_way_is_no_answer(failure):
    assert ask(Stub(failure=failure)) == ([], NONE)


def test_nobody_is_asked_without_a_coordinator_or_without_time():
    assert ask() == ([], NOT_ASKED)
    assert ask(Stub(match(KEY, 0, 0, "b")), seconds=0.0) == ([], NOT_ASKED)


def test_a_caller_that_goes_away_leaves_no_question_open():
    hanging = Stub(seconds=None)

    async def leave() -> None:
        before = asyncio.all_tasks()
        asking = asyncio.ensure_future(ask_fleet([hanging], pb.MatchBlendRequest(), 100))
        await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    run(leave())
    assert hanging.cancelled


def test_a_match_that_cannot_be_is_left_out():
    fleet, answer = ask(Stub(match(b"short", 0, 0, "b"), match(KEY, 0, 12, "b"), match(KEY, 0, 11, "b")))
    assert (told(fleet), answer) == ([(11, 0, KEY, ["b"])], COMPLETE)


def test_bl44_only_the_own_namespace_matches():
    server = Server()
    spaces = [
        Namespace("A", salt="0" * 31 + "1"),
        Namespace("A", salt="0" * 31 + "2"),
        Namespace("B", salt="0" * 31 + "1"),
    ]
    keys = [server.store(1, space=space)[0] for space in spaces]
    assert len(set(keys)) == 3
    for key, space in zip(keys, spaces, strict=True):
        assert told(server.find(9, 1, space=space).values()) == [(4, 0, key, [ME])]
    assert not server.find(9, 1)


def test_bl44_each_match_tells_both_positions():
    server = Server()
    keys = server.store(7, 1)
    assert told(server.find(1, 9, 1).values()) == [(0, 4, keys[1], [ME]), (8, 4, keys[1], [ME])]


def test_bl44_other_content_under_the_same_fingerprint_does_not_match():
    server = Server()
    server.store(1)
    index = server.matcher.index
    (entry,) = index._entries.values()
    entry.tokens = text(2)
    assert not server.find(9, 1)


def test_bl44_replaced_content_does_not_match_any_more():
    server = Server()
    (key,) = server.store(1)
    start = root(SPACE, SIZE)
    server.matcher.on_stored(StoredChunk(key, b"", start, start, 10, text(2)))
    assert not server.find(9, 1)
    # Nor does the new one: a key is made of its content, so where this was computed is not known.
    assert not server.find(9, 2)


def test_what_is_gone_does_not_match():
    server = Server()
    first, second = server.store(1, 2)
    start = root(SPACE, SIZE)
    server.matcher.on_removed(RemovedChunk(first, start, start, 10, evicted=True))
    server.held[second].announced = False
    assert not server.find(9, 1, 2)
    server.held[second].announced = True
    assert len(server.find(9, 1, 2)) == 1
    del server.held[second]
    assert not server.find(9, 1, 2)
    server.store(1, 2)
    server.matcher.on_cleared()
    assert not server.find(9, 1, 2)


def test_another_chunk_size_starts_anew_and_the_same_keeps_what_there_is():
    server = Server()
    server.store(1)
    server.matcher.bind_chunk_size(SIZE)
    assert server.find(9, 1)
    server.matcher.bind_chunk_size(2 * SIZE)
    assert not server.find(9, 1)


def test_before_a_chunk_size_is_bound_nothing_matches_and_nothing_fails():
    matcher = LocalMatcher(1 << 20)
    matcher.on_cleared()
    matcher.on_stored(StoredChunk(KEY, b"", KEY, KEY, 1, text(1)))
    assert matcher.tokens_of(KEY) == b""
    assert Blending(matcher, {}, ME, b"").local(SPACE, text(1), SIZE) == {}  # type: ignore[arg-type]


def test_bytes_that_are_no_tokens_are_refused():
    with pytest.raises(TokensInvalid):
        Server().blending.local(SPACE, b"12345", SIZE)
