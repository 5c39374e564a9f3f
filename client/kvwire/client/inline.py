"""The inline data path: pieces of objects on the gRPC connection, for clients that have nothing better."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from kvwire.errors import KvwireError, TransferFailed, TransferTimeout
from kvwire.transfer.base import (
    FAULTS,
    Mark,
    SlotResult,
    all_failed,
    expired,
    pieces,
    seconds_left,
    slot_error,
)
from kvwire.transfer.checksum import Checksum, mismatch
from kvwire.v1 import cache_service_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.client.client import Client
    from kvwire.transfer.base import Drain, Fill, Slot, Ticket

NAME: Final = "inline"
PIECE_BYTES: Final = 1 << 20


class InlinePath:
    """One registration's WriteChunks and ReadChunks. Several threads may use it at once."""

    name: Final = NAME

    def __init__(self, client: Client, registration_id: int) -> None:
        self._client = client
        self._registration_id = registration_id

    def write(
        self, ticket: Ticket, fill: Fill, deadline: float, *, with_checksum: bool = False
    ) -> list[SlotResult]:
        sender = _Sender(ticket, fill, deadline, self._registration_id, with_checksum=with_checksum)
        try:
            written = self._client.write_chunks(sender.requests(), timeout=max(seconds_left(deadline), 1e-3))
        except KvwireError as error:
            return all_failed(ticket.slots, error)
        finally:
            # gRPC reads the requests on a thread of its own, which must not touch blocks any more.
            sender.stop()
        if written != sender.sent:
            text = f"The server took {written} of {sender.sent} bytes."
            return all_failed(ticket.slots, TransferFailed(text, path=NAME, cause="short"))
        return sender.results()

    def read(self, ticket: Ticket, drain: Drain, deadline: float) -> list[SlotResult]:
        receiver = _Receiver(ticket, drain)
        replies = self._client.read_chunks(
            self._registration_id, [ticket.lease_id], timeout=max(seconds_left(deadline), 1e-3)
        )
        try:
            with contextlib.closing(replies):
                for reply in replies:
                    receiver.take(reply)
        except KvwireError as error:
            return all_failed(ticket.slots, error)
        return receiver.results()

    def mark(self) -> Mark:
        return Mark(time.monotonic())

    def publish(self, ticket: Ticket, mark: Mark) -> bool:
        return False

    def proves(self, ticket: Ticket, mark: Mark) -> bool:
        return False

    def close(self) -> None:
        """The connection is the client's."""


class _Sender:
    def __init__(
        self, ticket: Ticket, fill: Fill, deadline: float, registration_id: int, *, with_checksum: bool
    ) -> None:
        self._ticket = ticket
        self._fill = fill
        self._deadline = deadline
        self._registration_id = registration_id
        self._with_checksum = with_checksum
        self._busy = threading.Lock()
        self._stopped = False
        self._results: dict[int, SlotResult] = {}
        self.sent = 0

    def requests(self) -> Iterator[pb.WriteChunksRequest]:
        registration_id = self._registration_id
        buffer = np.empty(self._ticket.piece_bytes or PIECE_BYTES, np.uint8)
        for slot in self._ticket.slots:
            digest = Checksum()
            for start, stop in pieces(slot.size_bytes, len(buffer)):
                piece = self._piece(slot, start, stop, buffer)
                if piece is None:
                    break
                if self._with_checksum:
                    digest.update(piece)
                self.sent += len(piece)
                yield pb.WriteChunksRequest(
                    registration_id=registration_id,
                    lease_id=self._ticket.lease_id,
                    slot=slot.index,
                    offset=start,
                    data=piece,
                )
                registration_id = 0
            else:
                checksum = digest.digest() if self._with_checksum else b""
                self._results[slot.index] = SlotResult(slot.index, None, checksum)

    def _piece(
        self, slot: Slot, start: int, stop: int, buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]
    ) -> bytes | None:
        with self._busy:
            if self._stopped:
                return None
            if expired(self._deadline):
                self._results[slot.index] = SlotResult(slot.index, _late(slot))
                return None
            try:
                self._fill(slot, start, stop, buffer[: stop - start])
            except FAULTS as error:
                failure = slot_error(error, NAME, f"Reading the blocks of chunk {slot.chunk_index}")
                self._results[slot.index] = SlotResult(slot.index, failure)
                return None
            return buffer[: stop - start].tobytes()

    def stop(self) -> None:
        with self._busy:
            self._stopped = True

    def results(self) -> list[SlotResult]:
        return [
            self._results.get(slot.index) or SlotResult(slot.index, _late(slot))
            for slot in self._ticket.slots
        ]


class _Receiver:
    def __init__(self, ticket: Ticket, drain: Drain) -> None:
        self._ticket = ticket
        self._drain = drain
        self._done = [0] * len(ticket.slots)
        self._digests = [Checksum() if slot.checksum else None for slot in ticket.slots]
        self._errors: dict[int, KvwireError] = {}

    def take(self, reply: pb.ReadChunksResponse) -> None:
        """One piece. Raises TransferFailed for one that does not follow the one before."""
        ticket = self._ticket
        index = reply.slot
        if (
            reply.lease_id != ticket.lease_id
            or index >= len(ticket.slots)
            or reply.offset != self._done[index]
        ):
            raise TransferFailed("The server sent a piece that was not due.", path=NAME, cause="order")
        slot = ticket.slots[index]
        start, stop = reply.offset, reply.offset + len(reply.data)
        if stop > slot.size_bytes:
            raise TransferFailed("The server sent more than the object has.", path=NAME, cause="length")
        self._done[index] = stop
        digest = self._digests[index]
        if digest is not None:
            digest.update(reply.data)
        if index in self._errors:
            return
        try:
            self._drain(slot, start, stop, np.frombuffer(reply.data, np.uint8))
        except FAULTS as error:
            self._errors[index] = slot_error(error, NAME, f"Writing the blocks of chunk {slot.chunk_index}")

    def results(self) -> list[SlotResult]:
        return [SlotResult(slot.index, self._error(slot)) for slot in self._ticket.slots]

    def _error(self, slot: Slot) -> KvwireError | None:
        known = self._errors.get(slot.index)
        if known is not None:
            return known
        if self._done[slot.index] != slot.size_bytes:
            text = f"The server sent {self._done[slot.index]} of {slot.size_bytes} bytes."
            return TransferFailed(text, path=NAME, cause="short", chunk_index=slot.chunk_index)
        digest = self._digests[slot.index]
        if digest is not None and digest.digest() != slot.checksum:
            return mismatch(slot.chunk_index, slot.group_index, NAME)
        return None


def _late(slot: Slot) -> TransferTimeout:
    text = f"Chunk {slot.chunk_index} of KV group {slot.group_index} did not move over {NAME} in time."
    return TransferTimeout(text, path=NAME, chunk_index=slot.chunk_index, group_index=slot.group_index)
