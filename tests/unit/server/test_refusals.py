from __future__ import annotations

import pytest

from kvwire.errors import InvalidArgument, LayoutConflict
from kvwire.server.refusals import Refusals


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def fail(refusals, name, error):
    with pytest.raises(type(error)), refusals.noting(name):
        raise error


def told(refusals):
    return [(each.client_name, each.reason, each.times, each.last) for each in refusals.recent()]


def test_a_failed_call_is_noted_and_raised_on(clock):
    refusals = Refusals(clock)
    with refusals.noting("good"):
        pass
    fail(refusals, "bad", LayoutConflict("no", client_name="x", engine_id="y"))
    assert told(refusals) == [("bad", "LAYOUT_CONFLICT", 1, 100.0)]
    assert refusals.recent()[0].message == "no"


def test_one_entry_for_each_name_with_its_last_reason(clock):
    refusals = Refusals(clock)
    fail(refusals, "a", LayoutConflict("no", client_name="x", engine_id="y"))
    fail(refusals, "b", InvalidArgument("model", "is empty"))
    clock.now = 130.0
    fail(refusals, "a", InvalidArgument("model", "is empty"))
    assert told(refusals) == [("b", "INVALID_FIELD", 1, 100.0), ("a", "INVALID_FIELD", 2, 130.0)]


def test_who_registers_is_forgotten_and_so_is_who_gives_up(clock):
    refusals = Refusals(clock, keep=10)
    fail(refusals, "a", InvalidArgument("model", "is empty"))
    clock.now = 105.0
    fail(refusals, "b", InvalidArgument("model", "is empty"))
    refusals.forget("nobody")
    clock.now = 111.0
    assert [each.client_name for each in refusals.recent()] == ["b"]
    refusals.forget("b")
    assert not refusals.recent()


def test_the_oldest_go_when_there_are_too_many(clock):
    refusals = Refusals(clock, limit=2)
    for name in "abac":
        fail(refusals, name, InvalidArgument("model", "is empty"))
    assert [each.client_name for each in refusals.recent()] == ["a", "c"]


def test_other_exceptions_are_none_of_its_business(clock):
    refusals = Refusals(clock)
    with pytest.raises(ZeroDivisionError), refusals.noting("a"):
        _ = 1 / 0
    assert not refusals.recent()
