"""The leak check itself has teeth."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from support import leaks


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(leaks, "GRACE_S", 0.0)


def test_a_left_descriptor_is_named():
    before = leaks.snapshot(("fds",))
    fd = os.open(__file__, os.O_RDONLY)
    try:
        assert leaks.settle(before, ("fds",)) == [f"fd {fd}: {__file__}"]
    finally:
        os.close(fd)
    assert leaks.settle(before, ("fds",)) == []


def test_a_left_shm_entry_is_named():
    before = leaks.snapshot(("shm",))
    entry = Path(f"/dev/shm/kvwire-leakcheck-{os.getpid()}")
    entry.touch()
    try:
        assert leaks.settle(before, ("shm",)) == [str(entry)]
    finally:
        entry.unlink()


def test_a_running_thread_is_named():
    before = leaks.snapshot(("threads",))
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    try:
        assert leaks.settle(before, ("threads",)) == ["thread left-over"]
    finally:
        stop.set()
        thread.join()


@pytest.mark.asyncio
async def test_a_pending_task_is_named():
    before = leaks.tasks()
    task = asyncio.create_task(asyncio.sleep(60), name="left-over")
    (left,) = await leaks.settle_tasks(before)
    assert "left-over" in left
    task.cancel()


def test_unknown_kinds_are_refused():
    with pytest.raises(pytest.UsageError, match="socks"):
        leaks.kinds_of(pytest.mark.leakcheck("socks").mark)
