from __future__ import annotations

import signal
import threading
import time

import pytest

from kvwire.transfer.crew import Begun, Crew


@pytest.fixture
def crew():
    return Crew()


def test_a_job_is_run_beside_its_owner_once(crew):
    ran = []
    begun = crew.begin(lambda: ran.append(threading.current_thread()))
    deadline = time.monotonic() + 5
    while not ran and time.monotonic() < deadline:
        time.sleep(0.001)
    begun.finish()
    assert len(ran) == 1
    assert ran[0] is not threading.current_thread()


def test_an_owner_does_not_wait_for_threads_that_are_busy(crew):
    hold, ran = threading.Event(), []
    busy = [crew.begin(hold.wait) for _ in range(8)]
    begun = crew.begin(lambda: ran.append(threading.current_thread()))
    begun.finish()
    assert ran == [threading.current_thread()]
    hold.set()
    for each in busy:
        each.finish()


def test_what_a_job_raises_reaches_its_owner(crew):
    def fail():
        raise ValueError("no")

    for begun in (crew.begin(fail), Begun(fail)):
        with pytest.raises(ValueError, match="no"):
            begun.finish()


def test_an_interrupted_wait_is_still_a_wait(crew):
    started, ended = threading.Event(), []

    def slow():
        started.set()
        time.sleep(0.3)
        ended.append(True)

    begun = crew.begin(slow)
    started.wait(5)
    threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
    with pytest.raises(KeyboardInterrupt):
        begun.finish()
    assert ended == [True]


def test_who_drops_a_job_waits_for_it_if_it_runs(crew):
    started, ended = threading.Event(), []

    def slow():
        started.set()
        time.sleep(0.1)
        ended.append(True)

    begun = crew.begin(slow)
    started.wait(5)
    begun.drop()
    assert ended == [True]


def test_a_job_that_was_dropped_in_time_never_runs(crew):
    hold, ran = threading.Event(), []
    busy = [crew.begin(hold.wait) for _ in range(8)]
    crew.begin(lambda: ran.append(True)).drop()
    Begun(lambda: ran.append(True)).drop()
    hold.set()
    for each in busy:
        each.finish()
    assert ran == []
