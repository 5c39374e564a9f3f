"""How objects are named and laid out in a lower tier. docs/tiers.md has the same for other programs.

    <server>/<root>/<layout>/manifest               what the keys below belong to, as JSON
    <server>/<root>/<layout>/<key>.<shard>          one object: header, then its bytes

All of it is digests in hex (64 characters for root and key, 32 for the server, 16 for the layout): no name
of a model, tenant or server can reach a file name.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import KvwireError
from kvwire.server.layout import KvGroup, KvLayout, ShardMap, layout_digest

if TYPE_CHECKING:
    from kvwire.server.store import Space

MANIFEST: Final = "manifest"
HEADER_BYTES: Final = 64
CHECKSUM_BYTES: Final = 16
MANIFEST_VERSION: Final = 1
MANIFEST_SIZES: Final = (4096, 8192, 16384, 32768)
"""A manifest is filled up with spaces to one of these sizes: who reads one need not look its size up."""

_MAGIC: Final = b"kvwo"
_VERSION: Final = 1
_SEALED: Final = 1
_HEADER: Final = Struct("<4sBBxxQ16s32x")
_SERVER_DOMAIN: Final = b"kvwire/server/v1"
_NAME: Final = re.compile(r"([0-9a-f]{32}/[0-9a-f]{64}/[0-9a-f]{16})/(?:([0-9a-f]{64})\.(\d{1,4})|manifest)")


class BadFormat(ValueError):
    """What is stored is not what this server writes."""


@dataclass(frozen=True, slots=True)
class Header:
    """`size` and `checksum` (xxh3-128) are those of the object; `sealed`: its bytes are encrypted."""

    size: int
    checksum: bytes
    sealed: bool = False

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, _VERSION, _SEALED if self.sealed else 0, self.size, self.checksum)


def read_header(data: bytes | bytearray) -> Header:
    """Raises BadFormat."""
    magic, version, flags, size, checksum = _HEADER.unpack(data)
    if magic != _MAGIC or version != _VERSION or flags & ~_SEALED or any(data[32:]):
        raise BadFormat("no header of a stored object")
    return Header(size, checksum, bool(flags & _SEALED))


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the keys of one folder belong to. `tenant` is a digest of the salt, empty without one."""

    root: bytes
    base_root: bytes
    model: str
    tenant: str
    layout: KvLayout
    chunk_size: int

    @property
    def folder(self) -> str:
        """Below the server's own folder."""
        return f"{self.root.hex()}/{layout_name(self.layout, self.chunk_size)}"

    def shards(self) -> ShardMap:
        return ShardMap(self.layout, self.chunk_size)


@dataclass(frozen=True, slots=True)
class Name:
    """A parsed name. `key` is empty for a manifest."""

    folder: str
    key: bytes = b""
    shard: int = 0

    @property
    def is_manifest(self) -> bool:
        return not self.key


def server_folder(server_id: str) -> str:
    return sha256(_SERVER_DOMAIN + server_id.encode()).hexdigest()[:32]


@lru_cache(maxsize=1024)
def layout_name(layout: KvLayout, chunk_size: int) -> str:
    return layout_digest(layout, chunk_size)[:8].hex()


def object_name(folder: str, key: bytes, shard: int) -> str:
    return f"{folder}/{key.hex()}.{shard}"


def parse_name(name: str) -> Name | None:
    """None for what this server does not write."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    folder, key, shard = match.groups()
    return Name(folder, bytes.fromhex(key), int(shard)) if key else Name(folder)


def manifest_of(space: Space) -> Manifest:
    shards = space.shards
    return Manifest(space.root, space.base_root, space.model, space.tenant, shards.layout, shards.chunk_size)


def write_manifest(manifest: Manifest) -> bytes:
    layout = manifest.layout
    groups = [
        {
            "kind": group.kind,
            "span_tokens": group.span_tokens,
            "window_tokens": group.window_tokens,
            "num_layers": group.num_layers,
            "block_bytes": group.block_bytes,
            "blocks_per_object": group.blocks_per_object,
        }
        for group in layout.groups
    ]
    told = {
        "version": MANIFEST_VERSION,
        "root": manifest.root.hex(),
        "base_root": manifest.base_root.hex(),
        "model": manifest.model,
        "tenant": manifest.tenant,
        "chunk_size": manifest.chunk_size,
        "world_size": layout.world_size,
        "groups": groups,
    }
    data = json.dumps(told, indent=1).encode()
    size = next(size for size in MANIFEST_SIZES if size > len(data))
    return data.ljust(size - 1) + b"\n"


def read_manifest(data: bytes | bytearray, folder: str) -> Manifest:
    """The manifest that was found in `folder`. Raises BadFormat."""
    try:
        told = json.loads(data)
        manifest = _manifest(told)
        manifest.layout.validate(manifest.chunk_size)
    except (ValueError, TypeError, KeyError, KvwireError) as error:
        raise BadFormat("no manifest of this version") from error
    if not folder.endswith(manifest.folder) or len(manifest.base_root) != len(manifest.root):
        raise BadFormat("a manifest of another folder")
    return manifest


def _manifest(told: dict[str, Any]) -> Manifest:
    if told["version"] != MANIFEST_VERSION:
        raise BadFormat("a manifest of another version")
    groups = tuple(KvGroup(**group) for group in told["groups"])
    return Manifest(
        bytes.fromhex(told["root"]),
        bytes.fromhex(told["base_root"]),
        str(told["model"]),
        bytes.fromhex(told["tenant"]).hex(),
        KvLayout(int(told["world_size"]), groups),
        int(told["chunk_size"]),
    )
