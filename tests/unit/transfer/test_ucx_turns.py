from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvwire.transfer import tags, ucx_turns
from kvwire.transfer.ucx_turns import Turns


def op(lease, piece, peer="p", nbytes=1):
    return SimpleNamespace(tag=tags.encode(tags.Kind.PEER, lease, piece), peer=peer, nbytes=nbytes)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(ucx_turns, "MAX_SENDS", 2)
    monkeypatch.setattr(ucx_turns, "MAX_PEER_SENDS", 5)


def take(turns, lease, count):
    """Sends of a lease, and how many of them have their turn."""
    ops = [op(lease, piece) for piece in range(count)]
    return ops, sum(turns.take(each, each.peer) for each in ops)


def test_a_lease_that_nobody_takes_is_not_in_the_way_of_another():
    turns = Turns(100)
    _, first = take(turns, 1, 10)
    second, begun = take(turns, 2, 4)
    assert (first, begun) == (2, 2)
    assert turns.ended(second[0], "p") == [second[2]]
    assert turns.ended(second[1], "p") == [second[3]]
    assert turns.ended(second[2], "p") == []


def test_all_leases_of_a_peer_together_are_limited():
    turns = Turns(100)
    begun = [take(turns, lease, 3)[1] for lease in (1, 2, 3)]
    assert begun == [2, 2, 1]
    assert turns.take(op(4, 0, "another"), "another")


def test_what_was_held_back_by_the_limit_of_the_peer_comes_when_another_ends():
    turns = Turns(100)
    first, _ = take(turns, 1, 2)
    take(turns, 2, 2)
    third, begun = take(turns, 3, 2)
    assert begun == 1
    assert turns.ended(first[0], "p") == [third[1]]
    assert turns.ended(first[1], "p") == []


def test_what_was_cancelled_or_whose_peer_is_gone_waits_no_more():
    turns = Turns(100)
    ops, _ = take(turns, 1, 5)
    turns.forget(ops[2])
    assert turns.drop("p") == ops[3:]
    assert turns.ended(ops[0], "p") == []
    turns.forget(ops[4])
    assert turns.drop("p") == []


def test_a_lease_has_so_many_bytes_under_way_but_always_one_message():
    turns = Turns(100)
    ops = [op(1, piece, nbytes=nbytes) for piece, nbytes in enumerate((60, 60, 300, 10, 10))]
    assert [turns.take(each, "p") for each in ops] == [True, False, False, False, False]
    assert turns.ended(ops[0], "p") == [ops[1]]
    assert turns.ended(ops[1], "p") == [ops[2]]
    assert turns.ended(ops[2], "p") == ops[3:]
    assert turns.ended(ops[3], "p") == []
