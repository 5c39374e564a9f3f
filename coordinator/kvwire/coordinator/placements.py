"""Placements as rows of typed columns: of each key, only itself and its row number are Python objects, in a
dictionary that the garbage collector does not look into. (It would walk a list of millions while all wait.)

A row belongs to the chain of its key (`following`) and to the list of its slot (`before`, `after`), which is
the reverse index. Row 0 does not exist and stands for none. The keys are spread over many small dictionaries,
because a dictionary that grows is copied whole while everybody waits.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARDS: Final = 256
KEY_BYTES: Final = 32

_NO_SLOT: Final = 2**32 - 1


class PlacementTable:
    """Keys have 32 bytes and are spread by the first one. Slots are small numbers from 0 on."""

    __slots__ = (
        "_free",
        "after",
        "before",
        "following",
        "heads",
        "key_count",
        "keys",
        "shards",
        "sizes",
        "slots",
        "times",
        "uses",
    )

    def __init__(self) -> None:
        self.shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self.keys = bytearray(KEY_BYTES)
        self.slots = array("I", [_NO_SLOT])
        self.sizes = array("Q", [0])
        self.times = array("d", [0.0])
        self.uses = array("I", [0])
        self.following = array("I", [0])
        self.before = array("I", [0])
        self.after = array("I", [0])
        self.heads = array("I")
        self.key_count = 0
        self._free = 0

    def key(self, row: int) -> bytes:
        return bytes(self.keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def first(self, key: bytes) -> int:
        return self.shards[key[0]].get(key, 0)

    def add(self, key: bytes, first: int, slot: int, size: int, now: float) -> int:
        """A new row; `first` is the first one of the key, or 0."""
        row = self._free
        head = self.heads[slot]
        if row:
            self._free = self.following[row]
            self.keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
            self.slots[row] = slot
            self.sizes[row] = size
            self.times[row] = now
            self.uses[row] = 0
            self.before[row] = 0
            self.after[row] = head
        else:
            row = len(self.slots)
            self.keys += key
            self.slots.append(slot)
            self.sizes.append(size)
            self.times.append(now)
            self.uses.append(0)
            self.before.append(0)
            self.after.append(head)
            self.following.append(0)
        if head:
            self.before[head] = row
        self.heads[slot] = row
        if first:
            # Behind the first one: the row number in the dictionary stays.
            self.following[row] = self.following[first]
            self.following[first] = row
        else:
            self.following[row] = 0
            self.shards[key[0]][key] = row
            self.key_count += 1
        return row

    def remove(self, row: int) -> bool:
        """Free a row; True when it was the last one of its key."""
        if self.slots[row] == _NO_SLOT:
            raise ValueError(f"row {row} is free")
        self._unlink(row)
        gone = self._unchain(self.key(row), row)
        self.slots[row] = _NO_SLOT
        self.following[row] = self._free
        self._free = row
        return gone

    def move(self, row: int, slot: int) -> None:
        self._unlink(row)
        head = self.heads[slot]
        self.slots[row] = slot
        self.before[row] = 0
        self.after[row] = head
        if head:
            self.before[head] = row
        self.heads[slot] = row

    def new_list(self) -> int:
        self.heads.append(0)
        return len(self.heads) - 1

    def chain(self, key: bytes) -> Iterator[int]:
        row = self.first(key)
        while row:
            yield row
            row = self.following[row]

    def rows_of(self, slot: int) -> Iterator[int]:
        row = self.heads[slot]
        while row:
            yield row
            row = self.after[row]

    def _unlink(self, row: int) -> None:
        before, after = self.before[row], self.after[row]
        if after:
            self.before[after] = before
        if before:
            self.after[before] = after
        else:
            self.heads[self.slots[row]] = after

    def _unchain(self, key: bytes, row: int) -> bool:
        shard = self.shards[key[0]]
        here = shard[key]
        behind = self.following[row]
        if here != row:
            while self.following[here] != row:
                here = self.following[here]
            self.following[here] = behind
            return False
        if behind:
            shard[key] = behind
            return False
        del shard[key]
        self.key_count -= 1
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless chains, lists and the free list are exactly all rows."""
        chained = self._chained_rows()
        listed = [row for slot in range(len(self.heads)) for row in self.rows_of(slot)]
        free = self._free_rows()
        _require(len(listed) == len(set(listed)), "a row is listed twice")
        _require(set(listed) == chained, "chains and lists differ")
        _require(not chained & free, "a free row is in use")
        _require(len(chained) + len(free) + 1 == len(self.slots), "a row is lost")
        for slot in range(len(self.heads)):
            before = 0
            for row in self.rows_of(slot):
                _require(self.slots[row] == slot, f"row {row} is in the list of another slot")
                _require(self.before[row] == before, f"row {row} has a wrong predecessor")
                before = row

    def _chained_rows(self) -> set[int]:
        chained: set[int] = set()
        total = 0
        for number, shard in enumerate(self.shards):
            total += len(shard)
            for key in shard:
                _require(key[0] == number, "a key is in the wrong shard")
                for row in self.chain(key):
                    _require(self.key(row) == key, f"row {row} is in the chain of another key")
                    _require(row not in chained, f"row {row} is in two chains")
                    chained.add(row)
        _require(total == self.key_count, "the number of keys is wrong")
        return chained

    def _free_rows(self) -> set[int]:
        free: set[int] = set()
        row = self._free
        while row:
            _require(row not in free, "the free list is a circle")
            _require(self.slots[row] == _NO_SLOT, f"row {row} is free and has a slot")
            free.add(row)
            row = self.following[row]
        return free


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise AssertionError(complaint)
