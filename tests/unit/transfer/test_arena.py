from __future__ import annotations

import errno
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from kvwire.errors import ConfigError, DataPathUnavailable, OutOfSpace, RangeInvalid
from kvwire.transfer import shm
from kvwire.transfer.shm import HEADER_BYTES, LivenessLock, PrivateArena, SharedArena, sweep_dead

pytestmark = pytest.mark.leakcheck("shm", "fds", "threads")

MIB = 1 << 20


@pytest.fixture
def arena():
    made = SharedArena.create(16 * MIB, step=4 * MIB, incarnation=b"i" * 16)
    yield made
    made.unlink()
    made.close()


def test_file_is_private_and_named_by_chance(arena):
    path = shm.FOLDER / arena.name
    assert path.stat().st_mode & 0o777 == 0o600
    assert arena.name.startswith("kvwire-")
    assert len(arena.nonce) == 32
    assert arena.base == HEADER_BYTES
    assert arena.capacity == 16 * MIB
    assert arena.size == 16 * MIB + HEADER_BYTES


def test_offset_zero_is_no_slot(arena):
    arena.ensure(MIB)
    with pytest.raises(RangeInvalid):
        arena.view(0, 1)
    arena.view(HEADER_BYTES, 1)[0] = 7


def test_nothing_beyond_the_watermark_is_handed_out(arena):
    assert arena.allocated == HEADER_BYTES
    with pytest.raises(RangeInvalid):
        arena.view(HEADER_BYTES, 1)
    arena.ensure(HEADER_BYTES + 1)
    assert arena.allocated == 4 * MIB
    arena.array(HEADER_BYTES, 4 * MIB - HEADER_BYTES).fill(1)
    with pytest.raises(RangeInvalid):
        arena.view(4 * MIB, 1)
    arena.ensure(arena.size)
    assert arena.allocated == arena.size


def test_allocated_memory_is_really_there(arena):
    arena.ensure(8 * MIB)
    assert (shm.FOLDER / arena.name).stat().st_blocks * 512 >= 8 * MIB


def test_more_than_the_arena_is_out_of_space(arena):
    with pytest.raises(OutOfSpace):
        arena.ensure(arena.size + 1)


def test_bl68_full_dev_shm_is_an_error_and_no_signal(arena, monkeypatch):
    real = os.posix_fallocate

    def full(fd, offset, length):
        if offset + length > 6 * MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    arena.ensure(5 * MIB)  # the step to 8 MiB does not fit any more, the bytes that are needed do
    assert 5 * MIB <= arena.allocated < 6 * MIB
    with pytest.raises(OutOfSpace):
        arena.ensure(7 * MIB)
    arena.array(HEADER_BYTES, arena.allocated - HEADER_BYTES).fill(3)


def test_bl68_arena_larger_than_dev_shm_names_the_setting():
    room = os.statvfs(shm.FOLDER)
    with pytest.raises(ConfigError, match=r"--l1-size.*--shm-size"):
        SharedArena.create(room.f_bavail * room.f_frsize + MIB)


def test_client_sees_the_same_bytes(arena):
    arena.ensure(MIB)
    client = SharedArena.attach(arena.name, arena.nonce)
    client.array(HEADER_BYTES, 5)[:] = np.frombuffer(b"hello", dtype=np.uint8)
    assert bytes(arena.view(HEADER_BYTES, 5)) == b"hello"
    assert client.allocated == 4 * MIB
    with pytest.raises(RangeInvalid):
        client.view(4 * MIB, 1)
    arena.ensure(5 * MIB)
    client.view(4 * MIB, 1)
    client.close()


def test_prefault_maps_without_changing_bytes(arena):
    arena.ensure(8 * MIB)
    arena.view(HEADER_BYTES, 4)[:] = b"abcd"
    client = SharedArena.attach(arena.name, arena.nonce)
    client.prefault(HEADER_BYTES, 7 * MIB)
    client.prefault(HEADER_BYTES, 7 * MIB)
    assert bytes(client.view(HEADER_BYTES, 4)) == b"abcd"
    client.close()


@pytest.mark.parametrize("name", ["", "../etc/passwd", "kvwire-gone", ".hidden"])
def test_attach_refuses_what_is_no_arena(name):
    with pytest.raises(DataPathUnavailable):
        SharedArena.attach(name, b"x" * 32)


def test_attach_refuses_another_nonce(arena):
    with pytest.raises(DataPathUnavailable, match="another"):
        SharedArena.attach(arena.name, secrets.token_bytes(32))


def test_attach_refuses_another_file():
    name = f"kvwire-{secrets.token_hex(8)}"
    (shm.FOLDER / name).write_bytes(b"\0" * 8192)
    try:
        with pytest.raises(DataPathUnavailable):
            SharedArena.attach(name, b"\0" * 32)
    finally:
        (shm.FOLDER / name).unlink()


def test_views_outlive_close(arena):
    arena.ensure(MIB)
    seen = arena.array(HEADER_BYTES, 8)
    arena.close()
    seen.fill(1)
    with pytest.raises(RangeInvalid):
        arena.view(HEADER_BYTES, 8)


def test_private_arena_has_the_same_shape():
    arena = PrivateArena.create(4 * MIB, step=MIB)
    with pytest.raises(RangeInvalid):
        arena.view(HEADER_BYTES, 1)
    arena.ensure(2 * MIB)
    arena.prefault(HEADER_BYTES, MIB)
    arena.maps_ahead = True
    arena.ensure(3 * MIB)
    arena.array(HEADER_BYTES, MIB).fill(5)
    with pytest.raises(OutOfSpace):
        arena.ensure(arena.size + 1)
    arena.unlink()
    arena.close()


CRASHED_SERVER = """
    import os, signal, sys
    from kvwire.transfer.shm import LivenessLock, SharedArena
    arena = SharedArena.create(1 << 20, sys.argv[1])
    lock = LivenessLock.create(arena.name)
    print(arena.name, lock.name, flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


@pytest.fixture
def start():
    processes = []

    def run(code, *argv):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_sweep_takes_dead_arenas_only(start):
    # Not "kvwire-": a server that starts on this machine meanwhile would sweep it too.
    prefix = f"kvwire_t{secrets.token_hex(3)}-"
    dead, live = start(CRASHED_SERVER, prefix, "die"), start(CRASHED_SERVER, prefix, "live")
    dead_names = dead.stdout.readline().split()
    live_names = live.stdout.readline().split()
    dead.wait(10)
    held = LivenessLock.open(dead_names[1])
    assert sweep_dead(prefix) == [dead_names[0]]  # the lock of a client that lives stays
    held.close()
    assert sweep_dead(prefix) == [dead_names[1]]
    assert all((shm.FOLDER / name).exists() for name in live_names)
    live.kill()
    live.wait(10)
    assert sorted(sweep_dead(prefix)) == sorted(live_names)


CLIENT = """
    import os, sys, time
    from kvwire.transfer.shm import LivenessLock
    held = LivenessLock.open(sys.argv[1])
    if sys.argv[2] == "fork" and os.fork() == 0:
        os.write(1, b"child %d\\n" % os.getpid())
        time.sleep(60)
    os.write(1, b"held %d\\n" % os.getpid())
    time.sleep(60)
"""


def test_liveness_of_a_killed_client(arena, start):
    lock = LivenessLock.create(arena.name)
    assert (shm.FOLDER / lock.name).stat().st_mode & 0o777 == 0o600
    assert not lock.is_held()
    client = start(CLIENT, lock.name, "plain")
    assert client.stdout.readline().startswith("held")
    assert lock.is_held()
    assert lock.is_held()
    client.kill()
    client.wait(10)
    assert not lock.is_held()
    lock.close()
    assert not (shm.FOLDER / lock.name).exists()
    assert not lock.is_held()


def test_liveness_outlives_the_parent_of_a_forked_child(arena, start):
    lock = LivenessLock.create(arena.name)
    client = start(CLIENT, lock.name, "fork")
    pids = dict(client.stdout.readline().split() for _ in range(2))
    client.kill()
    client.wait(10)
    assert lock.is_held()  # the child has the arena mapped just as its parent had
    os.kill(int(pids["child"]), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while lock.is_held():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock.close()


def test_lock_of_a_server_that_is_gone_cannot_be_opened(arena):
    lock = LivenessLock.create(arena.name)
    lock.close()
    with pytest.raises(DataPathUnavailable):
        LivenessLock.open(lock.name)
    with pytest.raises(DataPathUnavailable):
        LivenessLock.open("../" + lock.name)


def test_pages_are_locked_as_the_arena_grows():
    from kvwire.transfer.cuda import PageLock

    arena = PrivateArena.create(1 << 20, step=1 << 18)
    locked, unlocked = [], []
    lock = PageLock(
        arena, lambda part: locked.append(part.nbytes) or True, lambda part: unlocked.append(part.nbytes)
    )
    lock.cover()
    assert locked == []
    arena.ensure(arena.base + 100)
    lock.cover()
    lock.cover()
    arena.ensure(arena.size)
    lock.cover()
    assert len(locked) == 2
    assert sum(locked) == arena.capacity
    lock.close()
    assert unlocked == locked
    arena.close()


def test_a_driver_that_does_not_lock_is_no_failure(caplog):
    from kvwire.transfer.cuda import PageLock

    arena = PrivateArena.create(1 << 20)
    arena.ensure(arena.size)
    lock = PageLock(arena, lambda part: False, lambda part: pytest.fail("nothing was locked"))
    lock.cover()
    lock.close()
    assert "does not page-lock" in caplog.text
    arena.close()
