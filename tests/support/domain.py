"""A cache engine with a clock and a small pool, for tests of the server's domain."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.keys import ExtraInput, Namespace, pack_tokens
from kvwire.server.engine import CacheEngine, make_store
from kvwire.server.layout import KvGroup, KvLayout
from kvwire.server.messages import (
    ClientInfo,
    CommitItem,
    CommitResult,
    LookupResult,
    ObjectRange,
    Prompt,
    RetrieveGrant,
    RetrieveItem,
    SessionRange,
    SlotState,
    StoreGrant,
    StoreItem,
    Target,
)
from kvwire.server.store import RemovedChunk, StoredChunk

if TYPE_CHECKING:
    from kvwire.server.state import EngineConfig

CHUNK = 4
BLOCK_BYTES = 64
BASE = 128
NAMESPACE = Namespace("model", layout_fingerprint=b"fp")

FULL = KvGroup(
    "full", span_tokens=2, window_tokens=0, num_layers=1, block_bytes=BLOCK_BYTES, blocks_per_object=2
)
OBJECT_BYTES = FULL.object_bytes


def window_group(window_tokens: int, blocks: int = 2) -> KvGroup:
    return KvGroup("window", 2, window_tokens, 1, BLOCK_BYTES, blocks)


def recurrent_group() -> KvGroup:
    return KvGroup("recurrent", 4, 0, 1, BLOCK_BYTES * 2, 1)


def layout(world_size: int = 1, *groups: KvGroup) -> KvLayout:
    return KvLayout(world_size, groups or (FULL,))


def with_salt(salt: str) -> Namespace:
    return Namespace(NAMESPACE.model, layout_fingerprint=NAMESPACE.layout_fingerprint, salt=salt)


def tokens(chunks: int, seed: int = 0, extra: int = 0) -> bytes:
    """Prompts of one seed are prefixes of each other; those of different seeds share nothing."""
    return pack_tokens(seed * 100_000 + position for position in range(chunks * CHUNK + extra))


@dataclass
class Events:
    log: list[StoredChunk | RemovedChunk | str] = field(default_factory=list)

    def on_stored(self, event: StoredChunk) -> None:
        self.log.append(event)

    def on_removed(self, event: RemovedChunk) -> None:
        self.log.append(event)

    def on_cleared(self) -> None:
        self.log.append("cleared")

    def on_used(self, chunks) -> None:
        pass

    @property
    def stored(self) -> list[bytes]:
        return [event.key for event in self.log if isinstance(event, StoredChunk)]

    @property
    def removed(self) -> list[bytes]:
        return [event.key for event in self.log if isinstance(event, RemovedChunk)]


class Domain:
    """`pool` is the memory in objects of OBJECT_BYTES."""

    def __init__(
        self,
        pool: int = 64,
        policy: str = "lru",
        kv_layout: KvLayout | None = None,
        config: EngineConfig | None = None,
    ) -> None:
        self.events = Events()
        self.layout = kv_layout or layout()
        store = make_store(
            pool * OBJECT_BYTES, policy, base=BASE, alignment=BLOCK_BYTES, listener=self.events
        )
        self.engine = CacheEngine(store, config)
        self.engine.bind_chunk_size(CHUNK)
        self.now = 1000.0
        self._clients = itertools.count(1)

    def register(
        self,
        engine_id: str = "engine",
        role: str = "standalone",
        rank: int = 0,
        path: str = "shm",
        client_id: bytes = b"",
        namespace: Namespace = NAMESPACE,
        kv_layout: KvLayout | None = None,
    ) -> int:
        number = next(self._clients)
        info = ClientInfo(
            client_id or number.to_bytes(16, "big"), engine_id, f"client {number}", role, rank, pid=number
        )
        return self.engine.register(
            info, namespace, kv_layout or self.layout, CHUNK, path, now=self.now
        ).registration_id

    def lookup(
        self,
        registration: int | None,
        session: str,
        packed: bytes,
        namespace: Namespace = NAMESPACE,
        extras: tuple[ExtraInput, ...] = (),
    ) -> LookupResult:
        return self.engine.lookup(registration, session, Prompt(namespace, packed, extras=extras), self.now)

    def begin(
        self,
        registration: int,
        target: Target | str,
        first: int = 0,
        count: int = 0,
        ranges: tuple[ObjectRange, ...] = (),
    ) -> StoreGrant:
        return self.engine.begin_store(
            registration, [StoreItem(_target(target, first, count), ranges)], self.now
        )[0]

    def commit(self, registration: int, lease_id: int, *slots: int) -> CommitResult:
        return self.engine.commit_store(registration, [CommitItem(lease_id, slots)], self.now)[0]

    def store(self, registration: int, session: str, first: int, count: int) -> StoreGrant:
        grant = self.begin(registration, session, first, count)
        assert grant.error is None
        if grant.lease_id:
            assert self.commit(registration, grant.lease_id).error is None
        return grant

    def store_prompt(
        self, registration: int, session: str, packed: bytes, namespace: Namespace = NAMESPACE
    ) -> None:
        """Look up, store every chunk, end the session."""
        asked = self.lookup(registration, session, packed, namespace).asked_chunks
        self.store(registration, session, 0, asked)
        self.engine.end_session(registration, [session], self.now)

    def retrieve(
        self,
        registration: int,
        target: Target | str,
        first: int = 0,
        count: int = 0,
        ranges: tuple[ObjectRange, ...] = (),
    ) -> RetrieveGrant:
        return self.engine.begin_retrieve(
            registration, [RetrieveItem(_target(target, first, count), ranges)], self.now
        )[0]

    def end(self, registration: int, lease_id: int) -> bool:
        return self.engine.end_retrieve(registration, [lease_id], self.now)[0]

    def hit(self, packed: bytes, namespace: Namespace = NAMESPACE) -> int:
        """Chunks that a prompt would hit; changes nothing."""
        return self.lookup(None, "", packed, namespace).hit_chunks

    @property
    def used(self) -> int:
        """Memory in use, in objects."""
        used = self.engine.store.allocator.used
        assert used % OBJECT_BYTES == 0
        return used // OBJECT_BYTES

    def check(self) -> None:
        self.engine.check_integrity()


def states(grant: StoreGrant) -> list[SlotState]:
    return [slot.state for slot in grant.slots]


def _target(target: Target | str, first: int, count: int) -> Target:
    return SessionRange(target, first, count) if isinstance(target, str) else target
