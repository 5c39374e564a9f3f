"""The client's end of the UCX paths: pages are gathered into staging memory and sent from there, and the
other way.

Copying one piece overlaps with the transfer of the ones before it: pieces are few and large, because a
message costs about 100 us whatever its size, and the staging memory is small, so that it stays in the
processor's cache.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from kvwire.errors import DataPathUnavailable, KvwireError
from kvwire.transfer.base import (
    FAULTS,
    PUBLISH_MARGIN_S,
    Mark,
    ReadCheck,
    SlotResult,
    is_complete,
    slot_error,
    threads_of,
    timed_out,
)
from kvwire.transfer.checksum import Checksum
from kvwire.transfer.crew import Begun, crew
from kvwire.transfer.ucx_arrival import Said
from kvwire.transfer.ucx_runs import Moving, Piece, ReadRun, Staging, WriteRun, pieces_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvwire.transfer.base import ByteArray, Drain, Fill, Ticket
    from kvwire.transfer.ucx import Peer, UcxEngine

DEFAULT_PIECE_BYTES: Final = 2 << 20
STAGING_PIECES: Final = 2
AHEAD: Final = {"local": 0, "remote": 1}
"""Pieces that another thread gathers while one is sent. To another host that takes all of a thread's time;
within a host the receiver copies, and the sender has nothing else to do."""
LOCAL_CHECK_SHARE: Final = 1 / 32
MOST_SAID: Final = 64
ANSWER_S: Final = 5.0
"""How long a server may take to commit; one that hangs is found out sooner."""


class _Gathering(NamedTuple):
    piece: Piece
    buffer: ByteArray
    part: ByteArray
    begun: Begun


class UcxPath:
    """One server over one engine. Safe to use from several threads: writes take turns, and so do reads."""

    def __init__(
        self,
        name: str,
        engine: UcxEngine,
        peer: Peer,
        *,
        check_share: float | None = None,
        staging_pieces: int = STAGING_PIECES,
    ) -> None:
        self.name: Final = name
        self._engine = engine
        self._peer = peer
        local = engine.options.kind == "local"
        self._check = ReadCheck((LOCAL_CHECK_SHARE if local else 1.0) if check_share is None else check_share)
        self._said: dict[int, Said] = {}
        self._ahead: Final = AHEAD[engine.options.kind]
        self._out = Staging(staging_pieces + self._ahead)
        self._in = Staging(staging_pieces)

    def write(
        self, ticket: Ticket, fill: Fill, deadline: float, *, with_checksum: bool = False
    ) -> list[SlotResult]:
        self._raise_if_lost()
        with self._out as staging, self._engine.driven():
            run = WriteRun(self.name, ticket, deadline)
            hashes = {slot.index: Checksum() for slot in ticket.slots} if with_checksum else {}
            with contextlib.closing(self._gathered(run, ticket, fill, staging)) as gathered:
                for each in gathered:
                    self._send(run, each, staging, hashes.get(each.piece.slot.index))
            if run.may_be_whole and time.monotonic() + PUBLISH_MARGIN_S < deadline and is_complete(fill):
                # It travels with the last piece: the server waits for both.
                self._say(ticket)
            run.finish(staging)
        results = run.results({index: each.digest() for index, each in hashes.items()})
        if any(result.error for result in results):
            self._forget(ticket)
        return results

    def read(self, ticket: Ticket, drain: Drain, deadline: float) -> list[SlotResult]:
        self._raise_if_lost()
        with self._in as staging, self._engine.driven():
            run = ReadRun(self.name, ticket, deadline, self._check)
            todo = pieces_of(ticket)
            while True:
                while (buffer := staging.take(ticket.piece_bytes)) is not None:
                    piece = next((each for each in todo if not run.is_over(each.slot)), None)
                    if piece is None:
                        staging.give(buffer)
                        break
                    self._expect(run, piece, buffer, staging)
                if not run.moving:
                    break
                run.take_in(drain, staging)
            left_out = any(result.error for result in run.results({}))
        if left_out:
            # The server may still be sending what nobody waits for any more.
            self._engine.discard(ticket.slots[0].first_tag)
        return run.results({})

    def mark(self) -> Mark:
        return Mark(time.monotonic())

    def publish(self, ticket: Ticket, mark: Mark) -> bool:
        """By a message, in good time, and only if the server answers that it has committed."""
        left = mark.asked_at + ticket.seconds - PUBLISH_MARGIN_S - time.monotonic()
        if left <= 0:
            self._forget(ticket)
            return False
        said = self._said.pop(ticket.lease_id, None) or self._say(ticket)
        self._said.pop(ticket.lease_id, None)
        # Asleep: the server's other threads have work, and the answer takes longer than a wake.
        return said is not None and said.wait(min(left, ANSWER_S))

    def _say(self, ticket: Ticket) -> Said | None:
        if not ticket.arrival_word:
            return None
        try:
            said = Said(self._engine, self._peer, ticket.lease_id, ticket.arrival_word)
        except KvwireError:
            return None
        self._said[ticket.lease_id] = said
        if len(self._said) > MOST_SAID:  # an exception elsewhere in their batch: nobody has asked for them
            self._said.pop(next(iter(self._said))).forget()
        return said

    def _forget(self, ticket: Ticket) -> None:
        """It is the server's to be asked by a call then."""
        said = self._said.pop(ticket.lease_id, None)
        if said is not None:
            said.forget()

    def proves(self, ticket: Ticket, mark: Mark) -> bool:
        """A message is whole only if the server held its bytes until the last was taken."""
        return True

    def give_up(self) -> None:
        """The server is gone or hangs, which UCX may never notice: what waits for it fails."""
        self._peer.give_up()

    def close(self) -> None:
        """Let go of the peer. The engine belongs to the process."""
        self._peer.close()

    def _gathered(
        self, run: WriteRun, ticket: Ticket, fill: Fill, staging: Staging
    ) -> Generator[_Gathering, None, None]:
        """The pieces in order, each when the next ones have been begun. To be closed."""
        ahead: deque[_Gathering] = deque()
        most = self._ahead if threads_of(fill) > 1 else 0
        try:
            for piece in pieces_of(ticket):
                if run.is_over(piece.slot):
                    continue
                buffer = run.free_buffer(staging, ticket.piece_bytes)
                if buffer is None:
                    run.fail(piece.slot, timed_out(self.name, piece.slot))
                    continue
                part = buffer[: piece.stop - piece.start]
                job = partial(fill, piece.slot, piece.start, piece.stop, part)
                ahead.append(_Gathering(piece, buffer, part, crew.begin(job) if most else Begun(job)))
                if len(ahead) > most:
                    yield ahead.popleft()
            while ahead:
                yield ahead.popleft()
        finally:
            for each in ahead:
                each.begun.drop()
                staging.give(each.buffer)

    def _send(self, run: WriteRun, gathering: _Gathering, staging: Staging, digest: Checksum | None) -> None:
        piece, buffer, part, begun = gathering
        if run.is_over(piece.slot):
            begun.drop()
            staging.give(buffer)
            return
        try:
            begun.finish()
            if digest is not None:
                digest.update(part)
            op = self._peer.send(piece.tag, part)
        except FAULTS as error:
            staging.give(buffer)
            run.fail(piece.slot, slot_error(error, self.name, f"Sending chunk {piece.slot.chunk_index}"))
            return
        run.moving.append(Moving(piece, buffer, op))

    def _expect(self, run: ReadRun, piece: Piece, buffer: ByteArray, staging: Staging) -> None:
        try:
            op = self._engine.recv(piece.tag, buffer[: piece.stop - piece.start], self._peer)
        except FAULTS as error:
            staging.give(buffer)
            run.fail(piece.slot, slot_error(error, self.name, f"Receiving chunk {piece.slot.chunk_index}"))
            return
        run.moving.append(Moving(piece, buffer, op))

    def _raise_if_lost(self) -> None:
        if self._peer.lost:
            raise DataPathUnavailable(
                f"The data path {self.name} is lost: {self._peer.lost}.",
                path=self.name,
                cause=self._peer.lost,
            )
