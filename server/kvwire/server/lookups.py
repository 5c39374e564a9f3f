from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from kvwire.errors import InvalidArgument, TokensInvalid
from kvwire.keys import DIGEST_SIZE, TOKEN_BYTES, chunk_keys
from kvwire.server.fetch.planning import origins_of
from kvwire.server.fetch.source import Origin
from kvwire.server.leases import LookupLease
from kvwire.server.messages import EndReason, LookupResult, ReleaseResult

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from kvwire.server.messages import Prompt, ReleaseItem
    from kvwire.server.registry import Registration
    from kvwire.server.sessions import Session
    from kvwire.server.state import EngineState
    from kvwire.server.store import Chunk, Hit, Space


@dataclass(slots=True, eq=False)
class Lacking:
    """What a lookup did not find could be brought from elsewhere, while it waits.

    `came` is for whoever does: what has come, by chunk.
    """

    space: Space
    keys: Sequence[bytes]
    tokens: bytes
    came: Mapping[int, Origin] = field(default_factory=dict)


Steps: TypeAlias = "Generator[Lacking | None, float | None, LookupResult]"
"""A lookup in slices: at each yield others may run, and the time is sent in."""


class Lookups:
    """Finding what a prompt can reuse, and holding it for the session."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def steps(
        self, registration_id: int, session_id: str, prompt: Prompt, now: float, *, fetch: bool
    ) -> Steps:
        """Look a prompt up in slices: each yield is a chance for other calls, and takes the time then.

        With `fetch` it yields once what it lacks, and looks again after.
        """
        state = self._state
        chunk_size = state.require_chunk_size()
        asked = _whole_chunks(prompt, chunk_size)
        if not registration_id:
            space = state.spaces.peek(prompt.namespace, chunk_size)
            keys, _ = yield from self._keys(space, None, prompt, now)
            return self._dry_result(space, asked, keys)
        registration = state.registrations.require(registration_id, now)
        if not session_id:
            raise InvalidArgument("session_id", "is empty; only a lookup without registration has none")
        space = state.spaces.open(prompt.namespace, chunk_size)
        if space is None:
            state.counters.fail("no_layout")
            self._count(chunk_size, asked, 0)
            return LookupResult(asked, 0, 0)
        session = state.sessions.open(registration.client.engine_id, session_id, space, now)
        session.lookups += 1
        turn = session.lookups
        keys, now = yield from self._keys(space, session, prompt, now)
        registration = state.registrations.require(registration_id, now)
        if self._overtaken(session, turn):
            return LookupResult(asked, 0, 0)
        session.last_used = now
        tokens = (prompt.tokens or b"")[: len(keys) * chunk_size * TOKEN_BYTES]
        session.learn(space, keys, tokens, prompt.extras)
        hit = self._lease(registration, session, keys, now)
        self._used(hit.chunks)
        if not fetch or hit.boundary == len(keys):
            return self._result(session, keys, hit)
        lacking = Lacking(space, keys, tokens)
        lease = session.lease
        try:
            sent = yield lacking
        except GeneratorExit:
            # Whoever asked has given up: nobody knows of the lease.
            if lease is not None and session.lease is lease:
                state.endings.end(lease, EndReason.FINISHED)
            raise
        now = now if sent is None else sent
        registration = state.registrations.require(registration_id, now)
        if self._overtaken(session, turn):
            return LookupResult(asked, 0, 0)
        session.last_used = now
        before, hit = hit, self._lease(registration, session, keys, now)
        self._used_more(before, hit, lacking.came)
        return self._result(session, keys, hit, before.boundary, lacking.came)

    def release(self, registration: Registration, item: ReleaseItem) -> ReleaseResult:
        """Unpin chunks of a lookup lease; what it does not hold is counted and left alone."""
        lease = self._state.leases.get(item.lease_id, LookupLease, registration)
        if lease is None or lease.session.session_id != item.session_id:
            return self._surplus(ReleaseResult(0, item.chunk_count or 1))
        end = len(lease.chunks)
        start = min(max(item.first_chunk - lease.first, 0), end)
        if item.chunk_count:
            end = max(start, min(end, item.first_chunk + item.chunk_count - lease.first))
        chosen = [chunk for chunk in lease.chunks[start:end] if chunk is not None]
        self._state.store.unpin(chosen)
        lease.chunks[start:end] = [None] * (end - start)
        lease.held -= len(chosen)
        if not lease.held:
            self._state.endings.end(lease, EndReason.FINISHED)
        asked = item.chunk_count or end - start
        return self._surplus(ReleaseResult(len(chosen), asked - len(chosen)))

    def _surplus(self, result: ReleaseResult) -> ReleaseResult:
        self._state.counters.surplus_releases += result.not_held
        return result

    def _keys(
        self, space: Space | None, session: Session | None, prompt: Prompt, now: float
    ) -> Generator[None, float | None, tuple[list[bytes], float]]:
        if prompt.keys is not None:
            return list(prompt.keys), now
        if space is None or prompt.tokens is None:
            return [], now
        keys = session.known_keys(space, prompt.tokens, prompt.extras) if session else []
        chunk_size = space.shards.chunk_size
        step = self._state.config.slice_chunks
        total = _whole_chunks(prompt, chunk_size)
        packed = memoryview(prompt.tokens)
        while True:
            first = len(keys)
            last = min(first + step, total)
            keys += chunk_keys(
                space.root,
                packed[first * chunk_size * TOKEN_BYTES : last * chunk_size * TOKEN_BYTES],
                chunk_size,
                prompt.extras,
                start_key=keys[-1] if keys else None,
                first_chunk=first,
            )
            if last == total:
                return keys, now
            sent = yield
            now = now if sent is None else sent

    def _overtaken(self, session: Session, turn: int) -> bool:
        """It has ended or was asked again meanwhile: a lease now would have no owner."""
        overtaken = session.lookups != turn or not self._state.sessions.is_current(session)
        if overtaken:
            self._state.counters.fail("lookup_overtaken")
        return overtaken

    def _lease(self, registration: Registration, session: Session, keys: list[bytes], now: float) -> Hit:
        """Lease what is found, instead of what the session has leased before."""
        state = self._state
        if session.lease is not None:
            state.endings.end(session.lease, EndReason.FINISHED)
        hit = state.store.find(session.space, keys)
        if not hit.boundary:
            return hit
        lease_id = state.leases.next_id
        state.store.pin(hit.chunks)
        session.lease = LookupLease(
            lease_id,
            registration,
            now + state.config.lookup_ttl,
            session,
            hit.first,
            list(hit.chunks),
            len(hit.chunks),
        )
        state.leases.add(session.lease)
        return hit

    def _used(self, chunks: Sequence[Chunk]) -> None:
        store = self._state.store
        store.refresh(chunks)
        store.policy.hit(chunks)
        if store.listener is not None and chunks:
            store.listener.on_used(chunks)

    def _used_more(self, before: Hit, hit: Hit, came: Mapping[int, Origin]) -> None:
        """What was brought is new, and what was found at first has been told."""
        store = self._state.store
        store.refresh(hit.chunks)
        told = set(before.chunks)
        more = [c for i, c in enumerate(hit.chunks, hit.first) if i not in came and c not in told]
        store.policy.hit(more)
        if store.listener is not None and more:
            store.listener.on_used(more)

    def _result(
        self,
        session: Session,
        keys: list[bytes],
        hit: Hit,
        before: int = 0,
        came: Mapping[int, Origin] | None = None,
    ) -> LookupResult:
        """The answer, and the count of what this session had not asked before."""
        chunk_size = session.space.shards.chunk_size
        counted = session.counted_chunks
        session.counted_chunks = max(counted, len(keys))
        self._count(chunk_size, max(len(keys) - counted, 0), max(hit.boundary - counted, 0))
        result = LookupResult(len(keys), hit.boundary, hit.boundary * chunk_size)
        if came:
            origins = origins_of(hit, before, came)
            result = replace(result, l2_chunks=origins[Origin.L2], peer_chunks=origins[Origin.PEER])
            fresh = origins_of(hit, before, came, counted)
            self._state.counters.l2_hit_tokens += fresh[Origin.L2] * chunk_size
            self._state.counters.peer_hit_tokens += fresh[Origin.PEER] * chunk_size
        if session.lease is None:
            return result
        return replace(result, lease_id=session.lease.id, lease_ttl=self._state.config.lookup_ttl)

    def _count(self, chunk_size: int, asked_chunks: int, hit_chunks: int) -> None:
        counters = self._state.counters
        counters.lookups += 1
        counters.asked_tokens += asked_chunks * chunk_size
        counters.hit_tokens += hit_chunks * chunk_size
        counters.miss_tokens += (asked_chunks - hit_chunks) * chunk_size

    def _dry_result(self, space: Space | None, asked: int, keys: list[bytes]) -> LookupResult:
        self._state.counters.dry_lookups += 1
        if space is None:
            return LookupResult(asked, 0, 0)
        boundary = self._state.store.find(space, keys).boundary
        return LookupResult(asked, boundary, boundary * space.shards.chunk_size)


def _whole_chunks(prompt: Prompt, chunk_size: int) -> int:
    if (prompt.tokens is None) == (prompt.keys is None):
        raise InvalidArgument("prompt", "must be given by tokens or by keys, and not by both")
    if prompt.keys is not None:
        if any(len(key) != DIGEST_SIZE for key in prompt.keys):
            raise InvalidArgument("keys", f"must have {DIGEST_SIZE} bytes each")
        return len(prompt.keys)
    size = len(prompt.tokens or b"")
    if size % TOKEN_BYTES:
        raise TokensInvalid(f"Packed tokens have {size} bytes, no multiple of {TOKEN_BYTES}.", length=size)
    return size // TOKEN_BYTES // chunk_size
