"""The index of what a former run has left, from names and sizes alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvwire.server.tiers.backends.base import NotFound, WrongSize
from kvwire.server.tiers.format import MANIFEST, MANIFEST_SIZES, BadFormat, parse_name, read_manifest

if TYPE_CHECKING:
    from kvwire.server.tiers.backends.base import Backend, Entry
    from kvwire.server.tiers.entries import TierSpace
    from kvwire.server.tiers.format import Name
    from kvwire.server.tiers.index import TierIndex

log = logging.getLogger("kvwire.server")

_SHOWN: Final = 3


class Loader:
    """What cannot be of use is doomed: sizes that do not fit, objects without a manifest."""

    def __init__(self, index: TierIndex, backend: Backend, prefix: str) -> None:
        self._index = index
        self._backend = backend
        self._prefix = prefix
        self._spaces: dict[str, TierSpace | None] = {}
        self._strangers: list[str] = []
        self._strange = 0
        self._dropped = 0

    async def load(self) -> None:
        """Raises BackendError. May be called again after it has."""
        async for page in self._backend.list(f"{self._prefix}/"):
            for entry in page:
                await self._take(entry)
        self._index.close_empty_spaces()
        self._index.shrink()
        if self._dropped:
            log.warning("L2: %d stored objects of no use are deleted", self._dropped)
        if self._strange:
            names = ", ".join(self._strangers)
            log.warning("L2: %d values of others are left alone: %s", self._strange, names)

    async def _take(self, entry: Entry) -> None:
        name = parse_name(entry.name)
        if name is None:
            self._strange += 1
            if len(self._strangers) < _SHOWN:
                self._strangers.append(entry.name)
            return
        if name.folder not in self._spaces:
            self._spaces[name.folder] = await self._open(name.folder)
        space = self._spaces[name.folder]
        if space is not None and (name.is_manifest or self._found(space, name, entry)):
            return
        self._dropped += 1
        self._index.doom_stray(entry.name, entry.size)

    def _found(self, space: TierSpace, name: Name, entry: Entry) -> bool:
        return self._index.found(space, name.key, name.shard, entry.size)

    async def _open(self, folder: str) -> TierSpace | None:
        name = f"{folder}/{MANIFEST}"
        for size in MANIFEST_SIZES:
            data = bytearray(size)
            try:
                await self._backend.read(name, [memoryview(data)])
                return self._index.open_space(folder, read_manifest(data, folder), size)
            except WrongSize:
                continue
            except (NotFound, BadFormat) as error:
                log.warning("L2: no manifest at %s: %s", name, error)
                return None
        log.warning("L2: no manifest at %s: it has a size that no manifest has", name)
        return None
