"""Which servers not to ask for a while, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvwire.server.peers.members import Place

FIRST_REST_S: Final = 0.5
LONGEST_REST_S: Final = 10.0
REFUSED_S: Final = 600.0
BUSY_S: Final = 0.1
_MOVING: Final = b"moving"
"""Beside the topics: it leases, and its bytes do not come."""


@dataclass(slots=True)
class _Record:
    failures: int = 0
    rest_until: float = 0.0
    problem: str = ""


class Standing:
    """Of runs of servers. What fails is asked again later and later; what does not fit, hardly ever.

    `topic` tells apart what is refused for one model only. Empty: for all.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[Place, bytes], _Record] = {}

    def rests(self, place: Place, topic: bytes, now: float) -> bool:
        """Whether it is not to be asked now."""
        records = [self._records.get((place, about)) for about in (b"", topic, _MOVING)]
        return any(record is not None and now < record.rest_until for record in records)

    def problem(self, place: Place) -> str:
        """Why nothing is shared with it, the last reason. Empty: nothing prevents it."""
        told = [record.problem for (who, _), record in self._records.items() if who == place]
        return next((problem for problem in told if problem), "")

    def worked(self, place: Place, topic: bytes) -> None:
        self._records.pop((place, b""), None)
        self._records.pop((place, topic), None)

    def busy(self, place: Place, now: float) -> None:
        """It is well and takes no more at the moment."""
        self._record(place).rest_until = now + BUSY_S

    def moved(self, place: Place) -> None:
        """Bytes came from it."""
        self._records.pop((place, _MOVING), None)

    def failed(self, place: Place, problem: str, now: float, *, moving: bool = False) -> bool:
        """It did not answer, or, `moving`, it has leased and nothing came. Whether that is news."""
        record = self._record(place, _MOVING if moving else b"")
        record.failures += 1
        rest = min(FIRST_REST_S * 2 ** min(record.failures - 1, 10), LONGEST_REST_S)
        record.rest_until = now + rest
        return self._told(record, problem)

    def refused(self, place: Place, topic: bytes, problem: str, now: float) -> bool:
        """It does not fit. Whether that is news."""
        record = self._record(place, topic)
        record.rest_until = now + REFUSED_S
        return self._told(record, problem)

    def forget(self, place: Place) -> None:
        """That run is over."""
        for key in [key for key in self._records if key[0] == place]:
            del self._records[key]

    def places(self) -> set[Place]:
        return {place for place, _ in self._records}

    def _record(self, place: Place, topic: bytes = b"") -> _Record:
        return self._records.setdefault((place, topic), _Record())

    @staticmethod
    def _told(record: _Record, problem: str) -> bool:
        news, record.problem = record.problem != problem, problem
        return news
