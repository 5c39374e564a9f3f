"""An engine's KV caches at one server: what a worker, a notebook or a tool stores and retrieves with."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict

from kvwire import telemetry
from kvwire.client.binding import CacheSpec, PathRegistrar
from kvwire.client.fingerprint import layout_fingerprint
from kvwire.client.health import HEARTBEAT_S
from kvwire.client.jobs import RetrieveResult, StoreResult
from kvwire.client.layout import GroupKind, KvGroup, KvLayout, blocks_per_object
from kvwire.client.link import START_S, Link
from kvwire.client.memory import kv_memory
from kvwire.client.pipeline import Task
from kvwire.client.runs import RetrieveRun, StoreRun
from kvwire.client.session import Session
from kvwire.client.types import Role
from kvwire.errors import InvalidArgument, KvwireError, LayoutUnsupported
from kvwire.keys import Namespace, required_alignment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from kvwire.client.client import Client
    from kvwire.client.jobs import TransferJob
    from kvwire.client.memory import KvMemory
    from kvwire.keys import ExtraInput, Tokens

Tensors = Any
"""Tensors or arrays of one KV group (a mapping by layer, or a sequence), or a sequence of groups of them."""

_REGISTER_S: Final = 20.0
"""Upper bound for a first attempt to connect, which ends by itself: a path that a firewall cuts off is probed
for some seconds before the next one is tried."""


class KvCache:
    """KV caches that are registered with a server, and stay so over its restarts.

    Several threads may store and retrieve at once. While the server is away every call fails at once.
    """

    def __init__(self, client: Client, spec: CacheSpec, *, interval: float = HEARTBEAT_S) -> None:
        """`client` is the cache's own from here on."""
        self.client = client
        self.spec = spec
        self._memory: KvMemory | None = None
        self._layout: tuple[int, KvLayout | None] = (0, None)
        self._registrar = PathRegistrar(spec, self._path_died)
        self.link = Link(client, spec.alignment, self._registrar, interval=interval)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, wait: float = START_S) -> None:
        """Connect, at most `wait` seconds; whoever watches the server goes on trying."""
        self.link.start(wait)

    def set_memory(self, memory: KvMemory, wait: float = START_S) -> None:
        """The blocks to move, from now on. Registers (again)."""
        self._memory = memory
        self._registrar.set_memory(memory)
        self.link.renew("the KV caches are being registered", wait)

    @property
    def is_healthy(self) -> bool:
        return self.link.is_healthy

    @property
    def degraded_reason(self) -> str:
        """Why the server is not used; empty while it is."""
        return self.link.degraded_reason

    @property
    def chunk_size(self) -> int:
        """In tokens; 0 before the negotiation."""
        return self.link.chunk_size

    @property
    def data_path(self) -> str:
        """How bytes move: "shm", "ucx-local", "ucx-remote" or "inline"; empty before the registration."""
        return self._registrar.data_path

    @property
    def layout(self) -> KvLayout:
        """How chunks are cut at the negotiated size."""
        size, layout = self._layout
        if layout is None or size != self.chunk_size:
            size = self.chunk_size
            layout = self.spec.layout(size)
            self._layout = size, layout
        return layout

    @property
    def memory(self) -> KvMemory | None:
        return self._memory

    @property
    def num_blocks(self) -> int:
        return self._memory.num_blocks if self._memory is not None else 0

    def session(
        self,
        tokens: Tokens,
        *,
        adapter: str = "",
        adapter_revision: str = "",
        salt: str = "",
        extra_inputs: Iterable[ExtraInput] = (),
        session_id: str = "",
    ) -> Session:
        """Look a prompt up, and hold what was found until the session is closed. Raises KvwireError."""
        self.link.ensure()
        base = self.spec.namespace
        space = Namespace(
            base.model, base.revision, base.kv_dtype, base.layout_fingerprint, adapter, adapter_revision, salt
        )
        name = session_id or uuid.uuid4().hex
        try:
            found = self.client.lookup(
                space,
                tokens,
                registration_id=self.link.registration_id,
                session_id=name,
                extra_inputs=extra_inputs,
            )
        except KvwireError as error:
            self.link.report(error)
            raise
        return Session(self, name, found)

    def store(self, jobs: Sequence[TransferJob]) -> list[StoreResult]:
        """One result per job, in order. Raises only for jobs that make no sense."""
        for job in jobs:
            self.check(job, is_store=True)
        try:
            return self.run_stores([Task(job) for job in jobs])
        except KvwireError as error:
            return [StoreResult(failed=tuple(job.objects()), error=error) for job in jobs]

    def retrieve(self, jobs: Sequence[TransferJob]) -> list[RetrieveResult]:
        """One result per job, in order. Blocks of objects that a result names as failed must not be used."""
        for job in jobs:
            self.check(job, is_store=False)
        try:
            return self.run_retrieves([Task(job) for job in jobs])
        except KvwireError as error:
            return [RetrieveResult(failed=tuple(job.objects()), error=error) for job in jobs]

    def ensure(self) -> None:
        """Raise Unavailable while the server is not used."""
        self.link.ensure()

    def check(self, job: TransferJob, *, is_store: bool) -> None:
        """Raise InvalidArgument for a job that no server and no copy could make sense of."""
        job.check(self.layout, self.num_blocks, is_store=is_store)

    def run_stores(self, tasks: Sequence[Task]) -> list[StoreResult]:
        """As `store`, for tasks that may be withdrawn. Raises Unavailable while the server is not used."""
        self.link.ensure()
        traces = [task.trace for task in tasks]
        with self._registrar.use() as lane, telemetry.batch_span("kvwire.store", traces, jobs=len(tasks)):
            results = StoreRun(lane, tasks).run()
        self._report(results)
        return results

    def run_retrieves(self, tasks: Sequence[Task]) -> list[RetrieveResult]:
        self.link.ensure()
        traces = [task.trace for task in tasks]
        with self._registrar.use() as lane, telemetry.batch_span("kvwire.retrieve", traces, jobs=len(tasks)):
            results = RetrieveRun(lane, tasks).run()
        self._report(results)
        return results

    def close(self) -> None:
        """Let transfers end, and leave the server. Idempotent, also before the first use."""
        self.link.close()

    def _report(self, results: Sequence[StoreResult] | Sequence[RetrieveResult]) -> None:
        for result in results:
            if result.error is not None:
                self.link.report(result.error)

    def _path_died(self, error: KvwireError) -> None:
        self.link.renew(str(error), 0)


class AsyncKvCache:
    """A `KvCache` for asyncio: its calls wait and copy on other threads."""

    def __init__(self, cache: KvCache) -> None:
        self.sync = cache

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_healthy(self) -> bool:
        return self.sync.is_healthy

    @property
    def chunk_size(self) -> int:
        return self.sync.chunk_size

    @property
    def data_path(self) -> str:
        return self.sync.data_path

    async def session(self, tokens: Tokens, **options: Any) -> Session:
        """As `KvCache.session`. The session's own calls block: give them a thread."""
        return await asyncio.to_thread(self.sync.session, tokens, **options)

    async def store(self, jobs: Sequence[TransferJob]) -> list[StoreResult]:
        return await asyncio.to_thread(self.sync.store, jobs)

    async def retrieve(self, jobs: Sequence[TransferJob]) -> list[RetrieveResult]:
        return await asyncio.to_thread(self.sync.retrieve, jobs)

    async def close(self) -> None:
        await asyncio.to_thread(self.sync.close)


class CacheOptions(TypedDict, total=False):
    """What `register_kv_caches` takes besides.

    `windows` has the window of each KV group in tokens, 0 for full attention. `facts` tells what else than
    shapes and types changes the bytes. `data_path`: auto, shm, ucx or inline. `copy_threads`: threads of one
    copy, 0 for as many as there are processors, up to 4.
    """

    windows: Sequence[int]
    revision: str
    engine_id: str
    world_size: int
    kv_rank: int
    facts: Mapping[str, Any]
    data_path: str
    heartbeat_interval: float
    copy_threads: int
    ucx_devices: Sequence[str]


def register_kv_caches(
    client: Client, tensors: Tensors, model: str, block_size: int | Sequence[int], options: CacheOptions
) -> KvCache:
    """See `Client.register_kv_caches`."""
    unknown = sorted(set(options) - CacheOptions.__optional_keys__)
    if unknown:
        known = ", ".join(sorted(CacheOptions.__optional_keys__))
        raise InvalidArgument(unknown[0], f"is no option of register_kv_caches; the options are {known}")
    groups = _groups(tensors)
    sizes = [block_size] * len(groups) if isinstance(block_size, int) else list(block_size)
    windows = list(options.get("windows") or [0] * len(groups))
    if not len(groups) == len(sizes) == len(windows):
        raise InvalidArgument(
            "tensors", f"{len(groups)} groups, {len(sizes)} block sizes, {len(windows)} windows"
        )
    memory = kv_memory(groups, threads=options.get("copy_threads", 0))
    fingerprint = _fingerprint(memory, sizes, options.get("facts"))
    namespace = Namespace(model, options.get("revision", ""), memory.dtype, fingerprint)
    namespace.validate()
    world_size = options.get("world_size", 1)
    spec = CacheSpec(
        engine_id=options.get("engine_id") or f"engine-{uuid.uuid4().hex}",
        role=Role.STANDALONE,
        namespace=namespace,
        layout=lambda chunk_size: layout_of(memory, sizes, windows, chunk_size, world_size),
        alignment=required_alignment(sizes),
        kv_rank=options.get("kv_rank", 0),
        client_name=client.client_name,
        data_paths=options.get("data_path", "auto"),
        ucx_devices=tuple(options.get("ucx_devices", ())),
    )
    cache = KvCache(client.clone(), spec, interval=options.get("heartbeat_interval", HEARTBEAT_S))
    try:
        cache.set_memory(memory, _REGISTER_S)
        cache.link.require()
    except BaseException:
        cache.close()
        raise
    return cache


def layout_of(
    memory: KvMemory, block_sizes: Sequence[int], windows: Sequence[int], chunk_size: int, world_size: int
) -> KvLayout:
    """The layout of attention groups. Layers that differ in size are one opaque layer to the server."""
    groups: list[KvGroup] = []
    for pages, span, window in zip(memory.groups, block_sizes, windows, strict=True):
        kind = GroupKind.SLIDING_WINDOW if window else GroupKind.FULL_ATTENTION
        equal = len(set(pages.page_bytes)) == 1
        groups.append(
            KvGroup(
                kind=kind,
                span_tokens=span,
                num_layers=pages.num_layers if equal else 1,
                block_bytes=pages.block_bytes,
                blocks_per_object=blocks_per_object(kind, chunk_size, span, window),
                window_tokens=window,
            )
        )
    return KvLayout(tuple(groups), world_size)


def _fingerprint(memory: KvMemory, block_sizes: Sequence[int], facts: Mapping[str, Any] | None) -> bytes:
    return layout_fingerprint(
        dtype=memory.dtype,
        block_sizes=block_sizes,
        page_bytes=[pages.page_bytes for pages in memory.groups],
        order=memory.groups[0].order,
        device=memory.device,
        facts=facts,
    )


def _groups(tensors: Tensors) -> list[list[Any]]:
    if hasattr(tensors, "items"):
        return [list(tensors.values())]
    found = list(tensors)
    if not found:
        raise LayoutUnsupported("There are no KV tensors.", problem="no tensors")
    if hasattr(found[0], "shape"):
        return [found]
    return [list(group.values()) if hasattr(group, "items") else list(group) for group in found]
