"""The event gate: which batches of a server count, and when its view has to be pulled anew.

A feed is in one of four states:

    STREAMING  everything up to `seen` is in the directory.
    WANTED     something is missing. Batches go on being applied, as they are the best that is known.
    PULLING    a snapshot was asked for and its position is not known. Batches are applied, and kept, because
               those after its position have to be applied again on top of it.
    LOADING    pages are arriving. Batches up to the position are known; those after it win over the pages.

A snapshot counts when its position covers every hole: each batch that is missing, that could not be kept, or
that had arrived before the snapshot was asked for. Otherwise the next one is wanted. So every batch that came
in is safe to forget for its sender, in every state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvwire.coordinator.incarnations import Incarnations, Standing
from kvwire.coordinator.messages import Admission
from kvwire.errors import ServerNotRegistered


class FeedState(StrEnum):
    STREAMING = "streaming"
    WANTED = "wanted"
    PULLING = "pulling"
    LOADING = "loading"


@dataclass(slots=True)
class GateStats:
    admitted: int = 0
    duplicates: int = 0
    stale: int = 0
    gaps: int = 0
    resyncs: int = 0
    refused: int = 0


@dataclass(slots=True, eq=False)
class Feed:
    """The events of one run of a server. `applied`: up to here nothing is missing; `seen`: the highest."""

    server_id: str
    incarnation: bytes
    state: FeedState = FeedState.WANTED
    applied: int = 0
    seen: int = 0
    floor: int = 0
    position: int = 0
    pull: int = 0
    kept: list[tuple[int, Any]] = field(default_factory=list)
    kept_events: int = 0

    @property
    def streaming(self) -> bool:
        return self.state is FeedState.STREAMING


class EventGate:
    """`kept` batches are whatever the caller handed in: the gate looks at sequences and sizes only."""

    def __init__(self, incarnations: Incarnations, max_kept_events: int) -> None:
        self.stats = GateStats()
        self._incarnations = incarnations
        self._max_kept = max_kept_events
        self._feeds: dict[str, Feed] = {}
        # One count for all: a server that leaves and comes back gets a new feed, and old answers may follow.
        self._pulls = 0

    def open(self, server_id: str, incarnation: bytes) -> Feed:
        """Take events of this run from now on. Some may have been missed, so a snapshot is wanted."""
        feed = self._feeds[server_id] = Feed(server_id, incarnation)
        return feed

    def resume(self, server_id: str, incarnation: bytes, applied: int) -> Feed:
        """Go on from a position: everything up to it is in the directory."""
        feed = Feed(server_id, incarnation, FeedState.STREAMING, applied, applied)
        self._feeds[server_id] = feed
        return feed

    def close(self, server_id: str) -> None:
        self._feeds.pop(server_id, None)

    def feed(self, server_id: str) -> Feed | None:
        return self._feeds.get(server_id)

    def feeds(self) -> list[Feed]:
        return list(self._feeds.values())

    def sender(self, server_id: str, incarnation: bytes) -> Feed | None:
        """The feed of a batch; None: it is of an earlier run. Raises ServerNotRegistered."""
        feed = self._feeds.get(server_id)
        if feed is not None and feed.incarnation == incarnation:
            return feed
        if feed is not None and self._incarnations.standing(server_id, incarnation) is Standing.SUPERSEDED:
            self.stats.stale += 1
            return None
        self.stats.refused += 1
        raise ServerNotRegistered(
            f"Cache server {server_id!r} is no member with this incarnation: register first.",
            server_id=server_id,
        )

    def admit(self, feed: Feed, sequence: int, lost: int, batch: Any, events: int) -> Admission:
        """What becomes of a batch. ADMITTED and GAP are to be applied, and nothing else."""
        if sequence <= feed.seen:
            self.stats.duplicates += 1
            return Admission.DUPLICATE
        hole = lost > 0 or sequence != feed.seen + 1
        self.stats.admitted += 1
        feed.seen = sequence
        if hole:
            self._hole(feed, sequence)
        elif feed.state is FeedState.STREAMING:
            feed.applied = sequence
        if feed.state is FeedState.PULLING:
            self._keep(feed, sequence, batch, events)
        return Admission.GAP if hole else Admission.ADMITTED

    def want(self, feed: Feed) -> None:
        """The view of this server has to be pulled (again)."""
        if feed.state is FeedState.STREAMING:
            feed.applied = feed.seen
        feed.state = FeedState.WANTED
        _drop_kept(feed)

    def begin(self, feed: Feed) -> int:
        """A snapshot is asked for; returns the number of the pull, which older ones lose their say to."""
        self.want(feed)
        feed.state = FeedState.PULLING
        feed.floor = feed.seen
        self._pulls += 1
        feed.pull = self._pulls
        return feed.pull

    def position(self, feed: Feed, pull: int, sequence: int) -> list[Any] | None:
        """The snapshot is as of `sequence`. Returns what to apply on top of it; None: it does not count."""
        if not self.counts(feed, pull, FeedState.PULLING):
            return None
        if sequence < feed.floor:
            self.want(feed)
            return None
        again = [batch for number, batch in feed.kept if number > sequence]
        _drop_kept(feed)
        feed.state = FeedState.LOADING
        feed.position = sequence
        feed.seen = max(feed.seen, sequence)
        return again

    def end(self, feed: Feed, pull: int) -> bool:
        """All pages are in. False: something went missing meanwhile, and the next snapshot is wanted."""
        if not self.counts(feed, pull, FeedState.LOADING):
            return False
        feed.state = FeedState.STREAMING
        feed.applied = feed.seen
        self.stats.resyncs += 1
        return True

    def counts(self, feed: Feed, pull: int, state: FeedState = FeedState.LOADING) -> bool:
        return self._feeds.get(feed.server_id) is feed and feed.pull == pull and feed.state is state

    def _hole(self, feed: Feed, sequence: int) -> None:
        if feed.state is FeedState.PULLING:
            feed.floor = max(feed.floor, sequence - 1)
        elif feed.state is not FeedState.WANTED:
            # A hole that a snapshot is due for anyway is no new one. `applied` stays before the hole.
            self.stats.gaps += 1
            feed.state = FeedState.WANTED

    def _keep(self, feed: Feed, sequence: int, batch: Any, events: int) -> None:
        feed.kept.append((sequence, batch))
        feed.kept_events += events
        if feed.kept_events > self._max_kept:
            feed.floor = max(feed.floor, sequence)
            _drop_kept(feed)


def _drop_kept(feed: Feed) -> None:
    feed.kept = []
    feed.kept_events = 0
