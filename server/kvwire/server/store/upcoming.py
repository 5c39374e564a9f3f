from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain
from typing import TYPE_CHECKING, Final

from kvwire.server.store.tenant_policy import TenantPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvwire.server.store.l1 import L1Store
    from kvwire.server.store.objects import Chunk
    from kvwire.server.store.policy import EvictionPolicy
    from kvwire.server.store.tenants import TenantUse

_EVERYTHING: Final = 1 << 62


def upcoming(store: L1Store, size: int, most: int) -> list[Chunk]:
    """The chunks that eviction would take next, in its order: of `size` bytes, or `most` chunks at most.

    Changes nothing. Under the policy "arc" the order inside a prompt is right, that between prompts nearly.
    """
    found: dict[Chunk, None] = {}
    for use in store.tenants.over():
        own = upcoming_of(store, use, use.excess(), most - len(found))
        found.update(dict.fromkeys(own))
        size -= sum(chunk.size for chunk in own)
    return _collect(found, store.tree.unreachable, _Walk(store.policy, store.policy.victim), size, most)


def upcoming_of(store: L1Store, use: TenantUse, size: int, most: int) -> list[Chunk]:
    """The same of one tenant, which gives way within its quota. Only the policy "tenant" has quotas."""
    policy = store.policy
    if not isinstance(policy, TenantPolicy):
        return []
    walk = _Walk(policy, lambda protect: policy.victim_of(use.tenant, protect))
    return _collect({}, use.unreachable, walk, size, most)


def needs_room(store: L1Store, need: Mapping[str, int]) -> bool:
    """Whether something must go before so many bytes, by tenant, are there."""
    return sum(need.values()) > store.allocator.free_bytes or any(
        use is not None and use.excess(size) > 0 for use, size in _uses(store, need)
    )


def is_held_up(store: L1Store, need: Mapping[str, int]) -> bool:
    """Whether so many bytes, by tenant, would find room if what is in use at this moment were not."""
    if sum(need.values()) > store.allocator.free_bytes + store.evictable_bytes:
        return True
    return any(
        use is not None and use.evictable < use.excess(size) and size <= use.limit
        for use, size in _uses(store, need)
    )


def going(store: L1Store, need: Mapping[str, int], most: int) -> list[Chunk]:
    """The chunks that go for so many bytes, by tenant: for quotas first, then for the pool."""
    found: dict[Chunk, None] = {}
    for use, size in _uses(store, need):
        if use is not None and use.excess(size) > 0:
            found.update(dict.fromkeys(upcoming_of(store, use, use.excess(size), most - len(found))))
    # Rather too many than too few: what goes for a quota may be next in the pool as well.
    lacking = sum(need.values()) - store.allocator.free_bytes
    if lacking > sum(chunk.size for chunk in found):
        found.update(dict.fromkeys(upcoming(store, lacking, most - len(found))))
    return list(found)


def _uses(store: L1Store, need: Mapping[str, int]) -> Iterator[tuple[TenantUse | None, int]]:
    return ((store.tenants.get(tenant), size) for tenant, size in need.items())


def _collect(
    found: dict[Chunk, None], lost: dict[bytes, Chunk], walk: _Walk, size: int, most: int
) -> list[Chunk]:
    """What nobody can resume at, then what the walk finds."""
    wanted = chain((chunk for chunk in lost.values() if chunk.idle), iter(walk.next, None))
    while size > 0 and len(found) < most and (chunk := next(wanted, None)) is not None:
        if chunk not in found:
            found[chunk] = None
            size -= chunk.size
    walk.end()
    return list(found)


class _Walk:
    """Leaves from the policy's queue, and chunks that become leaves when those before them have gone."""

    def __init__(self, policy: EvictionPolicy, victim: Callable[[int], Chunk | None]) -> None:
        self._policy = policy
        self._victim = victim
        self._popped: list[Chunk] = []
        self._bared: list[tuple[int, int, Chunk]] = []
        self._children_left: dict[Chunk, int] = {}
        self._leaf = self._pop()

    def next(self) -> Chunk | None:
        bared, leaf = self._bared, self._leaf
        if bared and (leaf is None or bared[0][0] < leaf.stamp):
            chunk = heappop(bared)[2]
        elif leaf is not None:
            chunk, self._leaf = leaf, self._pop()
        else:
            return None
        self._bare(chunk.parent)
        return chunk

    def end(self) -> None:
        """Offer what was popped again."""
        for chunk in self._popped:
            self._policy.offer(chunk)

    def _pop(self) -> Chunk | None:
        leaf = self._victim(_EVERYTHING)
        if leaf is not None:
            self._popped.append(leaf)
        return leaf

    def _bare(self, parent: Chunk | None) -> None:
        if parent is None:
            return
        left = self._children_left.get(parent, len(parent.children or ())) - 1
        self._children_left[parent] = left
        if not left and parent.idle and parent.size:
            heappush(self._bared, (parent.stamp, len(self._children_left), parent))
