"""What one server fetches out of another's memory, against memcpy and a raw socket, compared bit by bit.

A client stores a prompt at server a; a lookup at server b brings it there, and that is timed; a client of b
retrieves it, and every byte is compared. Every round has a fresh prompt, in arenas that are full.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvwire.cli import units
from kvwire.cli.bench import stats
from kvwire.cli.bench.blocks import BLOCK_BYTES, BLOCK_TOKENS, PagedKv, PlainCopies
from kvwire.cli.bench.peer.fleet import Counts, Fleet, fleet
from kvwire.cli.bench.peer.lifesigns import LifeSigns
from kvwire.cli.bench.peer.plan import PRIVATE, SHARED
from kvwire.cli.bench.processes import BenchError, work_folder
from kvwire.cli.bench.raw_socket import raw_socket
from kvwire.cli.bench.transfer import CHUNK_BYTES, CHUNK_TOKENS
from kvwire.client.calls import namespace_message
from kvwire.errors import DataPathUnavailable, MissingExtra
from kvwire.v1 import transfer_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.cli.bench.peer.lifesigns import Span
    from kvwire.cli.bench.peer.plan import Plan
    from kvwire.client import KvCache, Session

SMALL_BYTES: Final = 256 << 20
"""Up to here an arena has four times the size: a quarter of it may be on its way at once."""
SEALED_S: Final = 0.5
SEALED_BYTES_PER_S: Final = 2e9
"""After a pause, and then at this rate, a server has made the checksums of what was stored."""


@dataclass(slots=True)
class Rounds:
    """Seconds of each counted round."""

    fetch: list[float] = field(default_factory=list)
    at_once: list[float] = field(default_factory=list)
    """Of prompts that are asked for right after they were stored: the owner makes the checksums first."""
    memcpy: list[float] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)

    def report(self, size: int, path: str) -> dict[str, Any]:
        told: dict[str, Any] = {
            "fetch_vs_memcpy": round(stats.median_ratio(self.memcpy, self.fetch), 3),
            "fetch_gb_s": _gb_s(size, self.fetch),
            "fetch_at_once_gb_s": _gb_s(size, self.at_once),
            "memcpy_gb_s": _gb_s(size, self.memcpy),
            "fetch_ms": round(stats.median(self.fetch) * 1e3, 2),
            "path": path,
            "verified": True,
            "rounds": len(self.fetch),
        }
        if self.raw:
            told["fetch_vs_raw_socket"] = round(stats.median_ratio(self.raw, self.fetch), 3)
            told["raw_socket_gb_s"] = _gb_s(size, self.raw)
        return told


def _gb_s(size: int, seconds: list[float]) -> float | None:
    return round(size / stats.median(seconds) / 1e9, 2) if seconds else None


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """By path and size; a path that does not work here has {"skipped": why}."""
    signs = LifeSigns()
    paths: dict[str, Any] = {}
    for path in plan.paths:
        reports: dict[str, Any] = {}
        for size in plan.sizes:
            title = f"{path}, {units.exact_size(size)}"
            try:
                reports[units.exact_size(size)] = _sized(plan, path, size, signs, title, progress)
            except (DataPathUnavailable, MissingExtra) as error:
                progress(f"{title}: skipped, {error}")
                reports = {"skipped": str(error)}
                break
        paths[path] = reports
    return {"paths": paths, "heartbeats": signs.report()}


def _sized(
    plan: Plan, path: str, size: int, signs: LifeSigns, title: str, progress: Callable[[str], None]
) -> dict[str, Any]:
    progress(f"{title}: starting a coordinator and two servers")
    kv = PagedKv(size // BLOCK_BYTES, plan.memory)
    arena = units.exact_size(size * (4 if size <= SMALL_BYTES else 2) + CHUNK_BYTES)
    private = plan.is_private(path)
    arena_kind = PRIVATE if private else SHARED
    ways = ("--data-paths", path if private else f"shm,{path}", "--arena", arena_kind)
    flags = ("--l1-size", arena, "--chunk-size", str(CHUNK_TOKENS), *ways)
    client_path = "ucx" if private else "shm"
    with work_folder() as folder, fleet(folder, flags) as running, contextlib.ExitStack() as stack:
        caches = [
            stack.enter_context(
                server.client.register_kv_caches(
                    kv.layers, model="bench", block_size=BLOCK_TOKENS, data_path=client_path
                )
            )
            for server in (running.a, running.b)
        ]
        running.acquainted()
        signs.rest(running.relay, plan.idle_s)
        copies = stack.enter_context(contextlib.closing(PlainCopies(kv)))
        send = stack.enter_context(raw_socket(size)) if path == "ucx-remote" else None
        bench = _Bench(kv, running, caches[0], caches[1], copies, send)
        rounds, warm_up, total = Rounds(), Rounds(), plan.rounds_of(size)
        for number in range(1 - plan.warmup, total + 1):
            progress(f"{title}: round {number} of {total}" if number > 0 else f"{title}: warming up")
            bench.round(rounds if number > 0 else warm_up)
            if number == 0:
                bench.spans.clear()
        signs.note(running.relay.heartbeats().values(), bench.spans)
        first = (warm_up.at_once or rounds.at_once)[0]
        told = {"arena": arena_kind, "first_fetch_ms": round(first * 1e3, 2), **bench.counts()}
        return rounds.report(size, bench.path()) | told


class _Bench:
    def __init__(
        self,
        kv: PagedKv,
        running: Fleet,
        at_a: KvCache,
        at_b: KvCache,
        copies: PlainCopies,
        send: Callable[[memoryview], float] | None,
    ) -> None:
        self._kv, self._fleet, self._a, self._b = kv, running, at_a, at_b
        self._copies, self._send = copies, send
        self.spans: list[Span] = []
        """When bytes moved, monotonic seconds."""
        self._before = Counts.of(running.b)

    def round(self, rounds: Rounds) -> None:
        """One fetch right after the store, and one of what had been there for a while, between two copies."""
        rounds.at_once.append(self._fetched(settled=False))
        before = self._copies.into_shared()
        rounds.fetch.append(self._fetched(settled=True))
        rounds.memcpy.append((before + self._copies.into_shared()) / 2)
        if self._send is not None:
            rounds.raw.append(self._send(self._kv.bytes()))

    def path(self) -> str:
        """What the bytes really went by."""
        found = next(each.path for each in self._fleet.b.sharing().peers if each.fetched_bytes)
        return transfer_pb2.DataPath.Name(found).removeprefix("DATA_PATH_").lower().replace("_", "-")

    def counts(self) -> dict[str, int]:
        return Counts.of(self._fleet.b).since(self._before)

    def _fetched(self, *, settled: bool) -> float:
        """Seconds of one lookup at b of what a has, verified."""
        kv = self._kv
        tokens, stored_from, retrieved_into = kv.fresh_tokens(), kv.shuffled(), kv.shuffled()
        kv.load()
        self._store(tokens, stored_from)
        self._fleet.located(
            namespace_message(self._a.spec.namespace), tokens, kv.num_tokens // self._a.chunk_size
        )
        if settled:
            time.sleep(SEALED_S + kv.size_bytes / SEALED_BYTES_PER_S)
        kv.wipe()
        before = Counts.of(self._fleet.b).fetched_bytes
        started = time.monotonic()
        session = self._b.session(tokens)
        ended = time.monotonic()
        self.spans.append((started, ended))
        with session:
            self._check(session, Counts.of(self._fleet.b).fetched_bytes - before)
            self._retrieve(session, stored_from, retrieved_into)
        self._fleet.a.settle()
        self._fleet.b.settle()
        return ended - started

    def _store(self, tokens: bytes, blocks: list[int]) -> None:
        with self._a.session(tokens) as session:
            stored = session.store(blocks)
        if not stored.ok or stored.stored_bytes != self._kv.size_bytes:
            raise BenchError(
                f"{stored.stored_bytes} of {self._kv.size_bytes} bytes were stored: {stored.error}."
            )

    def _check(self, session: Session, fetched: int) -> None:
        if session.hit_tokens != self._kv.num_tokens:
            raise BenchError(
                f"{session.hit_tokens} of {self._kv.num_tokens} tokens came from the other server: "
                f"{self._fleet.b.sharing()}"
            )
        if fetched != self._kv.size_bytes:
            raise BenchError(f"{fetched} of {self._kv.size_bytes} bytes came from the other server.")

    def _retrieve(self, session: Session, stored_from: list[int], blocks: list[int]) -> None:
        retrieved = session.retrieve(blocks)
        if not retrieved.ok or not self._kv.is_moved(stored_from, blocks):
            raise BenchError(f"What came back is not what was stored: {retrieved.error}.")
