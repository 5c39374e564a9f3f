"""Threads of this process that work beside the caller's own, shared by all that copy."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

NAME: Final = "kvwire-crew"
MOST: Final = 4
"""Threads of one copy: more than these gain little, and an engine needs its processors."""

SPLIT_BYTES: Final = 4 << 20
"""Less than this is not worth another thread."""


def default_threads() -> int:
    """Threads of one copy, the caller's included: as many as processors may be used here, up to `MOST`."""
    return min(MOST, len(os.sched_getaffinity(0)))


class Begun:
    """A job that its owner needs later: `finish` or `drop` it. Without a `future` nobody else has it."""

    __slots__ = ("_future", "_job")

    def __init__(self, job: Callable[[], None], future: Future[None] | None = None) -> None:
        self._job = job
        self._future = future

    def finish(self) -> None:
        """Run it where nobody has begun it, or wait for whoever has. Raises what it raises.

        Nobody runs it any more then, even if the wait was interrupted.
        """
        if self._future is None or self._future.cancel():
            self._job()
            return
        try:
            self._future.result()
        finally:
            wait([self._future])

    def drop(self) -> None:
        """It is not needed any more: return when nobody runs it."""
        if self._future is not None and not self._future.cancel():
            wait([self._future])


class Crew:
    """Made on first use, anew in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._here = threading.local()
        os.register_at_fork(after_in_child=self._forget)

    @property
    def is_at_work(self) -> bool:
        """Whether this thread runs a job: what it does is not worth further threads."""
        return getattr(self._here, "jobs", 0) > 0

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run all at once, one on the caller's thread; whoever is done takes what nobody has begun.

        Raises what a job has raised, when nothing runs any more; jobs that have not begun are left then.
        """
        todo = deque(jobs)
        pool = self._started()
        helpers = [pool.submit(self._work, todo) for _ in jobs[1:]]
        try:
            self._work(todo)
        finally:
            # One that has not begun has nothing left to do.
            running = [each for each in helpers if not each.cancel()]
            wait(running)
        for each in running:
            each.result()

    def begin(self, job: Callable[[], None]) -> Begun:
        """Run it beside the caller, if a thread is free before the caller needs it."""
        return Begun(job, self._started().submit(self._work, deque([job])))

    def later(self, job: Callable[[], None]) -> None:
        """Something short that nobody waits for."""
        self._started().submit(job)

    def _started(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(MOST, NAME)
            return self._pool

    def _work(self, todo: deque[Callable[[], None]]) -> None:
        self._here.jobs = getattr(self._here, "jobs", 0) + 1
        try:
            while True:
                try:
                    job = todo.popleft()
                except IndexError:
                    return
                job()
        except BaseException:
            todo.clear()
            raise
        finally:
            self._here.jobs -= 1

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._pool = None


crew: Final = Crew()
