"""Begin, move the bytes, commit or end: one pass over a batch of jobs."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING

from kvwire.client.jobs import RetrieveResult, StoreResult
from kvwire.client.layered import LayeredRead, LayeredWrite, copy_by_layer
from kvwire.client.pipeline import cancelled, name, names, slot_names
from kvwire.client.types import CommitItem, Committed, EndRetrieveItem
from kvwire.errors import ChecksumMismatch, KvwireError, LeaseLost, ObjectNotFound, OutOfSpace
from kvwire.transfer.crew import crew

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.client.jobs import ObjectName
    from kvwire.client.pipeline import Lane, Part, Task
    from kvwire.client.types import RetrieveGrant
    from kvwire.transfer.base import Mark, Slot, Ticket


class StoreRun:
    """One pass over a batch of stores. The results are in the order of the tasks."""

    def __init__(self, lane: Lane, tasks: Sequence[Task]) -> None:
        self._lane = lane
        self._tasks = tasks
        self._counts: dict[Task, Counter[str]] = {task: Counter() for task in tasks}
        self._failed: defaultdict[Task, set[ObjectName]] = defaultdict(set)
        self._errors: dict[Task, KvwireError] = {}
        self._asked: dict[int, bool] = {}

    def run(self) -> list[StoreResult]:
        for parts in self._lane.parts(self._tasks):
            wanted = [part for part in parts if not self._is_over(part)]
            try:
                self._store(wanted)
            except KvwireError as error:
                for part in wanted:
                    self._fail(part.task, names(part.item), error)
        return [self._result(task) for task in self._tasks]

    def _is_over(self, part: Part) -> bool:
        """Chunks behind a hole can never be hit."""
        task = part.task
        if task.is_cancelled():
            self._errors.setdefault(task, cancelled())
        error = self._errors.get(task)
        if error is not None:
            self._fail(task, names(part.item), error)
        elif self._counts[task]["no_space"]:
            self._counts[task]["no_space"] += len(names(part.item))
        else:
            return False
        return True

    def _store(self, parts: Sequence[Part]) -> None:
        if not parts:
            return
        lane = self._lane
        mark = lane.path.mark()
        grants = lane.client.begin_store(lane.registration_id, [part.item for part in parts])
        leases = {grant.ticket.lease_id for grant in grants if grant.ticket}
        written: list[tuple[Part, Ticket, CommitItem]] = []
        layered: list[LayeredWrite] = []
        ready: list[tuple[Part, Ticket, CommitItem]] = []
        try:
            for part, grant in zip(parts, grants, strict=True):
                counts = self._counts[part.task]
                counts["already_stored"] += grant.already_stored
                counts["being_written"] += grant.being_written
                counts["no_space"] += grant.no_space
                if grant.error is not None:
                    self._fail(part.task, names(part.item), grant.error)
                elif grant.ticket is not None:
                    ticket = lane.ticket(grant.ticket)
                    deadline = mark.asked_at + lane.seconds(grant.ticket, "CommitStore")
                    item = self._write(part, ticket, deadline, layered)
                    if item is not None:
                        written.append((part, ticket, item))
            if layered:
                copy_by_layer(layered, self._fail_slot)
                written = [each for each in map(self._copied, written) if each[2].slots]
            ready = [each for each in written if self._may_commit(each[0].task, each[1])]
        finally:
            leases -= {ticket.lease_id for _, ticket, _ in ready}
            lane.client.abort_quietly(lane.registration_id, sorted(leases))
        self._commit([each for each in ready if not self._is_published(*each, mark)])

    def _copied(self, each: tuple[Part, Ticket, CommitItem]) -> tuple[Part, Ticket, CommitItem]:
        """Without the slots that failed after the path's turn."""
        part, ticket, item = each
        failed = self._failed[part.task]
        good = tuple(slot for slot in item.slots if name(ticket, slot) not in failed)
        return each if len(good) == len(item.slots) else (part, ticket, CommitItem(ticket.lease_id, good))

    def _write(
        self, part: Part, ticket: Ticket, deadline: float, layered: list[LayeredWrite]
    ) -> CommitItem | None:
        """Fill the slots. None: there is nothing to publish."""
        task, lane = part.task, self._lane
        copy = LayeredWrite(lane, task, task.watch, ticket, deadline) if task.watch else None
        with lane.span("store", ticket, task, shared=len(self._tasks) > 1):
            fill = copy.mover if copy else lane.fill(task, partial(self._may_commit, task, ticket))
            results = lane.path.write(ticket, fill, deadline)
        good = [result for result in results if result.error is None]
        if copy is not None:
            copy.settle([result.index for result in good])
            layered.append(copy)
        for result in results:
            if result.error is not None:
                self._fail(task, [name(ticket, result.index)], result.error)
        if not good:
            return None
        checksums = tuple(result.checksum for result in good) if all(each.checksum for each in good) else ()
        return CommitItem(ticket.lease_id, tuple(result.index for result in good), checksums)

    def _may_commit(self, task: Task, ticket: Ticket) -> bool:
        """Asked once for each lease: by the path as soon as all is read, or else afterwards."""
        known = self._asked.get(ticket.lease_id)
        if known is None:
            known = self._asked[ticket.lease_id] = task.may_commit()
            if not known:
                self._errors.setdefault(task, cancelled())
        return known

    def _is_published(self, part: Part, ticket: Ticket, item: CommitItem, mark: Mark) -> bool:
        """Commit without a call, where the path can and all slots are good."""
        whole = len(item.slots) == len(ticket.slots)
        if not whole or not self._lane.path.publish(ticket, mark):
            return False
        self._committed(part.task, ticket, item, Committed(len(item.slots)))
        return True

    def _commit(self, commits: Sequence[tuple[Part, Ticket, CommitItem]]) -> None:
        if not commits:
            return
        lane = self._lane
        try:
            results = lane.client.commit_store(lane.registration_id, [item for *_, item in commits])
        except KvwireError as error:
            for part, ticket, item in commits:
                self._fail(part.task, [name(ticket, slot) for slot in item.slots], error)
            lane.client.abort_quietly(lane.registration_id, [item.lease_id for *_, item in commits])
            return
        for (part, ticket, item), result in zip(commits, results, strict=True):
            self._committed(part.task, ticket, item, result)

    def _committed(self, task: Task, ticket: Ticket, item: CommitItem, result: Committed) -> None:
        lost = set(result.failed_slots)
        if result.error is not None and not lost:
            lost = set(item.slots)
        error = result.error or LeaseLost("The server published fewer objects than it was given.")
        if not lost and result.committed < len(item.slots):
            lost = set(item.slots)
        if lost:
            self._fail(task, [name(ticket, slot) for slot in lost], error)
        kept = [slot for slot in item.slots if slot not in lost]
        self._counts[task]["stored"] += len(kept)
        self._counts[task]["stored_bytes"] += sum(ticket.slots[slot].size_bytes for slot in kept)

    def _fail(self, task: Task, names: Sequence[ObjectName], error: KvwireError) -> None:
        self._failed[task].update(names)
        self._errors.setdefault(task, error)

    def _fail_slot(self, task: Task, ticket: Ticket, slot: Slot, error: KvwireError) -> None:
        self._fail(task, [name(ticket, slot.index)], error)

    def _result(self, task: Task) -> StoreResult:
        counts = self._counts[task]
        error = self._errors.get(task)
        if error is None and counts["no_space"]:
            error = OutOfSpace(f"The server had no memory for {counts['no_space']} objects.")
        return StoreResult(**counts, failed=tuple(sorted(self._failed[task])), error=error)


class RetrieveRun:
    """One pass over a batch of retrieves. The results are in the order of the tasks."""

    def __init__(self, lane: Lane, tasks: Sequence[Task]) -> None:
        self._lane = lane
        self._tasks = tasks
        self._failed: defaultdict[Task, set[ObjectName]] = defaultdict(set)
        self._errors: dict[Task, KvwireError] = {}
        self._bytes: Counter[Task] = Counter()

    def run(self) -> list[RetrieveResult]:
        for parts in self._lane.parts(self._tasks):
            wanted = [part for part in parts if not self._is_over(part)]
            try:
                self._retrieve(wanted)
            except KvwireError as error:
                for part in wanted:
                    self._fail(part.task, names(part.item), error)
        return [self._result(task) for task in self._tasks]

    def _is_over(self, part: Part) -> bool:
        """A job with a hole in it is not worth its later parts, but they have failed with it."""
        if part.task.is_cancelled():
            self._errors.setdefault(part.task, cancelled())
        error = self._errors.get(part.task)
        if error is not None:
            self._fail(part.task, names(part.item), error)
        return error is not None

    def _retrieve(self, parts: Sequence[Part]) -> None:
        if not parts:
            return
        with self._lane.path.turn:
            mark = self._lane.path.mark()
            ends = self._begin_and_read(parts, mark)
        self._end(ends, mark)

    def _begin_and_read(
        self, parts: Sequence[Part], mark: Mark
    ) -> list[tuple[Part, Ticket, EndRetrieveItem]]:
        lane = self._lane
        grants = lane.client.begin_retrieve(lane.registration_id, [part.item for part in parts])
        ends: list[tuple[Part, Ticket, EndRetrieveItem]] = []
        leases = {grant.ticket.lease_id for grant in grants if grant.ticket}
        layered: list[LayeredRead] = []
        try:
            for part, grant in zip(parts, grants, strict=True):
                if grant.error is not None:
                    self._fail(part.task, names(part.item), grant.error)
                    continue
                self._note_missing(part, grant)
                if grant.ticket is not None:
                    ticket = lane.ticket(grant.ticket)
                    deadline = mark.asked_at + lane.seconds(grant.ticket, "EndRetrieve")
                    ends.append((part, ticket, self._read(part.task, ticket, deadline, layered)))
            copy_by_layer(layered, self._fail_slot)
        except BaseException:
            lane.client.end_quietly(lane.registration_id, sorted(leases))
            raise
        return ends

    def _note_missing(self, part: Part, grant: RetrieveGrant) -> None:
        """All that is not granted is missing, whether the server names it or not."""
        granted = slot_names(grant.ticket) if grant.ticket is not None else ()
        for chunk, group in sorted(set(names(part.item)) - set(granted)):
            text = f"Chunk {chunk} of KV group {group} is not in the cache any more."
            self._fail(part.task, [(chunk, group)], ObjectNotFound(text, chunk=chunk, group=group))

    def _read(
        self, task: Task, ticket: Ticket, deadline: float, layered: list[LayeredRead]
    ) -> EndRetrieveItem:
        lane = self._lane
        read = LayeredRead(lane, task, task.watch, ticket, deadline) if task.watch else None
        with lane.span("retrieve", ticket, task, shared=len(self._tasks) > 1):
            results = lane.path.read(ticket, read.mover if read else lane.drain(task), deadline)
        if read is not None:
            read.settle([result.index for result in results if result.error is None])
            layered.append(read)
        for result in results:
            if result.error is not None:
                self._fail(task, [name(ticket, result.index)], result.error)
        corrupt = tuple(each.index for each in results if isinstance(each.error, ChecksumMismatch))
        return EndRetrieveItem(ticket.lease_id, corrupt)

    def _end(self, ends: Sequence[tuple[Part, Ticket, EndRetrieveItem]], mark: Mark) -> None:
        """Only a lease that was held all the time makes what was read true."""
        lane = self._lane
        proven: list[int] = []
        unproven: list[tuple[Part, Ticket, EndRetrieveItem]] = []
        for part, ticket, item in ends:
            if not item.corrupt_slots and lane.path.proves(ticket, mark):
                self._held(part.task, ticket)
                proven.append(ticket.lease_id)
            else:
                unproven.append((part, ticket, item))
        if proven:
            # In this retrieve's trace, on another thread: nobody waits for it.
            trace = copy_context()
            crew.later(partial(trace.run, lane.client.end_quietly, lane.registration_id, proven))
        self._ask(unproven)

    def _ask(self, ends: Sequence[tuple[Part, Ticket, EndRetrieveItem]]) -> None:
        if not ends:
            return
        lane = self._lane
        try:
            held = lane.client.end_retrieve(lane.registration_id, [item for *_, item in ends])
        except KvwireError as error:
            for part, ticket, _item in ends:
                self._fail(part.task, slot_names(ticket), error)
            return
        for (part, ticket, _item), is_held in zip(ends, held, strict=True):
            if is_held:
                self._held(part.task, ticket)
            else:
                lost = LeaseLost(
                    "The read lease ended while its bytes were copied.", lease_id=ticket.lease_id
                )
                self._fail(part.task, slot_names(ticket), lost)

    def _held(self, task: Task, ticket: Ticket) -> None:
        self._bytes[task] += sum(slot.size_bytes for slot in ticket.slots)

    def _fail(self, task: Task, names: Sequence[ObjectName], error: KvwireError) -> None:
        self._failed[task].update(names)
        self._errors.setdefault(task, error)

    def _fail_slot(self, task: Task, ticket: Ticket, slot: Slot, error: KvwireError) -> None:
        self._fail(task, [name(ticket, slot.index)], error)

    def _result(self, task: Task) -> RetrieveResult:
        failed = self._failed[task]
        good = sum(1 for name in task.job.objects() if name not in failed)
        return RetrieveResult(
            retrieved=good,
            retrieved_bytes=self._bytes[task],
            failed=tuple(sorted(failed)),
            error=self._errors.get(task),
        )
