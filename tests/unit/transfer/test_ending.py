from __future__ import annotations

import threading

import pytest

from kvwire.transfer.ending import Ending


def test_it_is_resolved_once():
    ending = Ending()
    assert not ending.done()
    ending.resolve()
    ending.resolve(ValueError("late"))
    assert ending.done()
    assert ending.exception() is None
    assert ending.result(0) is None


def test_its_error_is_raised_to_everybody_who_waits():
    ending = Ending()
    raised = []

    def wait():
        try:
            ending.result(10)
        except ValueError as error:
            raised.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    ending.resolve(ValueError("no"))
    for thread in threads:
        thread.join()
    assert raised == ["no"] * 4


def test_who_waits_too_long_is_told():
    with pytest.raises(TimeoutError):
        Ending().result(0.01)


def test_callbacks_are_called_once_wherever_they_come_from():
    for _ in range(200):
        ending, called = Ending(), []
        ending.add_done_callback(lambda _, called=called: called.append("before"))
        thread = threading.Thread(target=ending.resolve)
        thread.start()
        ending.add_done_callback(lambda _, called=called: called.append("beside"))
        thread.join()
        ending.add_done_callback(lambda _, called=called: called.append("after"))
        assert sorted(called) == ["after", "before", "beside"]


def test_callbacks_that_come_at_the_same_time_are_all_called():
    for _ in range(200):
        ending, called = Ending(), []
        threads = [threading.Thread(target=ending.add_done_callback, args=(called.append,)) for _ in range(4)]
        threads.append(threading.Thread(target=ending.resolve))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ending.add_done_callback(called.append)
        assert called == [ending] * 5


def test_a_callback_that_fails_takes_nothing_with_it(caplog):
    ending, called = Ending(), []

    def fail(_):
        raise RuntimeError("oops")

    ending.add_done_callback(fail)
    ending.add_done_callback(called.append)
    ending.resolve()
    assert called == [ending]
    assert "oops" in caplog.text
