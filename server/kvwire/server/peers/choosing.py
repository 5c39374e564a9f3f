"""Which server to ask for a prompt. Pure."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from kvwire.server.peers.members import Place

    Places = Sequence[Collection[Place]]


def longest_run(places: Places, first: int, without: Collection[Place]) -> tuple[Place, int] | None:
    """The server that is thought to hold most chunks in a row from `first` on, and how many.

    Among equals it is any: a fleet's first holder of a prompt shall not serve all others.
    """
    if first >= len(places):
        return None
    left = {place for place in places[first] if place not in without}
    best: set[Place] = set()
    count = 0
    while left:
        best, count = left, count + 1
        following = places[first + count] if first + count < len(places) else ()
        left = {place for place in left if place in following}
    return (random.choice(sorted(best)), count) if best else None  # noqa: S311 - it spreads load


def last_of(places: Places, place: Place) -> int:
    """The index behind the last chunk that this server is thought to hold."""
    return next((index + 1 for index in reversed(range(len(places))) if place in places[index]), 0)
