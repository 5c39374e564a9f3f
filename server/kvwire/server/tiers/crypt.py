"""What is at rest outside this server, unreadable without the key file: AES-256-GCM, a key per tenant.

A sealed payload is 36 bytes longer than what it holds:

    key id (8) | nonce (12) | ciphertext, as long as the plaintext | tag (16)

The tenant's key and the key id come from the content of the key file by HKDF-SHA256, with the tenant's digest
as salt. The nonce is random; the object's name and header are the associated data, so that no object can
stand in for another.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvwire.errors import ConfigError, MissingExtra

from .threads import Threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .backends.base import Buffer
    from .threads import Wanted

ID: Final = 8
NONCE: Final = 12
TAG: Final = 16
OVERHEAD: Final = ID + NONCE + TAG
KEY: Final = 32
PIECE: Final = 1 << 20
THREADS: Final = 2


class WrongKey(Exception):
    """Sealed with another key file, or for another tenant."""


class Damaged(Exception):
    """Not what was sealed under this name: changed, cut or moved."""


@dataclass(frozen=True, slots=True)
class _Keys:
    id: bytes
    key: bytes


class Vault:
    """Seals and unseals payloads off the event loop. The tenant is its digest, never its name."""

    def __init__(self, secret: bytes) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher
        except ImportError as error:
            raise MissingExtra("--l2-key-file", "l2") from error
        self._cipher = Cipher
        self._keys = lru_cache(1024)(lambda tenant: _derive(secret, tenant))
        self._threads = Threads(THREADS, "kvwire-crypt")

    async def seal(self, tenant: bytes, about: bytes, parts: Sequence[Buffer]) -> list[Buffer]:
        """The sealed payload in parts, in memory of their own. `about` is name and header."""
        return await self._threads.run(lambda wanted: self._seal(self._keys(tenant), about, parts, wanted))

    async def unseal(
        self, tenant: bytes, about: bytes, sealed: memoryview, into: Sequence[memoryview]
    ) -> None:
        """The plaintext, into writable parts. Raises WrongKey and Damaged, after which they hold anything."""
        keys = self._keys(tenant)
        if bytes(sealed[:ID]) != keys.id:
            raise WrongKey
        if sealed.nbytes != OVERHEAD + sum(part.nbytes for part in into):
            raise Damaged
        await self._threads.run(lambda wanted: self._unseal(keys, about, sealed, into, wanted))

    def close(self) -> None:
        self._threads.close()

    def _seal(self, keys: _Keys, about: bytes, parts: Sequence[Buffer], wanted: Wanted) -> list[Buffer]:
        nonce = os.urandom(NONCE)
        work = self._gcm(keys, nonce, None).encryptor()
        work.authenticate_additional_data(about)
        views = [memoryview(part).cast("B") for part in parts]
        out = np.empty(sum(view.nbytes for view in views), np.uint8).data
        at = 0
        for view in views:
            at += _turn(work, view, out[at : at + view.nbytes], wanted)
        work.finalize()
        return [keys.id + nonce, out, work.tag]

    def _unseal(
        self, keys: _Keys, about: bytes, sealed: memoryview, into: Sequence[memoryview], wanted: Wanted
    ) -> None:
        from cryptography.exceptions import InvalidTag

        nonce, tag = bytes(sealed[ID : ID + NONCE]), bytes(sealed[-TAG:])
        work = self._gcm(keys, nonce, tag).decryptor()
        work.authenticate_additional_data(about)
        at = ID + NONCE
        for part in into:
            at += _turn(work, sealed[at : at + part.nbytes], part.cast("B"), wanted)
        try:
            work.finalize()
        except InvalidTag as error:
            raise Damaged from error

    def _gcm(self, keys: _Keys, nonce: bytes, tag: bytes | None) -> Any:
        from cryptography.hazmat.primitives.ciphers import algorithms, modes

        return self._cipher(algorithms.AES(keys.key), modes.GCM(nonce, tag))


def read_vault(path: str) -> Vault:
    """The vault of a key file: at least 32 bytes, of which all count. Raises ConfigError and MissingExtra."""
    try:
        secret = Path(path).read_bytes()
        mode = Path(path).stat().st_mode
    except OSError as error:
        raise ConfigError(f"--l2-key-file: {path}: {error.strerror}") from error
    if len(secret) < KEY:
        raise ConfigError(
            f"--l2-key-file: {path} has {len(secret)} bytes, at least {KEY} random ones are needed"
        )
    if stat.S_IMODE(mode) & 0o007:
        raise ConfigError(f"--l2-key-file: everybody can read {path}: chmod o= it")
    return Vault(secret)


def _derive(secret: bytes, tenant: bytes) -> _Keys:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    both = HKDF(SHA256(), ID + KEY, salt=tenant or None, info=b"kvwire l2 v1").derive(secret)
    return _Keys(both[:ID], both[ID:])


def _turn(work: Any, source: memoryview, target: memoryview, wanted: Wanted) -> int:
    for at in range(0, source.nbytes, PIECE):
        wanted.check()
        work.update_into(source[at : at + PIECE], target[at : at + PIECE])
    return source.nbytes
