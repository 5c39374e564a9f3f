"""An engine's KV cache groups as kvwire sees them, and how they are cut into objects at one chunk size."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Final

from kvwire.client.layout import GroupKind, KvGroup, KvLayout, blocks_per_object
from kvwire.keys import required_alignment

if TYPE_CHECKING:
    from collections.abc import Iterator

NULL_BLOCK: Final = 0
"""The id that the engine puts in a block table where a group needs no block (any more)."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One cacheable KV group. `engine_index` is its place among all groups of the engine, scratch included.

    `window_tokens` is 0 but for windows. `page_bytes` has one entry per layer, in the group's order.
    `is_local`: attention reaches back to the last multiple of `window_tokens`, not `window_tokens` far.
    """

    engine_index: int
    kind: GroupKind
    span_tokens: int
    layer_names: tuple[str, ...]
    page_bytes: tuple[int, ...]
    window_tokens: int = 0
    is_local: bool = False

    @property
    def block_bytes(self) -> int:
        return sum(self.page_bytes)

    @property
    def is_window(self) -> bool:
        return self.kind is GroupKind.SLIDING_WINDOW

    @property
    def is_recurrent(self) -> bool:
        return self.kind is GroupKind.RECURRENT

    def first_needed_block(self, num_tokens: int) -> int:
        """The first block that resuming at `num_tokens`, after a whole block, reads."""
        if self.is_recurrent:
            return max(0, num_tokens // self.span_tokens - 1)
        if not self.is_window:
            return 0
        if self.is_local:
            return num_tokens // self.window_tokens * self.window_tokens // self.span_tokens
        return max(0, num_tokens - self.window_tokens + 1) // self.span_tokens

    def window_at(self, chunk_size: int) -> int:
        """The window that resuming at any multiple of `chunk_size` needs at most."""
        if not self.is_local:
            return self.window_tokens
        return self.window_tokens - gcd(self.window_tokens, chunk_size) + 1


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """All cacheable groups of one engine. `alignment`, the lcm of their spans, divides every promise.

    `num_engine_groups` counts scratch groups too; `block_major` says that all layers of a block lie together.
    `world_size` counts the workers, of which `replicas` neighbours hold the same bytes: they share a shard,
    which the first to come stores and each of them reads by a lease of its own.
    """

    groups: tuple[CacheGroup, ...]
    num_engine_groups: int
    num_blocks: int
    world_size: int
    block_major: bool
    replicas: int = 1

    @property
    def num_shards(self) -> int:
        return self.world_size // self.replicas

    def kv_rank(self, rank: int) -> int:
        """The shard that a worker has."""
        return rank // self.replicas

    @property
    def alignment(self) -> int:
        return required_alignment(group.span_tokens for group in self.groups)

    @property
    def resumes_at_chunks_only(self) -> bool:
        """Objects of windows and of recurrent state serve the end of their chunk and nothing before it."""
        return any(group.is_window or group.is_recurrent for group in self.groups)

    @property
    def has_states(self) -> bool:
        return any(group.is_recurrent for group in self.groups)

    def kv_layout(self, chunk_size: int) -> KvLayout:
        """What a registration says. Raises LayoutUnsupported when the chunk size does not fit."""
        return KvLayout(tuple(_kv_group(group, chunk_size) for group in self.groups), self.num_shards)


@dataclass(frozen=True, slots=True)
class GroupCut:
    """One group at one chunk size: a chunk has `blocks_per_chunk` blocks, its object the last `rows`."""

    group: CacheGroup
    blocks_per_chunk: int
    rows: int

    def object_blocks(self, chunk: int) -> range:
        """The positions, in the block table, of the blocks in the object of one chunk."""
        end = (chunk + 1) * self.blocks_per_chunk
        return range(end - self.rows, end)

    def chunks_of(self, blocks: range) -> range:
        """The chunks whose objects these consecutive blocks lie in."""
        if not blocks:
            return range(0)
        return range(blocks.start // self.blocks_per_chunk, (blocks.stop - 1) // self.blocks_per_chunk + 1)


@dataclass(frozen=True, slots=True)
class ChunkCut:
    """An engine's layout at the negotiated chunk size."""

    layout: EngineLayout
    chunk_size: int
    groups: tuple[GroupCut, ...]

    @classmethod
    def make(cls, layout: EngineLayout, chunk_size: int) -> ChunkCut:
        return cls(layout, chunk_size, tuple(_cut(group, chunk_size) for group in layout.groups))

    @property
    def has_states_inside_chunks(self) -> bool:
        """Whether the engine keeps recurrent states where no chunk ends."""
        return any(each.group.is_recurrent and each.blocks_per_chunk > 1 for each in self.groups)

    def __iter__(self) -> Iterator[tuple[int, GroupCut]]:
        """Each group with the index that objects name it by."""
        return iter(enumerate(self.groups))


def _cut(group: CacheGroup, chunk_size: int) -> GroupCut:
    rows = blocks_per_object(group.kind, chunk_size, group.span_tokens, group.window_at(chunk_size))
    return GroupCut(group, chunk_size // group.span_tokens, rows)


def _kv_group(group: CacheGroup, chunk_size: int) -> KvGroup:
    # A group whose layers differ in size is one opaque layer to the server.
    equal = len(set(group.page_bytes)) == 1
    return KvGroup(
        kind=group.kind,
        span_tokens=group.span_tokens,
        num_layers=len(group.page_bytes) if equal else 1,
        block_bytes=group.block_bytes,
        blocks_per_object=_cut(group, chunk_size).rows,
        window_tokens=group.window_at(chunk_size),
    )
