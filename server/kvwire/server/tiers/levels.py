"""All lower tiers of one server, from the setting to what memory, lookups and the fleet see of them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from kvwire.server.journal import Entry, EventKind
from kvwire.server.store.upcoming import is_held_up, needs_room
from kvwire.server.tiers.backends import make_backend
from kvwire.server.tiers.crypt import read_vault
from kvwire.server.tiers.settings import read_tiers
from kvwire.server.tiers.source import TierSource
from kvwire.server.tiers.spilling import Spiller
from kvwire.server.tiers.threads import Threads
from kvwire.server.tiers.tier import Tier
from kvwire.server.tiers.writer import Saving, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvwire.server.config import ServerConfig
    from kvwire.server.journal import Journal
    from kvwire.server.sealing import Sealer
    from kvwire.server.store import Chunk, L1Store, RemovedChunk, StoredChunk, StoredObject
    from kvwire.server.tiers.counters import TierStatus
    from kvwire.server.tiers.entries import TierChunk
    from kvwire.serving.supervisor import Supervisor

L2: Final = 2
"""As `kvwire.v1.StorageTier`."""
START_S: Final = 5.0
"""How long a start waits for the tiers, together. What takes longer goes on beside the serving."""
MAKE_WAY_S: Final = 0.5
"""How long a store or a fetch waits at most until what makes room for it has been written."""
LOOK_S: Final = 0.01


class TierEvents:
    """Writes what a tier holds into the journal."""

    def __init__(self, journal: Journal | None, backend: str) -> None:
        self._journal = journal
        self._backend = backend

    def on_stored(self, chunk: TierChunk) -> None:
        self._note(
            EventKind.STORE, chunk.key, chunk.size, parent=chunk.parent, root=chunk.space.manifest.root
        )

    def on_removed(self, chunk: TierChunk) -> None:
        self._note(EventKind.DELETE, chunk.key)

    def on_cleared(self) -> None:
        self._note(EventKind.CLEAR)

    def on_used(self, keys: Sequence[bytes]) -> None:
        if self._journal is not None:
            self._journal.note_accesses(L2, self._backend, keys)

    def _note(
        self, kind: EventKind, key: bytes = b"", size: int = 0, parent: bytes = b"", root: bytes = b""
    ) -> None:
        if self._journal is not None:
            self._journal.note(Entry(kind, L2, self._backend, key, size, parent=parent, root=root))


class Tiers:
    """Also a listener of the memory tier. Without any tier it does nothing."""

    def __init__(self, tiers: Sequence[Tier], events: Sequence[TierEvents], threads: Threads) -> None:
        self.tiers = tuple(tiers)
        self.sources: list[TierSource] = []
        self._events = events
        self._threads = threads
        self._writers: list[Writer] = []
        self._spiller: Spiller | None = None
        self._sealer: Sealer | None = None
        self._store: L1Store | None = None

    def __len__(self) -> int:
        return len(self.tiers)

    def attach(
        self, store: L1Store, view: Callable[[int, int], memoryview], sealer: Sealer, watermark: float
    ) -> None:
        """Write what this store holds or loses from now on, and bring back to it what it lacks."""
        self._store, self._sealer = store, sealer
        spilled: list[Saving] = []
        for tier, events in zip(self.tiers, self._events, strict=True):
            saving = Saving(tier, store, view)
            if tier.settings.store == "all":
                self._writers.append(Writer(saving, sealer.quiet))
            else:
                spilled.append(saving)
            if tier.settings.fetch:
                self.sources.append(TierSource(tier, store.policy.stamps, events.on_used))
        if spilled:
            self._spiller = Spiller(spilled, store, sealer, watermark)
        store.on_sealed = self.sealed

    async def start(self, supervisor: Supervisor) -> None:
        """Raises ConfigError for a storage that another server uses."""
        await asyncio.gather(*(tier.start(START_S) for tier in self.tiers))
        for tier in self.tiers:
            supervisor.start(f"L2 {tier.name}", tier.run())
        for writer in self._writers:
            supervisor.start(f"L2 {writer.tier.name} writer", writer.run())
        if self._spiller is not None:
            supervisor.start("L2 spiller", self._spiller.run())

    def keep_below_watermark(self) -> bool:
        """Whether eviction in the background is done here, after writing. Sets it to work."""
        if self._spiller is None:
            return False
        self._spiller.poke()
        return True

    async def make_way(self, need: Mapping[str, int], until: float) -> None:
        """Before so many bytes (by tenant) are needed in memory: write first what would go, and wait for what
        is held because it is being written. As far as it goes until then (monotonic seconds), and at most a
        moment.
        """
        store = self._store
        if store is None or not self.tiers or not needs_room(store, need):
            return
        until = min(until, time.monotonic() + MAKE_WAY_S)
        if self._spiller is not None:
            self._spiller.poke()
            await self._spiller.make_way(need, until)
        # In the end they break off: better lost below than no room above.
        while is_held_up(store, need) and any(writer.busy for writer in self._writers):
            if time.monotonic() >= until:
                await asyncio.gather(*(writer.give_way() for writer in self._writers))
                return
            await asyncio.sleep(LOOK_S)

    async def flush(self, until: float) -> None:
        """Write what waits, as far as it goes until then (monotonic seconds)."""
        if self._sealer is None or not self.tiers:
            return
        self._sealer.hurry()
        for writer in self._writers:
            writer.hurry()
        while self._unwritten and time.monotonic() < until:  # noqa: ASYNC110 - several places to look at
            await asyncio.sleep(LOOK_S)
        if self._spiller is not None:
            await self._spiller.save_all(until)
            await self._spiller.close()

    @property
    def _unwritten(self) -> bool:
        sealing = self._sealer is not None and self._sealer.waiting
        return sealing or any(writer.waiting for writer in self._writers)

    async def close(self) -> None:
        """After everything that reads or writes has ended."""
        if self._spiller is not None:
            await self._spiller.close()
        await asyncio.gather(*(tier.close() for tier in self.tiers))
        self._threads.close()

    def sealed(self, stored: StoredObject) -> None:
        """An object is in memory and has its checksum."""
        for writer in self._writers:
            writer.offer(stored)

    def status(self) -> Iterator[TierStatus]:
        waiting = {writer.tier.name: writer.waiting for writer in self._writers}
        spilling = self._spiller.waiting if self._spiller is not None else 0
        for tier in self.tiers:
            yield tier.status(waiting.get(tier.name, spilling))

    def announced(self) -> Iterator[tuple[Tier, bytes]]:
        """The keys of all complete chunks, tier by tier."""
        for tier in self.tiers:
            for chunk in tier.index:
                if chunk.announced:
                    yield tier, chunk.key

    def on_stored(self, event: StoredChunk) -> None: ...

    def on_removed(self, event: RemovedChunk) -> None:
        if event.evicted and self._spiller is not None and self._store is not None:
            chunk = self._store.get(event.key)
            if chunk is not None:
                self._spiller.count_lost(chunk)

    def on_cleared(self) -> None: ...

    def on_used(self, chunks: Sequence[Chunk]) -> None:
        for tier in self.tiers:
            tier.index.follow(chunks)


def make_tiers(config: ServerConfig, server_id: str, journal: Journal | None) -> Tiers:
    """Raises ConfigError and MissingExtra. Reaches nothing yet."""
    threads = Threads(2, "kvwire-tiers")
    tiers, every = [], []
    for settings in read_tiers(config.l2):
        events = TierEvents(journal, settings.name)
        vault = read_vault(config.l2_key_file) if config.l2_key_file else None
        tiers.append(
            Tier(settings, make_backend(settings.place), server_id, threads, vault=vault, listener=events)
        )
        every.append(events)
    return Tiers(tiers, every, threads)
