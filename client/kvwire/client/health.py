"""One heartbeat loop per server and process, however many clients of that server the process has."""

from __future__ import annotations

import logging
import threading
import time
from typing import Final, Protocol

from kvwire.client import forks

HEARTBEAT_S: Final = 10.0
_JOIN_S: Final = 10.0
_RUNNING: Final = float("inf")

logger = logging.getLogger(__name__)


class Member(Protocol):
    """Something whose server is watched."""

    @property
    def interval(self) -> float:
        """Seconds until the next heartbeat."""

    def heartbeat(self) -> None:
        """Check the server, and recover where needed. Runs on the loop's thread."""


class HealthLoop:
    """Calls each member's heartbeat at its interval, and at once when it is woken for it."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._changed = threading.Condition()
        self._due: dict[Member, float] = {}
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=f"kvwire-health {address}", daemon=True)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def add(self, member: Member) -> None:
        with self._changed:
            self._due[member] = time.monotonic() + member.interval
            if not self._thread.is_alive():
                self._thread.start()
            self._changed.notify()

    def wake(self, member: Member) -> None:
        """Have the member checked now."""
        with self._changed:
            if member in self._due:
                self._due[member] = 0.0
                self._changed.notify()

    def remove(self, member: Member) -> bool:
        """Whether it was the last one: the loop ends then."""
        with self._changed:
            self._due.pop(member, None)
            self._stopped = not self._due
            self._changed.notify()
            return self._stopped

    def join(self) -> None:
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while True:
            member = self._next()
            if member is None:
                return
            try:
                member.heartbeat()
            except Exception:
                logger.exception("kvwire: the heartbeat of %s failed", self._address)
            self._plan(member)

    def _next(self) -> Member | None:
        """Waits for the member that is due next; None when the loop is to end."""
        with self._changed:
            while not self._stopped:
                member = min(self._due, key=self._due.__getitem__)
                wait = self._due[member] - time.monotonic()
                if wait <= 0:
                    self._due[member] = _RUNNING
                    return member
                self._changed.wait(min(wait, threading.TIMEOUT_MAX))
            return None

    def _plan(self, member: Member) -> None:
        with self._changed:
            # Otherwise it was woken, or left, meanwhile.
            if self._due.get(member) == _RUNNING:
                self._due[member] = time.monotonic() + member.interval


class HealthLoops:
    """The loops of this process, by address."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loops: dict[str, HealthLoop] = {}
        forks.watch(self)

    def after_fork(self) -> None:
        # The parent's threads are not here. Whoever is used in the child joins again.
        self._lock = threading.Lock()
        forks.keep(self._loops)
        self._loops = {}

    def join(self, address: str, member: Member) -> HealthLoop:
        with self._lock:
            loop = self._loops.get(address)
            if loop is None:
                loop = self._loops[address] = HealthLoop(address)
            loop.add(member)
            return loop

    def leave(self, address: str, loop: HealthLoop, member: Member) -> None:
        with self._lock:
            ended = loop.remove(member)
            if ended and self._loops.get(address) is loop:
                del self._loops[address]
        if ended:
            loop.join()


loops: Final = HealthLoops()
