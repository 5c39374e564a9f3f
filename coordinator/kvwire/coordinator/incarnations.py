from __future__ import annotations

from collections import OrderedDict, deque
from enum import StrEnum
from typing import Final

_REMEMBERED_RUNS: Final = 16


class Standing(StrEnum):
    CURRENT = "current"
    SUPERSEDED = "superseded"
    UNKNOWN = "unknown"


class Incarnations:
    """Which run of a server is the newest. Ids are random, so only the order of arrival tells.

    The last runs of each server are remembered, also when it is no member: a message that was on its way for
    long must not bring one back.
    """

    def __init__(self, max_servers: int = 10_000) -> None:
        self._runs: OrderedDict[str, deque[bytes]] = OrderedDict()
        self._max_servers = max_servers

    def standing(self, server_id: str, incarnation: bytes) -> Standing:
        runs = self._runs.get(server_id)
        if not runs or incarnation not in runs:
            return Standing.UNKNOWN
        return Standing.CURRENT if runs[-1] == incarnation else Standing.SUPERSEDED

    def runs(self, server_id: str) -> tuple[bytes, ...]:
        """Those that are remembered, newest last."""
        return tuple(self._runs.get(server_id, ()))

    def note(self, server_id: str, incarnation: bytes) -> None:
        """This run is the newest one."""
        runs = self._runs.setdefault(server_id, deque(maxlen=_REMEMBERED_RUNS))
        if not runs or runs[-1] != incarnation:
            runs.append(incarnation)
        self._runs.move_to_end(server_id)
        while len(self._runs) > self._max_servers:
            self._runs.popitem(last=False)
