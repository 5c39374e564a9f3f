from __future__ import annotations

from kvwire.coordinator.sources.waiting_room import WaitingRoom


def test_a_servers_records_leave_in_the_order_in_which_they_came():
    room = WaitingRoom()
    for number in (1, 2):
        room.add("a", b"%d" % number, now=0)
    room.add("b", b"9", now=0)
    assert room.servers() == ["a", "b"]
    assert room.first("a") == b"1"
    room.remove_first("a")
    assert room.first("a") == b"2"
    room.remove_first("a")
    assert not room.holds("a")
    assert room.first("a") is None
    assert len(room) == 1


def test_what_has_waited_for_too_long_is_skipped_and_counted():
    room = WaitingRoom(patience=10)
    room.add("a", b"1", now=0)
    room.add("a", b"2", now=5)
    assert room.expire(10) == 0
    assert room.expire(10.1) == 1
    assert room.first("a") == b"2"
    assert room.expire(20) == 1
    assert not room.holds("a")
    assert room.skipped == 2
    assert len(room) == 0


def test_a_full_room_takes_nothing_more():
    room = WaitingRoom(max_records=1)
    room.add("a", b"1", now=0)
    room.add("b", b"2", now=0)
    assert not room.holds("b")
    assert room.skipped == 1


def test_a_room_is_bounded_in_bytes_too_and_has_room_again_when_something_left():
    room = WaitingRoom(max_bytes=10)
    room.add("a", bytes(8), now=0)
    room.add("b", bytes(3), now=0)
    assert (room.skipped, room.held_bytes, room.holds("b")) == (1, 8, False)
    room.remove_first("a")
    room.add("b", bytes(3), now=0)
    assert (room.holds("b"), room.held_bytes) == (True, 3)
    room.expire(100)
    assert (len(room), room.held_bytes) == (0, 0)
