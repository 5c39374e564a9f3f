"""How long each call may take: the one table. No call leaves without a deadline."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvwire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTROL_S: Final = 5.0
DATA_S: Final = 30.0
PING_S: Final = 2.0
ADMIN_S: Final = 10.0
ATTACH_S: Final = 5.0
"""For the first event of Attach. The stream itself is held open for life: heartbeats watch it."""
QUIET_S: Final = 45.0
"""Between two messages of SubscribeKvEvents: a server without news sends a sign of life every 15 s."""

DEADLINES: Final[Mapping[str, float]] = MappingProxyType(
    {
        "NegotiateChunkSize": CONTROL_S,
        "RegisterKvCache": CONTROL_S,
        "Attach": ATTACH_S,
        "UnregisterKvCache": CONTROL_S,
        "Ping": PING_S,
        "Lookup": CONTROL_S,
        "ReleaseLookup": CONTROL_S,
        "BeginStore": DATA_S,
        "CommitStore": DATA_S,
        "AbortStore": CONTROL_S,
        "BeginRetrieve": DATA_S,
        "EndRetrieve": DATA_S,
        "WriteChunks": DATA_S,
        "ReadChunks": DATA_S,
        "EndSession": CONTROL_S,
        "SubscribeKvEvents": QUIET_S,
        "MatchBlend": CONTROL_S,
        "GetStatus": ADMIN_S,
        "ListSessions": ADMIN_S,
        "ListObjects": ADMIN_S,
        "Clear": ADMIN_S,
        "Pin": ADMIN_S,
        "Unpin": ADMIN_S,
        "SetQuota": ADMIN_S,
        "GetQuota": ADMIN_S,
        "Prefetch": DATA_S,
        "Evict": ADMIN_S,
    }
)
"""Seconds by the name of the RPC."""

READS: Final = frozenset({"Ping", "GetStatus", "ListSessions", "ListObjects", "GetQuota", "MatchBlend"})
"""Calls that change nothing: repeated once when the server was UNAVAILABLE or OVERLOADED. So is a Lookup
without a registration."""


class Deadlines:
    """The table with a caller's own values in it."""

    __slots__ = ("_seconds",)

    def __init__(self, overrides: Mapping[str, float] | None = None) -> None:
        for method, seconds in (overrides or {}).items():
            if method not in DEADLINES:
                raise ConfigError(f"There is no call {method!r}: deadlines are set by the name of an RPC.")
            if not seconds > 0:
                raise ConfigError(f"The deadline of {method} must be above 0 s, not {seconds}.")
        self._seconds = {**DEADLINES, **(overrides or {})}

    def as_dict(self) -> dict[str, float]:
        return dict(self._seconds)

    def __getitem__(self, method: str) -> float:
        return self._seconds[method]
