"""Puts the parts of a connector together from the engine's configuration."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvwire import telemetry
from kvwire.client.channel import TlsConfig
from kvwire.client.layout import GroupKind
from kvwire.errors import ConfigError, MissingExtra
from kvwire.vllm import layerwise
from kvwire.vllm.adapters import LoadStoreOp, SchedulerAdapter, WorkerAdapter
from kvwire.vllm.adapters_transfer import Kind
from kvwire.vllm.announce import Announcer, vllm_events
from kvwire.vllm.autostart import default_folder, ensure_server
from kvwire.vllm.config import ConnectorConfig, connector_config
from kvwire.vllm.engine import read_layout
from kvwire.vllm.identity import engine_namespace
from kvwire.vllm.layerwise import LayerLoads
from kvwire.vllm.lazy import LazyStores, horizon
from kvwire.vllm.requests import TrackerFactory
from kvwire.vllm.scheduler import SchedulerSide
from kvwire.vllm.servers import Share, SpreadSchedulerAdapter, spread
from kvwire.vllm.tally import Tally
from kvwire.vllm.views import group_views
from kvwire.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvwire.keys import Namespace
    from kvwire.vllm.layout import EngineLayout
    from kvwire.vllm.metadata import Job

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """What both sides of one engine agree on."""

    config: ConnectorConfig
    layout: EngineLayout
    namespace: Namespace
    engine_id: str
    kv_role: Any
    shares: tuple[Share, ...]

    @classmethod
    def read(cls, vllm_config: Any, kv_cache_config: Any) -> Engine:
        """Raises ConfigError or LayoutUnsupported for what this connector cannot serve."""
        transfer = vllm_config.kv_transfer_config
        config = connector_config(transfer.kv_connector_extra_config)
        _trace_like_the_engine(config, vllm_config)
        layout = read_layout(vllm_config, kv_cache_config)
        namespace = engine_namespace(config, vllm_config, kv_cache_config, layout)
        shares = _shares(config.addresses, vllm_config.parallel_config, layout.num_shards)
        return cls(config, layout, namespace, str(transfer.engine_id), transfer, shares)

    def share_of(self, kv_rank: int) -> Share:
        return next(share for share in self.shares if kv_rank in share.ranks)

    def start_servers(self, shares: Sequence[Share]) -> None:
        """Where the configuration asks for it, and none is there."""
        if self.config.autostart:
            folder = Path(self.config.autostart_folder or default_folder())
            for share in shares:
                ensure_server(share.address, self.config.server_flags(), folder)

    def adapter_options(self, part: str, share: Share | None = None) -> dict[str, Any]:
        """For an adapter of the whole engine, or of one server's share."""
        config = self.config
        tls = TlsConfig(config.tls_ca, config.tls_cert, config.tls_key, config.tls_server_name)
        layout = self.layout.kv_layout
        return {
            "layout": share.layout(layout) if share else layout,
            "alignment": self.layout.alignment,
            "namespace": share.namespace(self.namespace) if share else self.namespace,
            "engine_id": self.engine_id,
            "client_name": f"vllm {part}, process {os.getpid()}",
            "heartbeat_interval": config.heartbeat_interval,
            "tls": tls if config.uses_tls else None,
            "token": config.token(),
        }


@dataclass(slots=True)
class SchedulerParts:
    """`announcer` is there when the engine publishes KV events. `horizon`: as of `LazyStores`; 0: none."""

    adapter: SchedulerAdapter | SpreadSchedulerAdapter
    side: SchedulerSide
    shares: tuple[Share, ...]
    reset_wait: float
    world_size: int
    horizon: int = 0
    announcer: Announcer | None = None

    def announce(self, hash_block_size: int) -> None:
        """Tell what the servers hold from now on. Blocks are named as the engine does."""
        one = self.adapter
        adapters = one.adapters if isinstance(one, SpreadSchedulerAdapter) else [one]
        self.announcer = Announcer(self.shares, hash_block_size)
        self.announcer.follow(
            [each.for_events() for each in adapters], partial(self.side.tally.add, "lost_events")
        )
        self.side.naming = self.announcer

    def watch(self, block_pool: Any) -> None:
        """The engine's blocks, for storing what it is about to drop."""
        if self.horizon and block_pool.enable_caching:
            self.side.lazy = LazyStores(block_pool, self.horizon, self.world_size)
        elif self.horizon:
            logger.warning("kvwire: kvwire.lazy is not used: the engine's prefix caching is off")

    @property
    def frees_soon(self) -> bool:
        return self.side.lazy is not None and self.side.lazy.frees_soon

    def take_events(self) -> list[Any]:
        return vllm_events(self.announcer.book) if self.announcer is not None else []

    def take_stats(self) -> dict[str, Any] | None:
        self.side.tally.is_usable(self.side.is_usable())
        return self.side.tally.take()

    def reset(self) -> bool:
        return self.side.reset(self.reset_wait)

    def shutdown(self) -> None:
        if self.announcer is not None:
            self.announcer.close()
        self.adapter.shutdown()


@dataclass(slots=True)
class WorkerParts:
    """`views` are the engine's blocks, once it has them: see `group_views`."""

    adapter: WorkerAdapter
    side: WorkerSide
    layout: EngineLayout
    shutdown_wait: float
    tally: Tally
    views: list[list[Any]] = field(default_factory=list)

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        self.views = group_views(self.layout, kv_caches)
        self.adapter.register_kv_caches(self.views)
        if self.adapter.is_healthy:
            logger.info("kvwire: blocks move by %s", self.adapter.data_path)

    def take_stats(self) -> dict[str, Any] | None:
        return self.tally.take()

    def event(self) -> Any:
        """Marks what the accelerator has been told so far; None on a CPU, where it is done."""
        device = self.views[0][0].device
        if device.type == "cpu":
            return None
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    def shutdown(self) -> None:
        self.side.finish_stores(self.shutdown_wait)
        self.adapter.shutdown()


def make_scheduler(vllm_config: Any, kv_cache_config: Any) -> SchedulerParts:
    _log_like_the_engine()
    engine = Engine.read(vllm_config, kv_cache_config)
    tally = Tally()
    engine.start_servers(engine.shares)
    adapter = _scheduler_adapter(engine, tally)
    side = SchedulerSide(
        engine.layout,
        adapter,
        TrackerFactory(engine.namespace, engine.config.request_defaults),
        loads=engine.kv_role.is_kv_consumer,
        stores=engine.kv_role.is_kv_producer,
        early_lookups=engine.config.early_lookups,
        overlap=_overlaps(engine, vllm_config),
        tally=tally,
    )
    logger.info(
        "kvwire: %s, chunk size %s tokens, %d KV groups%s",
        adapter.address,
        adapter.chunk_size or "not known yet",
        len(engine.layout.groups),
        "" if adapter.is_healthy else f"; not used yet: {adapter.degraded_reason}",
    )
    return SchedulerParts(
        adapter,
        side,
        engine.shares,
        engine.config.reset_wait,
        engine.layout.world_size,
        _horizon(engine, vllm_config) if engine.config.lazy else 0,
    )


def _horizon(engine: Engine, vllm_config: Any) -> int:
    if any(group.kind is not GroupKind.FULL_ATTENTION for group in engine.layout.groups):
        logger.warning("kvwire: kvwire.lazy is not used: this model has more than full attention")
        return 0
    scheduling = vllm_config.scheduler_config
    spans = [group.span_tokens for group in engine.layout.groups]
    return horizon(scheduling.max_num_batched_tokens, scheduling.max_num_seqs, spans)


def _scheduler_adapter(engine: Engine, tally: Tally) -> SchedulerAdapter | SpreadSchedulerAdapter:
    model, block_size = engine.namespace.model, engine.layout.alignment
    options = engine.adapter_options("scheduler")
    options["on_answer"] = partial(tally.observe, "lookup_seconds")
    if len(engine.shares) > 1:
        return SpreadSchedulerAdapter(engine.shares, model, block_size, **options)
    return SchedulerAdapter(
        engine.shares[0].address, None, model, engine.layout.num_shards, 0, block_size, **options
    )


def make_worker(vllm_config: Any, kv_cache_config: Any) -> WorkerParts:
    _log_like_the_engine()
    engine = Engine.read(vllm_config, kv_cache_config)
    rank = vllm_config.parallel_config.rank
    kv_rank = engine.layout.kv_rank(rank)
    share = engine.share_of(kv_rank)
    engine.start_servers([share])
    tally = Tally()
    adapter = WorkerAdapter(
        share.address,
        None,
        engine.namespace.model,
        len(share.ranks),
        share.local_rank(kv_rank),
        engine.layout.alignment,
        data_path=engine.config.data_path,
        copy_threads=engine.config.copy_threads,
        on_end=transfer_counter(tally),
        **engine.adapter_options(f"worker {rank}", share),
    )
    operation = partial(to_op, share=share)
    side = WorkerSide(
        adapter,
        operation,
        rank=rank,
        single_group=engine.layout.num_engine_groups == 1,
        store_wait=engine.config.store_wait,
        layers=_layer_loads(engine, vllm_config, adapter, operation),
    )
    return WorkerParts(adapter, side, engine.layout, engine.config.shutdown_wait, tally)


def _overlaps(engine: Engine, vllm_config: Any) -> bool:
    if not engine.config.overlap:
        return False
    drafts = getattr(vllm_config, "speculative_config", None) is not None
    why = layerwise.why_not(engine.layout, drafts=drafts)
    if why:
        logger.warning("kvwire: transfers do not overlap with this model's forward pass: %s", why)
    return not why


def _layer_loads(
    engine: Engine, vllm_config: Any, adapter: WorkerAdapter, operation: Callable[[Job], LoadStoreOp]
) -> LayerLoads | None:
    from vllm.platforms import current_platform

    if not _overlaps(engine, vllm_config):
        return None
    return LayerLoads(
        adapter,
        operation,
        engine.layout.groups[0].layer_names,
        engine.config.overlap_wait,
        may_store_behind=current_platform.is_cpu(),
    )


def transfer_counter(tally: Tally) -> Callable[[Kind, bool, int, float], None]:
    def count(kind: Kind, well: bool, moved: int, seconds: float) -> None:
        is_load = kind is Kind.LOAD
        tally.observe("load_seconds" if is_load else "store_seconds", seconds)
        tally.add("loaded_bytes" if is_load else "stored_bytes", moved)
        if is_load:
            tally.add("loads" if well else "failed_loads")
        else:
            tally.add("stores" if well else "dropped_stores")

    return count


def to_op(job: Job, share: Share) -> LoadStoreOp:
    chunks, prompt = job.plan.chunks, job.prompt
    op = LoadStoreOp(
        groups=job.plan.groups,
        first_chunk=chunks.start,
        chunk_count=len(chunks),
        session_id=prompt.session_id,
        keys=prompt.keys,
        namespace=prompt.namespace,
    )
    if share.is_whole or prompt.namespace is None:
        return op
    # The share's keys are made from the engine's, as the scheduler makes them for its lookups.
    return replace(op, keys=(), block_hashes=prompt.keys, namespace=share.namespace(prompt.namespace))


def _shares(addresses: tuple[str, ...], parallel: Any, world_size: int) -> tuple[Share, ...]:
    shares = spread(
        addresses,
        world_size,
        ranks_together=parallel.decode_context_parallel_size,
        engine_index=getattr(parallel, "data_parallel_index", 0),
    )
    unused = set(addresses) - {share.address for share in shares}
    if unused:
        logger.info("kvwire: this engine has no ranks for %s", ", ".join(sorted(unused)))
    return shares


def _trace_like_the_engine(config: ConnectorConfig, vllm_config: Any) -> None:
    """Before any client is made: kvwire's spans join the trace of the engine's request."""
    engines = getattr(vllm_config.observability_config, "otlp_traces_endpoint", None) or ""
    if telemetry.active() is not None or not (config.otlp_endpoint or engines):
        return
    try:
        telemetry.setup_tracing("kvwire-vllm", config.otlp_endpoint or engines)
    except (MissingExtra, ConfigError) as error:
        if config.otlp_endpoint:
            raise
        logger.warning("kvwire: the engine is traced, and kvwire in it is not: %s", error)


def _log_like_the_engine() -> None:
    """vLLM gives its own loggers handlers and leaves all others silent."""
    ours, engine = logging.getLogger("kvwire"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers:
        for handler in engine.handlers:
            ours.addHandler(handler)
        ours.setLevel(engine.level)
