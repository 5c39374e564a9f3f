"""The coordinator's domain as one object: what a servicer, a Kafka source and the timers call."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final

from kvwire.blend import BlendHit, BlendIndex
from kvwire.coordinator.apply import Applied, Applier
from kvwire.coordinator.archive import Restored
from kvwire.coordinator.directory import KeyDirectory
from kvwire.coordinator.gate import EventGate, FeedState, GateStats
from kvwire.coordinator.incarnations import Incarnations
from kvwire.coordinator.members import Changes, Members
from kvwire.coordinator.messages import Admission, Located, Placement, Reporting, Tier, Usage
from kvwire.coordinator.reporting import Arrivals
from kvwire.coordinator.steps import at_once
from kvwire.coordinator.views import Batch, FleetConfig, MemberView, Pull, Registered, Reported
from kvwire.errors import ChunkSizeNotNegotiated, InvalidArgument, TokensInvalid, TooManyItems
from kvwire.keys import chunk_keys, root

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from kvwire.coordinator.apply import Event
    from kvwire.coordinator.gate import Feed
    from kvwire.coordinator.messages import ServerInfo
    from kvwire.keys import Namespace

__all__ = ["MAX_EVENTS", "Batch", "Fleet", "FleetConfig", "MemberView", "Pull", "Registered", "Reported"]

MAX_EVENTS: Final = 10_000
SLICE_EVENTS: Final = 256
"""Entries that are applied at once, while everybody else waits: about a millisecond."""
SLICE_TOKEN_BYTES: Final = 4 << 20


@dataclass(slots=True, eq=False)
class _Watched:
    arrivals: Arrivals
    pull_at: float
    shown: Reporting = Reporting.CURRENT


class Fleet:
    """Single-threaded, never blocks; `now` is monotonic. What takes long is done in slices by `sweep`."""

    def __init__(self, config: FleetConfig | None = None) -> None:
        self.config = config or FleetConfig()
        self.incarnations = Incarnations()
        self.members = Members(self.incarnations, self.config.expires_after)
        self.gate = EventGate(self.incarnations, self.config.max_kept_events)
        self.directory = KeyDirectory()
        self.blend: BlendIndex | None = None
        self._plain = Applier(self.directory)
        self._applier = self._plain
        self._watched: dict[str, _Watched] = {}
        self._lost_at: dict[str, float] = {}
        self.restored = Restored(0.0)

    # Members.

    def register(self, info: ServerInfo, now: float) -> Registered:
        """Raises InvalidArgument, IncarnationStale."""
        joined = self.members.register(info, now)
        server_id = info.server_id
        if joined.new:
            self._open(info, now)
        self._watched[server_id].arrivals.heard(now)
        self._apply_terms()
        feed = self._feed(server_id)
        return Registered(feed.seen + 1, joined.member.sharing_problem)

    def _open(self, info: ServerInfo, now: float) -> None:
        server_id = info.server_id
        self._lost_at.pop(server_id, None)
        self._watched[server_id] = _Watched(Arrivals(now), pull_at=now)
        saved = self.restored.servers.pop(server_id, None)
        if saved is not None and saved.incarnation == info.incarnation and saved.applied is not None:
            # The run that the checkpoint is of: should it have told more since, that is seen to be missing.
            feed = self.gate.resume(server_id, info.incarnation, saved.applied)
            if self.config.blend_bytes:
                # A checkpoint has no tokens.
                self.gate.want(feed)
            return
        if saved is None or saved.incarnation != info.incarnation:
            self.directory.fence(server_id, (Tier.L1,))
        self.directory.set_incarnation(server_id, info.incarnation)
        # It may have told something before it was a member here, and what its last run had told of L2
        # when it ended may not have arrived.
        self.gate.open(server_id, info.incarnation)

    def lost_for(self, server_id: str, now: float) -> float | None:
        """Seconds since a server was dropped of which something is still listed; None: it was not."""
        at = self._lost_at.get(server_id)
        return None if at is None else now - at

    def note_lost(self, server_id: str, at: float) -> None:
        self._lost_at[server_id] = at

    def heartbeat(
        self,
        server_id: str,
        incarnation: bytes,
        now: float,
        used_bytes: int = 0,
        last_sequence: int = 0,
        usage: Usage | None = None,
    ) -> None:
        """Raises ServerNotRegistered, IncarnationStale."""
        member = self.members.heartbeat(server_id, incarnation, now, used_bytes, last_sequence)
        member.usage = usage or member.usage
        self._watched[server_id].arrivals.note(member, self._feed(server_id), now)

    def deregister(self, server_id: str, incarnation: bytes) -> bool:
        if not self.members.deregister(server_id, incarnation):
            return False
        self._leave(server_id)
        self.directory.forget(server_id)
        return True

    def tick(self, now: float) -> None:
        """What time alone brings about. To be called about every second."""
        for server_id in self.members.expire(now):
            self._leave(server_id)
            self._lose(server_id, now)
        if now - self.restored.at > self.config.expires_after:
            # Those that did not come back after a restart are lost like those that fell silent.
            for server_id in self.restored.servers:
                self._lose(server_id, now)
            self.restored.servers.clear()
        for server_id in [name for name, at in self._lost_at.items() if now - at > self.config.keep_l2]:
            del self._lost_at[server_id]
            self.directory.forget(server_id)
        for server_id, watched in self._watched.items():
            self._watch(server_id, watched, now)

    def view(self, server_id: str, now: float) -> MemberView | None:
        member = self.members.get(server_id)
        if member is None:
            return None
        feed = self._feed(server_id)
        return MemberView(
            member.info,
            now - member.heartbeat_at,
            member.used_bytes,
            self._watched[server_id].arrivals.state(feed),
            feed.applied,
            self.directory.holdings(server_id).placements,
            member.sharing_problem,
            member.last_sequence,
            member.usage,
        )

    def views(self, now: float) -> list[MemberView]:
        """All members by id."""
        views = [self.view(member.info.server_id, now) for member in self.members.all()]
        return [view for view in views if view is not None]

    def take_changes(self) -> Changes:
        return self.members.take_changes()

    # Events.

    def report(self, batch: Batch, now: float) -> Reported:
        """Raises InvalidArgument, TooManyItems, ServerNotRegistered."""
        return at_once(self.report_steps(batch, now))

    def report_steps(self, batch: Batch, now: float) -> Generator[None, None, Reported]:
        """As `report`, in slices. Between them no other batch and no page may come in; all else may."""
        server_id, sequence, events = batch.server_id, batch.sequence, batch.events
        if sequence < 1:
            raise InvalidArgument("batch.sequence", "0 is no sequence: batches are numbered from 1")
        if len(events) > MAX_EVENTS:
            raise TooManyItems(
                f"The batch has {len(events)} events; at most {MAX_EVENTS} are allowed.",
                actual=len(events),
                allowed=MAX_EVENTS,
            )
        feed = self.gate.sender(server_id, batch.incarnation)
        if feed is None:
            return Reported(0, Admission.STALE)
        admission = self.gate.admit(feed, sequence, batch.lost, batch, len(events))
        applied = Applied()
        if admission is not Admission.DUPLICATE:
            applier = self._applier_of(server_id)
            for start in range(0, len(events), SLICE_EVENTS):
                if start:
                    yield
                    if self.gate.feed(server_id) is not feed:
                        return Reported(0, Admission.STALE, applied)
                part = events if len(events) <= SLICE_EVENTS else events[start : start + SLICE_EVENTS]
                self._apply(server_id, feed, applier, part, now, applied)
        watched = self._watched[server_id]
        if watched.arrivals.silent:
            watched.pull_at = now
        watched.arrivals.heard(now)
        member = self.members.get(server_id)
        if member is not None:
            watched.arrivals.note(member, feed, now)
        return Reported(feed.seen, admission, applied)

    # Snapshots.

    def pulls(self, now: float) -> list[Pull]:
        """The snapshots to fetch now; each is begun by this call, and ended by `end_pull` or `fail_pull`."""
        begun: list[Pull] = []
        for server_id, watched in self._watched.items():
            feed = self._feed(server_id)
            member = self.members.get(server_id)
            if feed.state is FeedState.WANTED and now >= watched.pull_at and member is not None:
                number = self.gate.begin(feed)
                if watched.arrivals.silent:
                    watched.pull_at = now + self.config.repeat_silent
                begun.append(Pull(server_id, feed.incarnation, member.info.addresses, number))
        return begun

    def pull_page(
        self, pull: Pull, incarnation: bytes, sequence: int, placements: Iterable[Event], now: float
    ) -> bool:
        """One page of the answer. False: this pull counts no more, and another one will be wanted."""
        return at_once(self.pull_page_steps(pull, incarnation, sequence, placements, now))

    def pull_page_steps(
        self, pull: Pull, incarnation: bytes, sequence: int, placements: Iterable[Event], now: float
    ) -> Generator[None, None, bool]:
        """As `pull_page`, in slices, as `report_steps`."""
        feed = self.gate.feed(pull.server_id)
        if feed is None or feed.incarnation != pull.incarnation:
            return False
        if incarnation != pull.incarnation:
            self.fail_pull(pull, now)
            return False
        if self.gate.counts(feed, pull.number, FeedState.PULLING):
            yield from self._begin_loading(pull, feed, sequence, now)
        if not self.gate.counts(feed, pull.number):
            return False
        if sequence != feed.position:
            self.fail_pull(pull, now)
            return False
        holdings = self.directory.holdings(pull.server_id)
        applier, rest = self._applier_of(pull.server_id), iter(placements)
        while part := list(islice(rest, SLICE_EVENTS)):
            applier.snapshot_page(holdings, part, now)
            yield
            if not self.gate.counts(feed, pull.number):
                return False
        return True

    def end_pull(self, pull: Pull, now: float) -> bool:
        """All pages are in (at least one): the view of this server is whole."""
        feed = self.gate.feed(pull.server_id)
        if feed is None or feed.incarnation != pull.incarnation or not self.gate.end(feed, pull.number):
            self.fail_pull(pull, now)
            return False
        self.directory.end_snapshot(self.directory.holdings(pull.server_id))
        member = self.members.get(pull.server_id)
        if member is not None:
            self._watched[pull.server_id].arrivals.note(member, feed, now)
        return True

    def fail_pull(self, pull: Pull, now: float) -> None:
        """It could not be fetched: tried again after a while. What pages told stays."""
        feed = self.gate.feed(pull.server_id)
        if feed is None or feed.incarnation != pull.incarnation or feed.pull != pull.number:
            return
        if feed.state is not FeedState.STREAMING:
            self._obsolete(pull.server_id, feed)
            self._watched[pull.server_id].pull_at = now + self.config.retry_after

    # Questions.

    def locate(self, keys: Sequence[bytes], *, with_placements: bool = False) -> Located:
        """Keys in the order of the prompt. Raises TooManyItems, InvalidArgument."""
        if len(keys) > self.config.max_keys:
            raise TooManyItems(
                f"{len(keys)} keys were asked for; at most {self.config.max_keys} are allowed.",
                actual=len(keys),
                allowed=self.config.max_keys,
            )
        for position, key in enumerate(keys):
            if len(key) != 32:
                raise InvalidArgument("keys", f"key {position} has {len(key)} bytes instead of 32")
        return self.directory.locate(keys, with_placements=with_placements)

    def keys_of(self, namespace: Namespace, tokens: bytes) -> list[bytes]:
        """By the fleet's chunk size. Raises ChunkSizeNotNegotiated, TokensInvalid, InvalidArgument."""
        return at_once(self.keys_steps(namespace, tokens))

    def keys_steps(self, namespace: Namespace, tokens: bytes) -> Generator[None, None, list[bytes]]:
        """As `keys_of`, in slices."""
        chunk_size = self._require_chunk_size()
        chunk_root = root(namespace, chunk_size)
        slice_chunks = max(1, SLICE_TOKEN_BYTES // (4 * chunk_size))
        size = 4 * chunk_size * slice_chunks
        if len(tokens) <= size:
            return chunk_keys(chunk_root, tokens, chunk_size)
        if len(tokens) % 4:
            raise TokensInvalid(
                f"Packed tokens have {len(tokens)} bytes, no multiple of 4.", length=len(tokens)
            )
        view, keys = memoryview(tokens), list[bytes]()
        for start in range(0, len(tokens), size):
            before = keys[-1] if keys else None
            keys += chunk_keys(
                chunk_root, view[start : start + size], chunk_size, start_key=before, first_chunk=len(keys)
            )
            yield
        return keys

    def match_blend(
        self, namespace: Namespace, tokens: bytes
    ) -> list[tuple[BlendHit, tuple[Placement, ...]]]:
        """Raises ChunkSizeNotNegotiated, TokensInvalid, InvalidArgument. Hits are candidates only."""
        chunk_root = root(namespace, self._require_chunk_size())
        hits = self.blend.match(chunk_root, tokens) if self.blend is not None else []
        found = [(hit, self.directory.placements(hit.key)) for hit in hits]
        return [(hit, placements) for hit, placements in found if placements]

    @property
    def stats(self) -> GateStats:
        return self.gate.stats

    def sweep(self, limit: int = 2000) -> int:
        """Free up to `limit` fenced placements; returns how many are left for the next slice."""
        return self.directory.sweep(limit)

    # Inside.

    def _begin_loading(
        self, pull: Pull, feed: Feed, sequence: int, now: float
    ) -> Generator[None, None, None]:
        """The snapshot's position is known: what came after it is applied again on top of it."""
        again = self.gate.position(feed, pull.number, sequence)
        if again is None:
            self._watched[pull.server_id].pull_at = now + self.config.retry_after
            return
        holdings, applier = self.directory.holdings(pull.server_id), self._applier_of(pull.server_id)
        self.directory.begin_snapshot(holdings)
        for batch in again:
            yield
            if not self.gate.counts(feed, pull.number):
                return
            applier.events(holdings, batch.events, now, again=True)

    def _feed(self, server_id: str) -> Feed:
        feed = self.gate.feed(server_id)
        if feed is None:
            raise KeyError(server_id)
        return feed

    def _leave(self, server_id: str) -> None:
        self.gate.close(server_id)
        self._watched.pop(server_id, None)
        self.directory.abandon_snapshot(self.directory.holdings(server_id))
        self._apply_terms()

    def _lose(self, server_id: str, now: float) -> None:
        holdings = self.directory.holdings(server_id)
        holdings.reachable = False
        self.directory.fence(server_id, (Tier.L1,))
        if holdings.placements:
            self._lost_at[server_id] = now
        else:
            self.directory.forget(server_id)

    def _watch(self, server_id: str, watched: _Watched, now: float) -> None:
        feed, arrivals = self._feed(server_id), watched.arrivals
        arrivals.check(feed, now, self.config.silent_after)
        behind = arrivals.silent and arrivals.behind_since is not None
        if behind and feed.state is FeedState.STREAMING and now >= watched.pull_at:
            # Its events do not arrive, but it may be asked.
            self.gate.want(feed)
        state = arrivals.state(feed)
        if state is not watched.shown:
            watched.shown = state
            self.members.changed(server_id)

    def _apply(
        self, server_id: str, feed: Feed, applier: Applier, events: Sequence[Event], now: float, done: Applied
    ) -> None:
        holdings = self.directory.holdings(server_id)
        if holdings.loading and feed.state is not FeedState.LOADING:
            self.directory.abandon_snapshot(holdings)
        done.add(applier.events(holdings, events, now))
        if len(holdings.deleted) > self.config.max_deleted_while_loading:
            self._obsolete(server_id, feed)

    def _obsolete(self, server_id: str, feed: Feed) -> None:
        self.gate.want(feed)
        self.directory.abandon_snapshot(self.directory.holdings(server_id))

    def _applier_of(self, server_id: str) -> Applier:
        member = self.members.get(server_id)
        return self._applier if member is not None and member.sharing else self._plain

    def _apply_terms(self) -> None:
        """After anything that may change who fits the fleet."""
        for member in self.members.all():
            self.directory.holdings(member.info.server_id).reachable = member.sharing
        size = self.members.chunk_size
        if self.config.blend_bytes and size and (self.blend is None or self.blend.chunk_size != size):
            self.blend = BlendIndex(size, self.config.blend_bytes)
            self._applier = Applier(self.directory, self.blend)
            self.directory.on_dropped = self.blend.remove
            self._ask_for_tokens()

    def _ask_for_tokens(self) -> None:
        """What was told before there was an index is missing in it: an engine stores before its server, whose
        chunk size it has just bound, has told the size here."""
        for member in self.members.all():
            server_id = member.info.server_id
            feed = self.gate.feed(server_id)
            if feed is not None and self.directory.holdings(server_id).placements:
                self._obsolete(server_id, feed)

    def _require_chunk_size(self) -> int:
        if not self.members.chunk_size:
            raise ChunkSizeNotNegotiated(
                "No member of the fleet has a chunk size yet: ask by keys, or later."
            )
        return self.members.chunk_size
