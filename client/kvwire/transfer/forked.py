"""Objects that must not be destroyed by a forked child: what they would tear down is its parent's."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_owners: weakref.WeakKeyDictionary[Any, Callable[[], Iterable[Any]]] = weakref.WeakKeyDictionary()


def never_destroy(objects: Iterable[Any]) -> None:
    """Keep these alive until the process ends, through the interpreter's shutdown."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def never_destroy_in_children(owner: Any, objects: Callable[[], Iterable[Any]]) -> None:
    """After a fork the child keeps what `objects` names then. `objects` must not refer to the owner."""
    _owners[owner] = objects


def _keep_all() -> None:
    for objects in list(_owners.values()):
        never_destroy(objects())


os.register_at_fork(after_in_child=_keep_all)
