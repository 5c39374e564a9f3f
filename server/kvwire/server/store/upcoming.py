from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvwire.server.store.l1 import L1Store
    from kvwire.server.store.objects import Chunk

_EVERYTHING: Final = 1 << 62


def upcoming(store: L1Store, size: int, most: int) -> list[Chunk]:
    """The chunks that eviction would take next, in its order: of `size` bytes, or `most` chunks at most.

    Changes nothing. Under the policy "arc" the order inside a prompt is right, that between prompts nearly.
    """
    found: list[Chunk] = []
    for chunk in store.tree.unreachable.values():
        if size <= 0 or len(found) >= most:
            return found
        if chunk.idle:
            found.append(chunk)
            size -= chunk.size
    walk = _Walk(store)
    seen = set(found)
    while size > 0 and len(found) < most and (chunk_or_none := walk.next()) is not None:
        if chunk_or_none not in seen:
            found.append(chunk_or_none)
            size -= chunk_or_none.size
    walk.end()
    return found


class _Walk:
    """Leaves from the policy's queue, and chunks that become leaves when those before them have gone."""

    def __init__(self, store: L1Store) -> None:
        self._policy = store.policy
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
        leaf = self._policy.victim(_EVERYTHING)
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
