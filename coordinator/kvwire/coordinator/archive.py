"""The fleet's soft state as plain values, in slices, and back. `checkpoint.py` says why that is right."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvwire.coordinator.messages import Tier
from kvwire.coordinator.placements import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvwire.coordinator.fleet import Fleet

SLICE_ROWS: Final = 8192
ROW: Final = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("place", "<u4"),
        ("size", "<u8"),
        ("since", "<f8"),
        ("uses", "<u4"),
    ]
)
"""`place` numbers the places of its piece. `since` is on the clock that the head tells the time of."""


@dataclass(frozen=True, slots=True)
class SavedServer:
    """`applied`: its events up to here are in the rows; None: not known, it is to be asked.

    `lost_for`: seconds since it was dropped; None: it was a member. `runs`: its incarnations, newest last.
    """

    server_id: str
    incarnation: bytes
    applied: int | None
    lost_for: float | None
    runs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedRows:
    """`places`: (server, incarnation, tier, backend), as `rows` number them."""

    places: tuple[tuple[str, bytes, int, str], ...]
    rows: bytes


@dataclass(slots=True)
class Restored:
    """What waits for its server to register. `at`: when it was read."""

    at: float
    servers: dict[str, SavedServer] = field(default_factory=dict)


def saved_servers(fleet: Fleet, now: float) -> list[SavedServer]:
    """Of one moment: not to be called while a batch is half applied."""
    found = []
    for holdings in fleet.directory.servers():
        server_id = holdings.server_id
        feed, waiting = fleet.gate.feed(server_id), fleet.restored.servers.get(server_id)
        if waiting is not None and feed is None:
            found.append(waiting)
            continue
        whole = feed is not None and feed.streaming and feed.incarnation == holdings.incarnation
        found.append(
            SavedServer(
                server_id,
                holdings.incarnation,
                feed.applied if feed is not None and whole else None,
                fleet.lost_for(server_id, now),
                fleet.incarnations.runs(server_id),
            )
        )
    return found


def saved_rows(fleet: Fleet, slice_rows: int = SLICE_ROWS) -> Generator[SavedRows, None, None]:
    """All placements, a slice at a time; between slices anything may happen."""
    table, first = fleet.directory.table, 1
    while first < len(table.slots):
        last = min(first + slice_rows, len(table.slots))
        slots = np.array(table.slots[first:last], dtype=np.uint32)
        numbers, index = np.unique(slots, return_inverse=True)
        places = [fleet.directory.live_place(int(number)) for number in numbers]
        live = np.array([place is not None for place in places], dtype=bool)
        renumbered = np.cumsum(live) - 1
        rows = np.empty(last - first, ROW)
        rows["key"] = np.frombuffer(table.keys[first * KEY_BYTES : last * KEY_BYTES], f"V{KEY_BYTES}")
        rows["place"] = renumbered[index]
        rows["size"] = np.array(table.sizes[first:last], dtype=np.uint64)
        rows["since"] = np.array(table.times[first:last], dtype=np.float64)
        rows["uses"] = np.array(table.uses[first:last], dtype=np.uint32)
        chosen = rows[live[index]]
        if len(chosen):
            yield SavedRows(tuple(place for place in places if place is not None), chosen.tobytes())
        first = last


def restore_servers(fleet: Fleet, servers: list[SavedServer], now: float) -> None:
    """Into an empty fleet: nobody is a member, and what each holds is listed and in nobody's prefix."""
    fleet.restored = Restored(now)
    for server in servers:
        fleet.directory.set_incarnation(server.server_id, server.incarnation)
        for run in server.runs:
            fleet.incarnations.note(server.server_id, run)
        if server.lost_for is None:
            fleet.restored.servers[server.server_id] = server
        else:
            fleet.note_lost(server.server_id, now - server.lost_for)


def restore_rows(fleet: Fleet, saved: SavedRows, clock_ahead: float) -> None:
    """`clock_ahead` is added to times. What is in memory of another run than its server's is skipped."""
    directory = fleet.directory
    handles: list[Any] = []
    for server_id, incarnation, tier, _ in saved.places:
        holdings = directory.known(server_id)
        usable = holdings is not None and (tier != Tier.L1 or incarnation == holdings.incarnation)
        handles.append(holdings if usable else None)
    for key, place, size, since, uses in np.frombuffer(saved.rows, ROW).tolist():
        if handles[place] is not None:
            _, _, tier, backend = saved.places[place]
            directory.store(handles[place], tier, backend, bytes(key), size, since + clock_ahead)
            if uses:
                directory.access(handles[place], tier, backend, bytes(key), uses)
