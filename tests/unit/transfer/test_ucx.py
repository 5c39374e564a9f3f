from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvwire.errors import ConfigError, DataPathUnavailable, TransferFailed
from kvwire.transfer import tags
from kvwire.transfer.memory import anonymous
from kvwire.transfer.tags import Kind

pytest.importorskip("ucxx")

from kvwire.transfer.server_ucx import UcxServerPlane
from kvwire.transfer.ucx import UcxEngine, UcxOptions
from kvwire.transfer.ucx_probe import ProbeServer

pytestmark = [pytest.mark.leakcheck("shm", "fds", "threads"), pytest.mark.timeout(120)]

MIB = 1 << 20
KINDS = ["local", "remote"]


def _load(name):
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"kvwire_test_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ucx_peer = _load("ucx_peer")
pattern = ucx_peer.pattern


def options(kind, role="server"):
    return UcxOptions(kind, role, devices=("lo",) if kind == "remote" else ())


def device(kind):
    return "lo" if kind == "remote" else ""


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module", autouse=True)
def warm_up():
    """What the first start opens for the whole process (libraries, UCX's own files) is no leak of a test."""
    engine = UcxEngine(options("local"))
    engine.close()


@pytest.fixture
def engine(kind):
    made = UcxEngine(options(kind))
    yield made
    made.close()
    assert not any(lane.thread.is_alive() for lane in made._lanes)


@pytest.fixture
def start():
    """Start child processes; they are ended with the test, and must have ended well unless killed."""
    children = []

    def make(kind, **kwargs):
        child = ucx_peer.Child(kind, device=device(kind), **kwargs)
        children.append(child)
        return child

    yield make
    for child in children:
        assert child.close() in {0, -9}


def joined(engine, child):
    peer = engine.connect(child.address, "child")
    child.ask(do="connect", address=engine.address.hex())
    return peer


TAG = tags.encode(Kind.STORE, 7)


@pytest.mark.parametrize("nbytes", [1, 4096, MIB + 1, 8 * MIB])
def test_bytes_go_both_ways(engine, kind, start, nbytes):
    child = start(kind)
    peer = joined(engine, child)
    buffer = np.zeros(nbytes, dtype=np.uint8)
    op = engine.recv(TAG, buffer, peer)
    assert child.ask(do="send", tag=TAG, nbytes=nbytes, seed=3) == {}
    op.ending.result(20)
    assert (buffer == pattern(3, nbytes)).all()
    peer.send(TAG + 1, buffer)
    assert child.ask(do="recv", tag=TAG + 1, nbytes=nbytes, seed=3) == {"same": True}


@pytest.mark.parametrize("got", [MIB - 1, MIB + 1, 1, 8])
def test_another_length_than_agreed_fails_and_leaves_the_buffer(engine, kind, start, got):
    child = start(kind)
    peer = joined(engine, child)
    buffer = np.full(MIB, 7, dtype=np.uint8)
    op = engine.recv(TAG, buffer, peer)
    child.ask(do="send", tag=TAG, nbytes=got, seed=3)
    with pytest.raises(TransferFailed, match=f"{got} bytes"):
        op.ending.result(20)
    assert (buffer == 7).all()
    op = engine.recv(TAG + 1, buffer, peer)
    child.ask(do="send", tag=TAG + 1, nbytes=MIB, seed=4)
    op.ending.result(20)
    assert (buffer == pattern(4, MIB)).all()


def test_receive_that_nothing_has_come_for_is_cancelled_at_once(engine, kind):
    op = engine.recv(TAG, np.zeros(MIB, dtype=np.uint8))
    op.cancel()
    with pytest.raises(TransferFailed, match="cancelled"):
        op.ending.result(2)


def test_messages_of_an_ended_lease_are_dropped_and_others_are_not_held_up(engine, kind, start):
    child = start(kind)
    peer = joined(engine, child)
    ended, other = tags.encode(Kind.STORE, 8), tags.encode(Kind.STORE, 9)
    early = tags.encode(Kind.STORE, 6)
    child.ask(
        do="send", tag=early, nbytes=MIB, seed=1, wait=False
    )  # nobody wants it yet: it must not be in the way
    child.ask(do="send", tag=ended, nbytes=MIB, seed=1, wait=False)
    engine.discard(ended + 77)
    buffer = np.zeros(MIB, dtype=np.uint8)
    op = engine.recv(other, buffer, peer)
    child.ask(do="send", tag=other, nbytes=MIB, seed=5, wait=False)
    op.ending.result(20)
    assert (buffer == pattern(5, MIB)).all()
    engine.recv(early, buffer, peer).ending.result(20)
    assert (buffer == pattern(1, MIB)).all()
    assert child.ask(do="wait") == {}  # the sender of the dropped message is done with it too


def test_pieces_may_be_received_in_any_order(engine, kind, start):
    child = start(kind)
    peer = joined(engine, child)
    for piece in range(6):
        child.ask(do="send", tag=TAG + piece, nbytes=MIB, seed=piece, wait=False)
    for piece in (5, 0, 3, 1, 4, 2):
        buffer = np.zeros(MIB, dtype=np.uint8)
        engine.recv(TAG + piece, buffer, peer).ending.result(20)
        assert (buffer == pattern(piece, MIB)).all()
    assert child.ask(do="wait") == {}


def test_many_messages_at_once(engine, kind, start):
    child = start(kind)
    peer = joined(engine, child)
    for piece in range(64):
        child.tell(do="recv", tag=TAG + piece, nbytes=MIB, seed=1, wait=False)
    ops = [peer.send(TAG + piece, pattern(1, MIB)) for piece in range(64)]
    for op in ops:
        op.ending.result(30)
    for _ in range(64):
        child.answer()
    assert child.ask(do="wait") == {}


@pytest.mark.slow
def test_bl73_cancel_a_large_transfer_a_hundred_times(engine, kind, start):
    child = start(kind)
    peer = joined(engine, child)
    size = 256 * MIB
    child.ask(do="send", tag=TAG, nbytes=MIB, seed=1, wait=False)
    engine.discard(TAG)
    for round_number in range(100):
        tag = tags.encode(Kind.STORE, 100 + round_number)
        buffer = anonymous(size)
        op = engine.recv(tag, buffer, peer)
        if round_number % 10 == 0:  # now and then one that has begun
            child.ask(do="send", tag=tag, nbytes=size, seed=round_number, wait=False)
        op.cancel()
        del buffer  # UCX keeps what it still needs
        engine.discard(tag)
        with pytest.raises(TransferFailed):
            op.ending.result(20)
    buffer = np.zeros(MIB, dtype=np.uint8)
    op = engine.recv(tags.encode(Kind.STORE, 999), buffer, peer)
    child.ask(do="send", tag=tags.encode(Kind.STORE, 999), nbytes=MIB, seed=2, wait=False)
    op.ending.result(20)
    assert (buffer == pattern(2, MIB)).all()
    assert child.ask(do="wait") == {}


@pytest.mark.parametrize("direction", ["from", "to"])
def test_bl73_killed_peer_fails_its_own_transfers_and_nobody_else_s(engine, kind, start, direction):
    victim, other = start(kind), start(kind)
    lost, kept = joined(engine, victim), joined(engine, other)
    size = 256 * MIB
    buffer = anonymous(size)
    if direction == "from":
        victim.ask(do="send", tag=TAG, nbytes=size, seed=1, wait=False)
        op = engine.recv(TAG, buffer, lost)
    else:
        victim.ask(do="recv", tag=TAG, nbytes=size, seed=1, wait=False)
        op = lost.send(TAG, buffer)
    waiting = engine.recv(TAG + 1, np.zeros(MIB, dtype=np.uint8), lost)
    stop = threading.Event()
    rounds = []

    def traffic():
        back = np.zeros(MIB, dtype=np.uint8)
        while not stop.is_set():
            tag = tags.encode(Kind.PEER, 1, len(rounds))
            received = engine.recv(tag, back, kept)
            assert other.ask(do="send", tag=tag, nbytes=MIB, seed=len(rounds)) == {}
            received.ending.result(20)
            rounds.append(bool((back == pattern(len(rounds), MIB)).all()))

    thread = threading.Thread(target=traffic)
    thread.start()
    while not rounds:
        time.sleep(0.001)
    victim.kill()
    lost.mark_gone()
    before = len(rounds)
    for each in (op, waiting):
        try:
            each.ending.result(5)
        except TransferFailed:
            pass
        else:
            assert each is op  # it was faster than the kill
    while len(rounds) < before + 3:
        assert thread.is_alive()
        time.sleep(0.001)
    stop.set()
    thread.join()
    assert all(rounds)
    with pytest.raises(TransferFailed):
        lost.send(TAG, buffer[:MIB]).ending.result(5)


def test_bl73_death_of_a_remote_peer_is_seen_without_being_told(start):
    engine = UcxEngine(options("remote"))
    child = start("remote")
    peer = joined(engine, child)
    child.ask(do="send", tag=TAG + 1, nbytes=MIB, seed=1, wait=False)
    engine.recv(TAG + 1, np.zeros(MIB, dtype=np.uint8), peer).ending.result(20)
    op = engine.recv(TAG, np.zeros(MIB, dtype=np.uint8), peer)
    child.kill()
    with pytest.raises(TransferFailed):
        op.ending.result(10)
    assert peer.lost
    engine.close()


def test_a_transfer_that_stands_still_is_not_watched_for_ever(start):
    engine = UcxEngine(options("remote"))
    child = start("remote")
    peer = joined(engine, child)
    size = 256 * MIB
    buffer = anonymous(size)
    tag = tags.encode(Kind.PEER, 7)
    child.ask(do="send", tag=tag, nbytes=size, seed=1, wait=False)
    op = engine.recv(tag, buffer, peer)
    while not engine._lanes[0].state.is_receiving:
        time.sleep(0.0005)
    os.kill(child.pid, signal.SIGSTOP)
    try:
        time.sleep(0.1)  # what is on its way still comes
        spent = time.process_time()
        time.sleep(1)
        assert time.process_time() - spent < 0.5
        assert not op.ending.done()
    finally:
        os.kill(child.pid, signal.SIGCONT)
    op.ending.result(20)
    assert (buffer == pattern(1, size)).all()
    engine.close()


def test_bl73_close_with_eight_transfers_open(kind, start):
    engine = UcxEngine(options(kind))
    child = start(kind)
    peer = joined(engine, child)
    ops = [peer.send(tags.encode(Kind.RETRIEVE, i), anonymous(16 * MIB)) for i in range(1, 5)]
    ops += [engine.recv(tags.encode(Kind.STORE, i), anonymous(16 * MIB), peer) for i in range(1, 5)]
    began = time.monotonic()
    engine.close(timeout=4)
    assert time.monotonic() - began < 4.5
    for op in ops:
        with pytest.raises(TransferFailed):
            op.ending.result(0)
    with pytest.raises(DataPathUnavailable):
        engine.recv(TAG, anonymous(MIB))
    engine.close()


@pytest.mark.slow
def test_bl73_first_transfer_after_30_s_of_silence(engine, kind, start):
    child = start(kind)
    peer = joined(engine, child)
    buffer = np.zeros(4 * MIB, dtype=np.uint8)

    def transfer(tag):
        op = engine.recv(tag, buffer, peer)
        began = time.monotonic()
        child.ask(do="send", tag=tag, nbytes=4 * MIB, seed=tag & 0xFF)
        op.ending.result(20)
        return time.monotonic() - began

    transfer(TAG)
    usual = min(transfer(TAG + 1 + i) for i in range(3))
    spent = time.thread_time(), os.times()
    time.sleep(30)
    idle = os.times()
    assert (idle.user + idle.system) - (spent[1].user + spent[1].system) < 0.5  # nobody polls
    assert transfer(TAG + 9) < max(10 * usual, 0.5)


def test_bl68_probe_passes(engine, kind, start):
    child = start(kind)
    peer = joined(engine, child)
    tag = tags.encode(Kind.PROBE, 1)
    probe = ProbeServer(engine, peer, tag)
    assert child.ask(do="probe", tag=tag, nbytes=MIB, timeout=10) == {}
    probe.future.result(10)


def test_bl68_probe_without_an_answer_is_given_up(engine, kind, start):
    child = start(kind)
    peer = joined(engine, child)
    probe = ProbeServer(engine, peer, tags.encode(Kind.PROBE, 1))
    probe.cancel()
    with pytest.raises(TransferFailed):
        probe.future.result(2)
    tag = tags.encode(Kind.PROBE, 2)
    assert "did not come through" in child.ask(do="probe", tag=tag, nbytes=MIB, timeout=0.2)["error"]


def probe_or_error(engine, child, peer):
    """What becomes of a probe on a path that may not work, as both sides see it."""
    tag = tags.encode(Kind.PROBE, 1)
    probe = ProbeServer(engine, peer, tag)
    told = child.ask(do="probe", tag=tag, nbytes=MIB, timeout=3)
    try:
        probe.future.result(0.5)
    except (TransferFailed, TimeoutError) as error:
        probe.cancel()
        return str(error), told.get("error", "")
    return "", told.get("error", "")


def test_bl68_cma_blocked_from_the_start(start):
    """UCX sees that it may not copy between processes, and goes through shared memory."""
    with closing(UcxEngine(options("local"))) as engine:
        child = start("local", block_cma=True)
        assert probe_or_error(engine, child, joined(engine, child)) == ("", "")


def test_bl68_cma_that_turns_out_not_to_be_permitted(start, caplog):
    """Nothing tells UCX before it tries: the probe fails, nobody is killed, and TCP does it."""
    with closing(UcxEngine(options("local", "client"))) as engine:
        child = start("local", role="server")
        peer = joined(engine, child)
        peer.send(TAG, pattern(1, MIB))
        assert child.ask(do="recv", tag=TAG, nbytes=MIB, seed=1) == {"same": True}
        child.ask(do="block_cma")
        op = peer.send(TAG + 1, pattern(1, MIB))
        assert "TransferFailed" in child.ask(do="recv", tag=TAG + 1, nbytes=MIB, seed=1)["error"]
        op.cancel()
        _, told = probe_or_error(engine, child, peer)
        assert told
        child.ask(do="sleep", seconds=0)  # it lives
    with closing(UcxEngine(options("remote"))) as engine:
        child = start("remote", block_cma=True)
        assert probe_or_error(engine, child, joined(engine, child)) == ("", "")


def test_address_of_another_kind_is_refused(start):
    engine = UcxEngine(options("local"))
    child = start("remote")
    with pytest.raises(DataPathUnavailable):
        engine.connect(child.address)
    with pytest.raises(DataPathUnavailable):
        engine.connect(b"\0" * 40)
    engine.close()


def test_engine_of_the_parent_is_refused_in_a_forked_child(engine, kind):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            engine.recv(TAG, np.zeros(8, dtype=np.uint8))
        except DataPathUnavailable as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0
    assert b"forked" in os.read(read, 1000)
    os.close(read)
    op = engine.recv(TAG, np.zeros(8, dtype=np.uint8))
    op.cancel()


def test_bl71_device_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"--ucx-devices.*no-such0.*lo"):
        UcxEngine(UcxOptions("remote", devices=("no-such0",)))


def test_server_plane_cancel_waits_for_what_has_begun(engine, kind, start):
    child = start(kind)
    peer = joined(engine, child)
    plane = UcxServerPlane(engine)
    slots = [anonymous(2 * MIB), anonymous(MIB + 1)]
    opened = plane.expect_store(peer, 5, slots, MIB)
    assert [tags.decode(tag).piece for tag in opened.first_tags] == [0, 2]
    child.ask(do="send", tag=opened.first_tags[0], nbytes=MIB, seed=1)
    child.ask(do="send", tag=opened.first_tags[0] + 1, nbytes=MIB, seed=2)
    opened.slots[0].result(20)
    assert not opened.slots[1].done()
    plane.cancel(5).result(5)
    with pytest.raises(TransferFailed):
        opened.slots[1].result(0)
    child.ask(do="send", tag=opened.first_tags[1], nbytes=MIB, seed=3)
    assert not slots[1].any()  # a late message is dropped
    assert plane.cancel(5).result(0) is None
