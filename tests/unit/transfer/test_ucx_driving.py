"""A thread that moves bytes drives the UCX worker itself: what holds while it does, and once it has gone."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvwire.errors import DataPathUnavailable, TransferFailed
from kvwire.transfer import tags
from kvwire.transfer.memory import anonymous
from kvwire.transfer.tags import Kind

pytest.importorskip("ucxx")

from kvwire.transfer.ucx import UcxEngine, UcxOptions

pytestmark = [pytest.mark.leakcheck("shm", "fds", "threads"), pytest.mark.timeout(120)]

MIB = 1 << 20
TAG = tags.encode(Kind.STORE, 7)
_spec = importlib.util.spec_from_file_location(
    "kvwire_test_ucx_peer", Path(__file__).with_name("ucx_peer.py")
)
ucx_peer = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ucx_peer)
pattern = ucx_peer.pattern


class Pair:
    """Two engines of this process, joined. `near` is driven, `far` by its own thread."""

    def __init__(self, kind):
        devices = ("lo",) if kind == "remote" else ()
        self.near = UcxEngine(UcxOptions(kind, "client", devices))
        self.far = UcxEngine(UcxOptions(kind, "server", devices))
        self.to_far = self.near.connect(self.far.address)
        self.to_near = self.far.connect(self.near.address)

    @property
    def lane(self):
        return self.near._lanes[0]

    def close(self):
        self.near.close()
        self.far.close()


@pytest.fixture(scope="module", autouse=True)
def warm_up():
    for kind in ("local", "remote"):
        Pair(kind).close()


@pytest.fixture(params=["local", "remote"])
def pair(request):
    made = Pair(request.param)
    yield made
    made.close()
    assert not made.lane._turn.locked()


def threads_of(ops):
    """The thread that ends each of them, as far as they have ended."""
    names = []
    for op in ops:
        op.ending.add_done_callback(lambda _: names.append(threading.current_thread()))
    return names


def test_bytes_go_both_ways_without_the_lane_s_own_thread(pair):
    data, back = pattern(1, 8 * MIB), np.zeros(8 * MIB, dtype=np.uint8)
    there = np.zeros_like(data)
    with pair.near.driven():
        received = pair.far.recv(TAG, there, pair.to_near)
        ops = [pair.to_far.send(TAG, data), pair.near.recv(TAG + 1, back, pair.to_far)]
        ended_by = threads_of(ops)
        ops[0].wait(20)
        received.ending.result(20)
        pair.to_near.send(TAG + 1, there)
        ops[1].wait(20)
    assert (back == data).all()
    assert ended_by == [threading.main_thread()] * 2


def test_the_lane_s_thread_takes_over_what_is_left(pair):
    there = np.zeros(16 * MIB, dtype=np.uint8)
    back = np.zeros(MIB, dtype=np.uint8)
    with pair.near.driven():
        sent = pair.to_far.send(TAG, pattern(2, 16 * MIB))
        later = pair.near.recv(TAG + 1, back, pair.to_far)
    pair.far.recv(TAG, there, pair.to_near).ending.result(20)
    sent.ending.result(20)
    assert (there == pattern(2, 16 * MIB)).all()
    time.sleep(0.05)  # asleep: only an event wakes it
    ended_by = threads_of([later])
    pair.to_near.send(TAG + 1, pattern(3, MIB))
    later.ending.result(20)
    assert (back == pattern(3, MIB)).all()
    assert ended_by == [pair.lane.thread]


def test_one_drives_and_serves_the_others(pair):
    """The second thread finds the worker driven; its messages move while the first one waits for its own."""
    rounds = []

    def other():
        back = np.zeros(MIB, dtype=np.uint8)
        for number in range(20):
            tag = tags.encode(Kind.STORE, 100 + number)
            with pair.near.driven():
                received = pair.near.recv(tag, back, pair.to_far)
                pair.to_near.send(tag, pattern(number, MIB))
                received.wait(20)
            rounds.append(bool((back == pattern(number, MIB)).all()))

    mine = np.zeros(MIB, dtype=np.uint8)
    with pair.near.driven():
        thread = threading.Thread(target=other)
        received = pair.near.recv(TAG, mine, pair.to_far)
        thread.start()
        with pytest.raises(TimeoutError):
            received.wait(1)
        thread.join(0)
        assert len(rounds) == 20
        pair.to_near.send(TAG, pattern(9, MIB))
        received.wait(20)
    thread.join()
    assert all(rounds)
    assert (mine == pattern(9, MIB)).all()


def test_many_threads_take_turns(pair):
    good = []

    def work(number):
        for round_number in range(10):
            tag = tags.encode(Kind.STORE, 1000 + 100 * number + round_number)
            there = np.zeros(MIB, dtype=np.uint8)
            received = pair.far.recv(tag, there, pair.to_near)
            with pair.near.driven():
                pair.to_far.send(tag, pattern(number, MIB)).wait(20)
            received.ending.result(20)
            good.append(bool((there == pattern(number, MIB)).all()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * 60


def test_who_drives_and_waits_for_nothing_sleeps(pair):
    with pair.near.driven():
        op = pair.near.recv(TAG, np.zeros(MIB, dtype=np.uint8), pair.to_far)
        spent = time.process_time()
        with pytest.raises(TimeoutError):
            op.wait(1)
        assert time.process_time() - spent < 0.3
        op.cancel()
        with pytest.raises(TransferFailed, match="cancelled"):
            op.wait(5)


def test_a_close_ends_what_a_driver_waits_for(pair):
    closer = threading.Timer(0.2, pair.near.close)
    with pair.near.driven():
        op = pair.near.recv(TAG, np.zeros(MIB, dtype=np.uint8), pair.to_far)
        closer.start()
        began = time.monotonic()
        with pytest.raises(TransferFailed, match="closed"):
            op.wait(20)
        assert time.monotonic() - began < 5
    closer.join()
    assert not pair.lane.thread.is_alive()
    with pair.near.driven(), pytest.raises(DataPathUnavailable):
        pair.to_far.send(TAG, np.zeros(1, dtype=np.uint8))


def test_a_step_that_fails_ends_the_lane_and_nobody_hangs(pair, caplog):
    others = pair.near.recv(TAG + 1, np.zeros(MIB, dtype=np.uint8), pair.to_far)
    time.sleep(0.05)  # the lane's thread is asleep
    with pair.near.driven():
        op = pair.near.recv(TAG, np.zeros(MIB, dtype=np.uint8), pair.to_far)

        def broken():
            pair.lane.state.step = type(pair.lane.state).step.__get__(pair.lane.state)
            raise RuntimeError("a broken step")

        pair.lane.state.step = broken
        for each in (op, others):
            with pytest.raises(TransferFailed):
                each.wait(5)
    pair.lane.thread.join(5)
    assert not pair.lane.thread.is_alive()
    assert "a broken step" in caplog.text
    with pair.near.driven(), pytest.raises(DataPathUnavailable):
        pair.to_far.send(TAG, np.zeros(1, dtype=np.uint8))


def test_an_exception_of_the_driver_gives_the_turn_back(pair):
    with pytest.raises(KeyError), pair.near.driven():
        raise KeyError
    back = np.zeros(MIB, dtype=np.uint8)
    received = pair.near.recv(TAG, back, pair.to_far)
    pair.to_near.send(TAG, pattern(1, MIB))
    received.ending.result(20)
    assert (back == pattern(1, MIB)).all()


def test_what_an_ending_asks_for_waits_for_the_step_that_led_to_it(pair):
    """Cancelling out of a callback: the step looks at the very lists that it would change."""
    waiting = [pair.near.recv(TAG + i, np.zeros(1, dtype=np.uint8), pair.to_far) for i in range(1, 5)]
    with pair.near.driven():
        first = pair.near.recv(TAG, np.zeros(1, dtype=np.uint8), pair.to_far)
        depth = []

        def cancel_all(_):
            for op in waiting:
                op.cancel()
            depth.append([op.ending.done() for op in waiting])

        first.ending.add_done_callback(cancel_all)
        pair.to_near.send(TAG, np.zeros(1, dtype=np.uint8))
        first.wait(20)
        for op in waiting:
            with pytest.raises(TransferFailed, match="cancelled"):
                op.wait(5)
    assert depth == [[False] * 4]


def test_a_child_of_a_driver_drives_nothing(pair):
    with pair.near.driven():
        child = os.fork()
        if not child:
            try:
                with pair.near.driven():
                    pair.to_far.send(TAG, np.zeros(1, dtype=np.uint8))
            except DataPathUnavailable:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("direction", ["from", "to"])
@pytest.mark.parametrize("is_told_by", ["driver", "other"])
def test_bl73_a_driver_outlives_its_killed_peer(direction, is_told_by):
    engine = UcxEngine(UcxOptions("local", "client"))
    child = ucx_peer.Child("local")
    peer = engine.connect(child.address)
    child.ask(do="connect", address=engine.address.hex())
    size = 256 * MIB
    buffer = anonymous(size)
    try:
        with engine.driven():
            os.kill(child.pid, signal.SIGSTOP)
            op = engine.recv(TAG, buffer, peer) if direction == "from" else peer.send(TAG, buffer)
            child.kill()
            with pytest.raises(TimeoutError):
                op.wait(0.2)
            if is_told_by == "driver":
                peer.mark_gone()
            else:
                threading.Timer(0.1, peer.mark_gone).start()
            began = time.monotonic()
            with pytest.raises(TransferFailed):
                op.wait(20)
            assert time.monotonic() - began < 5
    finally:
        child.close()
        engine.close()


def test_bl73_a_limit_that_a_driver_has_set_holds_when_it_has_gone():
    """The lane's thread sleeps without a limit: it has to learn of the new one."""
    engine = UcxEngine(UcxOptions("local", "client"))
    child = ucx_peer.Child("local")
    peer = engine.connect(child.address)
    time.sleep(0.05)
    os.kill(child.pid, signal.SIGSTOP)
    try:
        with engine.driven():
            op = peer.send(TAG, anonymous(64 * MIB))
            peer.mark_gone()
        with pytest.raises(TransferFailed):
            op.ending.result(5)
    finally:
        os.kill(child.pid, signal.SIGCONT)
        child.close()
        engine.close()
