"""Transfers layer by layer: of a retrieve layer 0 of all objects first, so that an engine can begin with it;
of a store each layer as soon as the engine has computed it.

A path whose bytes lie still until the lease ends lends their places; they are copied afterwards, in the order
of the layers. Over other paths bytes move object by object: all layers arrive with the last object, and a
store begins when the last layer is there.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

from kvwire.client.pipeline import cancelled
from kvwire.transfer.base import FAULTS, expired, slot_error, timed_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvwire.client.pipeline import Lane, Task
    from kvwire.errors import KvwireError
    from kvwire.transfer.base import ByteArray, Drain, Fill, Slot, Ticket

    Failed = Callable[[Task, Ticket, Slot, KvwireError], None]


class LayerWatch:
    """How far one retrieve has come, or how far an engine is whose layers are stored.

    A layer of a retrieve has arrived when it has of every object.
    Layers count from 0, in the order that objects have them. Arrived does not mean proven: only the result of
    the retrieve tells whether the bytes were right. Once closed, no byte of it is written any more.
    """

    def __init__(self, num_layers: int, num_objects: int) -> None:
        self._changed = threading.Condition()
        self._missing = [num_objects] * num_layers
        self._writing = threading.Lock()
        self._closed = False
        self._ended = False

    def arrived(self, layer: int, num_objects: int) -> None:
        with self._changed:
            self._missing[layer] -= num_objects
            self._changed.notify_all()

    def all_arrived(self, num_objects: int) -> None:
        with self._changed:
            self._missing = [missing - num_objects for missing in self._missing]
            self._changed.notify_all()

    def has(self, layer: int) -> bool:
        return all(missing <= 0 for missing in self._missing[: layer + 1])

    def end(self) -> None:
        """The retrieve is over: nobody waits for what has not arrived."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, layer: int, deadline: float) -> bool:
        """Whether the layer arrives before the retrieve is over, and before `deadline`."""
        with self._changed:
            while not self.has(layer) and not self._ended and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self.has(layer)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Around each copy into the engine's blocks. Raises TransferFailed once it is closed."""
        with self._writing:
            if self._closed:
                raise cancelled()
            yield

    def close(self) -> None:
        """Waits for the copy that runs, if one does, and lets no other one begin."""
        with self._writing:
            self._closed = True
        with self._changed:
            self._changed.notify_all()


@dataclass(slots=True)
class LayeredCopy:
    """One ticket's places, as the path has lent them, and what is still to be copied from or to them."""

    lane: Lane
    task: Task
    watch: LayerWatch
    ticket: Ticket
    deadline: float
    _parts: dict[int, list[tuple[int, int, ByteArray]]] = field(default_factory=dict)

    @property
    def mover(self) -> Drain | Fill:
        """To be given to the path."""
        return self._note if self.lane.is_layered else self._whole

    def settle(self, good: Sequence[int]) -> None:
        """After the path's turn: these slots are what counts."""
        kept = set(good)
        self._parts = {index: parts for index, parts in self._parts.items() if index in kept}

    def copy(self, layer: int, failed: Failed) -> None:
        """Copy one layer of every slot that is good so far."""
        for index in list(self._parts):
            slot = self.ticket.slots[index]
            try:
                if expired(self.deadline):
                    raise timed_out(self.lane.path.name, slot)
                self._copy_slot(slot, layer)
            except FAULTS as error:
                del self._parts[index]
                failed(self.task, self.ticket, slot, slot_error(error, self.lane.path.name, "A copy"))

    def _note(self, slot: Slot, start: int, stop: int, data: ByteArray, /) -> None:
        self._parts.setdefault(slot.index, []).append((start, stop, data))

    def _whole(self, slot: Slot, start: int, stop: int, data: ByteArray, /) -> None:
        self._move(slot, start, stop, data)

    def _copy_slot(self, slot: Slot, layer: int) -> None:
        first, last = self._bounds(slot)[layer : layer + 2]
        for start, stop, data in self._parts[slot.index]:
            a, b = max(first, start), min(last, stop)
            if a < b:
                self._move(slot, a, b, data[a - start : b - start])

    def _move(self, slot: Slot, start: int, stop: int, data: ByteArray) -> None:
        raise NotImplementedError

    def _bounds(self, slot: Slot) -> list[int]:
        """Where each layer of an object begins, and its end."""
        group = self.lane.pages[slot.group_index]
        rows = slot.size_bytes // group.block_bytes
        return [0, *accumulate(page * rows for page in group.page_bytes)]


@dataclass(slots=True)
class LayeredRead(LayeredCopy):
    """The watch is told what arrives."""

    _drain: Drain = field(init=False)

    def __post_init__(self) -> None:
        self._drain = self.lane.drain(self.task)

    def settle(self, good: Sequence[int]) -> None:
        LayeredCopy.settle(self, good)
        if not self.lane.is_layered:
            self.watch.all_arrived(len(good))

    def copy(self, layer: int, failed: Failed) -> None:
        LayeredCopy.copy(self, layer, failed)
        self.watch.arrived(layer, len(self._parts))

    def _move(self, slot: Slot, start: int, stop: int, data: ByteArray) -> None:
        with self.watch.writing():
            self._drain(slot, start, stop, data)


@dataclass(slots=True)
class LayeredWrite(LayeredCopy):
    """The watch tells what may be read."""

    _fill: Fill = field(init=False)

    def __post_init__(self) -> None:
        self._fill = self.lane.fill(self.task)

    def copy(self, layer: int, failed: Failed) -> None:
        self.watch.wait_for(layer, self.deadline)
        LayeredCopy.copy(self, layer, failed)

    def _move(self, slot: Slot, start: int, stop: int, data: ByteArray) -> None:
        last = bisect_left(self._bounds(slot), stop) - 1
        if not self.watch.wait_for(last, self.deadline):
            raise timed_out(self.lane.path.name, slot)
        self._fill(slot, start, stop, data)


def copy_by_layer(copies: Sequence[LayeredCopy], failed: Failed) -> None:
    """What the path has lent, in the order of the layers over all copies."""
    lent = [each for each in copies if each.lane.is_layered]
    if not lent:
        return
    for layer in range(lent[0].lane.pages[0].num_layers):
        for each in lent:
            each.copy(layer, failed)
