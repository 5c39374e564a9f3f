"""The workers' side: hands loads and stores to the data path, and tells the engine what has ended."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvwire.vllm.metadata import StepMetadata, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvwire.vllm.metadata import Job

logger = logging.getLogger(__name__)

_PAUSE: Final = 0.001
"""See `scheduler.py`: how long a step waits that has nothing to compute."""


class Transfer(Protocol):
    """A load or a store under way. `failed_block_ids`: blocks of a load that are not proven right."""

    @property
    def failed(self) -> bool: ...
    @property
    def failed_block_ids(self) -> frozenset[int]: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float) -> bool: ...
    def cancel(self) -> None: ...


class Transfers(Protocol):
    """What this side needs of `WorkerAdapter`. Submitting only queues."""

    @property
    def is_healthy(self) -> bool: ...
    def submit_store_request(self, request_id: str, op: Any, event: Any = None) -> Transfer: ...
    def submit_retrieve_request(self, request_id: str, op: Any, event: Any = None) -> Transfer: ...
    def wait_for_any(self, timeout: float) -> bool: ...


@dataclass(slots=True)
class Results:
    """What the engine is told after a step, by request id."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.sent or self.received)


@dataclass(slots=True)
class _Running:
    """`transfer` is None when it could not even be started."""

    request_id: str
    blocks: frozenset[int]
    transfer: Transfer | None

    @property
    def ended(self) -> bool:
        return self.transfer is None or self.transfer.done()

    @property
    def lost_blocks(self) -> frozenset[int]:
        if self.transfer is None:
            return self.blocks
        if not self.transfer.failed:
            return frozenset()
        return self.transfer.failed_block_ids or self.blocks


class WorkerSide:
    """One per worker. With one KV cache group an engine wants failed blocks, with several failed requests."""

    def __init__(
        self,
        transfers: Transfers,
        to_op: Callable[[Job], Any],
        *,
        rank: int,
        single_group: bool,
        store_wait: float,
    ) -> None:
        self._transfers = transfers
        self._to_op = to_op
        self._rank = rank
        self._single_group = single_group
        self._store_wait = store_wait
        self._loads: dict[str, _Running] = {}
        self._stores: list[_Running] = []
        self._held: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._ended_stores: dict[str, int] = {}
        self._reported_health = True

    def make_room(self, step: StepMetadata) -> None:
        """Called before anything of the step is written: no store may read a block that gets a new owner.

        Waits `store_wait` seconds at most. A store that still runs then is cancelled: it may go on reading,
        but what it has read is never published.
        """
        blocks = step.overwritten
        if blocks is not None and not blocks:
            return
        deadline = time.monotonic() + self._store_wait
        for store in self._stores:
            if store.transfer is None or (blocks is not None and store.blocks.isdisjoint(blocks)):
                continue
            if not store.transfer.wait(max(0.0, deadline - time.monotonic())):
                logger.warning("kvwire: a store of request %s was given up for its blocks", store.request_id)
                store.transfer.cancel()

    def start_loads(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            running = self._start(job, self._transfers.submit_retrieve_request)
            self._loads[job.request_id] = running

    def start_stores(self, jobs: Iterable[Job], event: Any = None) -> None:
        self._stores.extend(self._start(job, self._transfers.submit_store_request, event) for job in jobs)

    def results(self, step: StepMetadata) -> Results:
        """What has ended. A step without tokens waits for it a moment, so that the engine does not spin."""
        self._held |= step.held
        results = self._collect()
        if step.idle and not results and (self._loads or self._held):
            self._transfers.wait_for_any(_PAUSE)
            results = self._collect()
        return results

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """None when there is nothing new."""
        ended, self._ended_stores = self._ended_stores, {}
        healthy = self._transfers.is_healthy
        changed = {} if healthy is self._reported_health else {self._rank: healthy}
        self._reported_health = healthy
        return WorkerReport(ended, changed) if ended or changed else None

    def finish_stores(self, timeout: float) -> None:
        """Let stores in flight end; those that do not are cancelled."""
        deadline = time.monotonic() + timeout
        for store in self._stores:
            if store.transfer is not None and not store.transfer.wait(max(0.0, deadline - time.monotonic())):
                store.transfer.cancel()

    def _start(self, job: Job, submit: Callable[..., Transfer], event: Any = None) -> _Running:
        blocks = job.plan.block_ids | job.lost
        if job.lost:
            return _Running(job.request_id, blocks, None)
        try:
            transfer = submit(job.request_id, self._to_op(job), event)
        except Exception:
            logger.exception("kvwire: a transfer of request %s could not be started", job.request_id)
            return _Running(job.request_id, blocks, None)
        return _Running(job.request_id, blocks, transfer)

    def _collect(self) -> Results:
        results = Results()
        self._collect_stores()
        for request_id, load in list(self._loads.items()):
            if load.ended:
                del self._loads[request_id]
                results.received.add(request_id)
                self._note_failure(load, results)
        busy = {store.request_id for store in self._stores}
        results.sent = self._held - busy
        self._held &= busy
        return results

    def _collect_stores(self) -> None:
        running: list[_Running] = []
        for store in self._stores:
            if store.ended:
                self._ended_stores[store.request_id] = self._ended_stores.get(store.request_id, 0) + 1
            else:
                running.append(store)
        self._stores = running

    def _note_failure(self, load: _Running, results: Results) -> None:
        lost = load.lost_blocks
        if lost and self._single_group:
            self._failed_blocks |= lost
        elif lost:
            results.failed.add(load.request_id)
