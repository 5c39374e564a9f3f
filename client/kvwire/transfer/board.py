"""What a server and one client of its host tell each other without a call: a page of shared memory.

The page is the client's lock file (see `liveness`), as 512 words of 8 bytes in the host's byte order:

    word 0        doubts, counted up by the server. While the count stays the same, no read lease of this
                  client has ended before its time and no object under one has been found damaged
    word 1..7     zero
    word 8..511   arrivals. A write lease whose ticket names one of them is committed, all slots of it, by the
                  client writing the lease's id there: after the last byte, before the lease's time is up

Each word is written by one side only, in one store. A client must see the doubts after its last copy of a
byte; an arrival must be seen after all bytes: total store order (x86-64) gives both, and so does the
interpreter's lock, which a copy takes when it is done, on other processors.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

BOARD_BYTES: Final = 4096
_DOUBTS: Final = 0
_FIRST_ARRIVAL: Final = 8


class Board:
    """One mapping of the page. `close` it before the file."""

    def __init__(self, fd: int) -> None:
        """Raises ValueError for a file that has no such page."""
        if os.fstat(fd).st_size < BOARD_BYTES:
            raise ValueError("the lock file has no board")
        self._map = mmap.mmap(fd, BOARD_BYTES)
        self._words = memoryview(self._map).cast("Q")

    @property
    def doubts(self) -> int:
        return self._words[_DOUBTS]

    def close(self) -> None:
        self._words.release()
        self._map.close()


class ClientBoard(Board):
    """The client's side."""

    def arrive(self, word: int, lease_id: int) -> None:
        """Every slot of the lease has its bytes."""
        if not _FIRST_ARRIVAL <= word < len(self._words):
            raise ValueError(f"word {word} is none for arrivals")
        self._words[word] = lease_id


class ServerBoard(Board):
    """The server's side: gives words to write leases and looks for arrivals."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        # In turn: a client that is late may write to a word that it had before.
        self._free = deque(range(_FIRST_ARRIVAL, BOARD_BYTES // 8))
        self._given: dict[int, int] = {}

    def __len__(self) -> int:
        """Leases that are waited for."""
        return len(self._given)

    def doubt(self) -> None:
        """What this client reads or has read may be wrong: it has to ask."""
        self._words[_DOUBTS] += 1

    def give(self, lease_id: int) -> int:
        """A word for this lease, 0 when all are in use."""
        if not self._free:
            return 0
        word = self._given[lease_id] = self._free.popleft()
        self._words[word] = 0
        return word

    def take_back(self, lease_id: int) -> None:
        """The lease's writer has said by other means that it is done, or never heard of the lease."""
        word = self._given.pop(lease_id, 0)
        if word:
            self._free.append(word)

    def arrived(self) -> Iterator[int]:
        """Leases that have arrived since the last call, whose words are free again."""
        found = [lease_id for lease_id, word in self._given.items() if self._words[word] == lease_id]
        for lease_id in found:
            self.take_back(lease_id)
            yield lease_id
