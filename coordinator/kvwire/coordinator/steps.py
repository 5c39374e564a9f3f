"""Work in slices: a generator yields where others may come in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

T = TypeVar("T")


def at_once(steps: Generator[None, None, T]) -> T:
    """Without letting anybody in between."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            done: T = stop.value
            return done


async def in_slices(steps: Generator[None, None, T]) -> T:
    """One slice per turn of the event loop. What was begun is finished, also when the caller goes away."""
    try:
        while True:
            next(steps)
            await asyncio.sleep(0)
    except StopIteration as stop:
        done: T = stop.value
        return done
    except asyncio.CancelledError:
        at_once(steps)
        raise
