"""What to bring of a prompt, and from where. Pure: masks in, a plan out.

All masks are per chunk: shard (rank, group) is bit `rank * num_groups + group`, as in `ShardMap`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from kvwire.server.fetch.source import Origin
from kvwire.server.store import longest_boundary, needed_shards

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvwire.server.layout import ShardMap
    from kvwire.server.store import Hit

__all__ = ["Plan", "longest_boundary", "make_plan", "needed_shards", "origins_of", "shards_of"]


@dataclass(frozen=True, slots=True)
class Plan:
    """`needs[i]` is what `boundary` leans on of chunk i, `gives[s][i]` what source s brings of it.

    What a boundary needs and no source brings is in memory, or on its way there. `size` is in bytes as
    allocated. `cut`: a longer one has no room.
    """

    boundary: int
    needs: Sequence[int]
    gives: Sequence[Sequence[int]]
    size: int
    cut: bool = False


def make_plan(
    shards: ShardMap,
    memory: Sequence[int],
    offers: Sequence[Sequence[int]],
    extents: Sequence[int],
    room: int,
) -> Plan:
    """The longest boundary that `memory` and all offers reach together and that has room, and who gives what.

    What several sources offer is taken from the first of them. `extents` are the bytes of an object by its
    group; what has to come takes at most `room` of them.
    """
    together = [_union(masks) for masks in zip(memory, *offers, strict=True)]
    sizes = _Sizes(shards, extents)
    limit = len(together)
    cut = False
    while True:
        boundary = longest_boundary(shards, together[:limit])
        needs = needed_shards(shards, boundary)
        lacking = [need & ~there for need, there in zip(needs, memory, strict=False)]
        size = sum(map(sizes.of, lacking))
        if size <= room:
            return Plan(boundary, needs, _assign(lacking, offers), size, cut)
        cut = True
        full = accumulate(sizes.of(mask & shards.full_mask) for mask in lacking)
        limit = min(boundary - 1, bisect_right(list(full), room))


def origins_of(hit: Hit, before: int, came: Mapping[int, Origin], counted: int = 0) -> Counter[Origin]:
    """Where the chunks of a hit came from, each once, without the first `counted`.

    `came` were brought; memory alone reached `before`. A chunk that the hit does not lean on came with the
    first one that it does.
    """
    origins = [came.get(index, Origin.MEMORY) for index in range(hit.first, hit.boundary)]
    lead = origins[0] if origins else Origin.MEMORY
    skipped = [Origin.MEMORY if index < before else lead for index in range(hit.first)]
    return Counter([*skipped, *origins][counted:])


def shards_of(mask: int) -> Iterator[int]:
    """The shards of a mask, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


class _Sizes:
    """Bytes of a mask; few different masks ever occur."""

    def __init__(self, shards: ShardMap, extents: Sequence[int]) -> None:
        self._groups = shards.num_groups
        self._extents = extents
        self._known: dict[int, int] = {0: 0}

    def of(self, mask: int) -> int:
        known = self._known.get(mask)
        if known is None:
            known = sum(self._extents[shard % self._groups] for shard in shards_of(mask))
            self._known[mask] = known
        return known


def _assign(lacking: Sequence[int], offers: Sequence[Sequence[int]]) -> list[list[int]]:
    rest = list(lacking)
    gives: list[list[int]] = []
    for offer in offers:
        given = [mask & offered for mask, offered in zip(rest, offer, strict=False)]
        rest = [mask & ~taken for mask, taken in zip(rest, given, strict=True)]
        gives.append(given)
    return gives


def _union(masks: Sequence[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
