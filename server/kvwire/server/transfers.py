"""Stores and retrieves: leases from the engine, tickets for the data path, and the ends of both."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvwire.errors import ChecksumMismatch, KvwireError, LeaseLost, NotRegistered
from kvwire.server import convert
from kvwire.server.dataplane import SlotMemory
from kvwire.server.limits import check_batch, check_chunks, check_slots
from kvwire.server.messages import CommitItem, CommitResult, SlotState
from kvwire.v1 import cache_service_pb2 as cache
from kvwire.v1 import transfer_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvwire.server.core import Core
    from kvwire.server.dataplane import Opened, ServerPath
    from kvwire.server.messages import LiveLease, ReadSlot, RetrieveGrant, SlotGrant, StoreGrant

CHECKED_PATHS: Final = frozenset({"inline"})
"""Where a client's checksums are checked at commit; on the fast paths it is left to who reads."""
MARGIN_S: Final = 0.2
"""Kept of a call's deadline for the reply, when bytes have to be waited for."""


class Transfers:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._engine = core.engine

    async def begin_store(
        self, request: cache.BeginStoreRequest, remaining: float | None
    ) -> cache.BeginStoreResponse:
        core = self._core
        path = self._transfer_path(request.registration_id)
        check_batch("items", request.items, core.config)
        check_chunks(request.items, self._groups(request.registration_id), core.config)
        items = [convert.store_item(item, core.config) for item in request.items]
        if core.tiers:
            need = self._engine.store_demand(request.registration_id, items)
            await core.tiers.make_way(need, core.now() + (remaining or MARGIN_S) - MARGIN_S)
        core.absorb()
        grants = self._engine.begin_store(request.registration_id, items, core.now())
        reply = cache.BeginStoreResponse(header=core.header)
        for grant in grants:
            reply.results.append(self._store_result(request.registration_id, path, grant))
        core.settle()
        core.expect_arrivals()
        return reply

    async def commit_store(
        self, request: cache.CommitStoreRequest, remaining: float | None
    ) -> cache.CommitStoreResponse:
        core = self._core
        path = self._transfer_path(request.registration_id)
        check_batch("items", request.items, core.config)
        check_slots("slots", (item.slots for item in request.items), core.config)
        check_slots("checksums", (item.checksums for item in request.items), core.config)
        items = [convert.commit_item(item) for item in request.items]
        seconds = max(MARGIN_S, (remaining or core.config.write_lease) - MARGIN_S)
        arrivals = await asyncio.gather(
            *(self._arrived(request.registration_id, item, seconds) for item in items)
        )
        reply = cache.CommitStoreResponse(header=core.header)
        over: list[int] = []
        for item, arrival in zip(items, arrivals, strict=True):
            result = self._commit(request.registration_id, arrival.good, item.lease_id)
            if result.committed and not result.aborted:
                over.append(item.lease_id)
            core.sealer.add(result.unchecked)
            if result.error is None or isinstance(result.error, LeaseLost):
                core.close_store(request.registration_id, item.lease_id)
            for error in arrival.failed.values():
                self._engine.counters.fail(error.reason)
            reply.results.append(_commit_result(arrival.failed, result))
        core.settle()
        # Only what has been published whole: a refused item leaves its lease, and another's, as it is, and
        # what was given back is cancelled, and waited for, as an ended lease.
        for lease_id in over:
            await path.cancel(lease_id)
        return reply

    def abort_store(self, request: cache.AbortStoreRequest) -> cache.AbortStoreResponse:
        core = self._core
        check_batch("lease_ids", request.lease_ids, core.config)
        aborted = self._engine.abort_store(request.registration_id, request.lease_ids, core.now())
        for lease_id in request.lease_ids:
            core.close_store(request.registration_id, lease_id)
        core.settle()
        return cache.AbortStoreResponse(header=core.header, aborted_slots=aborted)

    def begin_retrieve(self, request: cache.BeginRetrieveRequest) -> cache.BeginRetrieveResponse:
        core = self._core
        path = self._transfer_path(request.registration_id)
        check_batch("items", request.items, core.config)
        check_chunks(request.items, self._groups(request.registration_id), core.config)
        items = [convert.retrieve_item(item, core.config) for item in request.items]
        core.absorb()
        grants = self._engine.begin_retrieve(request.registration_id, items, core.now())
        reply = cache.BeginRetrieveResponse(header=core.header)
        for grant in grants:
            reply.results.append(self._retrieve_result(request.registration_id, path, grant))
        core.settle()
        return reply

    async def end_retrieve(self, request: cache.EndRetrieveRequest) -> cache.EndRetrieveResponse:
        core = self._core
        check_batch("items", request.items, core.config)
        check_slots("corrupt_slots", (item.corrupt_slots for item in request.items), core.config)
        for item in request.items:
            if item.corrupt_slots:
                await self._check_slots(request.registration_id, item)
        ids = [item.lease_id for item in request.items]
        held = self._engine.end_retrieve(request.registration_id, ids, core.now())
        core.settle()
        return cache.EndRetrieveResponse(
            header=core.header,
            results=[
                cache.EndRetrieveResult(state=cache.LEASE_STATE_HELD if each else cache.LEASE_STATE_LOST)
                for each in held
            ],
        )

    def _store_result(
        self, registration_id: int, path: ServerPath, grant: StoreGrant
    ) -> cache.BeginStoreResult:
        if grant.error is not None:
            return cache.BeginStoreResult(error=convert.item_error(grant.error))
        reserved = grant.reserved
        states = Counter(slot.state for slot in grant.slots)
        result = cache.BeginStoreResult(
            already_stored=states[SlotState.ALREADY_STORED],
            being_written=states[SlotState.BEING_WRITTEN],
            no_space=states[SlotState.NO_SPACE],
        )
        if grant.lease_id:
            try:
                opened = path.open_store(registration_id, grant.lease_id, _memory(reserved))
            except KvwireError as error:
                self._engine.abort_store(registration_id, [grant.lease_id], self._core.now())
                return cache.BeginStoreResult(error=convert.item_error(error))
            self._fill(result.ticket, registration_id, grant.lease_id, grant.ttl, reserved, opened)
        return result

    def _retrieve_result(
        self, registration_id: int, path: ServerPath, grant: RetrieveGrant
    ) -> cache.BeginRetrieveResult:
        if grant.error is not None:
            return cache.BeginRetrieveResult(error=convert.item_error(grant.error))
        missing = [
            cache.MissingObject(chunk_index=each.chunk_index, group_index=each.group_index)
            for each in grant.missing
        ]
        result = cache.BeginRetrieveResult(missing=missing)
        if grant.lease_id:
            try:
                opened = path.open_retrieve(registration_id, grant.lease_id, _memory(grant.slots))
            except KvwireError as error:
                self._engine.end_retrieve(registration_id, [grant.lease_id], self._core.now())
                return cache.BeginRetrieveResult(error=convert.item_error(error))
            self._fill(result.ticket, registration_id, grant.lease_id, grant.ttl, grant.slots, opened)
        return result

    def _fill(
        self,
        ticket: transfer_pb2.Ticket,
        registration_id: int,
        lease_id: int,
        ttl: float,
        slots: Sequence[SlotGrant | ReadSlot],
        opened: Opened,
    ) -> None:
        client = self._core.clients.get(registration_id)
        path = client.path if client else ""
        ticket.lease_id = lease_id
        ticket.path = convert.PATHS[path]
        ticket.expires_in.CopyFrom(convert.duration(ttl))
        ticket.piece_bytes = opened.piece_bytes
        ticket.arrival_word = opened.arrival_word
        mapped = path == "shm"
        for index, each in enumerate(slots):
            ticket.slots.add(
                chunk_index=each.chunk_index,
                group_index=each.group_index,
                size_bytes=each.size,
                arena_offset=each.offset if mapped else 0,
                first_tag=opened.first_tags[index] if opened.first_tags else 0,
                checksum=getattr(each, "checksum", b""),
            )

    def _commit(self, registration_id: int, good: CommitItem | None, lease_id: int) -> CommitResult:
        now = self._core.now()
        published = self._core.arrivals.published(registration_id, lease_id)
        if published:
            return CommitResult(published, 0, 0)
        if good is None:
            aborted = self._engine.abort_store(registration_id, [lease_id], now)
            return CommitResult(0, aborted[0], 0)
        return self._engine.commit_store(registration_id, [good], now)[0]

    async def _arrived(self, registration_id: int, item: CommitItem, seconds: float) -> _Arrival:
        """Wait for the named slots. A lease that is gone, or a bad slot, is the engine's to report."""
        try:
            lease = self._engine.live_lease(registration_id, item.lease_id, self._core.now())
        except NotRegistered:
            raise
        except KvwireError:
            return _Arrival(item, {})
        slots = item.slots or tuple(range(len(lease.objects)))
        known = [slot for slot in slots if slot < len(lease.objects)]
        received = await self._core.plane.path(lease.data_path).received(item.lease_id, known, seconds)
        failed = dict(received.failed)
        if lease.data_path in CHECKED_PATHS and len(item.checksums) == len(slots):
            failed |= await self._mismatches(lease, zip(slots, item.checksums, strict=True), failed)
        return _Arrival(_without(item, slots, failed), failed)

    async def _mismatches(
        self, lease: LiveLease, claims: Iterable[tuple[int, bytes]], failed: Mapping[int, KvwireError]
    ) -> dict[int, KvwireError]:
        """Slots whose bytes are not those that the client has hashed."""
        known = {
            slot: (lease.objects[slot], expected)
            for slot, expected in claims
            if slot not in failed and slot < len(lease.objects)
        }
        return {
            slot: ChecksumMismatch(
                f"The bytes of slot {slot} do not have the checksum that came with them.",
                lease_id=lease.lease_id,
                slot=slot,
            )
            for slot in await self._core.sealer.unlike(known)
        }

    async def _check_slots(self, registration_id: int, item: cache.EndRetrieveItem) -> None:
        """A reader found damage: look for ourselves, and drop what is damaged."""
        try:
            lease = self._engine.live_lease(registration_id, item.lease_id, self._core.now())
        except NotRegistered:
            raise
        except KvwireError:
            return
        for index in set(item.corrupt_slots):
            if index < len(lease.objects) and not await self._core.sealer.intact(lease.objects[index]):
                self._engine.counters.fail(ChecksumMismatch.reason)
                self._core.discard(lease.objects[index])

    def _transfer_path(self, registration_id: int) -> ServerPath:
        """The path of a client that moves bytes now."""
        client = self._core.clients.get(registration_id)
        if client is None or not self._engine.is_registered(registration_id):
            raise NotRegistered(
                f"Registration {registration_id} is not known to this server: negotiate and register again.",
                registration_id=registration_id,
            )
        if not client.path:
            raise NotRegistered(
                "A scheduler moves no bytes: register as a worker.", registration_id=registration_id
            )
        self._core.sealer.transfer_seen()
        return self._core.plane.path(client.path)

    def _groups(self, registration_id: int) -> int:
        client = self._core.clients.get(registration_id)
        return client.groups if client else 1


@dataclass(frozen=True, slots=True)
class _Arrival:
    """What can be committed (None: nothing) and what failed on the way, by slot."""

    good: CommitItem | None
    failed: Mapping[int, KvwireError]


def _memory(slots: Iterable[SlotGrant | ReadSlot]) -> list[SlotMemory]:
    return [SlotMemory(slot.offset, slot.size) for slot in slots]


def _without(item: CommitItem, slots: Sequence[int], failed: Mapping[int, KvwireError]) -> CommitItem | None:
    """The item without the slots that did not arrive; None when none is left."""
    if not failed:
        return item
    if item.checksums and len(item.checksums) != len(slots):
        return item  # the engine says what is wrong with it
    kept = [index for index, slot in enumerate(slots) if slot not in failed]
    if not kept:
        return None
    checksums = tuple(item.checksums[index] for index in kept) if item.checksums else ()
    return CommitItem(item.lease_id, tuple(slots[index] for index in kept), checksums)


def _commit_result(failed: Mapping[int, KvwireError], result: CommitResult) -> cache.CommitStoreResult:
    reply = cache.CommitStoreResult(
        committed=result.committed, aborted=result.aborted, failed_slots=sorted(failed)
    )
    error = result.error or next(iter(failed.values()), None)
    if error is not None:
        reply.error.CopyFrom(convert.item_error(error))
    return reply
