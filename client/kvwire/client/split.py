"""Batches below a server's limits on one call."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from kvwire.client.calls import fill_item
from kvwire.client.channel import MAX_MESSAGE_BYTES
from kvwire.client.types import KeyRange, Limits, ObjectRange, TransferItem
from kvwire.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

T = TypeVar("T")

_MESSAGE_MARGIN = 64 << 10
_ITEM_OVERHEAD = 16
# A slot of a reply: indices, size, offset or tag, checksum, and their headers.
_SLOT_BYTES = 96


def message_room(limits: Limits) -> int:
    """Bytes for the items of one message."""
    limit = min(limits.max_message_bytes or MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES)
    return max(limit - _MESSAGE_MARGIN, 1)


def slots_of(item: TransferItem, num_groups: int) -> int:
    """The most objects that an item can name."""
    if not item.ranges:
        return item.target.chunk_count * max(num_groups, 1)
    return sum(each.chunk_count for each in item.ranges)


def transfer_batches(
    items: Sequence[TransferItem], limits: Limits, num_groups: int
) -> Iterator[Sequence[TransferItem]]:
    """Items in order, in batches below the limits on items, chunks, slots and bytes.

    An item that is above a limit on its own is a batch of its own: `cut` it before.
    """

    def cost(item: TransferItem) -> tuple[int, int, int]:
        size = fill_item(pb.StoreItem(), item).ByteSize() + _ITEM_OVERHEAD
        slots = slots_of(item, num_groups)
        return item.target.chunk_count, slots, max(size, slots * _SLOT_BYTES)

    ceilings = (limits.max_chunks, _slot_limit(limits), message_room(limits))
    return _pack(items, cost, ceilings, limits.max_items)


def batches(items: Sequence[T], limits: Limits) -> Iterator[Sequence[T]]:
    """Small items, which only the limit on their number cuts."""
    return _pack(items, lambda _item: (), (), limits.max_items)


def cut(item: TransferItem, limits: Limits, num_groups: int) -> list[TransferItem]:
    """The same objects as items that are each below the limits, by ranges of chunks in order."""
    chunks = item.target.chunk_count
    per_chunk = len(item.ranges) or max(num_groups, 1)
    step = min(limits.max_chunks or chunks, max(_slot_limit(limits) // per_chunk, 1))
    if chunks <= step:
        return [item]
    parts = [_part(item, first, min(step, chunks - first)) for first in range(0, chunks, step)]
    return [part for part in parts if part is not None]


def _slot_limit(limits: Limits) -> int:
    by_size = message_room(limits) // _SLOT_BYTES
    return min(limits.max_slots, by_size) if limits.max_slots else by_size


def _part(item: TransferItem, skip: int, count: int) -> TransferItem | None:
    target = item.target
    first = target.first_chunk + skip
    if isinstance(target, KeyRange):
        part: TransferItem = TransferItem(
            replace(target, keys=target.keys[skip : skip + count], first_chunk=first)
        )
    else:
        part = TransferItem(replace(target, first_chunk=first, chunk_count=count))
    if not item.ranges:
        return part
    ranges = tuple(each for each in (_overlap(each, first, count) for each in item.ranges) if each)
    return replace(part, ranges=ranges) if ranges else None


def _overlap(each: ObjectRange, first: int, count: int) -> ObjectRange | None:
    start = max(each.first_chunk, first)
    stop = min(each.first_chunk + each.chunk_count, first + count)
    return ObjectRange(each.group_index, start, stop - start) if stop > start else None


def _pack(
    items: Sequence[T], cost: Callable[[T], tuple[int, ...]], ceilings: tuple[int, ...], max_items: int
) -> Iterator[Sequence[T]]:
    batch: list[T] = []
    used = [0] * len(ceilings)
    for item in items:
        costs = cost(item)
        over = any(
            limit and have + more > limit for have, more, limit in zip(used, costs, ceilings, strict=True)
        )
        if batch and (over or (max_items and len(batch) >= max_items)):
            yield batch
            batch, used = [], [0] * len(ceilings)
        batch.append(item)
        used = [have + more for have, more in zip(used, costs, strict=True)]
    if batch:
        yield batch
