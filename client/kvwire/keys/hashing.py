from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from operator import index
from struct import pack
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvwire.errors import InvalidArgument, TokensInvalid
from kvwire.keys.namespace import DIGEST_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

TOKEN_BYTES: Final = 4
MAX_EXTRA_DIGEST_BYTES: Final = 512

_BLOCK_HASH_DOMAIN = b"kvwire/blockhash/v1"
_MAX_POSITION = 2**63 - 1

Tokens: TypeAlias = "Iterable[int]"
"""Token ids: packed bytes (little-endian uint32), a buffer or tensor of integers, or any iterable of ints."""


@dataclass(frozen=True, slots=True)
class ExtraInput:
    """An input that token ids do not tell apart (an image, an audio clip, prompt embeddings).

    `digest` names the content; `start` and `length` say which tokens of the whole prompt stand for it.
    """

    digest: bytes
    start: int
    length: int

    def __post_init__(self) -> None:
        size = len(self.digest)
        if not 1 <= size <= MAX_EXTRA_DIGEST_BYTES:
            raise InvalidArgument("digest", f"has {size} bytes; 1 to {MAX_EXTRA_DIGEST_BYTES} are allowed")
        if self.start < 0:
            raise InvalidArgument("start", f"{self.start} is not a token position")
        if not 1 <= self.length <= _MAX_POSITION - self.start:
            raise InvalidArgument("length", f"{self.length} tokens from {self.start} on are not a range")

    def encode(self, chunk_start: int) -> bytes:
        """What the key of a chunk that begins at token `chunk_start` takes from this input."""
        head = pack("<I", len(self.digest)) + self.digest
        return head + pack("<qQ", self.start - chunk_start, self.length)


def pack_tokens(tokens: Tokens) -> bytes:
    """Token ids as little-endian uint32; bytes are taken as packed already.

    Raises TokensInvalid naming the first position whose value is no integer (a bool is none) or no uint32.
    """
    return bytes(_packed(tokens))


def chunk_keys(
    root: bytes,
    tokens: Tokens,
    chunk_size: int,
    extras: Iterable[ExtraInput] = (),
    *,
    start_key: bytes | None = None,
    first_chunk: int = 0,
) -> list[bytes]:
    """The 32-byte key of every whole chunk of `tokens`; a partial chunk at the end has no key.

    To continue a chain, `tokens` begin at chunk `first_chunk`, `start_key` is the key of the chunk before.
    `extras` keep their positions in the whole prompt; those outside these chunks do not matter.
    """
    packed = _packed(tokens)
    key = _chain_start(root, start_key, first_chunk)
    step = _chunk_bytes(chunk_size)
    count = len(packed) // step
    extra = _extra_by_chunk(extras, chunk_size, range(first_chunk, first_chunk + count))
    if extra:
        return _keys_with_extra(key, packed, step, range(first_chunk, first_chunk + count), extra)
    keys: list[bytes] = []
    for offset in range(0, count * step, step):
        digest = sha256(key)
        digest.update(packed[offset : offset + step])
        key = digest.digest()
        keys.append(key)
    return keys


class ChunkHasher:
    """The key chain of a prompt that grows. `append` takes everything, or raises and changes nothing."""

    __slots__ = ("_chunk_size", "_extras", "_keys", "_root", "_tail")

    def __init__(self, root: bytes, chunk_size: int) -> None:
        _chain_start(root, None, 0)
        _chunk_bytes(chunk_size)
        self._root = root
        self._chunk_size = chunk_size
        self._keys: list[bytes] = []
        self._tail = b""
        self._extras: list[ExtraInput] = []

    @property
    def keys(self) -> Sequence[bytes]:
        """Keys of all whole chunks so far. Not to be changed by the caller."""
        return self._keys

    @property
    def num_tokens(self) -> int:
        return len(self._keys) * self._chunk_size + len(self._tail) // TOKEN_BYTES

    def append(self, tokens: Tokens, extras: Iterable[ExtraInput] = ()) -> list[bytes]:
        """Add tokens, and inputs that start after the last whole chunk; returns the keys of new chunks."""
        keyed = len(self._keys) * self._chunk_size
        added = list(extras)
        if any(extra.start < keyed for extra in added):
            raise InvalidArgument(
                "extras", f"an input starts before token {keyed}, in a chunk that is keyed already"
            )
        pending = [*self._extras, *added]
        packed = b"".join((self._tail, _packed(tokens)))
        start_key = self._keys[-1] if self._keys else None
        new = chunk_keys(
            self._root, packed, self._chunk_size, pending, start_key=start_key, first_chunk=len(self._keys)
        )
        self._keys += new
        self._tail = packed[len(new) * self._chunk_size * TOKEN_BYTES :]
        keyed = len(self._keys) * self._chunk_size
        self._extras = [extra for extra in pending if extra.start + extra.length > keyed]
        return new


def keys_from_block_hashes(root: bytes, hashes: Iterable[bytes]) -> list[bytes]:
    """Keys of chunks that the engine names by its own chained hashes: per chunk, its last block's hash."""
    prefix = _BLOCK_HASH_DOMAIN + _chain_start(root, None, 0)
    keys: list[bytes] = []
    for position, block_hash in enumerate(hashes):
        if not block_hash:
            raise InvalidArgument("block_hashes", f"the hash at position {position} is empty")
        keys.append(sha256(b"".join((prefix, pack("<I", len(block_hash)), block_hash))).digest())
    return keys


def striding_block_hashes(block_hashes: Iterable[bytes], blocks_in_chunk: int) -> Iterator[bytes]:
    """The last block hash of every whole chunk. Hashes are chained, so it stands for all blocks before it."""
    if blocks_in_chunk < 1:
        raise InvalidArgument("blocks_in_chunk", f"a chunk cannot have {blocks_in_chunk} blocks")
    return islice(block_hashes, blocks_in_chunk - 1, None, blocks_in_chunk)


def _keys_with_extra(
    key: bytes, packed: memoryview, step: int, chunks: range, extra: Mapping[int, bytearray]
) -> list[bytes]:
    keys: list[bytes] = []
    for position, chunk in enumerate(chunks):
        tokens = packed[position * step : (position + 1) * step]
        key = sha256(b"".join((key, tokens, extra.get(chunk, b"")))).digest()
        keys.append(key)
    return keys


def _extra_by_chunk(extras: Iterable[ExtraInput], chunk_size: int, chunks: range) -> Mapping[int, bytearray]:
    encoded: defaultdict[int, bytearray] = defaultdict(bytearray)
    for extra in sorted(extras, key=lambda extra: (extra.start, extra.digest, extra.length)):
        first = max(extra.start // chunk_size, chunks.start)
        last = min((extra.start + extra.length - 1) // chunk_size, chunks.stop - 1)
        for chunk in range(first, last + 1):
            encoded[chunk] += extra.encode(chunk * chunk_size)
    return encoded


def _chain_start(root: bytes, start_key: bytes | None, first_chunk: int) -> bytes:
    if len(root) != DIGEST_SIZE:
        raise InvalidArgument("root", f"has {len(root)} bytes instead of {DIGEST_SIZE}")
    if first_chunk < 0 or (start_key is None) != (first_chunk == 0):
        raise InvalidArgument("first_chunk", "must be positive with a start key, and 0 without one")
    if start_key is None:
        return root
    if len(start_key) != DIGEST_SIZE:
        raise InvalidArgument("start_key", f"has {len(start_key)} bytes instead of {DIGEST_SIZE}")
    return start_key


def _chunk_bytes(chunk_size: int) -> int:
    if chunk_size < 1:
        raise InvalidArgument("chunk_size", f"{chunk_size} is not a chunk size: it must be at least 1 token")
    return chunk_size * TOKEN_BYTES


def _packed(tokens: Tokens) -> memoryview:
    view = _flat_buffer(tokens)
    if view is not None and view.format == "B":
        if view.nbytes % TOKEN_BYTES:
            raise TokensInvalid(
                f"Packed tokens have {view.nbytes} bytes, no multiple of {TOKEN_BYTES}.", length=view.nbytes
            )
        return view if view.c_contiguous else memoryview(view.tobytes())
    if view is not None and _is_uint32(view):
        return view.cast("B")
    return memoryview(_pack_ids(tokens))


def _flat_buffer(tokens: Any) -> memoryview | None:
    try:
        view = memoryview(tokens)
    except (TypeError, ValueError):
        return None
    return view if view.ndim == 1 else None


def _is_uint32(view: memoryview) -> bool:
    native = view.format in {"I", "L"} and view.itemsize == TOKEN_BYTES and sys.byteorder == "little"
    # An empty view cannot be cast.
    return native and view.c_contiguous and view.nbytes > 0


def _pack_ids(tokens: Any) -> bytes:
    # Arrays and tensors turn into Python ints at once this way, not one scalar at a time.
    tolist = getattr(tokens, "tolist", None)
    ids = list(tokens) if tolist is None else tolist()
    if not isinstance(ids, list):
        raise TokensInvalid("Tokens must be a flat sequence of integers.")
    try:
        packed = array("I", ids)
    except (TypeError, ValueError, OverflowError):
        raise _first_bad_token(ids) from None
    # An array takes True for 1, but a prompt of bools is a mask by mistake.
    if bool in set(map(type, ids)):
        raise _first_bad_token(ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _first_bad_token(ids: list[Any]) -> TokensInvalid:
    for position, token in enumerate(ids):
        if not _is_token(token):
            what = (
                "outside 0 to 2^32-1" if type(token) is int else f"a {type(token).__name__}, not an integer"
            )
            return TokensInvalid(f"The token at position {position} is {what}.", position=position)
    return TokensInvalid("Tokens must be integers from 0 to 2^32-1.")


def _is_token(token: Any) -> bool:
    try:
        return not isinstance(token, bool) and 0 <= index(token) < 2**32
    except TypeError:
        return False
