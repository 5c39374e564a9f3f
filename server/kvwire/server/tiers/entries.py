from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvwire.server.tiers.format import HEADER_BYTES, layout_name

if TYPE_CHECKING:
    from kvwire.server.tiers.format import Manifest


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
    """`objects` has a serial per shard that is there: it tells an object from a later one of the same name.

    `pins` counts who reads it.
    """

    key: bytes
    space: TierSpace
    parent: bytes
    stamp: int
    serial: int = 0
    objects: dict[int, int] = field(default_factory=dict)
    writing: dict[int, Writing] = field(default_factory=dict)
    mask: int = 0
    size: int = 0
    pins: int = 0
    queued: int = 0
    announced: bool = False

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
