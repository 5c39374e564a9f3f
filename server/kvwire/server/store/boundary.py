"""Where a prompt can resume: one definition, over masks of shards, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.layout import ShardMap
    from kvwire.server.store.objects import Chunk


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest boundary that every rank and group can resume at, and the chunks that it leans on.

    `chunks` are consecutive, head first; the first of them is chunk `first` of the prompt.
    """

    boundary: int
    first: int
    chunks: list[Chunk]


def longest_boundary(shards: ShardMap, masks: Sequence[int]) -> int:
    """The longest boundary, in chunks, that is there when chunk i has the shards of `masks[i]`."""
    need = shards.full_mask
    boundary = len(masks)
    if need:
        boundary = next((index for index, mask in enumerate(masks) if mask & need != need), boundary)
    return last_boundary(shards.windows, masks, boundary)


def needed_shards(shards: ShardMap, boundary: int) -> list[int]:
    """For each chunk before a boundary, the shards that it leans on."""
    masks = [shards.full_mask] * boundary
    for width, mask in shards.windows:
        for index in range(max(boundary - width, 0), boundary):
            masks[index] |= mask
    return masks


def last_boundary(windows: Sequence[tuple[int, int]], masks: Sequence[int], limit: int) -> int:
    """The longest boundary up to `limit` whose windows (width in chunks, shard mask) are all there."""
    boundary = limit
    while boundary and windows:
        gap = _gap_before(boundary, windows, masks)
        if gap is None:
            break
        # Every boundary whose window holds the gap fails as well: the next one to try ends right before it.
        boundary = gap
    return boundary


def _gap_before(boundary: int, windows: Sequence[tuple[int, int]], masks: Sequence[int]) -> int | None:
    for width, mask in windows:
        for index in range(boundary - 1, max(boundary - width, 0) - 1, -1):
            if masks[index] & mask != mask:
                return index
    return None
