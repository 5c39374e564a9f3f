"""The data paths against memcpy: what `KvCache` stores and retrieves in shuffled blocks, checked bit by bit.

Rounds are warm: fresh keys each time, in an arena that is full and whose pages have been used before.
Memcpy, store and retrieve of the same bytes take turns, so that whatever else the machine does hits all of
them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli import units
from kvwire.cli.bench import stats
from kvwire.cli.bench.blocks import BLOCK_BYTES, BLOCK_TOKENS, Memory, PagedKv, PlainCopies
from kvwire.cli.bench.processes import BenchError, kvwire_server, work_folder
from kvwire.cli.bench.raw_socket import raw_socket
from kvwire.client import Client
from kvwire.errors import ConfigError, DataPathUnavailable, MissingExtra
from kvwire.transfer.crew import default_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.client import KvCache

MIB: Final = 1 << 20
SIZES: Final = (64 * MIB, 1024 * MIB)
CHUNK_TOKENS: Final = 256
CHUNK_BYTES: Final = CHUNK_TOKENS // BLOCK_TOKENS * BLOCK_BYTES
LET_GO_S: Final = 5.0
PATHS: Final = {"shm": "shm", "ucx-local": "ucx", "ucx-remote": "ucx", "inline": "inline"}
"""The server's name of each path, and what the client is told. ucx-remote goes over TCP on loopback here."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`rounds` by size in bytes; the first `warmup` rounds of each are not counted."""

    paths: Sequence[str] = tuple(PATHS)
    sizes: Sequence[int] = SIZES
    rounds: int = 0
    warmup: int = 3
    memory: Memory = "auto"
    copy_threads: int = 0

    def rounds_of(self, size: int) -> int:
        return self.rounds or (5 if size >= 512 * MIB else 15)

    def check(self) -> None:
        unknown = [path for path in self.paths if path not in PATHS]
        if unknown:
            raise ConfigError(f"--path {unknown[0]}: the paths are {', '.join(PATHS)}.", setting="path")
        odd = [size for size in self.sizes if size < CHUNK_BYTES or size % CHUNK_BYTES]
        if odd:
            told = f"{units.exact_size(odd[0])} is no multiple of a chunk, {units.exact_size(CHUNK_BYTES)}"
            raise ConfigError(f"--size {told}.", setting="size")


@dataclass(slots=True)
class Rounds:
    """Seconds of each counted round. Each operation has the mean of the copies right before and after it."""

    store: list[float] = field(default_factory=list)
    retrieve: list[float] = field(default_factory=list)
    memcpy_store: list[float] = field(default_factory=list)
    memcpy_retrieve: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)

    def report(self, size: int, path: str) -> dict[str, Any]:
        told: dict[str, Any] = {
            "store_vs_memcpy": round(stats.median_ratio(self.memcpy_store, self.store), 3),
            "retrieve_vs_memcpy": round(stats.median_ratio(self.memcpy_retrieve, self.retrieve), 3),
        }
        if self.raw:
            # The slower of the two directions.
            both = [stats.median_ratio(self.raw, each) for each in (self.store, self.retrieve)]
            told["vs_raw_socket"] = round(min(both), 3)
            told["raw_socket_gb_s"] = _gb_s(size, self.raw)
        told |= {
            "store_gb_s": _gb_s(size, self.store),
            "retrieve_gb_s": _gb_s(size, self.retrieve),
            "memcpy_gb_s": _gb_s(size, [*self.memcpy_store, *self.memcpy_retrieve]),
            "verified": True,
            "rounds": len(self.store),
            "path": path,
        }
        return told


def _gb_s(size: int, seconds: Sequence[float]) -> float:
    return round(size / stats.median(seconds) / 1e9, 2)


def run(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """{"paths": {path: {size: report}}}; a path that does not work here has {"skipped": why}."""
    plan.check()
    paths: dict[str, Any] = {}
    for path in plan.paths:
        reports: dict[str, Any] = {}
        for size in plan.sizes:
            title = f"{path}, {units.exact_size(size)}"
            try:
                reports[units.exact_size(size)] = _measure(plan, path, size, title, progress)
            except (DataPathUnavailable, MissingExtra) as error:
                progress(f"{title}: skipped, {error}")
                reports = {"skipped": str(error)}
                break
        paths[path] = reports
    return {"paths": paths, "layout": _layout(), "copy_threads": plan.copy_threads or default_threads()}


def _layout() -> dict[str, Any]:
    return {
        "layers": 32,
        "block_tokens": BLOCK_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "block_bytes": BLOCK_BYTES,
    }


def _measure(plan: Plan, path: str, size: int, title: str, progress: Callable[[str], None]) -> dict[str, Any]:
    progress(f"{title}: starting a server")
    kv = PagedKv(size // BLOCK_BYTES, plan.memory)
    arena = units.exact_size(size + CHUNK_BYTES)
    flags = ["--l1-size", arena, "--watermark", "1", "--chunk-size", str(CHUNK_TOKENS), "--data-paths", path]
    with work_folder() as folder, kvwire_server(folder, flags) as server, Client(server) as client:
        cache = client.register_kv_caches(
            kv.layers,
            model="bench",
            block_size=BLOCK_TOKENS,
            data_path=PATHS[path],
            copy_threads=plan.copy_threads,
        )
        with cache:
            if cache.data_path != path:
                raise BenchError(f"The bytes go by {cache.data_path}, where {path} was asked for.")
            return _rounds(plan, kv, cache, client, title, progress).report(size, cache.data_path)


def _rounds(
    plan: Plan, kv: PagedKv, cache: KvCache, client: Client, title: str, progress: Callable[[str], None]
) -> Rounds:
    rounds = Rounds()
    total = plan.rounds_of(kv.size_bytes)
    with contextlib.ExitStack() as stack, contextlib.closing(PlainCopies(kv)) as copies:
        over_network = cache.data_path == "ucx-remote"
        send = stack.enter_context(raw_socket(kv.size_bytes)) if over_network else None
        for number in range(1 - plan.warmup, total + 1):
            progress(f"{title}: round {number} of {total}" if number > 0 else f"{title}: warming up")
            _round(kv, copies, cache, rounds if number > 0 else Rounds(), send)
            _let_go(client)
    return rounds


def _round(
    kv: PagedKv,
    copies: PlainCopies,
    cache: KvCache,
    rounds: Rounds,
    send: Callable[[memoryview], float] | None,
) -> None:
    """Store and retrieve, each between two plain copies that go the same way."""
    tokens, stored_from, retrieved_into = kv.fresh_tokens(), kv.shuffled(), kv.shuffled()
    kv.load()
    before = copies.into_shared()
    rounds.store.append(_store(kv, cache, tokens, stored_from))
    rounds.memcpy_store.append((before + copies.into_shared()) / 2)
    kv.wipe()
    before = copies.out_of_shared()
    kv.wipe()
    rounds.retrieve.append(_retrieve(kv, cache, tokens, retrieved_into))
    if not kv.is_moved(stored_from, retrieved_into):
        raise BenchError("What came back is not what was stored.")
    rounds.memcpy_retrieve.append((before + copies.out_of_shared()) / 2)
    if send is not None:
        rounds.raw.append(send(kv.bytes()))


def _store(kv: PagedKv, cache: KvCache, tokens: bytes, blocks: list[int]) -> float:
    with cache.session(tokens) as session:
        started = time.perf_counter()
        stored = session.store(blocks)
        seconds = time.perf_counter() - started
    if not stored.ok or stored.stored_bytes != kv.size_bytes:
        raise BenchError(f"{stored.stored_bytes} of {kv.size_bytes} bytes were stored: {stored.error}.")
    return seconds


def _retrieve(kv: PagedKv, cache: KvCache, tokens: bytes, blocks: list[int]) -> float:
    with cache.session(tokens) as session:
        if session.hit_tokens != kv.num_tokens:
            raise BenchError(f"{session.hit_tokens} of {kv.num_tokens} stored tokens were found again.")
        started = time.perf_counter()
        retrieved = session.retrieve(blocks)
        seconds = time.perf_counter() - started
    if not retrieved.ok or retrieved.retrieved_bytes != kv.size_bytes:
        raise BenchError(
            f"{retrieved.retrieved_bytes} of {kv.size_bytes} bytes came back: {retrieved.error}."
        )
    return seconds


def _let_go(client: Client) -> None:
    """Wait until nothing is leased: the next store evicts this round's chunks, as in any full cache."""
    deadline = time.monotonic() + LET_GO_S
    while True:
        leases = client.status().leases
        if not leases.lookup + leases.read + leases.write:
            return
        if time.monotonic() > deadline:
            raise BenchError("The server keeps leases that nobody uses.")
        time.sleep(0.01)
