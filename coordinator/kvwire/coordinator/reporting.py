from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.coordinator.gate import Feed, FeedState
from kvwire.coordinator.messages import Reporting

if TYPE_CHECKING:
    from kvwire.coordinator.members import Member


@dataclass(slots=True, eq=False)
class Arrivals:
    """Whether the events of a member arrive; another question than whether it is alive.

    `heard_at`: when a batch arrived or it registered. `behind_since`: since when it has closed batches that
    are not here. Silence ends with a batch, and not with a snapshot, which heals the view and not the way.
    """

    heard_at: float
    behind_since: float | None = None
    silent: bool = False

    def heard(self, now: float) -> None:
        self.heard_at = now
        self.silent = False

    def note(self, member: Member, feed: Feed, now: float) -> None:
        """After anything that changes what the member has closed or what is here of it."""
        if member.last_sequence <= feed.seen:
            self.behind_since = None
        elif self.behind_since is None:
            self.behind_since = now

    def check(self, feed: Feed, now: float, silent_after: float) -> None:
        """Whether it is silent by now. While a snapshot is due nobody knows how far behind it is."""
        if self.behind_since is not None and feed.state is FeedState.STREAMING:
            self.silent |= now - max(self.behind_since, self.heard_at) > silent_after

    def state(self, feed: Feed) -> Reporting:
        if self.silent:
            return Reporting.SILENT
        if feed.state is not FeedState.STREAMING:
            return Reporting.RESYNCING
        return Reporting.CURRENT if self.behind_since is None else Reporting.LAGGING
