from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.server.store.listing import Listing
from kvwire.server.store.objects import Chunk

if TYPE_CHECKING:
    from kvwire.server.store.objects import Space
    from kvwire.server.store.policy import EvictionPolicy


class PrefixTree:
    """The index of chunks by key, and who continues whom.

    `unreachable` holds chunks that no boundary can lean on: the chunk before is gone, or a shard failed for
    good. They go before anything else; their children become unreachable then.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.index: dict[bytes, Chunk] = {}
        self.listing: Listing[Chunk] = Listing()
        self.unreachable: dict[bytes, Chunk] = {}
        self._policy = policy
        # Chunks whose parent is absent, by its key.
        self._waiting: dict[bytes, dict[bytes, Chunk]] = {}

    def add(self, key: bytes, parent_key: bytes, space: Space, stamp: int) -> Chunk:
        """A new chunk without objects. `parent_key` is empty for a head, and when it is not known."""
        if parent_key == key:
            parent_key = b""  # a client may make up any keys
        chunk = Chunk(key, parent_key, space, [None] * space.shards.num_shards, stamp=stamp)
        self.index[key] = chunk
        self.listing.add(chunk)
        space.chunks += 1
        if parent_key:
            parent = self.index.get(parent_key)
            if parent is not None and parent.space is space:
                _link(parent, chunk)
            else:
                self._strand(chunk)
        if key in self._waiting:
            self._adopt(chunk)
        return chunk

    def remove(self, chunk: Chunk) -> None:
        """Forget a chunk. Its children stay, without a parent."""
        del self.index[chunk.key]
        self.listing.remove(chunk)
        chunk.space.chunks -= 1
        self._reach(chunk)
        parent = chunk.parent
        if parent is not None:
            self._unlink(parent, chunk)
        elif chunk.parent_key:
            self._stop_waiting(chunk)
        for child in (chunk.children or {}).values():
            child.parent = None
            self._strand(child)
        chunk.children = None

    def refile(self, chunk: Chunk) -> None:
        """Decide anew whether the chunk is reachable."""
        stranded = bool(chunk.parent_key) and chunk.parent is None
        # Without full attention a boundary leans on the last chunks alone.
        if chunk.space.shards.full_mask and (stranded or chunk.broken):
            self.unreachable[chunk.key] = chunk
            chunk.space.use.unreachable[chunk.key] = chunk
        else:
            self._reach(chunk)

    def ancestry(self, chunk: Chunk | None) -> list[Chunk]:
        """The chunk and what is known of the chain before it, head first."""
        chain: list[Chunk] = []
        while chunk is not None:
            chain.append(chunk)
            chunk = chunk.parent
        chain.reverse()
        return chain

    def waiting(self) -> dict[bytes, dict[bytes, Chunk]]:
        return self._waiting

    def _reach(self, chunk: Chunk) -> None:
        if self.unreachable.pop(chunk.key, None) is not None:
            del chunk.space.use.unreachable[chunk.key]

    def _unlink(self, parent: Chunk, child: Chunk) -> None:
        child.parent = None
        if parent.children:
            del parent.children[child.key]
        if parent.is_evictable_leaf:
            self._policy.offer(parent)

    def _strand(self, chunk: Chunk) -> None:
        self._waiting.setdefault(chunk.parent_key, {})[chunk.key] = chunk
        self.refile(chunk)

    def _adopt(self, chunk: Chunk) -> None:
        # Keys that a client made up could name each other as parents.
        above = {ancestor.key for ancestor in self.ancestry(chunk)}
        for child in list(self._waiting[chunk.key].values()):
            if child.space is chunk.space and child.key not in above:
                self._stop_waiting(child)
                _link(chunk, child)
                self.refile(child)

    def _stop_waiting(self, chunk: Chunk) -> None:
        siblings = self._waiting[chunk.parent_key]
        del siblings[chunk.key]
        if not siblings:
            del self._waiting[chunk.parent_key]


def _link(parent: Chunk, child: Chunk) -> None:
    child.parent = parent
    if parent.children is None:
        parent.children = {}
    parent.children[child.key] = child
