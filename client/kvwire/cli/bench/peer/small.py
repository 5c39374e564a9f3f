"""Many prompts of a small layout: what asking costs shows, and the bytes hardly do."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from kvwire.cli.bench.peer.fleet import Fleet, Server, fleet
from kvwire.cli.bench.processes import BenchError, work_folder
from kvwire.client.calls import namespace_message

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.cli.bench.peer.plan import Plan
    from kvwire.client import KvCache
    from kvwire.v1.namespace_pb2 import Namespace

LAYERS: Final = 4
PAGE_BYTES: Final = 4096
BLOCK_TOKENS: Final = 16
CHUNK_TOKENS: Final = 64
BLOCKS_PER_CHUNK: Final = CHUNK_TOKENS // BLOCK_TOKENS
CHUNK_BYTES: Final = BLOCKS_PER_CHUNK * LAYERS * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Prompt:
    """Its KV is noise that follows from `seed`."""

    seed: int
    tokens: bytes


class Small:
    """Two servers, and a client of each with the same blocks."""

    def __init__(self, running: Fleet, chunks: int) -> None:
        self.running, self.chunks = running, chunks
        self._blocks = np.zeros((LAYERS, chunks * BLOCKS_PER_CHUNK, PAGE_BYTES), np.uint8)
        self._random = np.random.default_rng(5)
        self._seeds = iter(range(1 << 30))
        self._at: dict[str, KvCache] = {}

    def __enter__(self) -> Self:
        for server in (self.running.a, self.running.b):
            self.register(server)
        self.running.acquainted()
        return self

    def __exit__(self, *_: object) -> None:
        for cache in self._at.values():
            cache.close()

    @property
    def namespace(self) -> Namespace:
        return namespace_message(self._at["b"].spec.namespace)

    @property
    def size_bytes(self) -> int:
        """Of one prompt."""
        return int(self._blocks.nbytes)

    def register(self, server: Server) -> None:
        """A client of it."""
        self._at[server.server_id] = server.client.register_kv_caches(
            list(self._blocks), model="small", block_size=BLOCK_TOKENS, data_path="shm"
        )

    def leave(self, server: Server) -> None:
        """Its client goes before it does."""
        self._at.pop(server.server_id).close()

    def prompt(self) -> Prompt:
        tokens = self._random.integers(0, 128_000, self.chunks * CHUNK_TOKENS, np.uint32)
        return Prompt(next(self._seeds), tokens.tobytes())

    def store(self, prompt: Prompt) -> None:
        """At a."""
        self._blocks[:] = self._noise(prompt)
        with self._at["a"].session(prompt.tokens) as session:
            stored = session.store(self._table)
        if not stored.ok or stored.stored_bytes != self.size_bytes:
            raise BenchError(f"A prompt was not stored: {stored.error}.")

    def stored(self, count: int) -> list[Prompt]:
        """So many, and the directory knows of all."""
        prompts = [self.prompt() for _ in range(count)]
        for each in prompts:
            self.store(each)
        for each in prompts:
            self.running.located(self.namespace, each.tokens, self.chunks)
        return prompts

    def look_up(self, prompt: Prompt) -> tuple[float, int]:
        """At b: seconds, and the chunks that were found, every byte of which is compared."""
        started = time.perf_counter()
        session = self._at["b"].session(prompt.tokens)
        seconds = time.perf_counter() - started
        with session:
            if session.hit_chunks:
                self._blocks.fill(0)
                got = session.retrieve(self._table)
                held = slice(0, session.hit_chunks * BLOCKS_PER_CHUNK)
                if not got.ok or not np.array_equal(self._blocks[:, held], self._noise(prompt)[:, held]):
                    raise BenchError(f"What came back is not what was stored: {got.error}.")
        return seconds, session.hit_chunks

    @property
    def _table(self) -> list[int]:
        return list(range(self._blocks.shape[1]))

    def _noise(self, prompt: Prompt) -> Any:
        return np.random.default_rng(prompt.seed).integers(0, 256, self._blocks.shape, np.uint8)


@contextlib.contextmanager
def small(plan: Plan, prompts: int) -> Iterator[Small]:
    """With room for so many prompts at each server."""
    size = (prompts + 16) * plan.lookup_chunks * CHUNK_BYTES
    flags = ("--l1-size", str(max(size, 64 << 20)), "--chunk-size", str(CHUNK_TOKENS))
    with (
        work_folder() as folder,
        fleet(folder, flags) as running,
        Small(running, plan.lookup_chunks) as found,
    ):
        yield found
