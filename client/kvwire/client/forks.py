"""What a forked child must forget: locks that another thread held, channels, threads that are not there."""

from __future__ import annotations

import os
import weakref
from typing import Any, Final, Protocol


class ForkAware(Protocol):
    def after_fork(self) -> None:
        """Called in the child, first of all. It may only drop and re-create plain objects."""


_watched: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_kept: Final[list[object]] = []


def watch(thing: ForkAware) -> None:
    """Have `thing.after_fork()` called in every child. Holds no reference to it."""
    _watched.add(thing)


def keep(thing: object) -> None:
    """Never destroy what belongs to the parent: its destructor would wait for threads that are not here."""
    _kept.append(thing)


def _after_fork() -> None:
    for thing in list(_watched):
        thing.after_fork()


os.register_at_fork(after_in_child=_after_fork)
