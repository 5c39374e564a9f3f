"""Which chunk goes first. A policy sees chunks, never leases; the store tells it what happens.

Only leaves of the prefix tree are offered, so the tail of a prompt goes before its head. Recency is a stamp
on each chunk: a whole chain is refreshed at once, so that the head ends latest.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvwire.server.store.objects import Chunk


class EvictionPolicy(Protocol):
    """What the store demands of a policy. `protect`: no chunk with a stamp from this one on may be chosen."""

    name: str

    def stamps(self, count: int) -> range:
        """`count` new stamps for a chain, head first: all later than any before, the head's the latest."""

    def hit(self, chunks: Sequence[Chunk]) -> None:
        """A lookup found this chain (head first) and its stamps were renewed."""

    def inserted(self, chunk: Chunk) -> None:
        """The chunk has its first resident object."""

    def resized(self, chunk: Chunk, change: int) -> None:
        """The size of an inserted chunk changed by so many bytes."""

    def removed(self, chunk: Chunk, *, evicted: bool) -> None:
        """An inserted chunk is going; its size is still the last one."""

    def offer(self, chunk: Chunk) -> None:
        """The chunk has become an evictable leaf."""

    def victim(self, protect: int) -> Chunk | None:
        """The chunk to evict next, which is not offered any more; None when no offered chunk may go."""

    def check_integrity(self, chunks: Iterable[Chunk]) -> None:
        """Raise AssertionError unless every evictable leaf is offered and the accounting holds."""


class LeafQueue:
    """Leaves by stamp. Entries are corrected when they surface, so that refreshing a chunk costs nothing."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, Chunk]] = []

    def push(self, chunk: Chunk) -> None:
        chunk.queued = True
        heappush(self._heap, (chunk.stamp, chunk))

    def first(self) -> Chunk | None:
        """The leaf with the earliest stamp, which stays."""
        heap = self._heap
        while heap:
            stamp, chunk = heap[0]
            if not chunk.is_evictable_leaf:
                # It is offered again when its last pin or child goes.
                heappop(heap)
                chunk.queued = False
            elif chunk.stamp != stamp:
                heapreplace(heap, (chunk.stamp, chunk))
            else:
                return chunk
        return None

    def pop(self, protect: int) -> Chunk | None:
        chunk = self.first()
        if chunk is None or chunk.stamp >= protect:
            return None
        heappop(self._heap)
        chunk.queued = False
        return chunk


class Clock:
    def __init__(self) -> None:
        self._latest = 0

    def stamps(self, count: int) -> range:
        first = self._latest + 1
        self._latest += count
        return range(self._latest, first - 1, -1)


class LruPolicy(Clock):
    """Least recently used prompt first."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self._leaves = LeafQueue()

    def hit(self, chunks: Sequence[Chunk]) -> None:
        """Stamps are all that counts."""

    def inserted(self, chunk: Chunk) -> None:
        """Stamps are all that counts."""

    def resized(self, chunk: Chunk, change: int) -> None:
        """Size does not count."""

    def removed(self, chunk: Chunk, *, evicted: bool) -> None:
        """Its entry is dropped when it surfaces."""

    def offer(self, chunk: Chunk) -> None:
        if not chunk.queued:
            self._leaves.push(chunk)

    def victim(self, protect: int) -> Chunk | None:
        return self._leaves.pop(protect)

    def check_integrity(self, chunks: Iterable[Chunk]) -> None:
        ensure_offered(chunks)


class ArcPolicy(Clock):
    """ARC (Megiddo and Modha, FAST '03), in bytes: chunks seen once (tier 1) and more often (tier 2) compete.

    Ghosts, the keys of what was evicted from each tier, move the share of tier 1 (`target`): a scan only ever
    pushes out what was seen once, unless what was seen once is what comes back.
    """

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._target = 0
        self._leaves = {1: LeafQueue(), 2: LeafQueue()}
        self._bytes = {1: 0, 2: 0}
        self._ghosts: dict[int, OrderedDict[bytes, int]] = {1: OrderedDict(), 2: OrderedDict()}
        self._ghost_bytes = {1: 0, 2: 0}

    @property
    def target(self) -> int:
        """Bytes that tier 1 may hold before it is the one to give."""
        return self._target

    def hit(self, chunks: Sequence[Chunk]) -> None:
        moved = 0
        for chunk in chunks:
            if chunk.tier == 1:
                chunk.tier = 2
                moved += chunk.size
        self._bytes[1] -= moved
        self._bytes[2] += moved

    def inserted(self, chunk: Chunk) -> None:
        chunk.tier = self._tier_of_new(chunk.key)
        self._bytes[chunk.tier] += chunk.size

    def resized(self, chunk: Chunk, change: int) -> None:
        self._bytes[chunk.tier] += change

    def removed(self, chunk: Chunk, *, evicted: bool) -> None:
        self._bytes[chunk.tier] -= chunk.size
        if evicted:
            self._ghosts[chunk.tier][chunk.key] = chunk.size
            self._ghost_bytes[chunk.tier] += chunk.size
            self._trim_ghosts()

    def offer(self, chunk: Chunk) -> None:
        if not chunk.queued:
            self._leaves[chunk.tier].push(chunk)

    def victim(self, protect: int) -> Chunk | None:
        first = 1 if self._bytes[1] > self._target else 2
        # The second may have moved chunks to the first, which were offered before they changed the tier.
        return self._pop(first, protect) or self._pop(3 - first, protect) or self._pop(first, protect)

    def check_integrity(self, chunks: Iterable[Chunk]) -> None:
        chunks = list(chunks)
        ensure_offered(chunks)
        for tier in (1, 2):
            resident = sum(chunk.size for chunk in chunks if chunk.size and chunk.tier == tier)
            ensure(resident == self._bytes[tier], f"bytes of tier {tier} drifted")
            ensure(sum(self._ghosts[tier].values()) == self._ghost_bytes[tier], f"ghosts {tier} drifted")
        ensure(0 <= self._target <= self._capacity, "target out of range")

    def _tier_of_new(self, key: bytes) -> int:
        for tier in (1, 2):
            size = self._ghosts[tier].pop(key, 0)
            if size:
                other = self._ghost_bytes[3 - tier]
                step = max(size, size * other // self._ghost_bytes[tier])
                self._ghost_bytes[tier] -= size
                target = self._target + (step if tier == 1 else -step)
                self._target = min(self._capacity, max(0, target))
                return 2
        return 1

    def _trim_ghosts(self) -> None:
        while self._ghosts[1] and self._bytes[1] + self._ghost_bytes[1] > self._capacity:
            self._forget_oldest(1)
        everything = sum(self._bytes.values()) + sum(self._ghost_bytes.values())
        while self._ghosts[2] and everything > 2 * self._capacity:
            everything -= self._forget_oldest(2)

    def _forget_oldest(self, tier: int) -> int:
        _, size = self._ghosts[tier].popitem(last=False)
        self._ghost_bytes[tier] -= size
        return size

    def _pop(self, tier: int, protect: int) -> Chunk | None:
        while (chunk := self._leaves[tier].pop(protect)) is not None:
            if chunk.tier == tier:
                return chunk
            self._leaves[chunk.tier].push(chunk)
        return None


def ensure_offered(chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        ensure(chunk.queued or not chunk.is_evictable_leaf, "an evictable leaf is not offered")


def ensure(condition: bool, problem: str) -> None:
    if not condition:
        raise AssertionError(problem)
