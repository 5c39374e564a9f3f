"""UCX worker addresses on the wire: xxh3-128 of the address, then the address.

UCX takes what it is given for an address and ends the process when it is none, so bytes that were made up or
damaged must not reach it. This is no protection from somebody who makes up an address on purpose: the UCX
paths are for clients that may be trusted, as TLS and tokens establish.
"""

from __future__ import annotations

from kvwire.transfer.checksum import CHECKSUM_BYTES, checksum
from kvwire.transfer.ucx_state import unavailable


def sealed(address: bytes) -> bytes:
    return checksum(address) + address


def unsealed(text: bytes) -> bytes:
    """Raises DataPathUnavailable."""
    digest, address = text[:CHECKSUM_BYTES], text[CHECKSUM_BYTES:]
    if not address or checksum(address) != digest:
        raise unavailable("the other side's UCX address is damaged, or none")
    return address
