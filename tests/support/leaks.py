"""What a test may leave behind, seen before and after it."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from kvwire.transfer.crew import NAME

KINDS = ("shm", "fds", "threads", "tasks")
SHM = Path("/dev/shm")
SHM_PREFIX = "kvwire"
GRACE_S = 3.0
ORPHAN_GRACE_S = 30.0
"""For memory that nobody maps, where other tests run beside this one: they kill servers, too, and tidy up
later."""


@dataclass(frozen=True)
class Snapshot:
    shm: frozenset[str] = frozenset()
    fds: dict[int, str] = field(default_factory=dict)
    threads: frozenset[int] = frozenset()


def kinds_of(marker: pytest.Mark) -> tuple[str, ...]:
    unknown = set(marker.args) - set(KINDS)
    if unknown:
        raise pytest.UsageError(f"leakcheck knows {KINDS}, not {sorted(unknown)}")
    return marker.args or KINDS


def snapshot(kinds: tuple[str, ...]) -> Snapshot:
    return Snapshot(
        shm=shm_entries() if "shm" in kinds else frozenset(),
        fds=open_fds() if "fds" in kinds else {},
        threads=frozenset(live_threads()) if "threads" in kinds else frozenset(),
    )


def settle(before: Snapshot, kinds: tuple[str, ...]) -> list[str]:
    """What is there now and was not there before, after giving it a moment to go."""
    began = time.monotonic()
    while True:
        gc.collect()
        left = compare(before, kinds)
        may_be_others = "PYTEST_XDIST_WORKER" in os.environ and all(
            each.startswith(f"{SHM}/") for each in left
        )
        if not left or time.monotonic() > began + (ORPHAN_GRACE_S if may_be_others else GRACE_S):
            return left
        time.sleep(0.05)


def compare(before: Snapshot, kinds: tuple[str, ...]) -> list[str]:
    left: list[str] = []
    if "shm" in kinds:
        new = shm_entries() - before.shm
        left += [f"/dev/shm/{name}" for name in sorted(new) if not held_by_a_stranger(name)]
    if "fds" in kinds:
        left += [f"fd {fd}: {what}" for fd, what in open_fds().items() if before.fds.get(fd) != what]
    if "threads" in kinds:
        left += [f"thread {name}" for ident, name in live_threads().items() if ident not in before.threads]
    return left


def shm_entries() -> frozenset[str]:
    return frozenset(entry.name for entry in SHM.glob(f"{SHM_PREFIX}*"))


def live_threads() -> dict[int, str]:
    """All but the process's own crew, which stays by design."""
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith(NAME)]
    return {thread.ident: thread.name for thread in threads if thread.ident}


def held_by_a_stranger(name: str) -> bool:
    """Another test run on this machine comes and goes meanwhile: what only its processes map is not ours."""
    me = psutil.Process()
    family = {me.pid} | {child.pid for child in me.children(recursive=True)}
    # A lock file is not mapped itself: it belongs to the arena whose name it begins with.
    arena = name.partition(".")[0]
    holders = {pid for pid in psutil.pids() if maps(pid, f"{SHM}/{arena}")}
    return bool(holders) and not holders & family


def maps(pid: int, path: str) -> bool:
    try:
        return path in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def open_fds() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the descriptor that listed the folder
        if not ignorable(target):
            found[int(entry.name)] = target
    return found


def ignorable(target: str) -> bool:
    """gRPC keeps its pollers for the process's life; libraries open /dev/null and urandom and keep them."""
    return target.startswith("anon_inode:") or target in {"/dev/null", "/dev/urandom", "/dev/tty"}


def tasks() -> set[asyncio.Task]:
    return asyncio.all_tasks()


async def settle_tasks(before: set[asyncio.Task]) -> list[str]:
    deadline = time.monotonic() + GRACE_S
    while True:
        new = {t for t in asyncio.all_tasks() - before - {asyncio.current_task()} if not t.done()}
        if not new or time.monotonic() > deadline:
            return sorted(repr(task) for task in new)
        await asyncio.sleep(0.02)
