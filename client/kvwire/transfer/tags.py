"""UCX tags: 64 bits that name one piece of one lease, once in an incarnation of the server.

    bits 63..56   kind    1 store, 2 retrieve, 3 probe, 4 peer, 5 arrival
    bits 55..24   lease   number of the lease, 1 to 2**32 - 1, never reused in an incarnation
    bits 23..0    piece   index of the message within the lease, from 0

A lease numbers its pieces through: the first slot has pieces 0 to k-1, the second goes on at k. A probe's
lease is the number that the server gave the probe; its piece 0 goes from the server to the client and piece 1
back. Behind the pieces of a store comes the word that all are there, and an arrival answers it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kvwire.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

KIND_SHIFT: Final = 56
LEASE_SHIFT: Final = 24
MAX_LEASE: Final = (1 << 32) - 1
MAX_PIECE: Final = (1 << 24) - 1
LEASE_MASK: Final = ((1 << 64) - 1) ^ MAX_PIECE
"""The bits that two pieces of one lease have in common."""


class Kind(IntEnum):
    """What a message is part of."""

    STORE = 1
    RETRIEVE = 2
    PROBE = 3
    PEER = 4
    ARRIVAL = 5


_KINDS: Final = frozenset(int(kind) for kind in Kind)


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag, taken apart."""

    kind: Kind
    lease: int
    piece: int


def encode(kind: Kind, lease: int, piece: int = 0) -> int:
    """The tag of one piece. Raises InvalidArgument for a number that does not fit its bits."""
    if not 1 <= lease <= MAX_LEASE:
        raise InvalidArgument("lease", f"{lease} is outside 1..{MAX_LEASE}")
    if not 0 <= piece <= MAX_PIECE:
        raise InvalidArgument("piece", f"{piece} is outside 0..{MAX_PIECE}")
    return Kind(kind) << KIND_SHIFT | lease << LEASE_SHIFT | piece


def decode(tag: int) -> Tag:
    """Take a tag apart. Raises InvalidArgument for one that `encode` never makes."""
    kind, lease = tag >> KIND_SHIFT, tag >> LEASE_SHIFT & MAX_LEASE
    if not 0 <= tag < 1 << 64 or kind not in _KINDS or lease == 0:
        raise InvalidArgument("tag", f"{tag:#x} is no tag of this protocol")
    return Tag(Kind(kind), lease, tag & MAX_PIECE)


def lease_prefix(tag: int) -> int:
    """What all tags of this tag's lease have in common."""
    return tag & LEASE_MASK


def lane(tag: int, lanes: int) -> int:
    """The number of the worker that a message goes to and comes from, at a side that has so many.

    Between servers by piece, over all of them. What clients store and retrieve uses the first half, since for
    every thread that copies here a client has one that gathers or scatters.
    """
    used = lanes if tag >> KIND_SHIFT == Kind.PEER else max(1, lanes // 2)
    return (tag & MAX_PIECE) % used


def piece_count(size_bytes: int, piece_bytes: int) -> int:
    """How many pieces an object of this size moves in."""
    return -(-size_bytes // piece_bytes)


def first_tags(kind: Kind, lease: int, sizes: Sequence[int], piece_bytes: int) -> tuple[int, ...]:
    """The first tag of each slot. Raises InvalidArgument when the lease has more pieces than tags."""
    if piece_bytes < 1:
        raise InvalidArgument("piece_bytes", f"{piece_bytes} is no size of a message")
    tags: list[int] = []
    piece = 0
    for size in sizes:
        tags.append(encode(kind, lease, piece))
        piece += piece_count(size, piece_bytes)
    if piece > MAX_PIECE + 1:
        raise InvalidArgument("piece_bytes", f"{piece} pieces are more than the {MAX_PIECE + 1} of a lease")
    return tuple(tags)
