"""What every data path has in common: tickets, slots, results, and the two movers that a caller gives.

A path never looks into the engine's memory. It asks the caller's `Fill` for bytes of an object and hands
bytes to the caller's `Drain`; `kvwire.transfer.pages` has both for paged KV.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvwire.errors import KvwireError, TransferFailed, TransferTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ByteArray: TypeAlias = NDArray[np.uint8]
BytesLike: TypeAlias = bytes | bytearray | memoryview | ByteArray

FAULTS: Final = (KvwireError, OSError, ValueError, TypeError, LookupError, RuntimeError, BufferError)
"""What a mover or a transport may raise for one object without the path being dead."""
PUBLISH_MARGIN_S: Final = 1.0
"""Before the end of a write lease, so that the server has looked when the time is up."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one object under a lease. `index` is its position in the ticket."""

    index: int
    chunk_index: int
    group_index: int
    size_bytes: int
    arena_offset: int = 0
    first_tag: int = 0
    checksum: bytes = b""


@dataclass(frozen=True, slots=True)
class Ticket:
    """How to move the bytes of one lease. `piece_bytes` is 0 on shared memory.

    `seconds` is how long the lease was given for, `arrival_word` where a write lease can be committed.
    """

    lease_id: int
    path: str
    slots: tuple[Slot, ...]
    piece_bytes: int = 0
    seconds: float = 0.0
    arrival_word: int = 0


class Mark(NamedTuple):
    """What a path looked like before a lease was asked for: the time, and what it was in doubt about."""

    asked_at: float
    doubts: int = 0


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What became of one slot. `checksum` is of the bytes that were written, where it was asked for."""

    index: int
    error: KvwireError | None = None
    checksum: bytes = b""

    @property
    def ok(self) -> bool:
        return self.error is None


class Fill(Protocol):
    """Gather bytes [start, stop) of the slot's object into `out`, which has just that length."""

    def __call__(self, slot: Slot, start: int, stop: int, out: ByteArray, /) -> None: ...


class Drain(Protocol):
    """Scatter `data`, bytes [start, stop) of the slot's object, to where they belong."""

    def __call__(self, slot: Slot, start: int, stop: int, data: ByteArray, /) -> None: ...


def threads_of(mover: Fill | Drain) -> int:
    """How many slots at once a mover likes to move: one, where it does not say."""
    return getattr(mover, "threads", 1)


def is_complete(fill: Fill) -> bool:
    """Asked when all bytes have been read: whether they may be published before `publish` is called."""
    complete = getattr(fill, "complete", None)
    return complete is not None and bool(complete())


class DataPath(Protocol):
    """The client's end of one data path. Not for use by two threads at once.

    `deadline` is a time of `time.monotonic()`. Failures are per slot, in the order of the ticket; an
    exception means that the path itself is dead (closed, or its peer gone) and must be negotiated again.
    """

    @property
    def name(self) -> str: ...

    def write(
        self, ticket: Ticket, fill: Fill, deadline: float, *, with_checksum: bool = False
    ) -> list[SlotResult]: ...

    def read(self, ticket: Ticket, drain: Drain, deadline: float) -> list[SlotResult]: ...

    def mark(self) -> Mark:
        """To be taken before the call that grants a ticket."""

    def publish(self, ticket: Ticket, mark: Mark) -> bool:
        """Commit all slots of a write ticket over the path itself. False: CommitStore has to be called."""

    def proves(self, ticket: Ticket, mark: Mark) -> bool:
        """Whether all that `read` reported as good is what the server held. False: EndRetrieve tells."""

    def close(self) -> None: ...


class ReadCheck:
    """Decides which slots of a read are checked against their checksum: a share of them, chosen at random."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._random = random.Random()  # noqa: S311  a sample, no secret

    def wants(self, slot: Slot) -> bool:
        return bool(slot.checksum) and (self._share >= 1.0 or self._random.random() < self._share)


def pieces(size_bytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """The bounds of each piece of an object, in order."""
    for start in range(0, size_bytes, piece_bytes):
        yield start, min(size_bytes, start + piece_bytes)


def expired(deadline: float) -> bool:
    return time.monotonic() >= deadline


def seconds_left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def slot_error(error: BaseException, path: str, what: str) -> KvwireError:
    """The typed error of one slot for whatever was raised."""
    if isinstance(error, KvwireError):
        return error
    cause = type(error).__name__
    return TransferFailed(f"{what} failed: {str(error) or cause}.", path=path, cause=cause)


def timed_out(path: str, slot: Slot) -> TransferTimeout:
    return TransferTimeout(
        f"Chunk {slot.chunk_index} of KV group {slot.group_index} did not move over {path} in time.",
        path=path,
        chunk_index=slot.chunk_index,
        group_index=slot.group_index,
    )


def all_failed(slots: Sequence[Slot], error: KvwireError) -> list[SlotResult]:
    return [SlotResult(slot.index, error) for slot in slots]
