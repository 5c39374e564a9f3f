"""One UCX worker, the thread that looks after it, and those that drive it themselves for a while."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from kvwire.errors import DataPathUnavailable
from kvwire.transfer.ucx_state import UcxState, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.transfer.ending import Ending
    from kvwire.transfer.ucx_library import Library
    from kvwire.transfer.ucx_ops import Peer
    from kvwire.transfer.ucx_options import UcxOptions

logger = logging.getLogger(__name__)

START_SECONDS: Final = 20.0
WATCH_S: Final = 200e-6 if len(os.sched_getaffinity(0)) > 1 else 0.0
"""How long a thread watches for what is on its way, before it sleeps.

Who sleeps has to be woken, by the side that moves the bytes, and the kernel then likes to run both on one
processor. A thread that watches gives its processor to any other that has work.
"""
TURN_S: Final = 0.001
"""How long one who wants to drive waits for the lane's own thread, which is seldom busy for longer."""


class Lane:
    """Starts its thread at once. Commands are run in order, one at a time. Raises what starting raises.

    The worker and all that the state knows belong to whoever has the turn: the lane's own thread, or a thread
    that moves bytes and drives the worker itself meanwhile (`driven`). Then nobody has to be woken for each
    message, neither to send it nor to learn that it has come, and a wake costs more than a message.
    """

    def __init__(
        self, library: Library, options: UcxOptions, name: str, lost: Callable[[Peer], None]
    ) -> None:
        self.state: Final = UcxState(library, options, lost)
        self.address = b""
        # Within a host a step copies 512 KiB of what is known already; else it may bring the next message.
        self._takes_all = options.kind == "local"
        self._watches = options.kind == "remote"
        self._library = library
        self._commands: deque[Callable[[], None]] = deque()
        self._door = threading.Lock()
        self._turn = threading.Lock()
        self._driver = 0
        self._is_stepping = False
        self._failure: Exception | None = None
        self._handle = 0
        self._is_open = True
        started: Future[None] = Future()
        self.thread: Final = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        self.thread.start()
        started.result(START_SECONDS)

    def submit(self, command: Callable[[], None]) -> None:
        """Raises DataPathUnavailable when the lane is closed."""
        if self._is_driven_here:
            self._commands.append(command)
            if not self._is_stepping:  # else an operation's ending has led here: its step goes on first
                self._as_driver(self._obey)
            return
        with self._door:
            if not self._is_open:
                raise unavailable("the engine is closed")
            self._commands.append(command)
            self._library.signal(self._handle)

    def submit_if_open(self, command: Callable[[], None]) -> None:
        """For what closing does by itself."""
        with contextlib.suppress(DataPathUnavailable):
            self.submit(command)

    @contextlib.contextmanager
    def driven(self) -> Iterator[None]:
        """The calling thread drives the worker meanwhile, unless another one does.

        It looks after all that is under way while it submits and waits, and nobody does while it copies.
        """
        if not self._takes_turn():
            yield
            return
        try:
            yield
        finally:
            if self._is_driven_here:
                self._as_driver(self._hand_over)
            if self._is_driven_here:
                self._leave()

    def _takes_turn(self) -> bool:
        if self._driver or not self._turn.acquire(timeout=TURN_S):
            return False
        if not self._is_open:
            self._turn.release()
            return False
        self._driver = threading.get_ident()
        return True

    def wait(self, ending: Ending, seconds: float) -> None:
        """Until it is resolved. Raises its error, or TimeoutError."""
        until = time.monotonic() + seconds
        while self._is_driven_here and not ending.done() and time.monotonic() < until:
            self._as_driver(lambda: self._advance(ending, until))
        ending.result(max(0.0, until - time.monotonic()))

    @property
    def _is_driven_here(self) -> bool:
        return self._driver == threading.get_ident()

    def _as_driver(self, step: Callable[[], None]) -> None:
        """What must not happen ends the lane, as it does on the lane's own thread."""
        self._is_stepping = True
        try:
            step()
        except Exception as error:  # noqa: BLE001  raised again on the lane's thread
            self._failure = error
            self._library.signal(self._handle)
            self._leave()
        finally:
            self._is_stepping = False

    def _advance(self, ending: Ending, until: float) -> None:
        """Do what there is to do, or wait for it."""
        self._obey()
        self.state.step()
        if ending.done() or self._watch() or not self._is_quiet() or ending.done():
            return
        left_ms = max(1, int((until - time.monotonic()) * 1000))
        wait_ms = self.state.wait_ms()
        self._sleep(left_ms if wait_ms < 0 else min(wait_ms, left_ms))

    def _hand_over(self) -> None:
        """The lane's thread may be asleep. Whatever comes from now on wakes it, and what is left does."""
        if not self._is_quiet() or self.state.wait_ms() >= 0 or self.state.is_stopped:
            self._library.signal(self._handle)

    def _leave(self) -> None:
        self._driver = 0
        self._turn.release()

    def _run(self, started: Future[None]) -> None:
        state = self.state
        try:
            self.address = state.open()
            self._handle = state.worker.handle
        except Exception as error:  # noqa: BLE001  raised again where the lane is made
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            self._loop(state)
        except Exception:
            logger.exception("The UCX thread has failed; what it had under way fails with it")
        finally:
            with self._turn:
                # From here on nobody may signal the worker any more.
                with self._door:
                    self._is_open = False
                state.stop(0)
                self._obey()
                state.destroy()

    def _loop(self, state: UcxState) -> None:
        while True:
            with self._turn:
                if self._failure is not None:
                    raise self._failure
                is_quiet = self._is_quiet()
                if state.is_stopped:
                    return
                if is_quiet and self._watches and state.is_receiving and self._watch():
                    continue
                wait_ms = state.wait_ms()
            if is_quiet:
                self._sleep(wait_ms)

    def _is_quiet(self) -> bool:
        """Do what there is to do. True: there was nothing, and whatever comes now wakes `_sleep`."""
        self._obey()
        self.state.step()
        worker = self.state.worker
        if worker.progress_once():
            if self._takes_all:
                worker.progress()
            return False
        return worker.arm() and not self._commands

    def _watch(self) -> bool:
        """Look for a moment whether anything comes, or is to be done, without sleeping: see WATCH_S.

        A driver waits for the first that comes. The lane's own thread takes in what else comes with it.
        """
        worker = self.state.worker
        until = time.perf_counter() + WATCH_S
        has_moved = False
        while not self._commands and time.perf_counter() < until:
            if not worker.progress_once():
                os.sched_yield()
            elif self._driver:
                return True
            else:
                has_moved = True
        return has_moved or bool(self._commands)

    def _sleep(self, milliseconds: int) -> None:
        """Until an event or a signal, or so long; -1 is for ever."""
        events = select.poll()
        events.register(self.state.worker.epoll_file_descriptor, select.POLLIN)
        events.poll(milliseconds)

    def _obey(self) -> None:
        while self._commands:
            self._commands.popleft()()
