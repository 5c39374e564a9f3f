from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvwire.coordinator.messages import DirectoryStats, HoldingStats, Located, Placement, Tier
from kvwire.coordinator.placements import SHARDS, PlacementTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_MAX_USES = 2**32 - 1


@dataclass(slots=True, eq=False)
class _Place:
    """A store of a server: what a placement is identified by within the chain of its key."""

    tier: int
    backend: str


@dataclass(slots=True, eq=False)
class _Slot:
    """The placements in one place that one generation of a server's view has told of."""

    number: int
    holdings: Holdings
    place: _Place
    incarnation: bytes
    generation: int
    alive: bool = True
    count: int = 0
    size: int = 0


@dataclass(slots=True, eq=False)
class Holdings:
    """What one server holds. Written through `KeyDirectory` only; to be taken as a handle.

    `reachable`: a member that fits the fleet. What others hold is listed and is in nobody's prefix.
    """

    server_id: str
    incarnation: bytes = b""
    reachable: bool = False
    generation: int = 0
    loading: bool = False
    places: dict[tuple[int, str], _Place] = field(default_factory=dict)
    current: dict[tuple[int, str], _Slot] = field(default_factory=dict)
    older: list[_Slot] = field(default_factory=list)
    deleted: set[tuple[int, str, bytes]] = field(default_factory=set)
    cleared: set[tuple[int, str]] = field(default_factory=set)

    @property
    def placements(self) -> int:
        return sum(slot.count for slot in self.slots())

    def slots(self) -> list[_Slot]:
        return [*self.current.values(), *self.older]


class KeyDirectory:
    """Which server said that it holds which chunk. Hints only. Single-threaded; times in seconds.

    Fencing takes effect at once and costs nothing: a slot dies, and its rows are no placements any more.
    `sweep` frees them afterwards, slice by slice. `on_dropped` is told the keys that have no placement left.
    """

    def __init__(self, on_dropped: Callable[[bytes], object] | None = None) -> None:
        self._table = PlacementTable()
        self._slots: list[_Slot] = []
        self._free_slots: list[int] = []
        self._holdings: dict[str, Holdings] = {}
        self._dead: deque[_Slot] = deque()
        self._count = 0
        self._size = 0
        self._unswept = 0
        self.on_dropped = on_dropped

    # Servers.

    def holdings(self, server_id: str) -> Holdings:
        found = self._holdings.get(server_id)
        if found is None:
            found = self._holdings[server_id] = Holdings(server_id)
        return found

    def set_incarnation(self, server_id: str, incarnation: bytes) -> None:
        """Placements from now on are of this run. Those of the one before stay until they are fenced."""
        holdings = self.holdings(server_id)
        if holdings.incarnation != incarnation:
            self._new_generation(holdings)
            holdings.incarnation = incarnation
            holdings.loading = False

    def fence(self, server_id: str, tiers: Iterable[int] = (Tier.L1,), backend: str | None = None) -> int:
        """What the server holds in these tiers (of this store) is gone; returns how many placements."""
        holdings = self._holdings.get(server_id)
        if holdings is None:
            return 0
        wanted = set(tiers)
        fenced = 0
        for slot in holdings.slots():
            if slot.place.tier in wanted and backend in {None, slot.place.backend}:
                fenced += slot.count
                self._retire(slot)
        return fenced

    def forget(self, server_id: str) -> int:
        """The server left for good, with everything in every tier."""
        fenced = self.fence(server_id, (Tier.L1, Tier.L2))
        self._holdings.pop(server_id, None)
        return fenced

    def known(self, server_id: str) -> Holdings | None:
        return self._holdings.get(server_id)

    @property
    def table(self) -> PlacementTable:
        """To be read only."""
        return self._table

    def live_place(self, slot_number: int) -> tuple[str, bytes, int, str] | None:
        """Server, incarnation, tier and backend of the rows of a slot; None: they are no placements."""
        if slot_number >= len(self._slots) or not self._slots[slot_number].alive:
            return None
        slot = self._slots[slot_number]
        return slot.holdings.server_id, slot.incarnation, slot.place.tier, slot.place.backend

    def servers(self) -> list[Holdings]:
        return list(self._holdings.values())

    # What the servers tell.

    def store(self, holdings: Holdings, tier: int, backend: str, key: bytes, size: int, now: float) -> None:
        slot = holdings.current.get((tier, backend))
        if slot is None:
            slot = self._new_slot(holdings, tier, backend)
        table = self._table
        first = table.shards[key[0]].get(key, 0)
        row = self._find(first, slot.place) if first else 0
        if row:
            self._renew(row, slot, size, now)
            return
        table.add(key, first, slot.number, size, now)
        slot.count += 1
        slot.size += size
        self._count += 1
        self._size += size

    def delete(self, holdings: Holdings, tier: int, backend: str, key: bytes) -> bool:
        """False: it was not known, which is no fault."""
        if holdings.loading:
            holdings.deleted.add((tier, backend, key))
        row = self._row(holdings, tier, backend, key)
        if not row:
            return False
        slot = self._slots[self._table.slots[row]]
        size = self._table.sizes[row]
        slot.count -= 1
        slot.size -= size
        self._count -= 1
        self._size -= size
        self._remove(row)
        return True

    def access(self, holdings: Holdings, tier: int, backend: str, key: bytes, count: int) -> bool:
        row = self._row(holdings, tier, backend, key)
        if row:
            self._table.uses[row] = min(self._table.uses[row] + count, _MAX_USES)
        return row != 0

    def clear(self, holdings: Holdings, tier: int, backend: str = "") -> int:
        """Everything of the server left a tier, or only this store of it."""
        if holdings.loading:
            holdings.cleared.add((tier, backend))
        return self.fence(holdings.server_id, (tier,), backend or None)

    # Snapshots: they replace what a server is thought to hold, while its events go on.

    def begin_snapshot(self, holdings: Holdings) -> None:
        """From now on events are younger than the snapshot: what they say wins over what its pages say."""
        self._new_generation(holdings)
        holdings.loading = True

    def add_from_snapshot(
        self, holdings: Holdings, tier: int, backend: str, key: bytes, size: int, now: float
    ) -> None:
        if (tier, backend, key) in holdings.deleted or not holdings.cleared.isdisjoint(
            ((tier, backend), (tier, ""))
        ):
            return
        row = self._row(holdings, tier, backend, key)
        if row and self._slots[self._table.slots[row]].generation == holdings.generation:
            return
        self.store(holdings, tier, backend, key, size, now)

    def end_snapshot(self, holdings: Holdings) -> int:
        """What neither the snapshot nor an event after it told of is gone; returns how many placements."""
        fenced = sum(slot.count for slot in holdings.older)
        for slot in list(holdings.older):
            self._retire(slot)
        self.abandon_snapshot(holdings)
        return fenced

    def abandon_snapshot(self, holdings: Holdings) -> None:
        """What has been told stays; nothing goes."""
        holdings.loading = False
        holdings.deleted.clear()
        holdings.cleared.clear()

    # Questions.

    def locate(self, keys: Sequence[bytes], *, with_placements: bool = False) -> Located:
        """Where the chunks of a prompt are, keys in its order."""
        reached: dict[str, int] = {}
        combined = 0
        slots, slot_of, following = self._slots, self._table.slots, self._table.following
        shards = self._table.shards
        for index, key in enumerate(keys):
            row = shards[key[0]].get(key, 0)
            held = False
            while row:
                slot = slots[slot_of[row]]
                if slot.alive and slot.holdings.reachable:
                    held = True
                    server_id = slot.holdings.server_id
                    if reached.get(server_id, 0) == index:
                        reached[server_id] = index + 1
                row = following[row]
            if not held:
                break
            combined = index + 1
        prefixes = sorted(reached.items(), key=lambda item: (-item[1], item[0]))
        placements = tuple(self.placements(key) for key in keys) if with_placements else ()
        return Located(len(keys), tuple(prefixes), combined, placements)

    def placements(self, key: bytes) -> tuple[Placement, ...]:
        table = self._table
        found: list[Placement] = []
        for row in table.chain(key):
            slot = self._slots[table.slots[row]]
            if slot.alive:
                found.append(_placement(slot, table.sizes[row], table.times[row], table.uses[row]))
        return tuple(found)

    def holds(self, key: bytes) -> bool:
        return any(self._slots[self._table.slots[row]].alive for row in self._table.chain(key))

    def page(self, after: bytes = b"", limit: int = 1000) -> list[tuple[bytes, tuple[Placement, ...]]]:
        """Keys in order, behind `after`. A key that comes or goes meanwhile moves no other one."""
        found: list[tuple[bytes, tuple[Placement, ...]]] = []
        for number in range(after[0] if after else 0, SHARDS):
            ordered = sorted(self._table.shards[number])
            for key in ordered[bisect_right(ordered, after) :]:
                placements = self.placements(key)
                if placements:
                    found.append((key, placements))
                if len(found) == limit:
                    return found
        return found

    def stats(self) -> DirectoryStats:
        return DirectoryStats(self._table.key_count, self._count, self._size, self._unswept)

    def holding_stats(self) -> list[HoldingStats]:
        totals: dict[tuple[str, int, str], tuple[int, int]] = {}
        for slot in self._live_slots():
            name = (slot.holdings.server_id, slot.place.tier, slot.place.backend)
            count, size = totals.get(name, (0, 0))
            totals[name] = (count + slot.count, size + slot.size)
        return [HoldingStats(*name, *totals[name]) for name in sorted(totals)]

    # Upkeep.

    def sweep(self, limit: int) -> int:
        """Free up to `limit` rows of what was fenced; returns how many are left."""
        while self._dead and limit > 0:
            slot = self._dead[0]
            row = self._table.heads[slot.number]
            while row and limit > 0:
                self._remove(row)
                self._unswept -= 1
                limit -= 1
                row = self._table.heads[slot.number]
            if not row:
                self._dead.popleft()
                self._free_slots.append(slot.number)
        return self._unswept

    def check_integrity(self) -> None:
        """Raise AssertionError unless every count is exact. Walks everything."""
        self._table.check_integrity()
        live = self._live_slots()
        for slot in live:
            rows = list(self._table.rows_of(slot.number))
            sizes = sum(self._table.sizes[row] for row in rows)
            if not slot.alive or (len(rows), sizes) != (slot.count, slot.size):
                raise AssertionError(f"slot {slot.number} counts {slot.count} rows, {slot.size} bytes")
        unswept = sum(len(list(self._table.rows_of(slot.number))) for slot in self._dead)
        counted = (sum(slot.count for slot in live), sum(slot.size for slot in live), unswept)
        if counted != (self._count, self._size, self._unswept):
            raise AssertionError(f"{counted} were counted as {self._count, self._size, self._unswept}")

    def _live_slots(self) -> list[_Slot]:
        return [slot for holdings in self._holdings.values() for slot in holdings.slots()]

    def _row(self, holdings: Holdings, tier: int, backend: str, key: bytes) -> int:
        place = holdings.places.get((tier, backend))
        return self._find(self._table.first(key), place) if place is not None else 0

    def _find(self, row: int, place: _Place) -> int:
        slots, slot_of, following = self._slots, self._table.slots, self._table.following
        while row:
            slot = slots[slot_of[row]]
            if slot.place is place and slot.alive:
                return row
            row = following[row]
        return 0

    def _renew(self, row: int, slot: _Slot, size: int, now: float) -> None:
        table = self._table
        old = self._slots[table.slots[row]]
        before = table.sizes[row]
        if old is not slot:
            table.move(row, slot.number)
            old.count -= 1
            slot.count += 1
        old.size -= before
        slot.size += size
        self._size += size - before
        table.sizes[row] = size
        table.times[row] = now

    def _remove(self, row: int) -> None:
        if self.on_dropped is None:
            self._table.remove(row)
            return
        key = self._table.key(row)
        if self._table.remove(row):
            self.on_dropped(key)

    def _new_generation(self, holdings: Holdings) -> None:
        holdings.generation += 1
        holdings.older += holdings.current.values()
        holdings.current.clear()
        holdings.deleted.clear()
        holdings.cleared.clear()
        for slot in [slot for slot in holdings.older if not slot.count]:
            self._retire(slot)

    def _new_slot(self, holdings: Holdings, tier: int, backend: str) -> _Slot:
        place = holdings.places.setdefault((tier, backend), _Place(tier, backend))
        number = self._free_slots.pop() if self._free_slots else self._table.new_list()
        slot = _Slot(number, holdings, place, holdings.incarnation, holdings.generation)
        if number == len(self._slots):
            self._slots.append(slot)
        else:
            self._slots[number] = slot
        holdings.current[tier, backend] = slot
        return slot

    def _retire(self, slot: _Slot) -> None:
        holdings, place = slot.holdings, slot.place
        if holdings.current.get((place.tier, place.backend)) is slot:
            del holdings.current[place.tier, place.backend]
        else:
            holdings.older.remove(slot)
        slot.alive = False
        self._count -= slot.count
        self._size -= slot.size
        self._unswept += slot.count
        self._dead.append(slot)


def _placement(slot: _Slot, size: int, since: float, uses: int) -> Placement:
    return Placement(
        slot.holdings.server_id, slot.incarnation, slot.place.tier, slot.place.backend, size, since, uses
    )
