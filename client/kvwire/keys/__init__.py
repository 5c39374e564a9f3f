"""Chunk sizes and chunk keys, the same in every client and server. Pure: no I/O, no dependencies."""

from __future__ import annotations

from kvwire.keys.alignment import DEFAULT_MAX_CHUNK_SIZE, final_chunk_size, required_alignment
from kvwire.keys.hashing import (
    MAX_EXTRA_DIGEST_BYTES,
    TOKEN_BYTES,
    ChunkHasher,
    ExtraInput,
    Tokens,
    chunk_keys,
    keys_from_block_hashes,
    pack_tokens,
    striding_block_hashes,
)
from kvwire.keys.namespace import (
    DIGEST_FUNCTION,
    DIGEST_SIZE,
    MAX_FIELD_BYTES,
    MAX_FINGERPRINT_BYTES,
    Namespace,
    canonical_encoding,
    root,
    salt_digest,
)

__all__ = [
    "DEFAULT_MAX_CHUNK_SIZE",
    "DIGEST_FUNCTION",
    "DIGEST_SIZE",
    "MAX_EXTRA_DIGEST_BYTES",
    "MAX_FIELD_BYTES",
    "MAX_FINGERPRINT_BYTES",
    "TOKEN_BYTES",
    "ChunkHasher",
    "ExtraInput",
    "Namespace",
    "Tokens",
    "canonical_encoding",
    "chunk_keys",
    "final_chunk_size",
    "keys_from_block_hashes",
    "pack_tokens",
    "required_alignment",
    "root",
    "salt_digest",
    "striding_block_hashes",
]
