"""Counts and durations of one process between two reports to the engine: bounded, and safe in threads."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Final

MAX_DURATIONS: Final = 512
"""Between two reports. What is beyond is counted, but not measured."""

COUNTERS: Final = {
    "lookups": "Prompts that the server was asked for.",
    "lookup_asked_tokens": "Tokens of those prompts, in whole chunks.",
    "lookup_hit_tokens": "Tokens that the server had of them.",
    "loaded_tokens": "Tokens of requests whose KV came from the server.",
    "stored_tokens": "Tokens whose KV was handed to stores.",
    "loads": "Loads that ended well, of all ranks.",
    "failed_loads": "Loads that failed, of all ranks.",
    "loaded_bytes": "Bytes that loads have brought, of all ranks.",
    "stores": "Stores that ended well, of all ranks.",
    "dropped_stores": "Stores that failed or were given up, of all ranks.",
    "stored_bytes": "Bytes that were stored anew, of all ranks.",
    "lost_events": "Times that KV events were lost and everything announced was withdrawn.",
}
DURATIONS: Final = {
    "lookup_seconds": "From a lookup's submission to its answer.",
    "load_seconds": "From a load's submission to its end, on each rank.",
    "store_seconds": "From a store's submission to its end, on each rank.",
}
USABLE: Final = "usable"


class Tally:
    """What `take` returns is plain data: it can be pickled, packed and merged by adding and appending."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._durations: dict[str, list[float]] = {}
        self._usable: bool | None = None
        self._told: bool | None = None

    def add(self, name: str, amount: int = 1) -> None:
        if amount:
            with self._lock:
                self._counts[name] += amount

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            found = self._durations.setdefault(name, [])
            if len(found) < MAX_DURATIONS:
                found.append(seconds)

    def is_usable(self, usable: bool) -> None:
        self._usable = usable

    def take(self) -> dict[str, Any] | None:
        """Everything since the last call; None when there is nothing new."""
        if not self._counts and not self._durations and self._usable is self._told:
            return None
        with self._lock:
            counts, self._counts = dict(self._counts), Counter()
            durations, self._durations = self._durations, {}
        found: dict[str, Any] = {**counts, **durations}
        if self._usable is not self._told:
            found[USABLE] = int(bool(self._usable))
            self._told = self._usable
        return found or None
