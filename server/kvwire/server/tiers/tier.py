"""One lower tier: its index, the storage behind it, and what is done when that fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from kvwire.errors import ConfigError
from kvwire.server.tiers.backends.base import BackendError, Full, NotFound, WrongSize
from kvwire.server.tiers.counters import TierCounters, TierStatus
from kvwire.server.tiers.crypt import OVERHEAD, Damaged, WrongKey
from kvwire.server.tiers.deleting import Deleter
from kvwire.server.tiers.filling import Fill
from kvwire.server.tiers.format import (
    CHECKSUM_BYTES,
    HEADER_BYTES,
    MANIFEST,
    BadFormat,
    Header,
    manifest_of,
    object_name,
    read_header,
    server_folder,
    write_manifest,
)
from kvwire.server.tiers.index import ALREADY, TierIndex
from kvwire.server.tiers.loading import Loader
from kvwire.server.tiers.problems import OPEN, READ, WRITE, Problems
from kvwire.server.tiers.retrying import Backoff, retried
from kvwire.transfer.checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvwire.server.store import Chunk, Space, StoredObject
    from kvwire.server.tiers.backends.base import Backend, Buffer
    from kvwire.server.tiers.crypt import Vault
    from kvwire.server.tiers.entries import IndexListener, TierChunk, TierSpace
    from kvwire.server.tiers.settings import TierSettings
    from kvwire.server.tiers.threads import Threads

log = logging.getLogger("kvwire.server")

WRITE_ATTEMPTS: Final = 4
READ_ATTEMPTS: Final = 3
SPARE: Final = 256
"""More than a header and an encryption add to an object."""
ROOM_S: Final = 10.0
"""How long a write waits until what was deleted to make room for it has gone."""
SEALED_BYTES: Final = OVERHEAD + CHECKSUM_BYTES
"""By how much an encrypted object is longer: its checksum is sealed with it."""
OTHER_KEY: Final = "encrypted with another key than that of --l2-key-file"
CLOSE_S: Final = 1.0
"""How long the end of a run waits for what is to be deleted. It is found by the next run."""
FIRST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 30.0


class ReadFailed(Exception):
    """`damaged`: the bytes are not those that were written; else they could not be had, or not in time."""

    def __init__(self, problem: str, *, damaged: bool = False) -> None:
        super().__init__(problem)
        self.damaged = damaged


class Tier:
    """Lives on the event loop. `ready` once its index is that of the storage; until then it holds nothing."""

    def __init__(
        self,
        settings: TierSettings,
        backend: Backend,
        server_id: str,
        threads: Threads,
        *,
        vault: Vault | None = None,
        listener: IndexListener | None = None,
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.index = TierIndex(settings.size, SEALED_BYTES if vault else 0, listener)
        self.counters = TierCounters()
        self.problems = Problems(settings.name, settings.location)
        self.ready = False
        self.on_ready: Callable[[], None] | None = None
        self._backend = backend
        self._vault = vault
        self._threads = threads
        self._listener = listener
        self._prefix = server_folder(server_id)
        self._deleter = Deleter(self.index, backend, self.problems)
        self._fill = Fill(self.index, settings.size, self.problems)
        self._manifests = asyncio.Lock()
        self._opening: asyncio.Task[None] | None = None

    async def start(self, seconds: float) -> None:
        """Reach the storage and read what it holds; what takes longer goes on in `run`.

        Raises ConfigError, and nothing for a storage that cannot be reached.
        """
        if self._listener is not None:
            # Whoever was told of a former run hears anew what is there.
            self._listener.on_cleared()
        self._opening = asyncio.get_running_loop().create_task(self._open(), name=f"kvwire-open-{self.name}")
        if not (await asyncio.wait((self._opening,), timeout=seconds))[0]:
            self.problems.failed(OPEN, "it has not told yet what it holds")
        elif error := self._opening.exception():
            if not isinstance(error, BackendError):
                raise error
            self.problems.failed(OPEN, error)

    async def run(self) -> None:
        """Open, as often as it takes; then delete what is to be deleted, for ever."""
        backoff = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S)
        opening = self._opening
        while not self.ready:
            try:
                await (opening or self._open())
            except (BackendError, ConfigError) as error:
                self.problems.failed(OPEN, error)
                await asyncio.sleep(backoff.next())
            opening = None
        if self.on_ready is not None:
            self.on_ready()
        await self._deleter.run()

    def has(self, chunk: Chunk, shard: int) -> bool:
        """Whether this object of the memory tier is here too, or is being written."""
        own = self.index.get(chunk.key)
        if own is None or not own.space.shards.same_as(chunk.space.shards):
            return False
        return bool(own.mask >> shard & 1) or shard in own.writing

    async def write(self, stored: StoredObject, data: memoryview) -> bool:
        """Store an object that the memory tier holds meanwhile, and that has its checksum.

        False: it is not there, for a reason that is counted; nothing of it stays.
        """
        if not self.ready or stored.size + SPARE > self._backend.max_size:
            self.counters.skipped_objects += 1
            return False
        try:
            try:
                return await self._write(stored, data)
            except Full as error:
                self._fill.full(error)
                return await self._write(stored, data)
        except BackendError as error:
            self.counters.failed_writes += 1
            self.problems.failed(WRITE, error)
            return False

    async def read(self, chunk: TierChunk, shard: int, into: memoryview, until: float) -> bytes:
        """Fill `into` with an object, compare it, return its checksum. Raises ReadFailed.

        What is damaged or not there any more is dropped, if it is still the object that was read.
        """
        generation = chunk.generation(shard)
        size = chunk.space.sizes[shard]
        try:
            async with asyncio.timeout_at(until):
                digest = await self._read(chunk, shard, into)
        except (NotFound, WrongSize, BadFormat, Damaged, WrongKey) as error:
            raise self._unusable(chunk, shard, generation, error) from error
        except (BackendError, TimeoutError) as error:
            self.counters.failed_reads += 1
            if isinstance(error, BackendError):
                self.problems.failed(READ, error)
            raise ReadFailed(str(error) or "not read in time") from error
        self.counters.read_objects += 1
        self.counters.read_bytes += size
        return digest

    def status(self, queued: int = 0) -> TierStatus:
        index = self.index
        return TierStatus(
            name=self.name,
            location=self.settings.location,
            capacity_bytes=self.settings.size,
            used_bytes=index.used,
            chunks=len(index),
            objects=index.objects,
            store=self.settings.store,
            encrypted=self._vault is not None,
            queued_objects=queued,
            evicted_chunks=index.evicted_chunks,
            problem=self.problems.told,
            counters=self.counters,
        )

    async def close(self) -> None:
        """After everything that reads or writes has ended."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self.ready:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self._deleter.finish()
        self.ready = False
        await self._backend.close()
        if self._vault is not None:
            self._vault.close()

    async def _open(self) -> None:
        await self._backend.open()
        await Loader(self.index, self._backend, self._prefix).load()
        self.ready = True
        self.problems.works(OPEN)
        log.info(
            "L2 %s at %s holds %d chunks, %d bytes",
            self.name,
            self.settings.location,
            len(self.index),
            self.index.kept,
        )

    async def _open_space(self, space: Space) -> TierSpace:
        """The folder of a namespace; its manifest is there before anything else is. Raises BackendError."""
        manifest = manifest_of(space)
        folder = f"{self._prefix}/{manifest.folder}"
        known = self.index.spaces.get(folder)
        if known is not None:
            return known
        async with self._manifests:
            known = self.index.spaces.get(folder)
            if known is not None:
                return known
            name, data = f"{folder}/{MANIFEST}", write_manifest(manifest)
            await self._deleter.gone(name, len(data), ROOM_S)
            try:
                await self._retry(WRITE_ATTEMPTS, partial(self._backend.write, name, [data]))
            except BaseException:
                # What is not known to have failed may be there all the same.
                self.index.doom_stray(name, len(data))
                raise
            return self.index.open_space(folder, manifest, len(data))

    async def _write(self, stored: StoredObject, data: memoryview) -> bool:
        """Raises BackendError when nothing of it is there, or will be once it has been deleted."""
        chunk = stored.chunk
        self._fill.look()
        space = await self._open_space(chunk.space)
        writing = self.index.reserve(space, chunk.key, chunk.parent_key, stored.shard, chunk.stamp)
        if isinstance(writing, str):
            self.counters.skipped_objects += writing != ALREADY
            return writing == ALREADY
        name = object_name(space.folder, chunk.key, stored.shard)
        tried = False
        try:
            await self._deleter.gone(name, 0, ROOM_S)
            parts = await self._parts(space, name, stored.checksum, data)
            tried = True
            await self._retry(WRITE_ATTEMPTS, partial(self._backend.write, name, parts))
        except BaseException:
            self.index.abort(writing, left=tried)
            raise
        self.problems.works(WRITE)
        self.counters.written_objects += 1
        self.counters.written_bytes += writing.size
        return self.index.commit(writing)

    async def _parts(self, space: TierSpace, name: str, digest: bytes, data: memoryview) -> Sequence[Buffer]:
        if self._vault is None:
            return [Header(data.nbytes, digest).pack(), data]
        # Who knows the checksum of what is sealed could tell it from what it guesses.
        header = Header(data.nbytes, bytes(CHECKSUM_BYTES), sealed=True).pack()
        return [header, *await self._vault.seal(_tenant(space), name.encode() + header, [digest, data])]

    async def _read(self, chunk: TierChunk, shard: int, into: memoryview) -> bytes:
        name = object_name(chunk.space.folder, chunk.key, shard)
        header = memoryview(bytearray(HEADER_BYTES))
        payload = into if self._vault is None else np.empty(into.nbytes + SEALED_BYTES, np.uint8).data
        await self._retry(READ_ATTEMPTS, partial(self._backend.read, name, [header, payload]))
        told = read_header(bytes(header))
        if told.size != into.nbytes or told.sealed != (self._vault is not None):
            raise BadFormat("the header is that of another object")
        digest = told.checksum
        if self._vault is not None:
            sealed = memoryview(bytearray(CHECKSUM_BYTES))
            about = name.encode() + bytes(header)
            await self._vault.unseal(_tenant(chunk.space), about, payload, [sealed, into])
            digest = bytes(sealed)
        if await self._threads.run(lambda _: checksum(into)) != digest:
            raise BadFormat("the bytes are not those that were stored")
        self.problems.works(READ)
        return digest

    def _unusable(self, chunk: TierChunk, shard: int, generation: int, error: Exception) -> ReadFailed:
        self.counters.failed_reads += 1
        wrong_key = isinstance(error, WrongKey)
        why = OTHER_KEY if wrong_key else str(error) or "changed, cut or moved"
        if wrong_key:
            self.problems.found(f"holds objects that were {OTHER_KEY}: they are dropped")
        if self.index.drop_object(chunk, shard, generation):
            self.counters.damaged_objects += 1
            if not wrong_key:
                self.problems.dropped(object_name(chunk.space.folder, chunk.key, shard), why)
        return ReadFailed(why, damaged=True)

    async def _retry(self, attempts: int, call: Callable[[], Awaitable[None]]) -> None:
        # While nothing works one attempt tells enough.
        await retried(1 if self.problems.now else attempts, call)


def _tenant(space: TierSpace) -> bytes:
    return bytes.fromhex(space.tenant)
