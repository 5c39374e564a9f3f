from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire.errors import InvalidArgument, TokensInvalid
from kvwire.keys import DIGEST_SIZE, TOKEN_BYTES, chunk_keys
from kvwire.server.leases import LookupLease
from kvwire.server.messages import EndReason, LookupResult, ReleaseResult

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvwire.server.messages import Prompt, ReleaseItem
    from kvwire.server.registry import Registration
    from kvwire.server.sessions import Session
    from kvwire.server.state import EngineState
    from kvwire.server.store import Hit, Space


class Lookups:
    """Finding what a prompt can reuse, and holding it for the session."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def steps(
        self, registration_id: int, session_id: str, prompt: Prompt, now: float
    ) -> Generator[None, float | None, LookupResult]:
        """Look a prompt up in slices: each yield is a chance for other calls, and takes the time then."""
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
        if session.lookups != turn or not state.sessions.is_current(session):
            # It has ended or was asked again meanwhile: a lease now would have no owner.
            state.counters.fail("lookup_overtaken")
            return LookupResult(asked, 0, 0)
        return self._finish(registration, session, space, prompt, keys, now=now)

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

    def _finish(
        self,
        registration: Registration,
        session: Session,
        space: Space,
        prompt: Prompt,
        keys: list[bytes],
        *,
        now: float,
    ) -> LookupResult:
        state = self._state
        session.last_used = now
        tokens = (prompt.tokens or b"")[: len(keys) * space.shards.chunk_size * TOKEN_BYTES]
        session.learn(space, keys, tokens, prompt.extras)
        if session.lease is not None:
            state.endings.end(session.lease, EndReason.FINISHED)
        hit = state.store.find(space, keys)
        if hit.boundary:
            self._hold(registration, session, hit, now)
        counted = session.counted_chunks
        session.counted_chunks = max(counted, len(keys))
        self._count(space.shards.chunk_size, max(len(keys) - counted, 0), max(hit.boundary - counted, 0))
        result = LookupResult(len(keys), hit.boundary, hit.boundary * space.shards.chunk_size)
        if session.lease is None:
            return result
        return replace(result, lease_id=session.lease.id, lease_ttl=state.config.lookup_ttl)

    def _hold(self, registration: Registration, session: Session, hit: Hit, now: float) -> None:
        state = self._state
        lease_id = state.leases.next_id
        state.store.pin(hit.chunks)
        state.store.refresh(hit.chunks)
        state.store.policy.hit(hit.chunks)
        if state.store.listener is not None:
            state.store.listener.on_used(hit.chunks)
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
