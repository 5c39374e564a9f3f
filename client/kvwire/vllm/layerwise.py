"""Loads ahead of the forward pass that reads them, stores behind the one that writes them, layer by layer.

A step begins with its loads and waits for each layer when it comes to it: the engine admits a request and
computes on it in one step. Nothing is proven before the step is over: what did not come in time, or turns out
wrong, is named as failed blocks, and the engine throws away what the step computed from them. Until then
nothing that was computed from such blocks may be stored.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvwire import telemetry
from kvwire.client.layered import LayerWatch
from kvwire.vllm.layout import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvwire.vllm.layout import EngineLayout
    from kvwire.vllm.metadata import Job

logger = logging.getLogger(__name__)


def why_not(layout: EngineLayout, *, drafts: bool = False) -> str:
    """Why an engine cannot load layer by layer; empty when it can. `drafts`: a second model guesses ahead."""
    if drafts:
        return "the layers of its draft model run after vLLM has asked what has failed"
    if layout.num_engine_groups > 1:
        return "it has several KV groups, and vLLM takes failed loads of a step itself for one group only"
    if layout.has_states:
        return "vLLM reads recurrent state before it begins a load"
    if layout.block_major:
        return "its memory keeps all layers of a block together"
    return ""


class OpenLoads:
    """The scheduler's view: loads of steps whose end the workers have not told yet."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._left: Counter[str] = Counter()
        self._blocks: dict[str, frozenset[int]] = {}

    def begin(self, request_id: str, blocks: frozenset[int]) -> None:
        self._left[request_id] += self._world_size
        self._blocks[request_id] = self._blocks.get(request_id, frozenset()) | blocks

    def end(self, counts: Mapping[str, int]) -> list[str]:
        """What the workers tell. Returns the requests whose loads have ended on every rank."""
        ended: list[str] = []
        for request_id, count in counts.items():
            self._left[request_id] -= count
            if self._left[request_id] <= 0:
                del self._left[request_id]
                self._blocks.pop(request_id, None)
                ended.append(request_id)
        return ended

    def touch(self, tables: Sequence[Sequence[int]] | None) -> bool:
        """Whether a request with these block tables reads what is not proven yet."""
        return any(not blocks.isdisjoint(table) for blocks in self._blocks.values() for table in tables or ())


def blocks_behind(layout: EngineLayout, tables: Sequence[Sequence[int]], num_tokens: int) -> frozenset[int]:
    """All blocks of a request from this token on."""
    return frozenset(
        block
        for group in layout.groups
        for block in tables[group.engine_index][num_tokens // group.span_tokens :]
        if block != NULL_BLOCK
    )


class Transfer(Protocol):
    """A load under way."""

    @property
    def failed(self) -> bool: ...
    @property
    def failed_block_ids(self) -> frozenset[int]: ...
    def wait(self, timeout: float) -> bool: ...
    def cancel(self) -> None: ...


class Transfers(Protocol):
    def submit_watched_retrieve_request(
        self, request_id: str, op: Any, watch: LayerWatch, event: Any = None
    ) -> Transfer: ...


@dataclass(slots=True)
class _Load:
    """`transfer` is None when it could not be started. `missed`: the forward pass did not get a layer."""

    request_id: str
    blocks: frozenset[int]
    watch: LayerWatch
    transfer: Transfer | None
    missed: bool = False


class LayerLoads:
    """A worker's loads of the step that runs."""

    def __init__(
        self,
        transfers: Transfers,
        to_op: Callable[[Job], Any],
        layer_names: Sequence[str],
        wait: float,
        *,
        may_store_behind: bool = False,
    ) -> None:
        """`may_store_behind`: a layer's KV is in place when its call returns, as on a CPU."""
        self.may_store_behind = may_store_behind
        self._transfers = transfers
        self._to_op = to_op
        self._index = {name: index for index, name in enumerate(layer_names)}
        self._wait = wait
        self._deadline = 0.0
        self._loads: list[_Load] = []
        self._waited: set[int] = set()

    def watch(self, num_objects: int = 1) -> LayerWatch:
        return LayerWatch(len(self._index), num_objects)

    def computed(self, name: str, watch: LayerWatch) -> None:
        index = self._index.get(name)
        if index is not None:
            watch.arrived(index, 1)

    def start(self, jobs: Iterable[Job], event: Any = None) -> None:
        """Before the forward pass."""
        self._deadline = time.monotonic() + self._wait
        self._waited = set()
        for job in jobs:
            watch = self.watch(sum(group.chunk_count for group in job.plan.groups))
            load = _Load(job.request_id, job.plan.block_ids | job.doomed, watch, None)
            self._loads.append(load)
            if job.plan.groups and not job.doomed:
                load.transfer = self._submit(job, watch, event)

    def wait_for_layer(self, name: str) -> None:
        """Before a layer reads its KV. Returns in time whatever happens; `finish` tells what is missing."""
        if not self._loads:
            return
        # A layer that is not known shares another one's KV: then all of it has to be there.
        index = self._index.get(name, len(self._index) - 1)
        self._waited.add(index)
        for load in self._loads:
            if load.transfer is not None and not load.missed:
                load.missed = not load.watch.wait_for(index, self._deadline)

    def finish(self) -> tuple[set[int], dict[str, int]]:
        """After the forward pass: the blocks that are not proven right, and how many loads have ended, by
        request. Nothing of these loads is written any more."""
        loads, self._loads = self._loads, []
        failed: set[int] = set()
        for load in loads:
            failed |= self._unproven(load)
        return failed, dict(Counter(load.request_id for load in loads))

    def _submit(self, job: Job, watch: LayerWatch, event: Any) -> Transfer | None:
        try:
            with telemetry.attached(telemetry.context_from_headers(job.trace)):
                submit = self._transfers.submit_watched_retrieve_request
                return submit(job.request_id, self._to_op(job), watch, event)
        except Exception:
            logger.exception("kvwire: a load of request %s could not be started", job.request_id)
            return None

    def _unproven(self, load: _Load) -> frozenset[int]:
        transfer = load.transfer
        if transfer is None:
            return load.blocks
        if not transfer.wait(max(0.0, self._deadline - time.monotonic())):
            transfer.cancel()
            load.watch.close()
            logger.warning(
                "kvwire: a load of request %s took more than %g s and was given up",
                load.request_id,
                self._wait,
            )
            return load.blocks
        if transfer.failed:
            return transfer.failed_block_ids or load.blocks
        if len(self._waited) < len(self._index):
            logger.error(
                "kvwire: %d of %d layers did not wait for their KV: this model needs kvwire.overlap off",
                len(self._index) - len(self._waited),
                len(self._index),
            )
            return load.blocks
        return load.blocks if load.missed else frozenset()
