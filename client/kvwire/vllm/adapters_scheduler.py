"""The scheduler's adapter: lookups are submitted and then checked. Nothing waits, and nothing is raised."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvwire.client import forks
from kvwire.client.health import HEARTBEAT_S
from kvwire.client.link import START_S, Link
from kvwire.client.types import Registration, ReleaseItem, Role
from kvwire.errors import KvwireError
from kvwire.vllm.adapters_common import (
    CLIENT_ID_BYTES,
    LayoutFor,
    adapter_options,
    hash_keys,
    layout_for,
    tenant_space,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Future

    from kvwire.client.agreement import ChunkSizeAgreement
    from kvwire.client.channel import TlsConfig
    from kvwire.client.client import Client
    from kvwire.client.types import LookupResult
    from kvwire.keys import ExtraInput, Namespace, Tokens

logger = logging.getLogger(__name__)

_MISS: Final = 0
_CLEAR_PAUSE: Final = 0.05


@dataclass(slots=True)
class _Lookup:
    """One request's lookup. `tokens` is None while it is under way."""

    registration_id: int
    submitted: float
    future: Future[LookupResult] | None = None
    tokens: int | None = None
    lease_id: int = 0
    expires_at: float = 0.0
    end_session: bool = False


class _SchedulerRegistrar:
    """Without a layout a scheduler only looks: it has no registration and takes no leases."""

    def __init__(self, layout: LayoutFor | None, namespace: Namespace, engine_id: str, name: str) -> None:
        self._layout = layout
        self._namespace = namespace
        self._engine_id = engine_id
        self._name = name
        self._client_id = os.urandom(CLIENT_ID_BYTES)
        self._pid = os.getpid()
        self._warned = False

    def register(self, client: Client, chunk_size: int) -> int:
        if self._layout is None:
            return 0
        if self._pid != os.getpid():
            self._pid, self._client_id = os.getpid(), os.urandom(CLIENT_ID_BYTES)
        layout = layout_for(self._layout, chunk_size)
        if layout.coarseness() and not self._warned:
            self._warned = True
            logger.warning("kvwire: %s", layout.coarseness())
        what = Registration(
            client_id=self._client_id,
            engine_id=self._engine_id,
            role=Role.SCHEDULER,
            namespace=self._namespace,
            layout=layout,
            chunk_size=chunk_size,
            client_name=self._name,
        )
        return client.register(what).registration_id

    def lost(self) -> None:
        """Nothing is in flight that touches memory."""

    def closed(self) -> None:
        """As little."""


class SchedulerAdapter:
    """Finds cached prefixes for an engine's scheduler.

    Every failure is a miss: `check_lookup_result` then answers 0. The server's answer is final, so a request
    is asked for once, however often it is checked. `context` is taken for compatibility and ignored.
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
        tls: TlsConfig | None = None,
        token: str = "",
        deadlines: Mapping[str, float] | None = None,
        start_wait: float = START_S,
        agreement: ChunkSizeAgreement | None = None,
        on_answer: Callable[[float], None] | None = None,
    ) -> None:
        """`agreement` is shared by the adapters of one engine's servers.

        `on_answer` is told how many seconds each lookup took, on a thread of the client's.
        """
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
        self._namespace = options.namespace
        self._block_size = vllm_block_size
        self._on_answer = on_answer
        self._client = options.client()
        registrar = _SchedulerRegistrar(layout, options.namespace, options.engine_id, options.client_name)
        self._link = Link(
            self._client,
            options.alignment,
            registrar,
            interval=options.heartbeat_interval,
            agreement=agreement,
        )
        self._forget()
        forks.watch(self)
        self._link.start(start_wait)

    def after_fork(self) -> None:
        """What is under way is the parent's."""
        self._forget()

    def _forget(self) -> None:
        self._answered = threading.Condition()
        self._lookups: dict[str, _Lookup] = {}
        self._leases: dict[str, tuple[int, int]] = {}

    @property
    def address(self) -> str:
        return str(self._client.target)

    @property
    def link(self) -> Link:
        return self._link

    @property
    def is_healthy(self) -> bool:
        return self._link.is_healthy

    @property
    def degraded_reason(self) -> str:
        """Why the server is not used; empty while it is."""
        return self._link.degraded_reason

    @property
    def chunk_size(self) -> int | None:
        """In tokens. None until the server has told it."""
        return self._link.chunk_size or None

    def num_blocks_per_chunk(self) -> int:
        """0 until the chunk size is known."""
        return self._link.chunk_size // self._block_size

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        block_hashes: Sequence[bytes] | None = None,
        *,
        tokens: Tokens | None = None,
        chunk_hashes: Sequence[bytes] | None = None,
        adapter: str = "",
        adapter_revision: str = "",
        salt: str = "",
        extra_inputs: Iterable[ExtraInput] = (),
    ) -> None:
        """Ask once for a request's prefix: by tokens, or by the engine's hashes of blocks or chunks."""
        if request_id in self._lookups:
            return
        lookup = _Lookup(self._link.registration_id, time.monotonic())
        self._lookups[request_id] = lookup
        try:
            self._link.ensure(wait=0)
            space = tenant_space(self._namespace, adapter, adapter_revision, salt)
            keys = None
            if tokens is None:
                hashes, stride = chunk_hashes, 1
                if hashes is None:
                    hashes, stride = block_hashes or (), self.num_blocks_per_chunk()
                keys = hash_keys(space, self._link.chunk_size, hashes, stride)
            future = self._client.lookup_future(
                space,
                tokens,
                keys=keys,
                registration_id=lookup.registration_id,
                session_id=request_id if lookup.registration_id else "",
                extra_inputs=extra_inputs,
            )
        except Exception as error:
            self._log_failure(request_id, error)
            lookup.tokens = _MISS
            return
        lookup.future = future
        future.add_done_callback(lambda done: self._finish(request_id, lookup, done))

    def check_lookup_result(self, request_id: str) -> int | None:
        """Tokens found, a multiple of the chunk size. None: not known yet. After a failure 0, for good."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return None
        if lookup.tokens is None and not self._link.is_usable:
            # The server is gone: nobody has to wait for this call's deadline.
            self._give_up(request_id, lookup)
        return lookup.tokens

    def is_lookup_stale(self, request_id: str) -> bool:
        """The answer is there, and its lease is more than half over or gone with the server's earlier run."""
        lookup = self._lookups.get(request_id)
        if lookup is None or not lookup.tokens or not lookup.lease_id:
            return False
        if lookup.registration_id != self._link.registration_id:
            return True
        return time.monotonic() > (lookup.submitted + lookup.expires_at) / 2

    def wait_for_lookups(self, timeout: float) -> bool:
        """Wait until a lookup that is under way gets its answer, at most `timeout` seconds."""
        with self._answered:
            if all(lookup.tokens is not None for lookup in self._lookups.values()):
                return False
            return self._answered.wait(timeout)

    def cleanup_lookup_result(self, request_id: str) -> None:
        """Forget the answer, so that the request may be asked for again."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None and lookup.future is not None:
            lookup.future.cancel()

    def release_lookup(self, request_id: str, first_chunk: int = 0, chunk_count: int = 0) -> None:
        """Give back leased chunks that will not be loaded. `chunk_count` 0: all from `first_chunk` on."""
        registration_id, lease_id = self._leases.get(request_id, (0, 0))
        if lease_id and registration_id == self._link.registration_id and self._link.is_usable:
            item = ReleaseItem(request_id, lease_id, first_chunk, chunk_count)
            self._client.release_quietly(registration_id, [item])

    def end_session(self, request_id: str) -> None:
        """The request is over: end its session, and forget it here."""
        self._leases.pop(request_id, None)
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None and lookup.tokens is None:
            # It would make the session anew if the server saw the end first.
            lookup.end_session = True
            if lookup.future is None or not lookup.future.done():
                return
        self._end_quietly(request_id)

    def for_events(self) -> tuple[Client, Namespace]:
        """A client of its own for following what the server stores and removes of this model."""
        return self._client.clone(), self._namespace

    def clear(self, timeout: float) -> int | None:
        """Drop what the server has of this model, for all engines, waiting `timeout` seconds at most.

        Returns how many chunks somebody uses: those stay. None: it was not done, and the log says why.
        """
        deadline = time.monotonic() + timeout
        kept: int | None = None
        # A lease that was given back a moment ago may be on its way yet.
        while (left := deadline - time.monotonic()) > 0:
            try:
                kept = int(self._client.clear(self._namespace, timeout=left).kept_chunks)
            except KvwireError as error:
                logger.warning("kvwire: the server could not be emptied: %s", error)
                return None
            if not kept:
                return 0
            time.sleep(min(_CLEAR_PAUSE, left))
        return kept

    def shutdown(self) -> None:
        """Leave the server. Idempotent, also before the first lookup."""
        self._link.close()
        with self._answered:
            self._answered.notify_all()

    def _finish(self, request_id: str, lookup: _Lookup, done: Future[LookupResult]) -> None:
        """Runs on gRPC's thread."""
        error = None if done.cancelled() else done.exception()
        if done.cancelled() or error is not None:
            self._fail(request_id, lookup, error)
        else:
            result = done.result()
            lookup.lease_id, lookup.expires_at = result.lease_id, result.expires_at
            if self._lookups.get(request_id) is lookup:
                # The lease of an earlier lookup of this session has ended with it.
                self._leases[request_id] = (lookup.registration_id, result.lease_id)
            if lookup.tokens is None:
                lookup.tokens = result.hit_tokens
            if self._on_answer is not None:
                self._on_answer(time.monotonic() - lookup.submitted)
        if lookup.end_session:
            self._end_quietly(request_id)
        with self._answered:
            self._answered.notify_all()

    def _fail(self, request_id: str, lookup: _Lookup, error: BaseException | None) -> None:
        lookup.tokens = _MISS
        if error is None:
            return
        self._log_failure(request_id, error)
        if isinstance(error, KvwireError):
            self._link.report(error)
        # The server may have leased for an answer that was lost on the way.
        lookup.end_session = True

    def _give_up(self, request_id: str, lookup: _Lookup) -> None:
        lookup.tokens = _MISS
        lookup.end_session = True
        if lookup.future is not None:
            lookup.future.cancel()

    def _end_quietly(self, request_id: str) -> None:
        registration_id = self._link.registration_id
        if registration_id and self._link.is_reachable:
            self._client.end_sessions_quietly(registration_id, [request_id])

    def _log_failure(self, request_id: str, error: Any) -> None:
        logger.debug("kvwire: the lookup of request %s is a miss: %s", request_id, error)
