"""A cache engine over real memory with a prefetcher, and lookups as the servicer makes them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvwire.keys import chunk_keys, root
from kvwire.server.fetch.planning import shards_of
from kvwire.server.fetch.prefetcher import Brought, FetchLimits, Prefetcher
from kvwire.server.messages import LookupResult, Prompt
from support.domain import BASE, CHUNK, NAMESPACE, OBJECT_BYTES, Domain, layout, tokens
from support.fake_source import FakeSource, content

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 5.0
"""Longer than any fetch that is to come takes."""
FAST = FetchLimits(fetch_s=5.0, grace_s=0.02)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - a test looks from outside
        await asyncio.sleep(0.001)


class Below:
    def __init__(
        self, *sources: FakeSource, pool: int = 28, kv_layout=None, limits: FetchLimits = FAST, policy="lru"
    ) -> None:
        self.domain = Domain(pool, policy, kv_layout or layout())
        self.registration = self.domain.register()
        self.arena = bytearray(BASE + pool * OBJECT_BYTES)
        view = memoryview(self.arena)
        self.fills = self.domain.engine.fills
        self.prefetcher = Prefetcher(self.fills, lambda offset, size: view[offset : offset + size], limits)
        for source in sources:
            self.prefetcher.add(source)
        self.space = self.domain.engine._state.spaces.open(NAMESPACE, CHUNK)

    def keys(self, chunks: int, seed: int = 0) -> list[bytes]:
        return chunk_keys(root(NAMESPACE, CHUNK), tokens(chunks, seed), CHUNK)

    async def bring(self, chunks: int, seed: int = 0, patience: float = PATIENCE) -> Brought:
        limit = self.prefetcher.now() + patience
        return await self.prefetcher.bring(self.space, self.keys(chunks, seed), tokens(chunks, seed), limit)

    async def look_up(
        self,
        chunks: int,
        session: str = "s",
        seed: int = 0,
        patience: float = PATIENCE,
        meanwhile: Callable[[], object] | None = None,
    ) -> LookupResult:
        """`meanwhile` happens right after the bytes have come, before it is looked again."""
        prompt = Prompt(NAMESPACE, tokens(chunks, seed))
        steps = self.domain.engine.lookup_steps(
            self.registration, session, prompt, self.domain.now, fetch=self.prefetcher.active
        )
        brought = None
        try:
            lacking = next(steps)
            while True:
                if lacking is not None:
                    limit = self.prefetcher.now() + patience
                    brought = await self.prefetcher.bring(lacking.space, lacking.keys, lacking.tokens, limit)
                    lacking.came = brought.origins
                    if meanwhile is not None:
                        meanwhile()
                lacking = steps.send(self.domain.now)
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()
            if brought is not None:
                brought.release()

    def check(self) -> None:
        """Accounts agree, and whatever is resident has the bytes that belong to it, or were stored."""
        self.domain.check()
        for chunk in self.domain.engine.store.chunks():
            for shard in shards_of(chunk.mask):
                stored = chunk.shards[shard]
                if stored.checksum:
                    data = bytes(self.arena[stored.offset : stored.offset + stored.size])
                    assert data == content((chunk.key, shard), stored.size)

    async def settle(self) -> None:
        """Let everything end that is under way, and see that nothing is left of it."""
        await until(lambda: not self.prefetcher.under_way)
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        self.check()
        store = self.domain.engine.store
        assert (store.reserved_bytes, store.quarantined_bytes, len(self.fills)) == (0, 0, 0)
        assert not list(self.fills.held)
        assert not self.prefetcher.waiters
        assert self.prefetcher.budget.used == 0
        assert [source.held for source in self.prefetcher.sources] == [0] * len(self.prefetcher.sources)
