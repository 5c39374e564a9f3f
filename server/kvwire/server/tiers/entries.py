from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from kvwire.server.tiers.format import HEADER_BYTES, layout_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire.server.tiers.format import Manifest

NOTHING: Final[Mapping[int, Writing]] = MappingProxyType({})


class TierSpace:
    """One namespace with one layout. `sizes` are those of its objects as stored, by shard."""

    __slots__ = ("chunks", "folder", "layout", "manifest", "manifest_bytes", "shards", "sizes", "tenant")

    def __init__(self, folder: str, manifest: Manifest, manifest_bytes: int, overhead: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self.manifest_bytes = manifest_bytes
        self.tenant = manifest.tenant
        self.layout = layout_name(manifest.layout, manifest.chunk_size)
        self.shards = manifest.shards()
        sizes = [size + HEADER_BYTES + overhead for size in self.shards.object_bytes]
        self.sizes = tuple(sizes * manifest.layout.world_size)
        self.chunks = 0


@dataclass(slots=True, eq=False)
class TierChunk:
    """`mask` has the shards that are there, `writing` those that are being written; `pins` counts readers.

    Millions of these may be in memory.
    """

    key: bytes
    space: TierSpace
    parent: bytes
    stamp: int
    serial: int = 0
    mask: int = 0
    size: int = 0
    pins: int = 0
    queued: int = 0
    announced: bool = False
    writing: Mapping[int, Writing] = field(default_factory=lambda: NOTHING)
    # How often the object of a shard was dropped.
    drops: dict[int, int] | None = None

    @property
    def idle(self) -> bool:
        return not self.pins and not self.writing

    @property
    def evictable(self) -> bool:
        return self.size > 0 and self.idle

    @property
    def is_complete(self) -> bool:
        need = self.space.shards.complete_mask
        return self.mask & need == need

    def generation(self, shard: int) -> int:
        """Tells the object of a shard from a later one."""
        return self.drops.get(shard, 0) if self.drops else 0

    def begin(self, writing: Writing) -> None:
        self.writing = {**self.writing, writing.shard: writing}

    def end(self, writing: Writing) -> None:
        left = {shard: each for shard, each in self.writing.items() if shard != writing.shard}
        self.writing = left or NOTHING


@dataclass(slots=True, eq=False)
class Writing:
    """An object that is being written. `cancelled`: it is not wanted any more."""

    chunk: TierChunk = field(repr=False)
    shard: int
    size: int
    cancelled: bool = False


class IndexListener(Protocol):
    """Told about complete chunks only, synchronously."""

    def on_stored(self, chunk: TierChunk) -> None: ...

    def on_removed(self, chunk: TierChunk) -> None: ...

    def on_cleared(self) -> None: ...
