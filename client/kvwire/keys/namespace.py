from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import sha256
from struct import pack
from typing import Final

from kvwire.errors import DigestUnsupported, InvalidArgument

DIGEST_FUNCTION: Final = "sha256"
DIGEST_SIZE: Final = 32
MAX_FIELD_BYTES: Final = 512
MAX_FINGERPRINT_BYTES: Final = 64

_ROOT_DOMAIN = b"kvwire/chunk/v1"
_SALT_DOMAIN = b"kvwire/salt/v1"
_CHUNK_SIZE_FIELD = 8
_DIGEST_FIELD = 9
# Exactly the Unicode category Cc, which can never grow, and what UTF-8 cannot hold.
_ILLEGAL = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal before two engines may share bytes. Text counts as UTF-8, without normalization.

    The salt separates tenants. It goes into the root and nowhere else, so it is missing from repr().
    """

    model: str
    revision: str = ""
    kv_dtype: str = ""
    layout_fingerprint: bytes = b""
    adapter: str = ""
    adapter_revision: str = ""
    salt: str = field(default="", repr=False)

    def validate(self) -> None:
        """Raise InvalidArgument, naming the field and never quoting its value, unless every field is legal.

        Text has at most 512 bytes of UTF-8 without control characters, and `model` at least one byte; the
        layout fingerprint has at most 64 bytes.
        """
        self.encoded_fields()

    def encoded_fields(self) -> tuple[bytes, ...]:
        """The validated fields as bytes, in the order of their numbers 1 to 7."""
        fields = (
            _text("model", self.model),
            _text("revision", self.revision),
            _text("kv_dtype", self.kv_dtype),
            _bounded("layout_fingerprint", self.layout_fingerprint, MAX_FINGERPRINT_BYTES),
            _text("adapter", self.adapter),
            _text("adapter_revision", self.adapter_revision),
            _text("salt", self.salt),
        )
        if not fields[0]:
            raise InvalidArgument("model", "is empty; name the model whose KV this is")
        return fields


def canonical_encoding(namespace: Namespace, chunk_size: int, digest: str = DIGEST_FUNCTION) -> bytes:
    """Number (u32 LE), length (u32 LE) and bytes of each field that is not empty, in order of the numbers.

    Empty fields leave no trace, so a field that is added later keeps the keys of those who do not use it.
    """
    if digest != DIGEST_FUNCTION:
        raise DigestUnsupported(
            f"Digest function {digest!r} is unknown; use {DIGEST_FUNCTION}.", digest=digest
        )
    if not 1 <= chunk_size < 2**32:
        raise InvalidArgument("chunk_size", f"{chunk_size} is not in the range 1 to 2^32-1")
    numbered = [(number, value) for number, value in enumerate(namespace.encoded_fields(), start=1) if value]
    numbered.append((_CHUNK_SIZE_FIELD, pack("<I", chunk_size)))
    numbered.append((_DIGEST_FIELD, digest.encode()))
    return b"".join(pack("<II", number, len(value)) + value for number, value in numbered)


def root(namespace: Namespace, chunk_size: int) -> bytes:
    """The 32 bytes that every key chain of this namespace starts from. Raises as `Namespace.validate`."""
    return sha256(_ROOT_DOMAIN + canonical_encoding(namespace, chunk_size)).digest()


def salt_digest(salt: str) -> str:
    """16 hex characters that stand for a tenant in quotas and listings; empty for the empty salt."""
    raw = _text("salt", salt)
    if not raw:
        return ""
    return sha256(_SALT_DOMAIN + pack("<I", len(raw)) + raw).hexdigest()[:16]


def _text(name: str, value: str) -> bytes:
    if _ILLEGAL.search(value):
        raise InvalidArgument(name, "contains a control character or half a surrogate pair")
    return _bounded(name, value.encode(), MAX_FIELD_BYTES)


def _bounded(name: str, raw: bytes, limit: int) -> bytes:
    if len(raw) > limit:
        raise InvalidArgument(name, f"has {len(raw)} bytes; at most {limit} are allowed")
    return raw
