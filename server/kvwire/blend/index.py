from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvwire.blend.rolling import RollingHash
from kvwire.errors import TokensInvalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ENTRY_BYTES: Final = 560
"""What an indexed chunk takes beside its tokens; measured by `tracemalloc`, rounded up."""

_UNKNOWN: Final = -1


class BlendChunk(NamedTuple):
    """A stored chunk with its tokens (packed). `parent_key` is empty for a first chunk and when unknown."""

    key: bytes
    root: bytes
    parent_key: bytes
    tokens: bytes


@dataclass(frozen=True, slots=True)
class BlendHit:
    """The tokens at `prompt_position` are those that `key` was computed from at `cached_position`.

    Attention depends on the position and on all that came before: whoever reuses the chunk validates that.
    """

    key: bytes
    cached_position: int
    prompt_position: int


@dataclass(slots=True, eq=False)
class _Space:
    """A namespace: `root` is one object for all its chunks."""

    root: bytes
    keys: dict[int, list[bytes]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Entry:
    space: _Space
    parent_key: bytes
    tokens: bytes
    fingerprint: int
    position: int


class BlendIndex:
    """Finds chunks of `chunk_size` tokens at any position of a prompt of the same namespace (key root).

    At most `max_bytes` are held; the chunks longest not stored or matched go first. Single-threaded.
    """

    def __init__(self, chunk_size: int, max_bytes: int = 256 << 20, max_candidates: int = 4) -> None:
        self.chunk_size = chunk_size
        self._hash = RollingHash(chunk_size)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._spaces: dict[bytes, _Space] = {}
        self._cost = ENTRY_BYTES + 4 * chunk_size
        self._max_entries = max(1, max_bytes // self._cost)
        self._max_candidates = max_candidates
        # Which fingerprints may be known, by their lower bits, so that most positions cost no look-up.
        self._marks = np.zeros(1 << (8 * self._max_entries).bit_length(), dtype=np.uint8)
        self._mask = np.uint64(len(self._marks) - 1)
        self._marked = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def namespaces(self) -> int:
        return len(self._spaces)

    @property
    def size_bytes(self) -> int:
        return len(self._entries) * self._cost + self._marks.nbytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def tokens_of(self, key: bytes) -> bytes:
        """Packed; empty for a chunk that is not known."""
        entry = self._entries.get(key)
        return entry.tokens if entry is not None else b""

    def add(self, chunks: Sequence[BlendChunk]) -> None:
        """Chunks of another length are left out: they belong to servers with another chunk size."""
        new = [chunk for chunk in chunks if self._is_new(chunk)]
        fingerprints = self._hash.of_chunks(b"".join([chunk.tokens for chunk in new]))
        for chunk, fingerprint in zip(new, fingerprints, strict=True):
            self._put(chunk, fingerprint)
        self._mark(fingerprints)

    def remove(self, key: bytes) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        space = entry.space
        keys = space.keys[entry.fingerprint]
        keys.remove(key)
        if not keys:
            del space.keys[entry.fingerprint]
        if not space.keys:
            del self._spaces[space.root]
        return True

    def clear(self) -> None:
        self._entries.clear()
        self._spaces.clear()
        self._marks[:] = 0
        self._marked = 0

    def match(self, root: bytes, tokens: bytes) -> list[BlendHit]:
        """Matches by position in the prompt, none overlapping another one's tokens.

        Where several chunks have the same tokens all are candidates (up to `max_candidates`), first one that
        was computed at this very position. Raises TokensInvalid.
        """
        if len(tokens) % 4:
            raise TokensInvalid(f"tokens: {len(tokens)} bytes are no packed uint32.")
        space = self._spaces.get(root)
        if space is None:
            return []
        fingerprints = self._hash.of_windows(tokens)
        likely = np.flatnonzero(self._marks[fingerprints & self._mask])
        hits: list[BlendHit] = []
        free_from = 0
        for position, fingerprint in zip(likely.tolist(), fingerprints[likely].tolist(), strict=True):
            if position < free_from or fingerprint not in space.keys:
                continue
            found = self._verified(space.keys[fingerprint], tokens, position)
            if found:
                hits += found
                free_from = position + self.chunk_size
        return hits

    def _verified(self, keys: Iterable[bytes], tokens: bytes, position: int) -> list[BlendHit]:
        window = tokens[4 * position : 4 * (position + self.chunk_size)]
        hits: list[BlendHit] = []
        for key in keys:
            entry = self._entries[key]
            if entry.tokens != window:
                continue
            cached = self._position(entry)
            if cached != _UNKNOWN:
                hits.append(BlendHit(key, cached, position))
        hits.sort(key=lambda hit: (hit.cached_position != position, hit.cached_position, hit.key))
        del hits[self._max_candidates :]
        for hit in hits:
            self._entries.move_to_end(hit.key)
        return hits

    def _position(self, entry: _Entry) -> int:
        """Where it was computed, by its chain of parents; a parent may have become known after its child."""
        chain: list[_Entry] = []
        at: _Entry | None = entry
        while at is not None and at.position == _UNKNOWN:
            chain.append(at)
            at = self._entries.get(at.parent_key) if len(chain) <= len(self._entries) else None
        if at is None:
            return _UNKNOWN
        position = at.position
        for child in reversed(chain):
            position += self.chunk_size
            child.position = position
        return position

    def _is_new(self, chunk: BlendChunk) -> bool:
        if len(chunk.tokens) != 4 * self.chunk_size:
            return False
        known = self._entries.get(chunk.key)
        if known is None or known.tokens != chunk.tokens or known.space.root != chunk.root:
            return True
        self._entries.move_to_end(chunk.key)
        return False

    def _put(self, chunk: BlendChunk, fingerprint: int) -> None:
        if chunk.key in self._entries:
            self.remove(chunk.key)
        while len(self._entries) >= self._max_entries:
            self.remove(next(iter(self._entries)))
        space = self._spaces.get(chunk.root)
        if space is None:
            space = self._spaces[chunk.root] = _Space(chunk.root)
        self._entries[chunk.key] = _Entry(
            space, chunk.parent_key, chunk.tokens, fingerprint, self._known_position(chunk)
        )
        space.keys.setdefault(fingerprint, []).append(chunk.key)

    def _known_position(self, chunk: BlendChunk) -> int:
        # An empty parent means the first chunk or not known. The first chunk's key is made from the root.
        if sha256(chunk.root + chunk.tokens).digest() == chunk.key:
            return 0
        parent = self._entries.get(chunk.parent_key)
        if parent is None or parent.position == _UNKNOWN:
            return _UNKNOWN
        return parent.position + self.chunk_size

    def _mark(self, fingerprints: list[int]) -> None:
        # Marks are never taken back one by one, since two chunks may share one: they are made anew instead.
        self._marked += len(fingerprints)
        self._marks[np.array(fingerprints, dtype=np.uint64) & self._mask] = 1
        if self._marked > 2 * self._max_entries:
            self._marks[:] = 0
            known = np.fromiter((entry.fingerprint for entry in self._entries.values()), dtype=np.uint64)
            self._marks[known & self._mask] = 1
            self._marked = len(self._entries)
