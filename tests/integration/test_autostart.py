"""Servers that connectors start by themselves: one for each address, detached, never in the engine's way."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvwire.client import Client
from kvwire.vllm.autostart import ServerFiles, ensure_server, is_free, is_running
from support.fake_server import fake_server
from support.server_process import server_process

FLAGS = ("--l1-size", "4MiB", "--chunk-size", "64")
PROGRAM = """
import os, sys
from pathlib import Path
from kvwire.vllm.autostart import ensure_server

ensure_server(sys.argv[1], sys.argv[3:], Path(sys.argv[2]))
print("done", flush=True)
"""


def wait_until(check, seconds=15.0):
    until = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < until
        time.sleep(0.02)


def servers_at(address):
    """The ids of all `kvwire server` processes of this address, alive ones."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and is_running(int(folder.name)):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"server" in words and address.encode() in words:
                found.append(int(folder.name))
    return found


class Place:
    def __init__(self, folder):
        self.address = f"unix:{folder}/kvwire.sock"
        self.folder = folder / "run"
        self.files = ServerFiles.of(self.folder, self.address)

    @property
    def pid(self):
        return int(self.files.lock.read_text())

    def ensure(self, *flags, wait=20.0):
        ensure_server(self.address, (*FLAGS, *flags), self.folder, wait)

    def command(self):
        return [sys.executable, "-c", PROGRAM, self.address, str(self.folder), *FLAGS]


@pytest.fixture
def place(short_tmp):
    made = Place(short_tmp)
    yield made
    for pid in servers_at(made.address):
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not servers_at(made.address))


def test_one_server_however_many_processes_start_at_once(place):
    starters = [subprocess.Popen(place.command(), stdout=subprocess.PIPE, text=True) for _ in range(4)]
    # Their output ends only when nobody holds the other end of the pipe any more.
    assert [each.communicate(timeout=40)[0] for each in starters] == ["done\n"] * 4
    assert servers_at(place.address) == [place.pid]
    assert not is_free(place.address)


def test_the_server_is_detached_from_its_starter(place):
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    done = subprocess.run(
        place.command(), check=True, capture_output=True, timeout=40, pass_fds=(writer,), text=True
    )
    os.close(writer)
    assert done.stdout == "done\n"
    assert os.read(reader, 1) == b""
    os.close(reader)
    pid = place.pid
    assert os.getsid(pid) == pid != os.getsid(0)
    process = Path(f"/proc/{pid}")
    assert [(process / "fd" / str(number)).readlink() for number in range(3)] == [
        Path("/dev/null"),
        place.files.log,
        place.files.log,
    ]
    assert (process / "cwd").readlink() == Path("/")
    assert "is serving" in place.files.log.read_text()
    assert place.folder.stat().st_mode & 0o077 == 0


def test_no_descendant_of_the_engine(place):
    place.ensure()
    pid = place.pid
    ancestors = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        ancestors.append(pid)
    assert os.getpid() not in ancestors


def test_a_server_that_is_there_is_used(place, short_tmp):
    with server_process(short_tmp, listen=place.address) as server:
        place.ensure()
        assert servers_at(place.address) == [server.pid]
        assert not place.folder.exists()


def test_a_server_that_hangs_is_somebodys_and_not_replaced(place):
    place.ensure()
    pid = place.pid
    os.kill(pid, signal.SIGSTOP)
    place.ensure(wait=5.0)
    assert servers_at(place.address) == [pid]


def test_one_that_is_shutting_down_is_waited_for_and_replaced(place):
    with fake_server(place.address) as leaving:
        leaving.draining = True
        starter = threading.Thread(target=place.ensure)
        starter.start()
        wait_until(lambda: leaving.calls["Ping"] > 2)
        assert servers_at(place.address) == []
        leaving.stop()
        starter.join(30)
    assert servers_at(place.address) == [place.pid]


def test_what_a_dead_server_left_is_replaced(place):
    place.ensure()
    first = place.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not is_running(first))
    assert Path(place.address.removeprefix("unix:")).exists()
    place.ensure()
    assert servers_at(place.address) == [place.pid] != [first]
    with Client(place.address) as client:
        assert client.negotiate(16).chunk_size == 64
    assert place.files.log.with_suffix(".log.old").exists()


def test_one_that_cannot_start_is_told_with_the_reason(place, caplog):
    with caplog.at_level(logging.WARNING, "kvwire"):
        place.ensure("--policy", "no-such-policy")
    (message,) = caplog.messages
    assert "no server was started" in message
    assert "policy" in message
    assert str(place.files.log) in message
    assert servers_at(place.address) == []


def test_a_folder_that_others_can_write_to_is_not_used(place, caplog):
    place.folder.mkdir()
    place.folder.chmod(0o777)
    with caplog.at_level(logging.WARNING, "kvwire"):
        place.ensure()
    assert "nobody else can write to" in caplog.text
    assert servers_at(place.address) == []


def test_whoever_starts_one_for_too_long_is_not_waited_for(place, caplog):
    import fcntl

    place.folder.mkdir(mode=0o700)
    with place.files.lock.open("w") as lock, caplog.at_level(logging.WARNING, "kvwire"):
        fcntl.flock(lock, fcntl.LOCK_EX)
        place.ensure(wait=0.3)
    assert "another process has been starting one" in caplog.text
    assert servers_at(place.address) == []


def test_without_clients_it_ends_by_itself(place):
    place.ensure("--idle-exit", "0.5s")
    pid = place.pid
    wait_until(lambda: not is_running(pid))
    log = place.files.log.read_text()
    assert "no client for" in log
    assert "Traceback" not in log
    assert not Path(place.address.removeprefix("unix:")).exists()


def test_with_a_client_it_stays(place):
    import numpy as np

    place.ensure("--idle-exit", "1s")
    pid = place.pid
    with Client(place.address) as client:
        kv = {"l0": np.zeros((16, 4096), np.uint8)}
        with client.register_kv_caches(kv, model="m", block_size=16, heartbeat_interval=0.3):
            time.sleep(2.5)
            assert is_running(pid)
    wait_until(lambda: not is_running(pid))
