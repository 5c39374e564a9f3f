"""The one place where events come in, from whatever source.

Batches and pages of snapshots take turns, and each is applied in slices, one per turn of the event loop: so
heartbeats and questions wait for a slice and not for all senders.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from google.protobuf.message import DecodeError

from kvwire.coordinator.apply import ACCESS, CLEAR, DELETE, STORE
from kvwire.coordinator.convert import ADMISSIONS
from kvwire.coordinator.messages import Admission
from kvwire.coordinator.steps import in_slices
from kvwire.errors import InvalidArgument
from kvwire.v1 import coordinator_service_pb2 as pb
from kvwire.v1 import event_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from kvwire.coordinator.fleet import Fleet, Reported

Source = Literal["rpc", "kafka"]
T = TypeVar("T")

LAG_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True)
class Taken:
    """A batch that came in. `kinds` counts its entries by kind, where somebody asked for it."""

    server_id: str
    sequence: int
    lost: int
    admission: Admission
    lag: float | None
    source: Source
    kinds: Counter[int]


@dataclass(slots=True)
class IntakeStats:
    """`skipped`: entries of unknown kind or outside the contract. `lags` counts batches by bucket."""

    batches: Counter[str] = field(default_factory=Counter)
    events: int = 0
    skipped: int = 0
    lags: list[int] = field(default_factory=lambda: [0] * (len(LAG_BUCKETS_S) + 1))
    lag_sum: float = 0.0


class Intake:
    """`tell` is given each batch, made when somebody listens; `incomplete` is called after a gap."""

    def __init__(
        self,
        fleet: Fleet,
        tell: Callable[[Callable[[], Taken]], None],
        incomplete: Callable[[], None] = lambda: None,
    ) -> None:
        self.stats = IntakeStats()
        self._fleet = fleet
        self._tell = tell
        self._incomplete = incomplete
        self._turn = asyncio.Lock()
        self._lags: dict[str, float] = {}

    async def take(self, batch: event_pb2.CacheEventBatch, source: Source) -> pb.ReportEventsResponse:
        """Raises InvalidArgument, TooManyItems, ServerNotRegistered; nothing has changed then."""
        async with self._turn:
            await asyncio.sleep(0)
            return await self._take(batch, source)

    async def take_raw(self, raw: bytes) -> pb.ReportEventsResponse:
        """As `take`, of a serialized ReportEventsRequest: parsing takes long, too."""
        async with self._turn:
            await asyncio.sleep(0)
            try:
                request = pb.ReportEventsRequest.FromString(raw)
            except DecodeError as error:
                raise InvalidArgument("request", "is not a message of this method") from error
            return await self._take(request.batch, "rpc")

    async def in_turn(self, steps: Generator[None, None, T]) -> T:
        """Run what must not mix with batches, slice by slice."""
        async with self._turn:
            await asyncio.sleep(0)
            return await in_slices(steps)

    def lag(self, server_id: str) -> float | None:
        """Seconds, of the server's last batch."""
        return self._lags.get(server_id)

    @property
    def worst_lag(self) -> float:
        """Seconds, over the last batch of each member."""
        return max(self._lags.values(), default=0.0)

    def forget(self, server_id: str) -> None:
        self._lags.pop(server_id, None)

    async def _take(self, batch: event_pb2.CacheEventBatch, source: Source) -> pb.ReportEventsResponse:
        reported = await in_slices(self._fleet.report_steps(batch, time.monotonic()))
        self._note(batch, reported, source)
        if reported.admission is Admission.GAP:
            self._incomplete()
        return pb.ReportEventsResponse(
            sequence=reported.sequence,
            admission=ADMISSIONS[reported.admission],
            unknown_events=reported.applied.unknown,
        )

    def _note(self, batch: event_pb2.CacheEventBatch, reported: Reported, source: Source) -> None:
        stats, admission = self.stats, reported.admission
        stats.batches[source] += 1
        lag = _lag(batch)
        if admission in {Admission.ADMITTED, Admission.GAP}:
            stats.events += len(batch.events)
            stats.skipped += reported.applied.unknown + reported.applied.invalid
            if lag is not None:
                self._lags[batch.server_id] = lag
                stats.lags[bisect_left(LAG_BUCKETS_S, lag)] += 1
                stats.lag_sum += lag

        def taken() -> Taken:
            kinds: Counter[int] = Counter(event.kind for event in batch.events)
            return Taken(batch.server_id, batch.sequence, batch.lost, admission, lag, source, kinds)

        self._tell(taken)


def kind_counts(kinds: Counter[int]) -> dict[str, int]:
    return {
        "stored_chunks": kinds[STORE],
        "accessed_chunks": kinds[ACCESS],
        "deleted_chunks": kinds[DELETE],
        "clears": kinds[CLEAR],
    }


def _lag(batch: event_pb2.CacheEventBatch) -> float | None:
    if not batch.HasField("created_at"):
        return None
    created = batch.created_at
    return max(time.time() - created.seconds - created.nanos / 1e9, 0.0)
