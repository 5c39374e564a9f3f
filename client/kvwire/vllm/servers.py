"""Several servers for one engine: its ranks are spread over them, and a hit is what all of them have."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from kvwire.client import forks
from kvwire.client.agreement import ChunkSizeAgreement
from kvwire.client.fingerprint import digest_of
from kvwire.client.layout import GroupKind
from kvwire.client.link import START_S
from kvwire.errors import ChunkSizeIncompatible, ConfigError
from kvwire.keys import chunk_keys, root
from kvwire.vllm.adapters_common import layout_for, tenant_space
from kvwire.vllm.adapters_scheduler import SchedulerAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvwire.client.layout import KvLayout
    from kvwire.keys import ExtraInput, Namespace, Tokens
    from kvwire.vllm.adapters_common import LayoutFor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Share:
    """What one server holds of an engine: the shards of these ranks, in ascending order.

    To the server they are the ranks 0, 1, ... of an engine that has no others, so that "a hit needs every
    rank" means every rank of the share.
    """

    address: str
    ranks: tuple[int, ...]
    world_size: int

    @property
    def is_whole(self) -> bool:
        return len(self.ranks) == self.world_size

    def local_rank(self, rank: int) -> int:
        return self.ranks.index(rank)

    def namespace(self, whole: Namespace) -> Namespace:
        """The namespace of the share: rank 1's bytes must never be taken for rank 0's."""
        if self.is_whole:
            return whole
        facts = {"engine": whole.layout_fingerprint.hex(), "ranks": self.ranks, "of": self.world_size}
        return replace(whole, layout_fingerprint=digest_of(facts))

    def layout(self, whole: LayoutFor) -> Callable[[int], KvLayout]:
        return lambda chunk_size: replace(layout_for(whole, chunk_size), world_size=len(self.ranks))


def spread(
    addresses: Sequence[str], world_size: int, *, ranks_together: int = 1, engine_index: int = 0
) -> tuple[Share, ...]:
    """Which server holds which ranks: rank i is at server i % n, and data-parallel engines go on counting.

    `ranks_together` is the number of consecutive ranks that share the tokens of a block: they are at one
    server. Servers that are left without a rank are left out. Raises ConfigError.
    """
    count = len(addresses)
    if not count or len(set(addresses)) != count:
        raise _bad_address("must name one server, or several different ones")
    if count > 1 and (world_size % count or (world_size // count) % ranks_together) and ranks_together > 1:
        raise _bad_address(
            f"names {count} servers for {world_size} ranks: {world_size / count:g} ranks for each are no "
            f"whole number of groups of {ranks_together} ranks, which share the tokens of a block "
            "(decode context parallelism)"
        )
    groups = world_size // ranks_together
    held: dict[int, list[int]] = {}
    for rank in range(world_size):
        server = (engine_index * groups + rank // ranks_together) % count
        held.setdefault(server, []).append(rank)
    return tuple(Share(addresses[server], tuple(held[server]), world_size) for server in sorted(held))


class _Tenant(TypedDict):
    adapter: str
    adapter_revision: str
    salt: str


@dataclass(slots=True)
class _Asked:
    """One request at all servers. `hit` in tokens, None until they agree. `trimmed`: what some server had
    beyond it has been given back."""

    tenant: _Tenant = field(repr=False)
    chunk_hashes: Sequence[bytes] = field(default=(), repr=False)
    hit: int | None = None
    trimmed: bool = False


class SpreadSchedulerAdapter:
    """Finds cached prefixes at all servers of an engine. The interface is that of `SchedulerAdapter`.

    A hit is the longest prefix that every server can resume at; what a server found beyond it is given back
    at once. While one of them is not used nothing is found, and the others are not asked.
    """

    def __init__(
        self,
        shares: Sequence[Share],
        model_name: str,
        block_size: int,
        *,
        namespace: Namespace,
        layout: LayoutFor,
        start_wait: float = START_S,
        **options: Any,
    ) -> None:
        """`options` as for `SchedulerAdapter`. Raises ChunkSizeIncompatible when servers that answer at once
        have different chunk sizes."""
        self._namespace = namespace
        self._agreement = ChunkSizeAgreement()
        self._layout = layout
        self.after_fork()
        forks.watch(self)
        self.adapters = [
            SchedulerAdapter(
                share.address,
                None,
                model_name,
                len(share.ranks),
                0,
                block_size,
                namespace=share.namespace(namespace),
                layout=share.layout(layout),
                agreement=self._agreement,
                start_wait=0,
                **options,
            )
            for share in shares
        ]
        self._connect(start_wait)

    def after_fork(self) -> None:
        """What is under way is the parent's."""
        self._asked: dict[str, _Asked] = {}

    def _connect(self, wait: float) -> None:
        deadline = time.monotonic() + wait
        for adapter in self.adapters:
            adapter.link.start(max(0.0, deadline - time.monotonic()))
        errors = {adapter.address: adapter.link.error for adapter in self.adapters}
        others = {
            address: error.metadata.get("bound_size", "")
            for address, error in errors.items()
            if isinstance(error, ChunkSizeIncompatible)
        }
        if others:
            self.shutdown()
            raise _different_sizes(self._agreement, others)

    @property
    def is_healthy(self) -> bool:
        return all(adapter.is_healthy for adapter in self.adapters)

    @property
    def degraded_reason(self) -> str:
        """Why the servers are not used; empty while they are."""
        return "; ".join(
            f"{adapter.address}: {adapter.degraded_reason}"
            for adapter in self.adapters
            if adapter.degraded_reason
        )

    @property
    def address(self) -> str:
        return ", ".join(adapter.address for adapter in self.adapters)

    @property
    def chunk_size(self) -> int | None:
        """In tokens. None until a server has told it."""
        return self._agreement.size or None

    def maybe_submit_lookup_request(
        self,
        request_id: str,
        *,
        tokens: Tokens,
        adapter: str = "",
        adapter_revision: str = "",
        salt: str = "",
        extra_inputs: Iterable[ExtraInput] = (),
    ) -> None:
        """Ask all servers once for a request's prefix."""
        if request_id in self._asked:
            return
        asked = _Asked(_Tenant(adapter=adapter, adapter_revision=adapter_revision, salt=salt))
        self._asked[request_id] = asked
        try:
            size = self._agreement.size
            space = tenant_space(self._namespace, **asked.tenant)
            asked.chunk_hashes = chunk_keys(root(space, size), tokens, size, tuple(extra_inputs))
        except Exception as error:
            logger.debug("kvwire: the lookup of request %s is a miss: %s", request_id, error)
            asked.hit = 0
            return
        for each in self.adapters:
            each.maybe_submit_lookup_request(request_id, chunk_hashes=asked.chunk_hashes, **asked.tenant)

    def check_lookup_result(self, request_id: str) -> int | None:
        """Tokens that all servers have, a multiple of the chunk size. None: not known yet."""
        asked = self._asked.get(request_id)
        if asked is None:
            return None
        if asked.hit is None:
            asked.hit = self._agree(request_id, asked)
        return asked.hit

    def is_lookup_stale(self, request_id: str) -> bool:
        """The answer is there, and one of its leases is more than half over or gone."""
        asked = self._asked.get(request_id)
        if asked is None or not asked.hit:
            return False
        return any(adapter.is_lookup_stale(request_id) for adapter in self.adapters)

    def wait_for_lookups(self, timeout: float) -> bool:
        """Wait until a lookup that is under way gets an answer, at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        return any(
            adapter.wait_for_lookups(max(0.0, deadline - time.monotonic())) for adapter in self.adapters
        )

    def cleanup_lookup_result(self, request_id: str) -> None:
        self._asked.pop(request_id, None)
        for adapter in self.adapters:
            adapter.cleanup_lookup_result(request_id)

    def release_lookup(self, request_id: str, first_chunk: int = 0, chunk_count: int = 0) -> None:
        """Give back leased chunks that will not be loaded. `chunk_count` 0: all from `first_chunk` on."""
        asked = self._asked.get(request_id)
        if asked is not None and asked.trimmed and not chunk_count:
            # All that is left: the rest must not be given back twice.
            chunk_count = (asked.hit or 0) // self._agreement.size - first_chunk
            if chunk_count <= 0:
                return
        for adapter in self.adapters:
            adapter.release_lookup(request_id, first_chunk, chunk_count)

    def end_session(self, request_id: str) -> None:
        """The request is over: its session ends at every server."""
        self._asked.pop(request_id, None)
        for adapter in self.adapters:
            adapter.end_session(request_id)

    def clear(self, timeout: float) -> int | None:
        """As `SchedulerAdapter.clear`, at every server: None when one of them was not emptied."""
        deadline = time.monotonic() + timeout
        kept = [adapter.clear(max(0.0, deadline - time.monotonic())) for adapter in self.adapters]
        known = [count for count in kept if count is not None]
        return sum(known) if len(known) == len(kept) else None

    def shutdown(self) -> None:
        """Leave the servers. Idempotent."""
        for adapter in self.adapters:
            adapter.shutdown()

    def _agree(self, request_id: str, asked: _Asked) -> int | None:
        found = [adapter.check_lookup_result(request_id) for adapter in self.adapters]
        answers = [tokens for tokens in found if tokens is not None]
        if len(answers) < len(found):
            return None
        common = min(answers)
        ahead = [adapter for adapter, tokens in zip(self.adapters, answers, strict=True) if tokens > common]
        chunks = common // self._agreement.size
        if common and ahead and self._boundaries_differ():
            # What a server needs for resuming earlier may be gone there, or not be leased.
            for adapter in ahead:
                adapter.cleanup_lookup_result(request_id)
                adapter.maybe_submit_lookup_request(
                    request_id, chunk_hashes=asked.chunk_hashes[:chunks], **asked.tenant
                )
            return None
        for adapter in ahead:
            adapter.release_lookup(request_id, chunks)
        asked.trimmed = bool(ahead)
        return common

    def _boundaries_differ(self) -> bool:
        """Whether a prefix can be resumed at its end and not everywhere before it."""
        groups = layout_for(self._layout, self._agreement.size).groups
        return any(group.kind is not GroupKind.FULL_ATTENTION for group in groups)


def _different_sizes(agreed: ChunkSizeAgreement, others: dict[str, str]) -> ChunkSizeIncompatible:
    found = ({agreed.told_by: str(agreed.size)} if agreed.size else {}) | others
    told = ", ".join(f"{address} has {size}" for address, size in found.items())
    return ChunkSizeIncompatible(
        f"All servers of an engine must have one chunk size, but {told}: start them with the same "
        "--chunk-size.",
        expected=agreed.size,
        bound_size=",".join(others.values()),
    )


def _bad_address(problem: str) -> ConfigError:
    return ConfigError(f"kvwire.address {problem}.", setting="kvwire.address")
