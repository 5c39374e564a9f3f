from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvwire.transfer import tags, ucx_turns
from kvwire.transfer.ucx_turns import Turns


def op(lease, piece, peer="p"):
    return SimpleNamespace(tag=tags.encode(tags.Kind.PEER, lease, piece), peer=peer)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(ucx_turns, "MAX_SENDS", 2)
    monkeypatch.setattr(ucx_turns, "MAX_PEER_SENDS", 5)


def take(turns, lease, count):
    """Sends of a lease, and how many of them have their turn."""
    ops = [op(lease, piece) for piece in range(count)]
    return ops, sum(turns.take(each, each.peer) for each in ops)


def test_a_lease_that_nobody_takes_is_not_in_the_way_of_another():
    turns = Turns()
    _, first = take(turns, 1, 10)
    second, begun = take(turns, 2, 4)
    assert (first, begun) == (2, 2)
    assert turns.ended(second[0], "p") is second[2]
    assert turns.ended(second[1], "p") is second[3]
    assert turns.ended(second[2], "p") is None


def test_all_leases_of_a_peer_together_are_limited():
    turns = Turns()
    begun = [take(turns, lease, 3)[1] for lease in (1, 2, 3)]
    assert begun == [2, 2, 1]
    assert turns.take(op(4, 0, "another"), "another")


def test_what_was_held_back_by_the_limit_of_the_peer_comes_when_another_ends():
    turns = Turns()
    first, _ = take(turns, 1, 2)
    take(turns, 2, 2)
    third, begun = take(turns, 3, 2)
    assert begun == 1
    assert turns.ended(first[0], "p") is third[1]
    assert turns.ended(first[1], "p") is None


def test_what_was_cancelled_or_whose_peer_is_gone_waits_no_more():
    turns = Turns()
    ops, _ = take(turns, 1, 5)
    turns.forget(ops[2])
    assert turns.drop("p") == ops[3:]
    assert turns.ended(ops[0], "p") is None
    turns.forget(ops[4])
    assert turns.drop("p") == []
