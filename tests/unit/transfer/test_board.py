"""The words between a server and a client, each end over its own mapping of one file."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvwire.transfer.arena_path import PUBLISH_MARGIN_S, ShmPath
from kvwire.transfer.base import Mark, Ticket
from kvwire.transfer.board import BOARD_BYTES, ClientBoard
from kvwire.transfer.shm import LivenessLock, SharedArena

WORDS = BOARD_BYTES // 8 - 8
pytestmark = pytest.mark.leakcheck("shm", "fds")


@pytest.fixture
def arena():
    made = SharedArena.create(1 << 20)
    yield made
    made.unlink()
    made.close()


@pytest.fixture
def lock(arena):
    made = LivenessLock.create(arena.name)
    yield made
    made.close()


@pytest.fixture
def path(arena, lock):
    opened = ShmPath.open(arena.name, arena.nonce, lock.name)
    yield opened
    opened.close()


@pytest.fixture
def client(path):
    return path._held.board


def ticket(lease_id, word, seconds=30.0):
    return Ticket(lease_id, "shm", (), seconds=seconds, arrival_word=word)


def test_a_lease_arrives_once(lock, client):
    words = {lease_id: lock.board.give(lease_id) for lease_id in (1, 2, 3)}
    assert len(set(words.values())) == 3
    assert list(lock.board.arrived()) == []
    client.arrive(words[2], 2)
    assert list(lock.board.arrived()) == [2]
    assert list(lock.board.arrived()) == []
    assert len(lock.board) == 2


def test_a_word_counts_for_the_lease_that_it_was_given_to_and_no_other(lock, client):
    first, second = lock.board.give(1), lock.board.give(2)
    client.arrive(first, 2)
    client.arrive(second, 77)
    assert list(lock.board.arrived()) == []


def test_what_a_late_client_writes_to_a_word_that_is_somebody_elses_by_now(lock, client):
    late = lock.board.give(1)
    lock.board.take_back(1)
    # Words go round: the same one comes back when all others have been out.
    given = [lock.board.give(lease_id) for lease_id in range(2, 2 + WORDS)]
    assert given[-1] == late
    client.arrive(late, 1)
    assert list(lock.board.arrived()) == []
    client.arrive(late, 1 + WORDS)
    assert list(lock.board.arrived()) == [1 + WORDS]


def test_a_word_is_empty_when_it_is_given(lock, client):
    word = lock.board.give(1)
    client.arrive(word, 5)
    lock.board.take_back(1)
    for lease_id in range(10, 9 + WORDS):
        lock.board.give(lease_id)
        lock.board.take_back(lease_id)
    assert lock.board.give(5) == word
    assert list(lock.board.arrived()) == []


def test_when_no_word_is_left_leases_are_committed_by_calls(lock, path):
    words = [lock.board.give(lease_id) for lease_id in range(1, WORDS + 2)]
    assert words[-1] == 0
    assert len(set(words)) == WORDS + 1
    assert not path.publish(ticket(WORDS + 1, 0), path.mark())
    lock.board.take_back(1)
    assert lock.board.give(WORDS + 2) == words[0]
    # Taking back what was never given frees nothing.
    lock.board.take_back(1)
    assert lock.board.give(WORDS + 3) == 0


@pytest.mark.parametrize("word", [0, 7, BOARD_BYTES // 8])
def test_words_that_are_the_servers_or_nobodys(client, word):
    with pytest.raises(ValueError, match="none for arrivals"):
        client.arrive(word, 1)


def test_a_file_without_a_board(tmp_path):
    file = tmp_path / "lock"
    file.touch()
    with file.open("r+b") as stream, pytest.raises(ValueError, match="no board"):
        ClientBoard(stream.fileno())


def test_publishing_is_done_in_good_time_or_not_at_all(lock, path):
    word = lock.board.give(1)
    early = Mark(time.monotonic(), 0)
    late = Mark(time.monotonic() - 30.0 + PUBLISH_MARGIN_S / 2, 0)
    assert not path.publish(ticket(1, word), late)
    assert list(lock.board.arrived()) == []
    assert path.publish(ticket(1, word), early)
    assert list(lock.board.arrived()) == [1]


def test_a_server_that_doubts_has_to_be_asked(lock, path):
    mark, word = path.mark(), lock.board.give(1)
    assert path.proves(ticket(2, 0), mark)
    lock.board.doubt()
    assert not path.proves(ticket(2, 0), mark)
    assert not path.publish(ticket(1, word), mark)
    assert path.proves(ticket(3, 0), path.mark())
    assert not path.proves(ticket(3, 0, seconds=0.0), path.mark())


def test_the_board_outlives_the_server(arena, path, lock):
    """The file is gone, the client's mapping is not: it writes where nobody looks, and nothing breaks."""
    mark, word = path.mark(), lock.board.give(1)
    lock.close()
    assert not Path("/dev/shm", lock.name).exists()
    path.publish(ticket(1, word), mark)
