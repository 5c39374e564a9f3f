from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.store.objects import Chunk


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest boundary that every rank and group can resume at, and the chunks that it leans on.

    `chunks` are consecutive, head first; the first of them is chunk `first` of the prompt.
    """

    boundary: int
    first: int
    chunks: list[Chunk]


def last_boundary(windows: Sequence[tuple[int, int]], chunks: Sequence[Chunk | None]) -> int:
    """The longest boundary up to len(chunks) whose windows (width in chunks, shard mask) are all there."""
    boundary = len(chunks)
    while boundary:
        gap = _gap_before(boundary, windows, chunks)
        if gap is None:
            break
        # Every boundary whose window holds the gap fails as well: the next one to try ends right before it.
        boundary = gap
    return boundary


def _gap_before(
    boundary: int, windows: Sequence[tuple[int, int]], chunks: Sequence[Chunk | None]
) -> int | None:
    for width, mask in windows:
        for index in range(boundary - 1, max(boundary - width, 0) - 1, -1):
            chunk = chunks[index]
            if chunk is None or chunk.mask & mask != mask:
                return index
    return None
