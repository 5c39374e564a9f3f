"""A worker's adapter: loads and stores blocks on its own threads, and tells when they are done."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvwire import telemetry
from kvwire.client import forks
from kvwire.client.binding import CacheSpec
from kvwire.client.cache import KvCache, layout_of
from kvwire.client.health import HEARTBEAT_S
from kvwire.client.jobs import RetrieveResult, TransferJob
from kvwire.client.link import START_S
from kvwire.client.memory import kv_memory
from kvwire.client.types import Role, SessionRange
from kvwire.errors import Internal, InvalidArgument, KvwireError, Unavailable
from kvwire.vllm.adapters_common import (
    LoadStoreOp,
    adapter_options,
    layout_for,
    transfer_job,
    wrap_kv_caches,
)
from kvwire.vllm.adapters_transfer import Kind, Transfer, TransferQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvwire.client.channel import TlsConfig
    from kvwire.client.jobs import StoreResult
    from kvwire.client.layered import LayerWatch
    from kvwire.client.layout import KvLayout
    from kvwire.keys import Namespace
    from kvwire.vllm.adapters_common import LayoutFor

logger = logging.getLogger(__name__)

COPY_THREADS: Final = 2
"""So that a load need not wait for a store that has begun."""
_COMPLAIN_S: Final = 60.0
_SHUTDOWN_S: Final = 5.0
_HURRY_S: Final = 0.5
_NO_JOB: Final = TransferJob(SessionRange("", 0, 0), ())


def _moved(result: StoreResult | RetrieveResult) -> int:
    return result.retrieved_bytes if isinstance(result, RetrieveResult) else result.stored_bytes


class WorkerAdapter:
    """Moves one rank's KV blocks between an engine and a server.

    Submitting only queues. A store that fails is dropped, a load that fails names its blocks; nothing is
    raised into the engine after construction. `context` is taken for compatibility and ignored.
    """

    def __init__(
        self,
        server_url: str,
        context: object = None,
        model_name: str = "",
        world_size: int = 1,
        kv_rank: int = 0,
        vllm_block_size: int = 16,
        *,
        layout: LayoutFor | None = None,
        alignment: int = 0,
        namespace: Namespace | None = None,
        engine_id: str = "",
        client_name: str = "",
        heartbeat_interval: float = HEARTBEAT_S,
        data_path: str = "auto",
        copy_threads: int = 0,
        ucx_devices: Sequence[str] = (),
        tls: TlsConfig | None = None,
        token: str = "",
        deadlines: Mapping[str, float] | None = None,
        start_wait: float = START_S,
        on_end: Callable[[Kind, bool, int, float], None] | None = None,
    ) -> None:
        """`on_end` is told of every transfer, on the thread that ends it: whether all of it went well, how
        many bytes moved, and the seconds since its submission."""
        options = adapter_options(
            server_url,
            model_name,
            world_size,
            kv_rank,
            vllm_block_size,
            alignment=alignment,
            namespace=namespace,
            engine_id=engine_id,
            client_name=client_name,
            heartbeat_interval=heartbeat_interval,
            tls=tls,
            token=token,
            deadlines=deadlines,
        )
        self._options = options
        self._block_size = vllm_block_size
        self._layout = layout
        self._start_wait = start_wait
        self._on_end = on_end
        threads = copy_threads or COPY_THREADS
        spec = CacheSpec(
            engine_id=options.engine_id,
            role=Role.WORKER,
            namespace=options.namespace,
            layout=self._layout_for,
            alignment=options.alignment,
            kv_rank=kv_rank,
            client_name=options.client_name,
            data_paths=data_path,
            ucx_devices=tuple(ucx_devices),
        )
        self._cache = KvCache(options.client(), spec, interval=options.heartbeat_interval)
        self._queue = TransferQueue(self._run, threads, f"kvwire-copy-{kv_rank}")
        self._complained: dict[str, float] = {}
        self._forget()
        forks.watch(self)
        self._cache.start(start_wait)

    def after_fork(self) -> None:
        """What is under way is the parent's."""
        self._forget()

    def _forget(self) -> None:
        self._done = threading.Condition()
        self._open: dict[Kind, Counter[str]] = {kind: Counter() for kind in Kind}
        self._stores: set[Transfer] = set()
        self._held: set[str] = set()
        self._loaded: set[str] = set()
        self._new_failures: dict[str, set[int]] = {}
        self._failed_requests: set[str] = set()
        self._failed_blocks: set[int] = set()

    @property
    def is_healthy(self) -> bool:
        return self._cache.is_healthy

    @property
    def degraded_reason(self) -> str:
        """Why the server is not used; empty while it is."""
        return self._cache.degraded_reason

    @property
    def chunk_size(self) -> int | None:
        """In tokens. None until the server has told it."""
        return self._cache.chunk_size or None

    @property
    def data_path(self) -> str:
        """How bytes move: "shm", "ucx-local", "ucx-remote", "inline"; empty before the registration."""
        return self._cache.data_path

    def require_chunk_size(self, chunk_size: int) -> None:
        """Work with this size and no other: the scheduler's plans are made for it.

        They differ when the two have met different servers, one after the other or beside each other. Costs
        nothing where it is the size already.
        """
        self._cache.link.require_chunk_size(chunk_size)

    def num_blocks_per_chunk(self) -> int:
        """0 until the chunk size is known."""
        return self._cache.chunk_size // self._block_size

    def register_kv_caches(self, kv_caches: Mapping[str, Any] | Sequence[Sequence[Any]]) -> None:
        """The engine's memory; returns after `start_wait` at the latest, server or no server.

        Tensors by layer, block first (one group of full attention), or for each KV group its matrices of
        bytes, one row per block.
        """
        try:
            if isinstance(kv_caches, Mapping):
                groups = [wrap_kv_caches(kv_caches)]
            else:
                groups = [list(group) for group in kv_caches]
            self._cache.set_memory(kv_memory(groups), self._start_wait)
        except Exception:
            logger.exception("kvwire: these KV caches cannot be registered; nothing will be stored or loaded")

    def submit_store_request(self, request_id: str, op: LoadStoreOp, event: Any = None) -> Transfer:
        return self.batched_submit_store_requests([request_id], [op], event)[0]

    def submit_retrieve_request(self, request_id: str, op: LoadStoreOp, event: Any = None) -> Transfer:
        return self.batched_submit_retrieve_requests([request_id], [op], event)[0]

    def submit_watched_retrieve_request(
        self, request_id: str, op: LoadStoreOp, watch: LayerWatch, event: Any = None
    ) -> Transfer:
        """A load that is waited for layer by layer. `get_finished` is silent about it: ask the transfer."""
        return self._submit(Kind.LOAD, [request_id], [op], event, watch)[0]

    def submit_watched_store_request(
        self, request_id: str, op: LoadStoreOp, event: Any = None, *, watch: LayerWatch
    ) -> Transfer:
        """A store that begins before its blocks are complete: `watch` tells which layers are."""
        return self._submit(Kind.STORE, [request_id], [op], event, watch)[0]

    def batched_submit_store_requests(
        self, request_ids: Sequence[str], ops: Sequence[LoadStoreOp], event: Any = None
    ) -> list[Transfer]:
        return self._submit(Kind.STORE, request_ids, ops, event)

    def batched_submit_retrieve_requests(
        self, request_ids: Sequence[str], ops: Sequence[LoadStoreOp], event: Any = None
    ) -> list[Transfer]:
        return self._submit(Kind.LOAD, request_ids, ops, event)

    def get_finished(
        self, finished_req_ids_from_engine: Collection[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Requests the engine has finished whose stores are all done, each once; requests whose loads are
        done."""
        with self._done:
            self._held |= set(finished_req_ids_from_engine)
            sent = {each for each in self._held if not self._open[Kind.STORE][each]}
            self._held -= sent
            received = {each for each in self._loaded if not self._open[Kind.LOAD][each]}
            self._loaded -= received
            for request_id in received & self._new_failures.keys():
                self._failed_requests.add(request_id)
                self._failed_blocks |= self._new_failures.pop(request_id)
        return sent or None, received or None

    def failed_requests(self) -> set[str]:
        """Of the requests that `get_finished` has reported as loaded since the last call: those that
        failed."""
        with self._done:
            failed, self._failed_requests = self._failed_requests, set()
        return failed

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of those requests that are not proven right."""
        with self._done:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_stores(self, request_ids: Collection[str], timeout: float) -> bool:
        """Before the requests' blocks get another owner: whether their stores were done in time.

        Those that were not may go on reading, but what they read is never published.
        """
        wanted = set(request_ids)
        deadline = time.monotonic() + timeout
        with self._done:
            while True:
                running = [each for each in self._stores if each.request_id in wanted]
                left = deadline - time.monotonic()
                if not running or left <= 0:
                    break
                self._done.wait(left)
        for each in running:
            each.cancel()
        return not running

    def wait_for_any(self, timeout: float) -> bool:
        """Wait until some transfer is done, at most `timeout` seconds."""
        with self._done:
            if not any(self._open[kind].total() for kind in Kind):
                return False
            return self._done.wait(timeout)

    def shutdown(self) -> None:
        """End what runs, drop what waits, leave the server. Idempotent."""
        closed = Unavailable("The adapter was shut down.")
        # A server that hangs is not waited for: closing the cache ends what hangs in it.
        for transfer in self._queue.close(_SHUTDOWN_S if self.is_healthy else _HURRY_S):
            self._finish(transfer, closed)
        self._cache.close()

    def _submit(
        self,
        kind: Kind,
        request_ids: Sequence[str],
        ops: Sequence[LoadStoreOp],
        event: Any,
        watch: LayerWatch | None = None,
    ) -> list[Transfer]:
        trace = telemetry.current_context()
        transfers = [
            self._accept(kind, request_id, op, event, trace, watch)
            for request_id, op in zip(request_ids, ops, strict=True)
        ]
        waiting = [transfer for transfer in transfers if not transfer.done()]
        if not self._queue.submit(waiting):
            for transfer in waiting:
                self._finish(transfer, Unavailable("The adapter was shut down."))
        return transfers

    def _accept(
        self,
        kind: Kind,
        request_id: str,
        op: LoadStoreOp,
        event: Any,
        trace: Any,
        watch: LayerWatch | None,
    ) -> Transfer:
        """A transfer to queue; one that is done already where there is no use in trying."""
        job, error = self._job(kind, request_id, op)
        transfer = Transfer(request_id, kind, job, op.all_block_ids(), event, trace, watch)
        with self._done:
            self._open[kind][request_id] += 1
            if kind is Kind.STORE:
                self._stores.add(transfer)
        if error is not None:
            self._finish(transfer, error)
        return transfer

    def _job(self, kind: Kind, request_id: str, op: LoadStoreOp) -> tuple[TransferJob, KvwireError | None]:
        try:
            self._cache.ensure()
            job = transfer_job(
                request_id, op, self._options.namespace, self._cache.chunk_size, self.num_blocks_per_chunk()
            )
            self._cache.check(job, is_store=kind is Kind.STORE)
        except KvwireError as error:
            return _NO_JOB, error
        except Exception as error:
            logger.exception("kvwire: a %s of request %s could not be started", kind.value, request_id)
            return _NO_JOB, Internal(str(error))
        return job, None

    def _run(self, kind: Kind, transfers: list[Transfer]) -> None:
        """One batch, on a thread of the queue."""
        error: KvwireError | None = None
        results: Sequence[StoreResult] | Sequence[RetrieveResult] = ()
        try:
            for transfer in transfers:
                transfer.wait_for_kernels()
            results = (
                self._cache.run_stores(transfers)
                if kind is Kind.STORE
                else self._cache.run_retrieves(transfers)
            )
        except KvwireError as caught:
            error = caught
        except Exception as caught:
            logger.exception("kvwire: %ss could not be run", kind.value)
            error = Internal(str(caught))
        for index, transfer in enumerate(transfers):
            if index < len(results):
                result = results[index]
                self._finish(transfer, result.error, result.failed, well=result.ok, moved=_moved(result))
            else:
                self._finish(transfer, error or Internal("There is no result."))

    def _finish(
        self,
        transfer: Transfer,
        error: KvwireError | None,
        failed: Sequence[Any] = (),
        *,
        well: bool = False,
        moved: int = 0,
    ) -> None:
        if error is not None:
            self._complain(transfer, error)
        with self._done:
            if transfer.done():
                return
            transfer.finish(error, failed)
            opened = self._open[transfer.kind]
            opened[transfer.request_id] -= 1
            if not opened[transfer.request_id]:
                del opened[transfer.request_id]
            self._stores.discard(transfer)
            if transfer.kind is Kind.LOAD and transfer.watch is None:
                self._loaded.add(transfer.request_id)
                if transfer.failed:
                    self._new_failures.setdefault(transfer.request_id, set()).update(
                        transfer.failed_block_ids
                    )
            self._done.notify_all()
        if self._on_end is not None:
            self._on_end(transfer.kind, well, moved, transfer.seconds)

    def _complain(self, transfer: Transfer, error: KvwireError) -> None:
        """Once a minute and reason: an outage must not fill the log."""
        now = time.monotonic()
        if now < self._complained.get(error.reason, 0.0):
            return
        self._complained[error.reason] = now + _COMPLAIN_S
        logger.warning(
            "kvwire: a %s of request %s failed: %s", transfer.kind.value, transfer.request_id, error
        )

    def _layout_for(self, chunk_size: int) -> KvLayout:
        if self._layout is not None:
            return layout_for(self._layout, chunk_size)
        memory = self._cache.memory
        if memory is None:
            raise InvalidArgument("kv_caches", "are not registered yet")
        return layout_of(memory, [self._block_size], [0], chunk_size, self._options.world_size)
