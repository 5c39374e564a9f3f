"""One prompt on its way into memory: ask, plan, reserve, fetch, and once more for what failed."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvwire.keys import TOKEN_BYTES
from kvwire.server.fetch.fetching import Fetching
from kvwire.server.fetch.planning import longest_boundary, make_plan, shards_of
from kvwire.server.fetch.source import Target, Wanted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.server.fetch.fills import Fill, Hold, Survey
    from kvwire.server.fetch.planning import Plan
    from kvwire.server.fetch.prefetcher import Prefetcher
    from kvwire.server.fetch.source import Found, Origin, Source
    from kvwire.server.store import Space, StoredObject

log = logging.getLogger("kvwire.server")

IN_FLIGHT: Final = 2
"""Batches of one prompt: the way to a source and back is no pause."""
RELEASE_S: Final = 5.0
"""How long a source may take to let go."""
HELD_SHARE: Final = 0.9
"""Of the memory: what leases, pins and writers may hold when something is brought. The rest is for stores."""
MAX_ROUNDS: Final = 8
"""How often it is asked and planned for one prompt, as long as there is time: once more for what failed."""


@dataclass(slots=True, eq=False)
class Offer:
    """What a source has of a prompt, without what it has failed to give before."""

    source: Source
    found: Found
    masks: list[int]


@dataclass(slots=True, eq=False)
class Waiter:
    """Waits for objects that others bring. `done` is set when all have come or failed."""

    bringing: Bringing
    done: asyncio.Future[None]
    indexes: dict[StoredObject, int] = field(default_factory=dict)

    def resolved(self, stored: StoredObject, origin: Origin | None) -> None:
        index = self.indexes.pop(stored, None)
        if index is None:
            return
        self.bringing.came(index, stored, origin)
        if not self.indexes and not self.done.done():
            self.done.set_result(None)


class Bringing:
    """`over`: nobody waits for it any more, so that it begins nothing new."""

    def __init__(
        self, owner: Prefetcher, space: Space, keys: list[bytes], tokens: bytes, hold: Hold, until: float
    ) -> None:
        self.owner = owner
        self.space = space
        self.keys = keys
        self.hold = hold
        self.until = until
        self.origins: dict[int, Origin] = {}
        self.over = False
        self.short_of_room = False
        self._tokens = tokens
        # What each source, by its id(), has failed to give, by chunk.
        self._failed: dict[int, dict[int, int]] = {}
        self._again = False

    async def run(self) -> None:
        for _ in range(MAX_ROUNDS):
            self._again = False
            offers: list[Offer] = []
            try:
                await self._ask(offers)
                await self._get(offers)
            finally:
                await _release(offers)
            if self.over or not self._again:
                break

    def came(self, index: int, stored: StoredObject, origin: Origin | None) -> None:
        """An object that another fetch brings is in memory now; None: it will not come."""
        if origin is None:
            self._again = True
        else:
            self.origins[index] = origin
            self.owner.fills.keep(self.hold, (stored.chunk,))

    def failed(self, source: Source, index: int, shard: int) -> None:
        missing = self._failed.setdefault(id(source), {})
        missing[index] = missing.get(index, 0) | 1 << shard
        self._again = True

    def tokens_of(self, index: int) -> bytes:
        step = self.space.shards.chunk_size * TOKEN_BYTES
        return self._tokens[index * step : (index + 1) * step]

    async def _ask(self, offers: list[Offer]) -> None:
        """Ask one source after the other, until all is found."""
        survey = self._survey()
        masks = _memory(survey)
        for source in self.owner.sources:
            if self.over or longest_boundary(self.space.shards, masks) == len(masks):
                return
            failed = self._failed.get(id(source), {})
            shown = [mask | failed.get(index, 0) for index, mask in enumerate(masks)]
            found = await self._find(source, shown)
            if found is None:
                continue
            offer = Offer(source, found, [0] * len(masks))
            offers.append(offer)
            offer.masks = self._offered(source, found, survey)
            masks = [mask | offered for mask, offered in zip(masks, offer.masks, strict=True)]

    async def _find(self, source: Source, masks: list[int]) -> Found | None:
        wanted = Wanted(self.space, self.keys, masks)
        try:
            async with asyncio.timeout(max(self.until - self.owner.now(), 0)):
                return await source.find(wanted, self.until)
        except TimeoutError:
            return None
        except Exception:
            self.owner.counters.faults += 1
            log.exception("%s cannot tell what it has", source.name)
            return None

    def _offered(self, source: Source, found: Found, survey: Survey) -> list[int]:
        """Of what a source says to have, what can be taken from it."""
        everything = (1 << self.space.shards.num_shards) - 1
        failed = self._failed.get(id(source), {})
        try:
            told = [int(mask) for mask in found.masks]
        except Exception:
            self.owner.counters.faults += 1
            log.exception("%s cannot tell what it has", source.name)
            told = []
        told += [0] * (len(self.keys) - len(told))
        return [
            mask & everything & ~closed & ~failed.get(index, 0)
            for index, (mask, closed) in enumerate(zip(told[: len(self.keys)], survey.closed, strict=True))
        ]

    async def _get(self, offers: list[Offer]) -> None:
        """Bring what the longest boundary needs, batch by batch, and wait for what others bring of it."""
        fills, shards = self.owner.fills, self.space.shards
        survey = self._survey()
        plan = make_plan(
            shards,
            _memory(survey),
            [offer.masks for offer in offers],
            fills.extents(self.space),
            fills.room(self.space, self.keys, HELD_SHARE),
        )
        self.short_of_room |= plan.cut
        if plan.boundary <= longest_boundary(shards, survey.resident):
            return
        fills.keep_resident(self.hold, self.space, self.keys, plan.needs)
        await self._get_batches(offers, plan)
        await self._wait_for_others(plan)

    async def _get_batches(self, offers: list[Offer], plan: Plan) -> None:
        """One behind the other; the next one is asked for while one comes."""
        running: deque[asyncio.Task[None]] = deque()
        try:
            for batch in self._batches(plan):
                if len(running) == IN_FLIGHT:
                    await running[0]
                    running.popleft()
                if self.over or not await self._begin_batch(offers, plan, batch, running):
                    break
            while running:
                await running[0]
                running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _batches(self, plan: Plan) -> Iterator[list[tuple[int, int]]]:
        """(chunk, mask of shards), head first, in parts that may be in flight at once."""
        limits = self.owner.limits
        extents = self.owner.fills.extents(self.space)
        batch: list[tuple[int, int]] = []
        size = count = 0
        for index, masks in enumerate(zip(*plan.gives, strict=True)):
            mask = sum(masks)
            if not mask:
                continue
            added = sum(extents[shard % len(extents)] for shard in shards_of(mask))
            if batch and (size + added > limits.batch_bytes or count >= limits.batch_objects):
                yield batch
                batch, size, count = [], 0, 0
            batch.append((index, mask))
            size += added
            count += mask.bit_count()
        if batch:
            yield batch

    async def _begin_batch(
        self,
        offers: list[Offer],
        plan: Plan,
        batch: list[tuple[int, int]],
        running: deque[asyncio.Task[None]],
    ) -> bool:
        """Reserve, and fetch in a task of its own. False when there was not room for all of it."""
        owner = self.owner
        extents = owner.fills.extents(self.space)
        size = sum(extents[shard % len(extents)] for _, mask in batch for shard in shards_of(mask))
        try:
            async with asyncio.timeout(max(self.until - owner.now(), 0)):
                taken = await owner.budget.take(size)
        except TimeoutError:
            return False
        try:
            if owner.make_way is not None and not self.over:
                await owner.make_way({self.space.tenant: size}, self.until)
        except BaseException:
            owner.budget.give(taken)
            raise
        if self.over:
            owner.budget.give(taken)
            return False
        fill = owner.fills.begin(self.space, self.keys[: plan.boundary], batch)
        task = asyncio.create_task(self._fetch(offers, plan, fill), name="kvwire-fetch batch")
        # Also for a task that is cancelled before it begins.
        task.add_done_callback(lambda _: self._end_batch(fill, taken))
        running.append(task)
        self.short_of_room |= fill.full
        return not fill.full

    def _end_batch(self, fill: Fill, taken: int) -> None:
        for stored in list(fill.objects):
            # Nobody has begun to write to these.
            self.owner.fills.abort(stored)
            self.owner.tell(stored, None)
        self.owner.budget.give(taken)

    async def _fetch(self, offers: list[Offer], plan: Plan, fill: Fill) -> None:
        parts: list[dict[Target, StoredObject]] = [{} for _ in offers]
        for stored, index in fill.objects.items():
            giver = next(s for s, gives in enumerate(plan.gives) if gives[index] >> stored.shard & 1)
            view = self.owner.view(stored.offset, stored.size)
            parts[giver][Target(index, stored.shard, stored.size, view)] = stored
        until = self.owner.now() + self.owner.limits.fetch_s
        running = [
            Fetching(self, offer.source, offer.found, part).run(until)
            for offer, part in zip(offers, parts, strict=True)
            if part
        ]
        await asyncio.gather(*running)

    async def _wait_for_others(self, plan: Plan) -> None:
        """Wait for what other fetches are bringing, as long as anybody waits for this one."""
        survey = self._survey()
        waiter = Waiter(self, asyncio.get_running_loop().create_future())
        for index, need in enumerate(plan.needs):
            for shard in shards_of(survey.coming[index] & need):
                stored = self.owner.fills.writes(self.space, self.keys[index], shard)
                if stored is not None:
                    waiter.indexes[stored] = index
        if not waiter.indexes or self.over:
            return
        wanted = list(waiter.indexes)
        for stored in wanted:
            self.owner.waiters.setdefault(stored, []).append(waiter)
        try:
            await asyncio.wait({waiter.done}, timeout=max(self.until - self.owner.now(), 0))
        finally:
            for stored in wanted:
                self._forget(stored, waiter)

    def _forget(self, stored: StoredObject, waiter: Waiter) -> None:
        waiters = self.owner.waiters.get(stored)
        if waiters is not None:
            waiters.remove(waiter)
            if not waiters:
                del self.owner.waiters[stored]

    def _survey(self) -> Survey:
        return self.owner.fills.survey(self.space, self.keys)


def _memory(survey: Survey) -> list[int]:
    return [here | coming for here, coming in zip(survey.resident, survey.coming, strict=True)]


async def _release(offers: list[Offer]) -> None:
    for offer in offers:
        try:
            async with asyncio.timeout(RELEASE_S):
                await offer.found.release()
        except Exception:
            log.exception("%s does not let go", offer.source.name)
