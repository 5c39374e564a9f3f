"""Other servers as a source: found through the directory, leased by their owner, moved over UCX."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvwire.errors import (
    DataPathUnavailable,
    Draining,
    FleetMixed,
    IncarnationStale,
    KvwireError,
    NotImplementedYet,
    Overloaded,
    TransferFailed,
    TransferTimeout,
    VersionUnsupported,
)
from kvwire.server import convert
from kvwire.server.fetch.source import Origin
from kvwire.server.layout import layout_digest
from kvwire.server.peers import borrowing
from kvwire.server.peers.choosing import last_of, longest_run
from kvwire.server.peers.loans import Loan
from kvwire.server.store import longest_boundary
from kvwire.telemetry import tracing
from kvwire.v1 import transfer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.server.fetch.source import Target, Wanted
    from kvwire.server.peers.directory import Directory
    from kvwire.server.peers.hints import Hints
    from kvwire.server.peers.loans import LoanTools
    from kvwire.server.peers.members import Members, PeerInfo, Place
    from kvwire.server.peers.standing import Standing

log = logging.getLogger("kvwire.server")

MAX_ASKED: Final = 4
"""Servers that are asked for one prompt."""
FAR_S: Final = 60.0
MISFITS: Final = (
    FleetMixed,
    VersionUnsupported,
    NotImplementedYet,
    IncarnationStale,
    TransferFailed,
)
"""Asking the same run again would not help. TransferFailed: its answer cannot be right."""


@dataclass(slots=True)
class PeerCounters:
    """Of one server, over all its runs. `path` is the last one that bytes came over."""

    path: str = ""
    fetched_chunks: int = 0
    fetched_bytes: int = 0
    failed_hints: int = 0
    failed_transfers: int = 0


@dataclass(slots=True)
class SharingCounters:
    """`fallback_chunks` were located elsewhere, and an engine had to compute them."""

    fallback_chunks: int = 0
    peers: dict[str, PeerCounters] = field(default_factory=dict)

    def of(self, server_id: str) -> PeerCounters:
        return self.peers.setdefault(server_id, PeerCounters())


class PeerSource:
    """All other servers of the fleet."""

    name = "peers"
    origin = Origin.PEER

    def __init__(
        self,
        tools: LoanTools,
        members: Members,
        directory: Directory,
        hints: Hints,
        standing: Standing,
        counters: SharingCounters,
    ) -> None:
        self.tools = tools
        self.counters = counters
        self._members = members
        self._directory = directory
        self._hints = hints
        self._standing = standing
        self._transfers = borrowing.TransferIds()
        self._far: dict[Place, float] = {}
        """Runs to which nothing came within this host, until when the way between hosts is taken."""

    async def find(self, wanted: Wanted, until: float) -> PeerFound | None:
        if not self._members.latest() or self.tools.links.problem:
            return None
        search = _Search(wanted, list(wanted.masks))
        try:
            await self._search(search, until)
        except Exception:
            log.exception("looking for a prompt at other servers failed")
        except BaseException:
            for loan in search.loans:
                loan.release()
            raise
        if not search.loans:
            self.counters.fallback_chunks += len(search.located)
            return None
        return PeerFound(self, wanted, search)

    async def borrow(
        self, place: Place, wanted: Wanted, keys: Sequence[bytes], masks: Sequence[int], until: float
    ) -> Loan | None:
        """Ask one server for what it has beside `masks`. None: nothing; why is told in its standing."""
        peer = self._members.find(place)
        if peer is None:
            return None
        topic = layout_digest(wanted.space.shards.layout, wanted.space.shards.chunk_size)
        with tracing.span("kvwire.peer.lease", peer=peer.server_id, chunks=len(keys)) as span:
            try:
                loan = await self._ask(peer, wanted, keys, masks, until)
            except KvwireError as error:
                span.set(error=error.reason)
                self._note(peer, topic, error)
                return None
        self._standing.worked(place, topic)
        return loan

    def note_outcome(
        self, peer: PeerInfo, path: str, chunks: int, size: int, error: KvwireError | None
    ) -> None:
        """What a fetch has brought."""
        counters = self.counters.of(peer.server_id)
        counters.fetched_chunks += chunks
        counters.fetched_bytes += size
        if size:
            counters.path = path
            self._standing.moved(peer.place)
        if error is not None:
            counters.failed_transfers += 1
            log.info("a transfer from %s failed: %s", peer.server_id, error)
            if not size:
                self._standing.failed(peer.place, str(error), time.monotonic(), moving=True)
            if not size and path == "ucx-local" and isinstance(error, TransferFailed | TransferTimeout):
                self._far = {each: until for each, until in self._far.items() if self._members.find(each)}
                self._far[peer.place] = time.monotonic() + FAR_S

    async def _search(self, search: _Search, until: float) -> None:
        """One server after the other, each for what follows on what is there by then."""
        wanted = search.wanted
        keys, shards = wanted.keys, wanted.space.shards
        first = longest_boundary(shards, search.masks)
        if first >= len(keys):
            return
        places: list[tuple[Place, ...]] = [()] * first
        places += await self._directory.locate(keys[first:], until)
        search.located = {index for index, known in enumerate(places) if known}
        topic = layout_digest(shards.layout, shards.chunk_size)
        for _ in range(MAX_ASKED):
            now = time.monotonic()
            position = longest_boundary(shards, search.masks)
            there = places[position] if position < len(places) else ()
            without = search.useless | {place for place in there if self._standing.rests(place, topic, now)}
            chosen = longest_run(places, position, without)
            if chosen is None or now >= until:
                return
            await self._try(search, chosen[0], places, until)
            if longest_boundary(shards, search.masks) == position:
                search.useless.add(chosen[0])
            else:
                search.useless.clear()

    async def _try(
        self, search: _Search, place: Place, places: Sequence[Sequence[Place]], until: float
    ) -> None:
        end = last_of(places, place)
        wanted = search.wanted
        loan = await self.borrow(place, wanted, wanted.keys[:end], search.masks[:end], until)
        given = loan.masks(len(wanted.keys)) if loan is not None else [0] * len(wanted.keys)
        if loan is not None and loan.ticket.lease_id:
            search.loans.append(loan)
        search.masks = [mask | more for mask, more in zip(search.masks, given, strict=True)]
        if loan is not None:
            self._check_hints(search, place, places)

    def _check_hints(self, search: _Search, place: Place, places: Sequence[Sequence[Place]]) -> None:
        """What it should have had and has not is no hint any more."""
        reached = longest_boundary(search.wanted.space.shards, search.masks)
        wrong = 0
        for index in range(reached, len(places)):
            if place not in places[index]:
                break
            self._hints.drop(search.wanted.keys[index], place)
            wrong += 1
        self.counters.of(place[0]).failed_hints += wrong

    async def _ask(
        self, peer: PeerInfo, wanted: Wanted, keys: Sequence[bytes], masks: Sequence[int], until: float
    ) -> Loan:
        """Raises KvwireError."""
        shards = wanted.space.shards
        if peer.chunk_size not in {0, shards.chunk_size}:
            raise FleetMixed(f"Its chunk size is {peer.chunk_size}, this server's {shards.chunk_size}.")
        offers = await self._offers(peer)
        if not offers:
            raise DataPathUnavailable(self.tools.links.problem)
        transfer = self._transfers.next()
        request = borrowing.question(self.tools.own_id, peer, wanted.space, keys, masks, transfer, offers)
        paths = [convert.PATH_NAMES[offer.path] for offer in offers]
        lease_id = 0
        try:
            reply = await self.tools.calls.call(peer, "LookupAndLease", request, until - time.monotonic())
            lease_id = reply.ticket.lease_id
            ticket = borrowing.check_answer(reply, peer.place, shards, masks, transfer, paths)
        except BaseException:
            # Whether it sends or not, nobody waits for it.
            Loan(self.tools, peer, shards, borrowing.Ticket(lease_id), transfer).release()
            raise
        return Loan(self.tools, peer, shards, ticket, transfer)

    async def _offers(self, peer: PeerInfo) -> list[transfer_pb2.DataPathOffer]:
        """Shared memory may be there and not be usable, between containers: nothing proves it but bytes."""
        offers = await self.tools.links.offers()
        if time.monotonic() < self._far.get(peer.place, 0.0):
            far = [offer for offer in offers if offer.path != transfer_pb2.DATA_PATH_UCX_LOCAL]
            return far or offers
        return offers

    def _note(self, peer: PeerInfo, topic: bytes, error: KvwireError) -> None:
        """What a failure to lease says about a server."""
        now, place, text = time.monotonic(), peer.place, str(error)
        if isinstance(error, Overloaded | Draining):
            self._standing.busy(place, now)
        elif isinstance(error, MISFITS):
            only = topic if error.metadata.get("differs") == "layout" else b""
            if self._standing.refused(place, only, text, now):
                log.warning("nothing is shared with %s: %s", peer.server_id, text)
        elif self._standing.failed(place, text, now):
            log.info("%s: %s", peer.server_id, text)


@dataclass(slots=True)
class _Search:
    """`masks` grows with what was found, `useless` are servers that had nothing to go on from there."""

    wanted: Wanted
    masks: list[int]
    located: set[int] = field(default_factory=set)
    loans: list[Loan] = field(default_factory=list)
    useless: set[Place] = field(default_factory=set)


class PeerFound:
    """Leased at up to a few servers. Each lease brings one batch; the next batches ask anew."""

    def __init__(self, source: PeerSource, wanted: Wanted, search: _Search) -> None:
        self._source = source
        self._wanted = wanted
        self._loans = search.loans
        self._located = search.located
        self._fetched: set[int] = set()
        self._asked: set[int] = set()
        self._owner: dict[tuple[int, int], Loan] = {}
        for loan in reversed(search.loans):
            self._owner.update(dict.fromkeys(loan.ticket.objects or (), loan))
        self._masks = [new & ~old for new, old in zip(search.masks, wanted.masks, strict=True)]

    @property
    def masks(self) -> Sequence[int]:
        return self._masks

    async def fetch(
        self,
        targets: Sequence[Target],
        done: Callable[[Target, bytes, KvwireError | None], None],
        until: float,
    ) -> None:
        by_loan: dict[int, list[Target]] = {}
        loans = {id(loan): loan for loan in self._loans}
        self._asked |= {target.index for target in targets}
        for target in targets:
            loan = self._owner.get((target.index, target.shard))
            if loan is None:
                done(target, b"", TransferFailed("It was not found.", path="ucx", cause="unknown"))
            else:
                by_loan.setdefault(id(loan), []).append(target)
        work = [self._fetch_from(loans[name], mine, done, until) for name, mine in by_loan.items()]
        # One that fails in a way that nobody has thought of must not end this while others still write.
        for error in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(error, Exception):
                log.error("a fetch failed: %r", error, exc_info=error)

    async def release(self) -> None:
        for loan in self._loans:
            loan.release()
        self._source.counters.fallback_chunks += len(self._located - self._fetched - self._spared())

    async def _fetch_from(
        self,
        loan: Loan,
        targets: Sequence[Target],
        done: Callable[[Target, bytes, KvwireError | None], None],
        until: float,
    ) -> None:
        fresh: Loan | None = loan
        if loan.used:
            fresh = await self._anew(loan, targets, until)
        if fresh is None:
            for target in targets:
                done(target, b"", TransferFailed("It was not found again.", path="ucx", cause="lost"))
            return
        outcome = await fresh.fetch(targets, done, until)
        self._fetched |= outcome.chunks
        self._source.note_outcome(
            loan.peer, fresh.ticket.path, len(outcome.chunks), outcome.size, outcome.error
        )

    async def _anew(self, loan: Loan, targets: Sequence[Target], until: float) -> Loan | None:
        """A lease on just these."""
        everything = (1 << self._wanted.space.shards.num_shards) - 1
        end = max(target.index for target in targets) + 1
        masks = [everything] * end
        for target in targets:
            masks[target.index] &= ~(1 << target.shard)
        keys = self._wanted.keys[:end]
        found = await self._source.borrow(loan.peer.place, self._wanted, keys, masks, until)
        return found if found is not None and found.ticket.lease_id else None

    def _spared(self) -> set[int]:
        """Chunks that were leased here and that nobody has asked for: they came another way."""
        return {index for index, _ in self._owner} - self._asked
