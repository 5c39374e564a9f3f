"""What other servers ask for: leases on objects in memory, and their bytes over UCX."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvwire.errors import FleetMixed, IncarnationStale, InvalidArgument
from kvwire.keys import DIGEST_SIZE
from kvwire.server import convert
from kvwire.server.dataplane import SlotMemory
from kvwire.server.layout import MAX_SHARDS
from kvwire.server.lending import LoanRequest
from kvwire.serving.requests import check_count
from kvwire.serving.version import PROTOCOL_VERSIONS
from kvwire.transfer.tags import MAX_LEASE
from kvwire.v1 import namespace_pb2, transfer_pb2
from kvwire.v1 import peer_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.server.config import ServerConfig
    from kvwire.server.core import Core
    from kvwire.server.dataplane import Opened
    from kvwire.server.lending import Loan
    from kvwire.server.peers.links import Link, Links
    from kvwire.server.registry import Registration

log = logging.getLogger("kvwire.server")

CANCEL_GRACE_S: Final = 2.0
"""How long sends may outlive their lease. Then the connection is closed, so that the memory comes back."""
MAX_SERVER_ID: Final = 128


class Lender:
    def __init__(self, core: Core, links: Links) -> None:
        self._core = core
        self._links = links
        self._lending = core.engine.lending
        self._borrowers: dict[Link, Registration] = {}
        self._lent: dict[int, Link] = {}

    async def lookup_and_lease(self, request: pb.LookupAndLeaseRequest) -> pb.LookupAndLeaseResponse:
        core = self._core
        question = _question(request, core.config)
        offers = convert.offers(request.offers)
        if request.expected_incarnation != core.incarnation:
            raise IncarnationStale(
                f"{core.server_id} is another run than the one that was meant.", server_id=core.server_id
            )
        _check_compatible(request, core)
        core.absorb()
        reply = pb.LookupAndLeaseResponse(incarnation=core.incarnation)
        reply.hit_chunks, helps = self._lending.look(question, core.now())
        if helps:
            link = await self._links.choose(offers, request.requester_id)
            await self._lend(request, question, link, reply)
        return reply

    def release(self, request: pb.ReleaseLeaseRequest) -> pb.ReleaseLeaseResponse:
        core = self._core
        check_count("lease_ids", len(request.lease_ids), core.config.max_items)
        held = [self._lending.end(request.requester_id, each, core.now()) for each in request.lease_ids]
        core.settle()
        for lease_id in request.lease_ids:
            self._watch(lease_id, CANCEL_GRACE_S)
        return pb.ReleaseLeaseResponse(held=held)

    async def _lend(
        self,
        request: pb.LookupAndLeaseRequest,
        question: LoanRequest,
        link: Link,
        reply: pb.LookupAndLeaseResponse,
    ) -> None:
        borrower = self._borrower(link, request.requester_id)
        loan = self._lending.lend(borrower, question, self._core.now())
        reply.hit_chunks = loan.hit_chunks
        if not loan.lease_id:
            return
        try:
            checksums = await self._sealed(borrower, loan)
            # Looked at again: making checksums may have taken longer than the lease.
            opened = None if checksums is None else self._send(request, loan, link)
        except BaseException:
            self._lending.give_up(borrower, loan.lease_id)
            raise
        finally:
            self._core.settle()
        if checksums is None or opened is None:
            reply.hit_chunks = 0
            return
        self._watch(loan.lease_id, loan.ttl + CANCEL_GRACE_S)
        engine = await link.path.started()
        reply.ucx_address = engine.engine.address
        _fill(reply.ticket, loan, checksums, opened, link.path.name)

    async def _sealed(self, borrower: Registration, loan: Loan) -> tuple[bytes, ...] | None:
        """The checksums of a loan, those that were missing made now. None: it was lost meanwhile."""
        sealer = self._core.sealer
        sealer.transfer_seen()
        missing = [slot.ref for slot in loan.slots if not slot.ref.checksum]
        if missing:
            await sealer.seal(missing)
        return self._lending.checksums(borrower, loan.lease_id, self._core.now())

    def _send(self, request: pb.LookupAndLeaseRequest, loan: Loan, link: Link) -> Opened:
        memory = [SlotMemory(slot.ref.offset, slot.ref.size) for slot in loan.slots]
        opened = link.path.send_peer(link.peer, loan.lease_id, request.transfer_id, memory)
        self._lent[loan.lease_id] = link
        link.users += 1
        return opened

    def _borrower(self, link: Link, name: str) -> Registration:
        for known in [each for each in self._borrowers if not each.usable]:
            self._drop(known)
        borrower = self._borrowers.get(link)
        if borrower is None or borrower.client.name != name:
            borrower = self._borrowers[link] = self._lending.borrower(name, link.path.name)
        return borrower

    def _watch(self, lease_id: int, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._look_after, lease_id)

    def _look_after(self, lease_id: int) -> None:
        """Of a lease that should have ended: a peer that is gone, or hangs, may never take what was sent."""
        link = self._lent.get(lease_id)
        if link is None or self._lending.is_live(lease_id, self._core.now()):
            return
        self._core.settle()
        if self._lending.is_waiting(lease_id) and link.usable:
            log.warning("a peer does not take what was sent to it: its connection is closed")
            self._drop(link)
        del self._lent[lease_id]
        link.users -= 1

    def _drop(self, link: Link) -> None:
        link.close()
        borrower = self._borrowers.pop(link, None)
        if borrower is not None:
            self._lending.forget(borrower)
            self._core.settle()


def _question(request: pb.LookupAndLeaseRequest, config: ServerConfig) -> LoanRequest:
    """Raises InvalidArgument, TooManyItems."""
    name = convert.identifier("requester_id", request.requester_id)
    if len(name.encode()) > MAX_SERVER_ID:
        raise InvalidArgument("requester_id", f"is longer than {MAX_SERVER_ID} bytes")
    if not 1 <= request.transfer_id <= MAX_LEASE:
        raise InvalidArgument("transfer_id", f"{request.transfer_id} is not in 1 to {MAX_LEASE}")
    for field in ("layout_digest", "namespace_root"):
        if len(getattr(request, field)) != DIGEST_SIZE:
            raise InvalidArgument(field, f"must have {DIGEST_SIZE} bytes")
    keys = convert.chunk_keys("chunk_keys", request.chunk_keys, config)
    return LoanRequest(
        root=request.namespace_root,
        layout_digest=request.layout_digest,
        keys=keys,
        have=_masks(request.have_objects, len(keys)),
        max_objects=config.max_slots,
    )


def _masks(have: Sequence[bytes], chunks: int) -> list[int]:
    if len(have) > chunks:
        raise InvalidArgument("have_objects", f"has {len(have)} entries for {chunks} keys")
    if any(len(each) > MAX_SHARDS // 8 for each in have):
        raise InvalidArgument("have_objects", f"has an entry of more than {MAX_SHARDS // 8} bytes")
    return [int.from_bytes(each, "little") for each in have] + [0] * (chunks - len(have))


def _check_compatible(request: pb.LookupAndLeaseRequest, core: Core) -> None:
    """Raises FleetMixed."""
    bound = core.binding.bound
    pairs = (
        ("protocol", request.protocol_version, request.protocol_version in PROTOCOL_VERSIONS),
        (
            "digest function",
            request.digest_function,
            request.digest_function == namespace_pb2.DIGEST_FUNCTION_SHA256,
        ),
        ("chunk size", request.chunk_size, bound is not None and request.chunk_size == bound.chunk_size),
    )
    ours = {
        "protocol": max(PROTOCOL_VERSIONS),
        "digest function": int(namespace_pb2.DIGEST_FUNCTION_SHA256),
        "chunk size": bound.chunk_size if bound else 0,
    }
    for what, theirs, same in pairs:
        if not same:
            raise FleetMixed(
                f"The two servers differ in their {what}: {theirs} there, {ours[what]} at {core.server_id}.",
                differs=what,
                chunk_size=request.chunk_size,
                fleet_chunk_size=ours["chunk size"],
                digest=request.digest_function,
                fleet_digest=ours["digest function"],
            )


def _fill(
    ticket: transfer_pb2.Ticket, loan: Loan, checksums: Sequence[bytes], opened: Opened, path: str
) -> None:
    ticket.lease_id = loan.lease_id
    ticket.path = convert.PATHS[path]
    ticket.expires_in.CopyFrom(convert.duration(loan.ttl))
    ticket.piece_bytes = opened.piece_bytes
    for slot, tag, digest in zip(loan.slots, opened.first_tags, checksums, strict=True):
        ticket.slots.add(
            chunk_index=slot.chunk_index,
            group_index=slot.group_index,
            kv_rank=slot.rank,
            size_bytes=slot.ref.size,
            first_tag=tag,
            checksum=digest,
        )
