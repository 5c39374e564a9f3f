"""How the KV of one engine is cut: groups, shards, objects, and what a chunk boundary needs of them."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from struct import pack
from typing import Final, Literal

from kvwire.errors import LayoutUnsupported

MAX_WORLD_SIZE: Final = 1024
MAX_GROUPS: Final = 64
MAX_SHARDS: Final = 4096

GroupKind = Literal["full", "window", "recurrent"]


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table.

    `block_bytes` is one block of all layers of the group on one rank; an object holds the last
    `blocks_per_object` blocks of a chunk. `window_tokens` is 0 unless `kind` is "window".
    """

    kind: GroupKind
    span_tokens: int
    window_tokens: int
    num_layers: int
    block_bytes: int
    blocks_per_object: int

    @property
    def object_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_object

    def chunks_needed(self, chunk_size: int) -> int | None:
        """How many chunks before a boundary must have an object of this group; None: all of them."""
        if self.kind == "full":
            return None
        if self.kind == "recurrent":
            return 1
        return max(1, -(-(self.window_tokens - 1) // chunk_size))


@dataclass(frozen=True, slots=True)
class KvLayout:
    """All shards of a chunk: `world_size` ranks times `groups`."""

    world_size: int
    groups: tuple[KvGroup, ...]

    def validate(self, chunk_size: int) -> None:
        """Raise LayoutUnsupported, saying which part and why, unless chunks of this size can be cached."""
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise _unsupported(f"world_size {self.world_size} is not in 1 to {MAX_WORLD_SIZE}")
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise _unsupported(f"{len(self.groups)} KV groups are not in 1 to {MAX_GROUPS}")
        if self.world_size * len(self.groups) > MAX_SHARDS:
            shards = self.world_size * len(self.groups)
            raise _unsupported(f"{shards} shards in a chunk are more than {MAX_SHARDS}")
        for index, group in enumerate(self.groups):
            problem = _problem(group, chunk_size)
            if problem:
                raise _unsupported(f"group {index}: {problem}", group=index)


class ShardMap:
    """A layout at one chunk size, as bit masks: shard (rank, group) is bit `rank * num_groups + group`.

    `full_mask` is what every chunk before a boundary needs; `windows` lists (w, mask): what the last w chunks
    need beside it, narrowest window first. `complete_mask` is what makes a chunk worth announcing.
    """

    __slots__ = (
        "chunk_size",
        "complete_mask",
        "full_mask",
        "layout",
        "num_groups",
        "num_shards",
        "object_bytes",
        "windows",
    )

    def __init__(self, layout: KvLayout, chunk_size: int) -> None:
        layout.validate(chunk_size)
        self.layout = layout
        self.chunk_size = chunk_size
        self.num_groups = len(layout.groups)
        self.num_shards = self.num_groups * layout.world_size
        self.object_bytes = tuple(group.object_bytes for group in layout.groups)
        self.full_mask = 0
        by_window: dict[int, int] = {}
        for index, group in enumerate(layout.groups):
            mask = sum(1 << self.shard(rank, index) for rank in range(layout.world_size))
            chunks = group.chunks_needed(chunk_size)
            if chunks is None:
                self.full_mask |= mask
            else:
                by_window[chunks] = by_window.get(chunks, 0) | mask
        self.windows = tuple(sorted(by_window.items()))
        self.complete_mask = self.full_mask or (1 << self.num_shards) - 1

    def shard(self, rank: int, group: int) -> int:
        return rank * self.num_groups + group

    def same_as(self, other: ShardMap) -> bool:
        return self.layout == other.layout and self.chunk_size == other.chunk_size


_DIGEST_DOMAIN: Final = b"kvwire/layout/v1"
_KIND_NUMBERS: Final[dict[GroupKind, int]] = {"full": 1, "window": 2, "recurrent": 3}


def layout_digest(layout: KvLayout, chunk_size: int) -> bytes:
    """What two servers compare before they exchange bytes, and what stored bytes are filed under.

    SHA-256 over "kvwire/layout/v1" and little-endian 64-bit numbers: chunk size, world size, number of
    groups, and per group in order its kind (as in `KvGroupKind`), span, window, layers, block bytes and
    blocks per object.
    """
    numbers = [chunk_size, layout.world_size, len(layout.groups)]
    for group in layout.groups:
        numbers += [
            _KIND_NUMBERS[group.kind],
            group.span_tokens,
            group.window_tokens,
            group.num_layers,
            group.block_bytes,
            group.blocks_per_object,
        ]
    return sha256(_DIGEST_DOMAIN + pack(f"<{len(numbers)}Q", *numbers)).digest()


def _problem(group: KvGroup, chunk_size: int) -> str:
    if group.span_tokens < 1 or chunk_size % group.span_tokens:
        return f"chunk size {chunk_size} is not a multiple of span_tokens {group.span_tokens}"
    if group.num_layers < 1 or group.block_bytes < 1:
        return "num_layers and block_bytes must be at least 1"
    if group.kind not in ("full", "window", "recurrent"):
        return f"kind {group.kind!r} is unknown"
    if group.window_tokens < 0 or (group.kind == "window") != (group.window_tokens > 0):
        return f"window_tokens {group.window_tokens} does not fit kind {group.kind!r}"
    return _problem_of_object(group, chunk_size // group.span_tokens)


def _problem_of_object(group: KvGroup, blocks: int) -> str:
    if not 1 <= group.blocks_per_object <= blocks:
        return f"blocks_per_object {group.blocks_per_object} is not in 1 to {blocks}, the blocks of a chunk"
    if group.kind == "full" and group.blocks_per_object != blocks:
        return f"full attention needs all {blocks} blocks of a chunk, not {group.blocks_per_object}"
    return ""


def _unsupported(problem: str, **metadata: object) -> LayoutUnsupported:
    return LayoutUnsupported(f"The KV layout cannot be cached: {problem}.", problem=problem, **metadata)
