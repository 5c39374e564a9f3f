"""The workers' side: hands loads and stores to the data path, and tells the engine what has ended."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvwire import telemetry
from kvwire.vllm.metadata import StepMetadata, WorkerReport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from kvwire.client.layered import LayerWatch
    from kvwire.vllm.layerwise import LayerLoads
    from kvwire.vllm.metadata import Job

logger = logging.getLogger(__name__)

_PAUSE: Final = 0.001
"""See `scheduler.py`: how long a step waits that has nothing to compute."""


class Transfer(Protocol):
    """A store under way."""

    def done(self) -> bool: ...
    def wait(self, timeout: float) -> bool: ...
    def cancel(self) -> None: ...


class Transfers(Protocol):
    """What this side needs of `WorkerAdapter`. Submitting only queues."""

    @property
    def is_healthy(self) -> bool: ...
    def submit_store_request(self, request_id: str, op: Any, event: Any = None) -> Transfer: ...
    def submit_watched_store_request(
        self, request_id: str, op: Any, event: Any = None, *, watch: LayerWatch
    ) -> Transfer: ...
    def submit_retrieve_request(self, request_id: str, op: Any, event: Any = None) -> Transfer: ...
    def get_finished(self, finished: Collection[str]) -> tuple[set[str] | None, set[str] | None]: ...
    def failed_requests(self) -> set[str]: ...
    def get_block_ids_with_load_errors(self) -> set[int]: ...
    def wait_for_any(self, timeout: float) -> bool: ...
    def require_chunk_size(self, chunk_size: int) -> None: ...


@dataclass(slots=True)
class Results:
    """What the engine is told after a step, by request id."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.sent or self.received)


@dataclass(slots=True)
class _Store:
    """`transfer` is None when it could not even be started."""

    request_id: str
    blocks: frozenset[int]
    transfer: Transfer | None

    @property
    def ended(self) -> bool:
        return self.transfer is None or self.transfer.done()


class WorkerSide:
    """One per worker. With one KV cache group the engine is told of failed blocks, else of requests."""

    def __init__(
        self,
        transfers: Transfers,
        to_op: Callable[[Job], Any],
        *,
        rank: int,
        single_group: bool,
        store_wait: float,
        layers: LayerLoads | None = None,
    ) -> None:
        self._transfers = transfers
        self._to_op = to_op
        self._rank = rank
        self._single_group = single_group
        self._store_wait = store_wait
        self.layers = layers
        self._stores: list[_Store] = []
        self._stillborn: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._ended_stores: dict[str, int] = {}
        self._ended_loads: dict[str, int] = {}
        self._behind: LayerWatch | None = None
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

    def start_loads(self, jobs: Iterable[Job], event: Any = None) -> None:
        if self.layers is not None:
            self.layers.start(jobs, event)
            return
        for job in jobs:
            submit = self._transfers.submit_retrieve_request
            if not job.plan.groups or self._start(job, submit, event) is None:
                self._stillborn.add(job.request_id)

    def start_stores(self, jobs: Iterable[Job], event: Any = None, watch: LayerWatch | None = None) -> None:
        submit = self._transfers.submit_store_request
        if watch is not None:
            submit = partial(self._transfers.submit_watched_store_request, watch=watch)
        for job in jobs:
            transfer = self._start(job, submit, event)
            self._stores.append(_Store(job.request_id, job.plan.block_ids, transfer))

    def before_layer(self, name: str, step: StepMetadata) -> None:
        """Loads and stores of the step itself, where they overlap with its forward pass."""
        if self.layers is None:
            return
        if step.stores and self._behind is None and self.layers.may_store_behind:
            self._behind = self.layers.watch()
            self.start_stores(step.stores, watch=self._behind)
        self.layers.wait_for_layer(name)

    def after_layer(self, name: str) -> None:
        if self.layers is not None and self._behind is not None:
            self.layers.computed(name, self._behind)

    def after_forward(self, step: StepMetadata, event: Any = None) -> None:
        """The stores of the step begin now, unless they have."""
        behind, self._behind = self._behind, None
        if behind is not None:
            behind.all_arrived(1)
        elif step.stores:
            self.start_stores(step.stores, event)

    def results(self, step: StepMetadata) -> Results:
        """What has ended. A step without tokens waits for it a moment, so that the engine does not spin."""
        if step.chunk_size:
            self._transfers.require_chunk_size(step.chunk_size)
        if self.layers is not None:
            failed, self._ended_loads = self.layers.finish()
            self._failed_blocks |= failed
        results = self._collect(step.held)
        if step.idle and not results and self._transfers.wait_for_any(_PAUSE):
            results = self._collect(())
        return results

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """None when there is nothing new."""
        ended, self._ended_stores = self._ended_stores, {}
        loads, self._ended_loads = self._ended_loads, {}
        healthy = self._transfers.is_healthy
        changed = {} if healthy is self._reported_health else {self._rank: healthy}
        self._reported_health = healthy
        return WorkerReport(ended, changed, loads) if ended or changed or loads else None

    def finish_stores(self, timeout: float) -> None:
        """Let stores in flight end; those that do not are cancelled."""
        deadline = time.monotonic() + timeout
        for store in self._stores:
            if store.transfer is not None and not store.transfer.wait(max(0.0, deadline - time.monotonic())):
                store.transfer.cancel()

    def _start(self, job: Job, submit: Callable[..., Transfer], event: Any) -> Transfer | None:
        try:
            with telemetry.attached(telemetry.context_from_headers(job.trace)):
                return submit(job.request_id, self._to_op(job), event)
        except Exception:
            logger.exception("kvwire: a transfer of request %s could not be started", job.request_id)
            return None

    def _collect(self, held: Collection[str]) -> Results:
        self._count_stores()
        sent, received = self._transfers.get_finished(held)
        failed = self._transfers.failed_requests()
        blocks = self._transfers.get_block_ids_with_load_errors()
        if self._single_group:
            self._failed_blocks |= blocks
            failed = set()
        stillborn, self._stillborn = self._stillborn, set()
        return Results(sent or set(), (received or set()) | stillborn, failed | stillborn)

    def _count_stores(self) -> None:
        running: list[_Store] = []
        for store in self._stores:
            if store.ended:
                self._ended_stores[store.request_id] = self._ended_stores.get(store.request_id, 0) + 1
            else:
                running.append(store)
        self._stores = running
