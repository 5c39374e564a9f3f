"""The cache server's domain: who is registered, what a prompt can reuse, who may write and read which bytes.

Pure and single-threaded. The clock is the `now` of each call, in seconds. A lease whose deadline has come has
ended at the next call, swept or not.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from kvwire.errors import InvalidArgument, ResizeRefused
from kvwire.server.audit import check_engine
from kvwire.server.endings import LeaseEndings
from kvwire.server.fetch.fills import Fills
from kvwire.server.leases import LeaseTable, ReadLease, WriteLease
from kvwire.server.lending import Lending
from kvwire.server.lifecycle import Lifecycle
from kvwire.server.lookups import Lookups
from kvwire.server.messages import CommitItem, EndReason, LiveLease
from kvwire.server.registry import Registrations
from kvwire.server.retrieves import Retrieves
from kvwire.server.sessions import Sessions
from kvwire.server.spaces import Spaces, base_of, identify
from kvwire.server.state import EngineConfig, EngineState
from kvwire.server.status import (
    EngineCounters,
    EngineStatus,
    SessionStatus,
    l1_status,
    namespace_status,
    registration_status,
    session_status,
    space_status,
)
from kvwire.server.store import ExtentAllocator, L1Store, make_policy
from kvwire.server.stores import CHECKSUM_BYTES, Stores
from kvwire.server.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.keys import Namespace
    from kvwire.server.layout import KvLayout
    from kvwire.server.lookups import Steps
    from kvwire.server.messages import (
        ClientInfo,
        CommitResult,
        EndedLease,
        Expired,
        LookupResult,
        Prompt,
        QuarantinedOwner,
        Registered,
        ReleaseItem,
        ReleaseResult,
        RetrieveGrant,
        RetrieveItem,
        StoreGrant,
        StoreItem,
    )
    from kvwire.server.store import ObjectRef, Space, StoreListener


def make_store(
    capacity: int,
    policy: str = "lru",
    *,
    base: int = 4096,
    alignment: int = 4096,
    listener: StoreListener | None = None,
) -> L1Store:
    """A store over `capacity` bytes of an arena, from `base` on. Raises ConfigError for a bad policy."""
    allocator = ExtentAllocator(capacity, base=base, alignment=alignment)
    return L1Store(allocator, make_policy(policy, allocator.capacity), listener)


class CacheEngine:
    """Composes the parts; the servicer converts and calls.

    Methods that take a `registration_id` raise NotRegistered for an unknown one, unless they return bool.
    """

    def __init__(
        self,
        store: L1Store,
        config: EngineConfig | None = None,
        on_first_session: Callable[[], None] | None = None,
    ) -> None:
        config = config or EngineConfig()
        registrations = Registrations(config.max_registrations)
        leases = LeaseTable(config.first_lease)
        counters = EngineCounters()
        self._state = EngineState(
            config=config,
            store=store,
            registrations=registrations,
            sessions=Sessions(config.session_ttl, config.max_sessions, on_first_session),
            spaces=Spaces(registrations),
            leases=leases,
            endings=LeaseEndings(store, leases, counters),
            counters=counters,
            fills=Fills(store, leases),
        )
        targets = Targets(self._state)
        self._lifecycle = Lifecycle(self._state)
        self.lending = Lending(self._state, self._lifecycle)
        self._lookups = Lookups(self._state)
        self._stores = Stores(self._state, targets)
        self._retrieves = Retrieves(self._state, targets)

    @property
    def store(self) -> L1Store:
        return self._state.store

    @property
    def fills(self) -> Fills:
        return self._state.fills

    @property
    def chunk_size(self) -> int:
        """The bound size in tokens, 0 before."""
        return self._state.chunk_size

    @property
    def counters(self) -> EngineCounters:
        counters = self._state.counters
        counters.evicted_chunks = self.store.evicted_chunks
        counters.evicted_bytes = self.store.evicted_bytes
        counters.quota_evicted_chunks = self.store.eviction.quota_chunks
        counters.quota_refusals = self.store.eviction.quota_refusals
        return counters

    def bind_chunk_size(self, chunk_size: int) -> None:
        """Fix the chunk size. Idempotent; raises ResizeRefused for another size once anyone depends on it."""
        state = self._state
        if chunk_size < 1:
            raise InvalidArgument("chunk_size", f"{chunk_size} is not a chunk size")
        if chunk_size != state.chunk_size and (state.sessions.started or len(state.registrations)):
            raise ResizeRefused(
                f"Sessions have started with chunk size {state.chunk_size}: it is final.",
                bound_size=state.chunk_size,
            )
        state.chunk_size = chunk_size

    def register(
        self,
        client: ClientInfo,
        namespace: Namespace,
        layout: KvLayout,
        chunk_size: int,
        data_path: str,
        *,
        now: float,
    ) -> Registered:
        """Make a client known; its former registration ends as if it had been silent too long.

        Raises ChunkSizeNotNegotiated, ChunkSizeIncompatible, LayoutUnsupported, LayoutConflict,
        InvalidArgument or TooManySessions, and changes nothing then.
        """
        return self._lifecycle.register(client, namespace, layout, chunk_size, data_path=data_path, now=now)

    def unregister(self, registration_id: int, now: float) -> bool:
        """A client leaves and does not touch its slots any more. False for one that is not known."""
        self._lifecycle.advance(now)
        return self._lifecycle.unregister(registration_id)

    def disconnect(self, registration_id: int, now: float) -> bool:
        """The client's Attach stream ended: its registration and leases do too. False: not known.

        Memory that it may still write to stays taken, see `quarantined_owners`.
        """
        self._lifecycle.advance(now)
        return self._lifecycle.end_registration(registration_id, EndReason.DISCONNECTED) is not None

    def owner_dead(self, registration_id: int) -> int:
        """The process of a client is proven gone: its registration ends if it has not, its slots come free.

        Where the server moves the bytes, they wait for `confirm_cancelled`. Returns the leases that let go.
        """
        self._lifecycle.end_registration(registration_id, EndReason.DISCONNECTED)
        return self._state.endings.owner_dead(registration_id)

    def confirm_cancelled(self, lease_id: int) -> bool:
        """The data path is done with the memory of an ended lease. A no-op for any other lease."""
        return self._state.endings.confirm(lease_id)

    def ping(self, registration_id: int, now: float) -> bool:
        """Keep a registration alive. False for one that is not known."""
        registration = self._state.registrations.get(registration_id)
        if registration is None:
            return False
        registration.last_seen = now
        return True

    def is_registered(self, registration_id: int) -> bool:
        return self._state.registrations.get(registration_id) is not None

    def lookup_steps(
        self, registration_id: int | None, session_id: str, prompt: Prompt, now: float, *, fetch: bool = False
    ) -> Steps:
        """A lookup in slices, for an event loop: `send` the time at each yield; it returns the result.

        With `fetch` it yields what it lacks, which may then be brought, and looks once more. A session that
        ends or is looked up again meanwhile gets no lease and no hit; one that is closed leaves no lease.
        Without a registration nothing changes. Raises ChunkSizeNotNegotiated, NotRegistered, TokensInvalid,
        InvalidArgument, TooManySessions.
        """
        self._lifecycle.advance(now)
        return (yield from self._lookups.steps(registration_id or 0, session_id, prompt, now, fetch=fetch))

    def lookup(
        self, registration_id: int | None, session_id: str, prompt: Prompt, now: float
    ) -> LookupResult:
        """`lookup_steps` in one go."""
        steps = self.lookup_steps(registration_id, session_id, prompt, now)
        try:
            while True:
                next(steps)
        except StopIteration as stop:
            result: LookupResult = stop.value
            return result

    def release_lookup(
        self, registration_id: int, items: Sequence[ReleaseItem], now: float
    ) -> tuple[ReleaseResult, ...]:
        """Give chunks of lookup leases back. What is not held is counted; no other lease is touched."""
        registration = self._lifecycle.enter(registration_id, now)
        return tuple(self._lookups.release(registration, item) for item in items)

    def end_session(self, registration_id: int, session_ids: Sequence[str], now: float) -> int:
        """End sessions and their lookup leases; stores in flight go on. Returns how many there were."""
        registration = self._lifecycle.enter(registration_id, now)
        engine_id = registration.client.engine_id
        found = [self._state.sessions.get(engine_id, session_id) for session_id in dict.fromkeys(session_ids)]
        end = self._lifecycle.end_session
        return sum(end(session, EndReason.FINISHED) for session in found if session is not None)

    def store_demand(self, registration_id: int, items: Sequence[StoreItem]) -> dict[str, int]:
        """Bytes by tenant that `begin_store` would need if nothing were there; of a registered client."""
        registration = self._state.registrations.get(registration_id)
        return self._stores.demand(registration, items) if registration is not None else {}

    def begin_store(
        self, registration_id: int, items: Sequence[StoreItem], now: float
    ) -> tuple[StoreGrant, ...]:
        """Reserve slots for this client's rank.

        Per item: SessionUnknown, RangeInvalid, InvalidArgument, OutOfSpace (larger than the pool).
        """
        return self._stores.begin(self._lifecycle.enter(registration_id, now), items, now)

    def commit_store(
        self, registration_id: int, items: Sequence[CommitItem], now: float
    ) -> tuple[CommitResult, ...]:
        """Publish slots. The client says with it that it does not write any more, whatever the result.

        Per item: LeaseLost, LeaseUnknown; RangeInvalid and InvalidArgument leave the lease as it is.
        """
        registration = self._lifecycle.enter(registration_id, now)
        return tuple(self._stores.commit(registration, item) for item in items)

    def commit_arrived(self, registration_id: int, lease_id: int, now: float) -> tuple[ObjectRef, ...]:
        """A client says, without a call, that all slots of a write lease are written and left alone.

        Publishes a live lease and returns its objects without a checksum. For one that has ended, also with
        its registration, it is the acknowledgement.
        """
        self._lifecycle.advance(now)
        registration = self._state.registrations.get(registration_id)
        if registration is None:
            self._state.endings.acknowledge_former(lease_id, registration_id)
            return ()
        return self._stores.commit(registration, CommitItem(lease_id)).unchecked

    def abort_store(self, registration_id: int, lease_ids: Sequence[int], now: float) -> tuple[int, ...]:
        """Give slots back, or acknowledge that the lease has ended. Returns the number of slots per lease."""
        registration = self._lifecycle.enter(registration_id, now)
        return tuple(self._stores.abort(registration, lease_id) for lease_id in lease_ids)

    def begin_retrieve(
        self, registration_id: int, items: Sequence[RetrieveItem], now: float
    ) -> tuple[RetrieveGrant, ...]:
        """Hold objects of this client's rank for reading.

        Per item: SessionUnknown, RangeInvalid, InvalidArgument.
        """
        registration = self._lifecycle.enter(registration_id, now)
        return tuple(self._retrieves.begin(registration, item, now) for item in items)

    def end_retrieve(self, registration_id: int, lease_ids: Sequence[int], now: float) -> tuple[bool, ...]:
        """End read leases. Per lease: whether it was held all the time, so that what was read may be used."""
        registration = self._lifecycle.enter(registration_id, now)
        return tuple(self._retrieves.end(registration, lease_id) for lease_id in lease_ids)

    def live_lease(self, registration_id: int, lease_id: int, now: float) -> LiveLease:
        """A read or write lease of this client, for the data path. Raises LeaseLost or LeaseUnknown."""
        registration = self._lifecycle.enter(registration_id, now)
        leases = self._state.leases
        lease = leases.get(lease_id, ReadLease, registration) or leases.get(
            lease_id, WriteLease, registration
        )
        if lease is None:
            raise leases.missing(lease_id)
        return LiveLease(
            lease_id=lease_id,
            kind=lease.kind,
            registration_id=registration_id,
            data_path=registration.data_path,
            expires_in=lease.deadline - now,
            objects=tuple(self.store.ref(stored) for stored in lease.objects),
        )

    def set_checksum(self, ref: ObjectRef, checksum: bytes) -> bool:
        """Give a resident object the checksum that was made of it. False if it is gone or has one."""
        if len(checksum) != CHECKSUM_BYTES:
            raise InvalidArgument("checksum", f"has {len(checksum)} bytes instead of {CHECKSUM_BYTES}")
        stored = self.store.resolve(ref)
        if stored is None or stored.checksum:
            return False
        stored.checksum = checksum
        self.store.sealed(stored)
        return True

    def discard(self, ref: ObjectRef) -> bool:
        """Make a damaged object absent; leases that read it count as lost. False if it is gone."""
        stored = self.store.resolve(ref)
        if stored is None:
            return False
        self.store.discard(stored)
        return True

    def evict_to(self, fraction: float, max_chunks: int = 256) -> int:
        """Evict up to `max_chunks` until that fraction of the memory is in use. Returns the freed bytes."""
        return self.store.evict_to(int(self.store.allocator.capacity * fraction), max_chunks)

    def space_of(self, namespace: Namespace) -> Space | None:
        """The space of a namespace, also after everyone who registered its layout has gone; None before.

        Raises ChunkSizeNotNegotiated.
        """
        return self._state.spaces.peek(namespace, self._state.require_chunk_size())

    def clear(self, namespace: Namespace | None = None) -> tuple[int, int]:
        """Drop what no lease holds, of one model if given. Returns (chunks dropped, chunks kept)."""
        if namespace is None:
            return self.store.clear()
        chunk_size = self._state.chunk_size
        if not chunk_size:
            return 0, 0
        base_root = identify(base_of(namespace), chunk_size).root
        return self.store.clear(lambda space: space.base_root == base_root)

    def expire(self, now: float) -> Expired:
        """End what has run out: leases, idle sessions, silent registrations."""
        return self._lifecycle.expire(now)

    def shutdown(self) -> None:
        """End everything; nothing is published. Data paths still have to confirm, see `drain_ended`."""
        for registration in list(self._state.registrations):
            self._lifecycle.end_registration(registration.id, EndReason.SHUTDOWN)
        self.lending.forget_all(EndReason.SHUTDOWN)

    def drain_ended(self) -> tuple[EndedLease, ...]:
        """Leases that have ended since the last call whose transfers must be cancelled, then confirmed."""
        return self._state.endings.drain()

    def quarantined_owners(self) -> tuple[QuarantinedOwner, ...]:
        """Former owners whose process must be proven gone before the memory they could write to is reused."""
        return self._state.endings.owners()

    def status(self) -> EngineStatus:
        state = self._state
        return EngineStatus(
            chunk_size=state.chunk_size,
            l1=l1_status(state.store),
            leases=dict(state.leases.counts),
            waiting_leases=len(state.endings),
            sessions=len(state.sessions),
            registrations=tuple(registration_status(each) for each in state.registrations),
            namespaces=tuple(namespace_status(record) for record in state.registrations.layouts.values()),
            spaces=tuple(space_status(space) for space in state.spaces if space.chunks),
            counters=copy.deepcopy(self.counters),
        )

    def sessions(self, after: int, count: int, now: float) -> tuple[SessionStatus, ...]:
        """A page of sessions in the order of their generations, from the first above `after` on."""
        self._lifecycle.advance(now)
        return tuple(session_status(session, now) for session in self._state.sessions.page(after, count))

    def check_integrity(self) -> None:
        """Raise AssertionError unless leases, sessions, index and bytes agree. Slow."""
        check_engine(self._state)
