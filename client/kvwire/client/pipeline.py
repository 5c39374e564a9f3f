"""What a batch of jobs is made of on its way: tasks, parts below the limits, tickets and their bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvwire import telemetry
from kvwire.client import split
from kvwire.client.types import Path
from kvwire.errors import TransferFailed
from kvwire.transfer.base import Slot, SlotResult, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from kvwire.client.client import Client
    from kvwire.client.jobs import ObjectName, TransferJob
    from kvwire.client.layered import LayerWatch
    from kvwire.client.layout import KvLayout
    from kvwire.client.types import TransferItem
    from kvwire.transfer.base import ByteArray, Drain, Fill, Mark
    from kvwire.transfer.pages import KvGroupPages, PageMover
    from kvwire.v1 import transfer_pb2

PART_BYTES: Final = 512 << 20
"""What one lease covers at most: it must not run out while its bytes are under way."""


class BoundPath(Protocol):
    """The data path of one registration. Safe to use from several threads.

    Both return when nothing touches the engine's blocks any more, with one result per slot. An exception
    means that the path is dead.
    """

    @property
    def name(self) -> str: ...

    @property
    def lends(self) -> bool:
        """Whether what `read` hands to a drain lies still until the lease ends."""

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """To be held from BeginRetrieve to the last read.

        On UCX the server sends at once, in the order of the calls, and only so many messages ahead: whoever
        reads in another order waits for a message that waits for him.
        """

    def write(self, ticket: Ticket, fill: Fill, deadline: float) -> list[SlotResult]: ...

    def read(self, ticket: Ticket, drain: Drain, deadline: float) -> list[SlotResult]: ...

    def mark(self) -> Mark: ...

    def publish(self, ticket: Ticket, mark: Mark) -> bool: ...

    def proves(self, ticket: Ticket, mark: Mark) -> bool: ...


class Task:
    """One job on its way. The two questions let its owner withdraw it.

    `watch` is for a retrieve whose layers are waited for one by one.
    """

    def __init__(self, job: TransferJob, trace: Any = None, watch: LayerWatch | None = None) -> None:
        self.job = job
        self.trace = trace
        self.watch = watch

    def is_cancelled(self) -> bool:
        """Asked between slots: what is not moved yet is then left."""
        return False

    def may_commit(self) -> bool:
        """Asked once, when all bytes are read and before anything is published."""
        return True


@dataclass(slots=True)
class Part:
    """What one item of a call asks for of one task."""

    task: Task
    item: TransferItem


@dataclass(frozen=True, slots=True)
class _Moves:
    """The bytes of one task, until it is withdrawn. For as many threads at once.

    `complete` says whether what has been read may be published.
    """

    task: Task
    move: Callable[[Slot, int, int, ByteArray], None]
    threads: int
    complete: Callable[[], bool] | None = None

    def __call__(self, slot: Slot, start: int, stop: int, part: ByteArray, /) -> None:
        if self.task.is_cancelled():
            raise cancelled()
        self.move(slot, start, stop, part)


@dataclass(frozen=True, slots=True)
class Lane:
    """One registration's means, as long as it is good."""

    client: Client
    registration_id: int
    layout: KvLayout
    path: BoundPath
    pages: Sequence[KvGroupPages]

    @property
    def is_layered(self) -> bool:
        """Whether a retrieve can bring one layer of all objects before the next one."""
        return self.path.lends and len(self.pages) == 1 and self.pages[0].order == "layers"

    def parts(self, tasks: Sequence[Task]) -> Iterator[list[Part]]:
        """The tasks' items below the server's limits and `PART_BYTES`, in calls."""
        limits = self.client.state.limits
        num_groups = len(self.layout.groups)
        chunk_bytes = sum(group.object_bytes for group in self.layout.groups)
        by_size = max(PART_BYTES // max(chunk_bytes, 1), 1)
        chunks = min(limits.max_chunks, by_size) if limits.max_chunks else by_size
        limits = replace(limits, max_chunks=chunks)
        parts = [
            Part(task, item) for task in tasks for item in split.cut(task.job.item(), limits, num_groups)
        ]
        done = 0
        for batch in split.transfer_batches([part.item for part in parts], limits, num_groups):
            yield parts[done : done + len(batch)]
            done += len(batch)

    def fill(self, task: Task, complete: Callable[[], bool] | None = None) -> Fill:
        """Reads the task's blocks, until the task is withdrawn."""
        return _Moves(task, self._mover(task).fill, self._threads, complete)

    def drain(self, task: Task) -> Drain:
        """Writes the task's blocks, until the task is withdrawn."""
        return _Moves(task, self._mover(task).drain, self._threads)

    @property
    def _threads(self) -> int:
        return min(pages.threads for pages in self.pages)

    def _mover(self, task: Task) -> PageMover:
        from kvwire.transfer.pages import PageMover

        return PageMover(self.pages, task.job.by_object())

    def ticket(self, message: transfer_pb2.Ticket) -> Ticket:
        """The ticket as data paths take it. Raises TransferFailed for sizes that are not the layout's."""
        ticket = to_ticket(message)
        for slot in ticket.slots:
            groups = self.layout.groups
            size = groups[slot.group_index].object_bytes if slot.group_index < len(groups) else 0
            if slot.size_bytes != size:
                raise TransferFailed(
                    f"The server has {slot.size_bytes} bytes for an object of {size} bytes.",
                    path=self.path.name,
                    cause="size",
                )
        return ticket

    def seconds(self, ticket: transfer_pb2.Ticket, method: str) -> float:
        """How long a ticket's bytes may take: the call's deadline, or the lease's where that is shorter."""
        lease = lease_seconds(ticket)
        return min(self.client.deadlines[method], lease) if lease > 0 else self.client.deadlines[method]

    def span(
        self, direction: str, ticket: Ticket, task: Task, *, shared: bool
    ) -> AbstractContextManager[object]:
        """The transfer in the task's own trace, also when the batch around it serves several."""
        size = sum(slot.size_bytes for slot in ticket.slots)
        return telemetry.data_plane_span(
            self.path.name, direction, size, ticket.lease_id, parent=task.trace if shared else None
        )


def cancelled() -> TransferFailed:
    """Nobody's fault: it casts no doubt on the server."""
    return TransferFailed("The job was withdrawn before it was done.", cause="withdrawn")


def to_ticket(message: transfer_pb2.Ticket) -> Ticket:
    """The ticket as the data paths take it."""
    slots = tuple(
        Slot(
            index,
            slot.chunk_index,
            slot.group_index,
            slot.size_bytes,
            slot.arena_offset,
            slot.first_tag,
            slot.checksum,
        )
        for index, slot in enumerate(message.slots)
    )
    return Ticket(
        message.lease_id,
        Path(message.path).label,
        slots,
        message.piece_bytes,
        lease_seconds(message),
        message.arrival_word,
    )


def lease_seconds(message: transfer_pb2.Ticket) -> float:
    return float(message.expires_in.seconds + message.expires_in.nanos * 1e-9)


def name(ticket: Ticket, slot: int) -> ObjectName:
    return ticket.slots[slot].chunk_index, ticket.slots[slot].group_index


def slot_names(ticket: Ticket | transfer_pb2.Ticket) -> list[ObjectName]:
    return [(slot.chunk_index, slot.group_index) for slot in ticket.slots]


def names(item: TransferItem) -> list[ObjectName]:
    return [
        (chunk, each.group_index)
        for each in item.ranges
        for chunk in range(each.first_chunk, each.first_chunk + each.chunk_count)
    ]
