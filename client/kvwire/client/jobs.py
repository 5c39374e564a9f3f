"""What to store and to retrieve, and what became of it. A failure is never part of a success."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvwire.client.types import ObjectRange, TransferItem
from kvwire.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.client.layout import KvLayout
    from kvwire.client.types import ChunkRange
    from kvwire.errors import KvwireError

NOT_WANTED: Final = -1
"""A row of an object that a retrieve leaves alone, and that a store must not have."""

ObjectName = tuple[int, int]
"""(chunk, group), the chunk counted in the prompt."""


@dataclass(frozen=True, slots=True)
class GroupBlocks:
    """Blocks of consecutive chunks of one group, in order: for each chunk as many as an object has rows."""

    group_index: int
    first_chunk: int
    chunk_count: int
    block_ids: tuple[int, ...] = field(repr=False)

    def blocks_of(self, chunk: int) -> tuple[int, ...]:
        rows = len(self.block_ids) // self.chunk_count
        start = (chunk - self.first_chunk) * rows
        return self.block_ids[start : start + rows]


@dataclass(frozen=True, slots=True)
class TransferJob:
    """Objects of one prompt and the engine's blocks that they are. `groups` name each object once."""

    target: ChunkRange
    groups: tuple[GroupBlocks, ...]

    def item(self) -> TransferItem:
        ranges = tuple(
            ObjectRange(each.group_index, each.first_chunk, each.chunk_count) for each in self.groups
        )
        return TransferItem(self.target, ranges)

    def objects(self) -> Iterable[ObjectName]:
        for each in self.groups:
            for chunk in range(each.first_chunk, each.first_chunk + each.chunk_count):
                yield chunk, each.group_index

    def blocks_of(self, name: ObjectName) -> tuple[int, ...]:
        """The block ids of one object. Raises KeyError for an object that is not the job's."""
        chunk, group = name
        for each in self.groups:
            if each.group_index == group and 0 <= chunk - each.first_chunk < each.chunk_count:
                return each.blocks_of(chunk)
        raise KeyError(name)

    def by_object(self) -> dict[ObjectName, tuple[int, ...]]:
        """The block ids of every object."""
        return {
            (chunk, each.group_index): each.blocks_of(chunk)
            for each in self.groups
            for chunk in range(each.first_chunk, each.first_chunk + each.chunk_count)
        }

    def block_ids(self, names: Iterable[ObjectName] | None = None) -> frozenset[int]:
        """The wanted blocks of these objects, or of all."""
        wanted = self.objects() if names is None else names
        return frozenset(block for name in wanted for block in self.blocks_of(name)) - {NOT_WANTED}

    def check(self, layout: KvLayout, num_blocks: int, *, is_store: bool) -> None:
        """Raise InvalidArgument for what no server and no copy could make sense of."""
        if not self.groups:
            raise InvalidArgument("groups", "names no objects")
        first, count = self.target.first_chunk, self.target.chunk_count
        for each in self.groups:
            if not 0 <= each.group_index < len(layout.groups):
                raise InvalidArgument("group_index", f"{each.group_index} is no group of the layout")
            begin = each.first_chunk - first
            if each.chunk_count < 1 or begin < 0 or begin + each.chunk_count > count:
                raise InvalidArgument("chunk_count", "reaches outside the chunks of the target")
            rows = layout.groups[each.group_index].blocks_per_object
            if len(each.block_ids) != rows * each.chunk_count:
                problem = f"has {len(each.block_ids)} ids, not {rows} for each of {each.chunk_count} chunks"
                raise InvalidArgument("block_ids", problem)
            lowest = 0 if is_store else NOT_WANTED
            if not lowest <= min(each.block_ids) <= max(each.block_ids) < num_blocks:
                raise InvalidArgument("block_ids", f"has an id outside 0 to {num_blocks - 1}")


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Objects by what became of them. `already_stored` and `being_written` are successes."""

    stored: int = 0
    stored_bytes: int = 0
    already_stored: int = 0
    being_written: int = 0
    no_space: int = 0
    failed: tuple[ObjectName, ...] = ()
    error: KvwireError | None = None

    @property
    def ok(self) -> bool:
        """Everything is, or is about to be, in the cache."""
        return not self.failed and not self.no_space and self.error is None


@dataclass(frozen=True, slots=True)
class RetrieveResult:
    """`failed` names every object whose blocks must not be used; `error` says why, for the first of them."""

    retrieved: int = 0
    retrieved_bytes: int = 0
    failed: tuple[ObjectName, ...] = ()
    error: KvwireError | None = None

    @property
    def ok(self) -> bool:
        return not self.failed and self.error is None
