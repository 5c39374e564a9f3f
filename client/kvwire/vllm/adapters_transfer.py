"""Loads and stores on their way, and the threads that run them."""

from __future__ import annotations

import threading
import time
from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from kvwire.client import forks
from kvwire.client.pipeline import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.client.jobs import ObjectName, TransferJob
    from kvwire.client.layered import LayerWatch
    from kvwire.errors import KvwireError

MAX_BATCH: Final = 16
"""Transfers that share one call to the server. All of them are done when the last one is."""


class Kind(Enum):
    LOAD = "load"
    STORE = "store"


class Transfer(Task):
    """One load or store.

    `event` marks the end of the kernels that the blocks wait for (None: they have ended). Who gave a `watch`
    asks the transfer itself what became of it.
    """

    def __init__(
        self,
        request_id: str,
        kind: Kind,
        job: TransferJob,
        block_ids: frozenset[int],
        event: Any,
        trace: Any,
        watch: LayerWatch | None = None,
    ) -> None:
        super().__init__(job, trace, watch)
        self.request_id = request_id
        self.kind = kind
        self.error: KvwireError | None = None
        self._all_blocks = block_ids
        self._event = event
        self._failed_blocks: frozenset[int] = frozenset()
        self._cancelled = False
        self._done = threading.Event()
        self._begin = time.monotonic()
        self.seconds = 0.0
        """From its submission to its end."""

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: float) -> bool:
        """Whether it is done within `timeout` seconds."""
        return self._done.wait(timeout)

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def failed_block_ids(self) -> frozenset[int]:
        """Of a load that has failed: every block whose bytes are not proven right."""
        return self._failed_blocks

    def cancel(self) -> None:
        """Nothing of it that is not committed yet is ever committed.

        A load fails; it is done once no copy runs.
        """
        self._cancelled = True

    def is_cancelled(self) -> bool:
        return self._cancelled

    def may_commit(self) -> bool:
        return not self._cancelled

    def wait_for_kernels(self) -> None:
        """Until the engine has written what is stored, or no longer reads what is loaded over."""
        if self._event is not None:
            self._event.synchronize()

    def finish(self, error: KvwireError | None = None, failed: Sequence[ObjectName] | None = None) -> None:
        """`failed` None with an error: all of it. Only the first call counts."""
        if self._done.is_set():
            return
        self.error = error
        if error is not None and self.kind is Kind.LOAD:
            self._failed_blocks = self.job.block_ids(failed) if failed else self._all_blocks
        self.seconds = time.monotonic() - self._begin
        self._event = None
        self._done.set()
        if self.watch is not None and self.kind is Kind.LOAD:
            self.watch.end()


class TransferQueue:
    """Runs transfers: loads before stores, and those of one request in the order of their submission."""

    def __init__(self, run: Callable[[Kind, list[Transfer]], None], threads: int, name: str) -> None:
        self._run = run
        self._names = [f"{name}-{index}" for index in range(threads)]
        self._closed = False
        self._forget()
        forks.watch(self)

    def after_fork(self) -> None:
        """What is under way is the parent's."""
        self._forget()

    def _forget(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[str, deque[Transfer]] = {}
        self._ready: dict[Kind, deque[Transfer]] = {kind: deque() for kind in Kind}
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in self._names]
        self._started = False

    def submit(self, transfers: Sequence[Transfer]) -> bool:
        """False: the queue is closed, and nothing was taken."""
        with self._changed:
            if self._closed:
                return False
            for transfer in transfers:
                line = self._lines.setdefault(transfer.request_id, deque())
                line.append(transfer)
                if len(line) == 1:
                    self._ready[transfer.kind].append(transfer)
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            self._changed.notify(len(transfers))
        return True

    def close(self, timeout: float) -> list[Transfer]:
        """Take nothing more, end what runs, and return what never began."""
        with self._changed:
            self._closed = True
            running = self._running()
            left = [each for line in self._lines.values() for each in line if each not in running]
            for line in self._lines.values():
                for each in list(line):
                    if each not in running:
                        line.remove(each)
            for ready in self._ready.values():
                ready.clear()
            for each in running:
                each.cancel()
            self._changed.notify_all()
        if self._started:
            for thread in self._threads:
                thread.join(timeout)
        return left

    def _running(self) -> set[Transfer]:
        waiting = {each for ready in self._ready.values() for each in ready}
        return {line[0] for line in self._lines.values() if line and line[0] not in waiting}

    def _work(self) -> None:
        while True:
            taken = self._take()
            if not taken:
                return
            try:
                self._run(taken[0].kind, taken)
            finally:
                self._give_way(taken)

    def _take(self) -> list[Transfer]:
        """Waits for transfers of one kind that may run together; none when the queue is closed."""
        with self._changed:
            while not self._closed:
                for ready in self._ready.values():
                    if ready:
                        # Leave some for the other threads.
                        share = -(-len(ready) // len(self._threads))
                        return [ready.popleft() for _ in range(min(share, MAX_BATCH))]
                self._changed.wait()
            return []

    def _give_way(self, done: Sequence[Transfer]) -> None:
        with self._changed:
            for transfer in done:
                line = self._lines[transfer.request_id]
                line.popleft()
                if not line:
                    del self._lines[transfer.request_id]
                elif not self._closed:
                    self._ready[line[0].kind].append(line[0])
            self._changed.notify_all()
