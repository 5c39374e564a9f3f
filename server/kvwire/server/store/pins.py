"""What an operator has pinned: keys whose chunks stay, present or stored later, whole or in part.

Leases hold chunks, too, for seconds. A pin holds by key and for good, and what it holds may still be damaged
and discarded, or belong to a former layout: then it goes like everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.server.store.objects import Chunk

PINNED_SHARE: Final = 0.9
"""Of the memory: what pins may hold. The rest is left for everybody else."""


@dataclass(slots=True, eq=False)
class KeyPins:
    """`chunks` and `bytes` count what is held. Above `limit` bytes no more is: the key goes into `over`."""

    limit: int
    keys: set[bytes] = field(default_factory=set)
    over: dict[bytes, None] = field(default_factory=dict)
    chunks: int = 0
    bytes: int = 0

    def wants(self, chunk: Chunk) -> bool:
        """Whether a chunk that is not held is to be, and there is room for it."""
        if chunk.key not in self.keys:
            return False
        if self.bytes + chunk.size > self.limit or self.bytes >= self.limit:
            self.over[chunk.key] = None
            return False
        return True

    def hold(self, chunk: Chunk) -> None:
        chunk.kept = True
        self.over.pop(chunk.key, None)
        self.chunks += 1
        self.bytes += chunk.size

    def let_go(self, chunk: Chunk) -> None:
        chunk.kept = False
        self.chunks -= 1
        self.bytes -= chunk.size

    def resized(self, chunk: Chunk, change: int) -> None:
        if chunk.kept:
            self.bytes += change

    def with_all(self, chunks: Iterable[Chunk | None]) -> int:
        """What would be held in bytes with these as well."""
        return self.bytes + sum(chunk.size for chunk in chunks if chunk is not None and not chunk.kept)
