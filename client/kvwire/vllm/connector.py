"""`KvwireConnector`: vLLM's connector interface over the two sides. No failure here may stop the engine."""

from __future__ import annotations

import logging
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

from kvwire.vllm import versions
from kvwire.vllm.assembly import make_scheduler, make_worker
from kvwire.vllm.config import connector_config
from kvwire.vllm.metadata import StepMetadata, WorkerReport

try:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
except ImportError as error:
    raise versions.unusable(error) from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.vllm.assembly import SchedulerParts, WorkerParts
    from kvwire.vllm.stats import KvwirePromMetrics, KvwireStats

logger = logging.getLogger(__name__)

KVConnectorMetadata.register(StepMetadata)
KVConnectorWorkerMetadata.register(WorkerReport)

P = ParamSpec("P")
R = TypeVar("R")


def contained(default: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """An exception in a hook would end the engine: log it and answer what means "nothing" instead."""

    def around(hook: Callable[P, R]) -> Callable[P, R]:
        @wraps(hook)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(*args, **kwargs)
            except Exception:
                logger.exception("kvwire: %s failed; the engine goes on without it", hook.__name__)
                answer: R = default()
                return answer

        return call

    return around


def _nothing() -> None:
    return None


class KvwireConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the KV of prompts in a kvwire server, and finds it there again.

    The engine makes one in its scheduler and one in every worker. An engine or a configuration that cannot be
    served is refused here, at start; a server that cannot be reached is not: the engine runs without it.
    """

    # A store that is dropped is a miss later on, nothing more.
    requires_kv_delivery: ClassVar[bool] = False

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerParts | None = None
        self._worker: WorkerParts | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = make_scheduler(vllm_config, kv_cache_config)
            untried = versions.warning(str(vllm.__version__))
            if untried:
                logger.warning("kvwire: %s", untried)
        else:
            self._worker = make_worker(vllm_config, kv_cache_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """On a GPU all layers of a block side by side: a block is one copy then. A wish, not a condition.

        Not where layers are to come one by one.
        """
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            return None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return "LBHNC" if connector_config(extra).overlap else "BLHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A captured graph calls no hooks between its layers."""
        return connector_config(extra_config).overlap

    # The scheduler's side

    @contained(_nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        events = self._vllm_config.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            self._of_scheduler.announce(gpu_block_pool.hash_block_size)
        self._of_scheduler.watch(gpu_block_pool)

    @contained(lambda: False)
    def has_pending_block_frees(self) -> bool:
        """Blocks that are copied before the engine drops them are free soon: nobody has to be preempted."""
        return self._of_scheduler.frees_soon

    @contained(lambda: False)
    def has_pending_push_work(self) -> bool:
        """An engine without requests steps on until such blocks are free."""
        return self._of_scheduler.frees_soon

    @contained(list)
    def take_events(self) -> list[Any]:
        return self._of_scheduler.take_events()

    @contained(_nothing)
    def on_new_request(self, request: Any) -> None:
        self._of_scheduler.side.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._matched(request, num_computed_tokens)
        return tokens, bool(tokens) and not self._of_scheduler.side.overlap

    @contained(lambda: 0)
    def _matched(self, request: Any, num_computed_tokens: int) -> int | None:
        return self._of_scheduler.side.matched_tokens(request, num_computed_tokens)

    @contained(_nothing)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of_scheduler.side.allocated(request, blocks, num_external_tokens)

    @contained(StepMetadata)
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._of_scheduler.side.step(scheduler_output)

    @contained(_nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        self._of_scheduler.side.worker_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = self._answer(request)
        return self._finished(request), answer

    @contained(_nothing)
    def _answer(self, request: Any) -> dict[str, Any] | None:
        return self._of_scheduler.side.answer(request)

    @contained(lambda: False)
    def _finished(self, request: Any) -> bool:
        return self._of_scheduler.side.finished(request)

    @contained(lambda: False)
    def reset_cache(self) -> bool | None:
        """Empties the server of this engine's model, also for other engines. False: not all of it is gone."""
        return self._of_scheduler.reset()

    # The workers' side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._of_worker.register(kv_caches)

    @contained(_nothing)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._of_worker.side.make_room(kv_connector_metadata)

    @contained(_nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        worker = self._of_worker
        if self._step.loads:
            worker.side.start_loads(self._step.loads, worker.event())

    @contained(_nothing)
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Asynchronous loads have nothing to do with the step that runs."""
        side = self._of_worker.side
        if side.layers is not None:
            side.before_layer(layer_name, self._step)

    @contained(_nothing)
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._of_worker.side.after_layer(layer_name)

    @contained(_nothing)
    def wait_for_save(self) -> None:
        worker = self._of_worker
        worker.side.after_forward(self._step, worker.event() if self._step.stores else None)

    @contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._of_worker.side.results(self._step)
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    @contained(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._of_worker.side.take_failed_blocks()

    @contained(_nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._of_worker.side.take_report()

    # Both

    @contained(_nothing)
    def get_kv_connector_stats(self) -> KvwireStats | None:
        side = self._scheduler or self._worker
        data = side.take_stats() if side is not None else None
        return self.build_kv_connector_stats(data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvwireStats:
        from kvwire.vllm.stats import KvwireStats

        return KvwireStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvwirePromMetrics:
        from kvwire.vllm.stats import KvwirePromMetrics

        return KvwirePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @contained(_nothing)
    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()

    @property
    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        if not isinstance(step, StepMetadata):
            raise TypeError(f"this step's metadata is of the type {type(step).__name__}")
        return step

    @property
    def _of_scheduler(self) -> SchedulerParts:
        if self._scheduler is None:
            raise RuntimeError("this is the connector of a worker")
        return self._scheduler

    @property
    def _of_worker(self) -> WorkerParts:
        if self._worker is None:
            raise RuntimeError("this is the connector of the scheduler")
        return self._worker
