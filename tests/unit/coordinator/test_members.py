from __future__ import annotations

import pytest

from kvwire.coordinator.incarnations import Incarnations, Standing
from kvwire.coordinator.members import Members
from kvwire.coordinator.messages import ServerInfo
from kvwire.errors import IncarnationStale, InvalidArgument, ServerNotRegistered


def info(name: str, run: int = 1, size: int = 256, digest: str = "sha256") -> ServerInfo:
    return ServerInfo(name, bytes([run]) * 16, (f"{name}:1",), size, digest)


@pytest.fixture
def members():
    return Members(Incarnations())


def test_expiry_counts_from_the_last_life_sign(members):
    members.register(info("a"), 0)
    members.register(info("b"), 0)
    members.heartbeat("a", bytes([1]) * 16, 10)
    assert members.expire(30) == []
    assert members.expire(30.1) == ["b"]
    assert members.expire(40.1) == ["a"]
    with pytest.raises(ServerNotRegistered):
        members.heartbeat("a", bytes([1]) * 16, 41)


def test_a_newer_run_fences_the_older_one_for_good(members):
    members.register(info("a"), 0)
    assert members.register(info("a", 2), 1).new
    for old_call in (
        lambda: members.register(info("a"), 2),
        lambda: members.heartbeat("a", bytes([1]) * 16, 2),
    ):
        with pytest.raises(IncarnationStale):
            old_call()
    assert not members.deregister("a", bytes([1]) * 16)
    assert members.get("a").info.incarnation == bytes([2]) * 16
    members.expire(100)
    with pytest.raises(IncarnationStale):
        members.register(info("a"), 101)
    assert members.register(info("a", 2), 102).new


def test_a_registration_is_a_life_sign_and_renews(members):
    members.register(info("a", size=0), 0)
    assert not members.register(info("a", size=256), 29).new
    assert members.expire(50) == []
    assert members.chunk_size == 256


def test_who_differs_from_the_fleet_is_shown_and_told_why(members):
    members.register(info("unbound", size=0), 0)
    members.register(info("a"), 0)
    members.register(info("b", size=512), 0)
    members.register(info("c", digest="blake3"), 0)
    problems = {member.info.server_id: member.sharing_problem for member in members.all()}
    assert problems["a"] == problems["unbound"] == ""
    assert "512" in problems["b"]
    assert "--chunk-size 256" in problems["b"]
    assert "blake3" in problems["c"]
    assert not members.get("b").sharing


def test_the_terms_are_those_of_who_has_been_there_longest(members):
    members.register(info("a"), 0)
    members.register(info("b", size=512), 0)
    members.take_changes()
    members.register(info("a", run=2, size=1024), 1)
    assert members.chunk_size == 512
    assert members.get("b").sharing
    assert not members.get("a").sharing
    assert set(members.take_changes().changed) == {"a", "b"}


def test_changes_are_told_once_and_the_last_one_counts(members):
    members.register(info("a"), 0)
    members.register(info("b"), 0)
    members.deregister("b", bytes([1]) * 16)
    changes = members.take_changes()
    assert (list(changes.changed), list(changes.left)) == (["a"], ["b"])
    members.heartbeat("a", bytes([1]) * 16, 5)
    members.deregister("a", bytes([1]) * 16)
    members.register(info("a"), 6)
    changes = members.take_changes()
    assert (list(changes.changed), list(changes.left)) == (["a"], [])


def test_last_sequence_never_goes_back(members):
    members.register(info("a"), 0)
    members.heartbeat("a", bytes([1]) * 16, 1, last_sequence=9)
    assert members.heartbeat("a", bytes([1]) * 16, 2, last_sequence=8).last_sequence == 9


@pytest.mark.parametrize("bad", [info(""), info("x" * 129), ServerInfo("a", b"short")])
def test_bad_ids_are_refused(members, bad):
    with pytest.raises(InvalidArgument):
        members.register(bad, 0)


def test_runs_are_remembered_within_bounds():
    incarnations = Incarnations(max_servers=2)
    for name in "abc":
        incarnations.note(name, b"1")
    incarnations.note("c", b"2")
    assert incarnations.standing("a", b"1") is Standing.UNKNOWN
    assert incarnations.standing("c", b"1") is Standing.SUPERSEDED
    assert incarnations.standing("c", b"2") is Standing.CURRENT
    for run in range(100):
        incarnations.note("c", bytes([run]))
    assert incarnations.standing("c", b"2") is Standing.UNKNOWN
