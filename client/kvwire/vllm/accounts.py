"""What each request was given, for its response, and the sum of it, for the engine's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.vllm.tally import Tally
from kvwire.vllm.tracker import Stage

if TYPE_CHECKING:
    from kvwire.vllm.tracker import RequestTracker


class Accounts:
    """Each request counts once, at its first admission, however often it is preempted.

    Tokens that are loaded or stored count each time.
    """

    def __init__(self, tally: Tally | None = None) -> None:
        self.tally = tally or Tally()

    def not_asked(self, tracker: RequestTracker, reason: str) -> None:
        tracker.account.reason = tracker.account.reason or reason

    def answered(self, tracker: RequestTracker, hit_tokens: int) -> None:
        if not tracker.account.admitted:
            tracker.account.hit = hit_tokens
            tracker.account.reason = "" if hit_tokens else "nothing found"

    def loaded(self, tracker: RequestTracker) -> None:
        if tracker.stage is not Stage.LOADING or not tracker.may_load:
            return
        self.tally.add("loaded_tokens", tracker.promised)
        if not tracker.account.admitted:
            tracker.account.loaded = tracker.promised

    def load_failed(self, tracker: RequestTracker) -> None:
        tracker.account.reason = "the load failed"

    def admitted(self, tracker: RequestTracker) -> None:
        """Before its stage says so."""
        account = tracker.account
        if account.admitted:
            return
        account.admitted, account.local = True, tracker.local
        if tracker.stage in {Stage.ASKED, Stage.LOADING}:
            self.tally.add("lookups")
            self.tally.add("lookup_asked_tokens", tracker.asked)
            self.tally.add("lookup_hit_tokens", tracker.hit)

    def stored(self, tracker: RequestTracker, num_tokens: int) -> None:
        tracker.account.stored += num_tokens
        self.tally.add("stored_tokens", num_tokens)
