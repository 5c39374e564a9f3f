"""What a server writes to a lower tier and brings back from it, against copying the same bytes file to file.

A client stores a prompt; the server writes it below its memory by itself; the memory is cleared, and a lookup
brings the prompt back, is timed, and every byte is compared. A real server process does it, so the times have
in them all that a user waits for: checksums, index, files or requests, and the place in memory.

Files are in the page cache on both sides, and nothing is synced on either: it is the software that is
compared, not a disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from kvwire.cli import units
from kvwire.cli.bench import stats
from kvwire.cli.bench.blocks import BLOCK_BYTES, BLOCK_TOKENS, Memory, PagedKv
from kvwire.cli.bench.processes import BenchError, kvwire_server, work_folder
from kvwire.cli.bench.transfer import CHUNK_BYTES, CHUNK_TOKENS
from kvwire.client import Client
from kvwire.errors import ConfigError
from kvwire.v1 import admin_service_pb2 as admin_pb
from kvwire.v1 import admin_service_pb2_grpc, event_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvwire.client import KvCache, Session

MIB: Final = 1 << 20
SIZES: Final = (256 * MIB, 1024 * MIB)
PATIENCE_S: Final = 120.0
PAUSE_S: Final = 0.25
"""The server writes to lower tiers when no client has moved bytes for so long. It is no part of the time."""

DEADLINES: Final = {"Lookup": PATIENCE_S}
FOLDER: Final = "folder"
ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """`urls` are stores as in --l2, measured after the folder; the first `warmup` rounds are not counted."""

    sizes: Sequence[int] = SIZES
    urls: Sequence[str] = ()
    folder: str = ""
    key_file: str = ""
    rounds: int = 0
    warmup: int = 2
    memory: Memory = "auto"

    def rounds_of(self, size: int) -> int:
        return self.rounds or (5 if size >= 512 * MIB else 9)

    def check(self) -> None:
        odd = [size for size in self.sizes if size < 2 * CHUNK_BYTES or size % CHUNK_BYTES]
        if odd:
            told = f"{units.exact_size(odd[0])} is not two or more chunks of {units.exact_size(CHUNK_BYTES)}"
            raise ConfigError(f"--size {told}.", setting="size")
        if self.folder and not Path(self.folder).is_dir():
            raise ConfigError(f"--folder {self.folder}: there is no such folder.", setting="folder")


@dataclass(slots=True)
class Rounds:
    """Seconds of each counted round; each copy is the mean of those right before and after."""

    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    copy_write: list[float] = field(default_factory=list)
    copy_read: list[float] = field(default_factory=list)

    def report(self, size: int) -> dict[str, Any]:
        return {
            "write_vs_file_copy": round(stats.median_ratio(self.copy_write, self.write), 3),
            "read_vs_file_copy": round(stats.median_ratio(self.copy_read, self.read), 3),
            "write_gb_s": _gb_s(size, self.write),
            "read_gb_s": _gb_s(size, self.read),
            "file_copy_gb_s": _gb_s(size, [*self.copy_write, *self.copy_read]),
            "read_ms": round(stats.median(self.read) * 1e3, 2),
            "verified": True,
            "rounds": len(self.read),
        }


def _gb_s(size: int, seconds: Sequence[float]) -> float:
    return round(size / stats.median(seconds) / 1e9, 3)


def run(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """{"stores": {store: {size: report}}}, and the worst ratios of the folder."""
    plan.check()
    stores = {
        name: {
            units.exact_size(size): _measure(plan, url, size, f"{name}, {units.exact_size(size)}", progress)
            for size in plan.sizes
        }
        for name, url in _named(plan.urls)
    }
    local = list(stores[FOLDER].values())
    worst = {name: min(each[name] for each in local) for name in ("write_vs_file_copy", "read_vs_file_copy")}
    return {**worst, "encrypted": bool(plan.key_file), "stores": stores}


def _named(urls: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield FOLDER, ""
    for url in urls:
        yield url.partition("?")[0], url


def _measure(plan: Plan, url: str, size: int, title: str, progress: Callable[[str], None]) -> dict[str, Any]:
    progress(f"{title}: starting a server")
    kv = PagedKv(size // BLOCK_BYTES, plan.memory)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        files = stack.enter_context(_files(plan.folder, folder))
        flags = _flags(
            url or f"file://{files / 'tier'}?size={units.exact_size(2 * size)}", size, plan.key_file
        )
        address = stack.enter_context(kvwire_server(folder, flags))
        client = stack.enter_context(Client(address, client_name="kvwire bench", deadlines=DEADLINES))
        cache = stack.enter_context(
            client.register_kv_caches(kv.layers, model="bench", block_size=BLOCK_TOKENS, data_path="shm")
        )
        copies = stack.enter_context(FileCopies(files, kv))
        bench = _Bench(kv, client, cache, copies, None if url else files / "tier")
        rounds, total = Rounds(), plan.rounds_of(size)
        for number in range(1 - plan.warmup, total + 1):
            progress(f"{title}: round {number} of {total}" if number > 0 else f"{title}: warming up")
            bench.good_round(rounds if number > 0 else Rounds())
        return rounds.report(size)


def _flags(url: str, size: int, key_file: str) -> list[str]:
    flags = ["--l1-size", units.exact_size(size + size // 2), "--watermark", "1", "--l2", url]
    flags += [
        "--chunk-size",
        str(CHUNK_TOKENS),
        "--data-paths",
        "shm",
        "--prefetch-deadline",
        str(PATIENCE_S),
    ]
    return [*flags, "--server-id", "bench", *(("--l2-key-file", key_file) if key_file else ())]


@contextlib.contextmanager
def _files(asked: str, otherwise: Path) -> Iterator[Path]:
    """A folder of its own for tier and copies, on one file system."""
    base = Path(asked) / f"kvwire-bench-{os.getpid()}" if asked else otherwise / "files"
    base.mkdir()
    try:
        yield base
    finally:
        shutil.rmtree(base, ignore_errors=True)


class FileCopies:
    """The yardstick: a file for every object, with the same bytes, copied to new ones by one thread."""

    def __init__(self, folder: Path, kv: PagedKv) -> None:
        self._sources = folder / "sources"
        self._targets = folder / "targets"
        self._bytes = kv.bytes()

    def __enter__(self) -> Self:
        for made in (self._sources, self._targets):
            made.mkdir()
        for start in range(0, len(self._bytes), CHUNK_BYTES):
            with (self._sources / str(start)).open("wb") as file:
                file.write(self._bytes[start : start + CHUNK_BYTES])
                os.fsync(file)  # or the kernel would slow down writers for it, sooner or later
        return self

    def __exit__(self, *_: object) -> None:
        for made in (self._sources, self._targets):
            shutil.rmtree(made, ignore_errors=True)

    def seconds(self) -> float:
        """Of one copy of everything. It takes the memory that the last one has left."""
        pairs = [(source, self._targets / source.name) for source in self._sources.iterdir()]
        self.let_go()
        started = time.perf_counter()
        for source, target in pairs:
            shutil.copyfile(source, target)
        return time.perf_counter() - started

    def let_go(self) -> None:
        """The memory of what was copied is free: that which nobody has used for a while can be slower."""
        for target in self._targets.iterdir():
            target.unlink()


class _Early(Exception):
    """The write began before the store had ended, nobody knows when."""


class _Bench:
    def __init__(
        self, kv: PagedKv, client: Client, cache: KvCache, copies: FileCopies, folder: Path | None
    ) -> None:
        self._kv, self._client, self._cache, self._copies, self._folder = kv, client, cache, copies, folder
        self._objects = kv.size_bytes // CHUNK_BYTES
        self._admin: Any = admin_service_pb2_grpc.AdminServiceStub(client.channel())

    def good_round(self, rounds: Rounds) -> None:
        """One whose write began after its store: the server does not wait for a pause for ever."""
        for _ in range(ATTEMPTS):
            with contextlib.suppress(_Early):
                return self._round(rounds)
            self._clear(event_pb2.STORAGE_TIER_UNSPECIFIED)
        raise BenchError(
            "The server writes to its lower tier while a client stores: the machine is too busy."
        )

    def _round(self, rounds: Rounds) -> None:
        kv = self._kv
        tokens, stored_from, retrieved_into = kv.fresh_tokens(), kv.shuffled(), kv.shuffled()
        kv.load()
        before = self._copies.seconds()
        wrote = self._write(tokens, stored_from)
        between = self._copies.seconds()
        self._clear(event_pb2.STORAGE_TIER_L1)
        kv.wipe()
        started = time.perf_counter()
        session = self._cache.session(tokens)
        rounds.read.append(time.perf_counter() - started)
        with session:
            self._check(session, stored_from, retrieved_into)
        after = self._copies.seconds()
        rounds.write.append(wrote)
        rounds.copy_write.append((before + between) / 2)
        rounds.copy_read.append((between + after) / 2)
        self._settle()
        self._clear(event_pb2.STORAGE_TIER_UNSPECIFIED)

    def _write(self, tokens: bytes, blocks: list[int]) -> float:
        """Seconds from the first written byte, or from the pause before it, to the last."""
        before = self._tier().written_objects
        known = _names(self._folder)
        with self._cache.session(tokens) as session:
            stored = session.store(blocks)
        ended = time.time()
        self._copies.let_go()
        if not stored.ok or stored.stored_bytes != self._kv.size_bytes:
            raise BenchError(
                f"{stored.stored_bytes} of {self._kv.size_bytes} bytes were stored: {stored.error}."
            )
        begun = ended + PAUSE_S if self._folder is None else _first_write(self._folder, known)
        done = self._written(before + self._objects)
        if begun < ended:
            raise _Early
        return (done if self._folder is None else _last_write(self._folder)) - begun

    def _written(self, objects: int) -> float:
        """When so many objects were written."""
        until = time.monotonic() + PATIENCE_S
        while (tier := self._tier()).written_objects < objects:
            if tier.failed_writes or tier.skipped_objects or time.monotonic() > until:
                raise BenchError(f"Not all of it was written to the tier: {tier.problem or tier}.")
            time.sleep(0.02)
        return time.time()

    def _check(self, session: Session, stored_from: list[int], blocks: list[int]) -> None:
        if session.hit_tokens != self._kv.num_tokens:
            raise BenchError(
                f"{session.hit_tokens} of {self._kv.num_tokens} tokens came from the tier: {self._tier()}."
            )
        retrieved = session.retrieve(blocks)
        if not retrieved.ok or not self._kv.is_moved(stored_from, blocks):
            raise BenchError(f"What came back is not what was stored: {retrieved.error}.")

    def _tier(self) -> admin_pb.TierStatus:
        return self._client.status().tiers[0]

    def _clear(self, tier: event_pb2.StorageTier.ValueType) -> None:
        self._settle()
        self._admin.Clear(admin_pb.ClearRequest(tier=tier), timeout=PATIENCE_S)

    def _settle(self) -> None:
        """Until nothing is leased."""
        until = time.monotonic() + PATIENCE_S
        while True:
            leases = self._client.status().leases
            if not leases.lookup + leases.read + leases.write:
                return
            if time.monotonic() > until:
                raise BenchError("The server keeps leases that nobody uses.")
            time.sleep(0.01)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """All files below; what comes and goes meanwhile may be missing."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))
            else:
                yield entry


def _names(folder: Path | None) -> set[str]:
    return {entry.path for entry in _entries(folder)} if folder else set()


def _first_write(folder: Path, known: set[str]) -> float:
    """When the first new file came; 0 when there is one already."""
    if not _names(folder) <= known:
        return 0
    until = time.time() + PATIENCE_S
    while time.time() < until:
        if not _names(folder) <= known:
            return time.time()
        time.sleep(0.0002)
    raise BenchError("The server writes nothing to its lower tier.")


def _last_write(folder: Path) -> float:
    return max(entry.stat().st_mtime for entry in _entries(folder))
