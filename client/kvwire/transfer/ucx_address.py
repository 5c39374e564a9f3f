"""UCX addresses on the wire: xxh3-128 of the rest, then for each worker the length (u16 LE) and the address.

UCX takes what it is given for an address and ends the process when it is none, so bytes that were made up or
damaged must not reach it. This is no protection from somebody who makes up an address on purpose: the UCX
paths are for clients that may be trusted, as TLS and tokens establish.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from kvwire.transfer.checksum import CHECKSUM_BYTES, checksum
from kvwire.transfer.ucx_state import unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

_LENGTH: Final = struct.Struct("<H")
MAX_WORKERS: Final = 64


def sealed(addresses: Sequence[bytes]) -> bytes:
    text = b"".join(_LENGTH.pack(len(address)) + address for address in addresses)
    return checksum(text) + text


def unsealed(text: bytes) -> list[bytes]:
    """Raises DataPathUnavailable."""
    digest, rest = text[:CHECKSUM_BYTES], text[CHECKSUM_BYTES:]
    addresses: list[bytes] = []
    if checksum(rest) == digest:
        while len(rest) > _LENGTH.size and len(addresses) < MAX_WORKERS:
            end = _LENGTH.size + int(_LENGTH.unpack_from(rest)[0])
            addresses.append(rest[_LENGTH.size : end])
            rest = rest[end:]
    if rest or not addresses or not all(addresses):
        raise unavailable("the other side's UCX address is damaged, or none")
    return addresses
