"""What the data paths move, without a server around them, against memcpy and a plain socket in the same run.

    python benchmarks/transfer_probe.py --mib 64 1024 --paths shm ucx-local ucx-remote --json

The KV has the shape of Llama 3 8B (32 layers, blocks of 16 tokens, 64 KiB per block and layer), its blocks
are shuffled, and chunks of 256 tokens make objects of 32 MiB. Every transfer is compared bit by bit. Ratios
are taken between neighbours in time and their median is reported, because other programs use the machine too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvwire.transfer.arena import HEADER_BYTES
from kvwire.transfer.arena_path import ShmPath
from kvwire.transfer.base import Slot, Ticket
from kvwire.transfer.memory import anonymous
from kvwire.transfer.pages import KvGroupPages, PageMover, pages_from_arrays
from kvwire.transfer.shm import LivenessLock, SharedArena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

LAYERS = 32
PAGE_BYTES = 64 << 10
BLOCKS_PER_CHUNK = 16
OBJECT_BYTES = LAYERS * PAGE_BYTES * BLOCKS_PER_CHUNK
PIECE_BYTES = 4 << 20


class Kv:
    """Paged KV of which half the blocks are stored."""

    def __init__(self, chunks: int) -> None:
        blocks = 2 * chunks * BLOCKS_PER_CHUNK
        memory = anonymous(LAYERS * blocks * PAGE_BYTES, huge_pages=False)
        seed = np.random.default_rng(0).integers(0, 256, PAGE_BYTES + 4096, dtype=np.uint8)
        self._layers = memory.reshape(LAYERS, blocks, PAGE_BYTES)
        for layer in range(LAYERS):
            for block in range(blocks):
                shift = (layer * 31 + block * 7) % 4096
                self._layers[layer, block] = seed[shift : shift + PAGE_BYTES]
        ids = np.random.default_rng(1).permutation(blocks)
        self.ids = ids[: chunks * BLOCKS_PER_CHUNK].reshape(chunks, BLOCKS_PER_CHUNK)
        self.other_ids = ids[chunks * BLOCKS_PER_CHUNK :].reshape(chunks, BLOCKS_PER_CHUNK)
        self.pages: KvGroupPages = pages_from_arrays(list(self._layers))
        self.source = PageMover([self.pages], {(i, 0): each for i, each in enumerate(self.ids)})
        self.target = PageMover([self.pages], {(i, 0): each for i, each in enumerate(self.other_ids)})

    def forget(self) -> None:
        self._layers[:, self.other_ids.reshape(-1), :64] = 0

    def is_the_same(self) -> bool:
        pairs = zip(self.ids.reshape(-1), self.other_ids.reshape(-1), strict=True)
        return all(np.array_equal(self._layers[:, a], self._layers[:, b]) for a, b in pairs)


@dataclass
class Ratios:
    """Seconds of the reference divided by seconds of what is measured, round by round."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float, reference: float) -> None:
        self.values.setdefault(name, []).append(reference / seconds)

    def report(self) -> dict[str, float]:
        return {name: round(statistics.median(found), 3) for name, found in self.values.items()}


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def slots(chunks: int, first_tags: list[int]) -> tuple[Slot, ...]:
    return tuple(
        Slot(i, i, 0, OBJECT_BYTES, HEADER_BYTES + i * OBJECT_BYTES, first_tags[i] if first_tags else 0)
        for i in range(chunks)
    )


def server(kind: str, client: bytes, control: Connection, arena_bytes: int, device: str) -> None:
    """The server's part, in another process: open leases when told, and say when their bytes have come."""
    from kvwire.transfer.server_ucx import UcxServerPlane
    from kvwire.transfer.ucx import UcxEngine, UcxOptions

    arena = SharedArena.create(arena_bytes)
    arena.ensure(arena.size)
    arena.prefault(HEADER_BYTES, arena_bytes)
    engine = UcxEngine(UcxOptions(kind, "server", (device,) if device else ()))  # type: ignore[arg-type]
    plane = UcxServerPlane(engine)
    peer = engine.connect(client, "client")
    control.send(engine.address)
    for lease, what, chunks in iter(control.recv, None):
        places = [arena.array(HEADER_BYTES + i * OBJECT_BYTES, OBJECT_BYTES) for i in range(chunks)]
        begin = plane.expect_store if what == "store" else plane.send_retrieve
        opened = begin(peer, lease, places, PIECE_BYTES)
        control.send(opened.first_tags)
        for each in opened.slots:
            each.result(120)
        control.send("done")
    peer.close()
    engine.close()
    arena.unlink()
    arena.close()


class Shm:
    name = "shm"

    def __init__(self, arena_bytes: int) -> None:
        self._arena = SharedArena.create(arena_bytes)
        self._arena.ensure(self._arena.size)
        self._lock = LivenessLock.create(self._arena.name)
        self.path = ShmPath.open(self._arena.name, self._arena.nonce, self._lock.name, check_share=0)

    def begin(self, what: str, chunks: int) -> list[int]:
        return []

    def end(self) -> None:
        """Nothing is on the way."""

    def close(self) -> None:
        self.path.close()
        self._lock.close()
        self._arena.unlink()
        self._arena.close()


class Ucx:
    def __init__(self, kind: str, arena_bytes: int) -> None:
        from kvwire.transfer.ucx import UcxEngine, UcxOptions
        from kvwire.transfer.ucx_path import UcxPath

        self.name = f"ucx-{kind}"
        device = "lo" if kind == "remote" else ""
        self._engine = UcxEngine(
            UcxOptions(
                kind,
                "client",
                (device,) if device else (),
                tuple(tuple(x.split("=")) for x in __import__("os").environ.get("CLX", "").split(";") if x),
            )
        )  # type: ignore[arg-type]
        self._control, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=server, args=(kind, self._engine.address, there, arena_bytes, device), daemon=True
        )
        self._process.start()
        peer = self._engine.connect(self._control.recv(), "server")
        self.path = UcxPath(self.name, self._engine, peer, check_share=0)
        self._lease = 0

    def begin(self, what: str, chunks: int) -> list[int]:
        self._lease += 1
        self._control.send((self._lease, what, chunks))
        tags: list[int] = list(self._control.recv())
        return tags

    def end(self) -> None:
        self._control.recv()

    def close(self) -> None:
        self.path.close()
        self._control.send(None)
        self._process.join(10)
        self._engine.close()


def move(end: Any, kv: Kv, what: str, chunks: int) -> None:
    """One lease over one path, as a client and a server do it."""
    ticket = Ticket(1, end.name, slots(chunks, end.begin(what, chunks)), PIECE_BYTES)
    deadline = time.monotonic() + 120
    if what == "store":
        results = end.path.write(ticket, kv.source.fill, deadline)
    else:
        results = end.path.read(ticket, kv.target.drain, deadline)
    end.end()
    for result in results:
        if result.error is not None:
            raise result.error


class RawSocket:
    """A TCP connection over loopback to a thread of another process that receives into one buffer."""

    def __init__(self, nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(target=_receive_for_ever, args=(there, nbytes), daemon=True)
        self._process.start()
        self._socket = socket.create_connection(("127.0.0.1", here.recv()))
        self._data = anonymous(nbytes)
        self._data.fill(1)

    def send(self) -> None:
        self._socket.sendall(self._data)
        self._socket.recv(1)

    def close(self) -> None:
        self._socket.close()
        self._process.join(10)


def _receive_for_ever(control: Connection, nbytes: int) -> None:
    buffer = memoryview(anonymous(nbytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    while True:
        done = 0
        while done < nbytes:
            got = connection.recv_into(buffer[done:])
            if not got:
                return
            done += got
        connection.send(b"k")


class Memcpy:
    """The same bytes from a warm buffer to warm shared memory, by one thread."""

    def __init__(self, nbytes: int) -> None:
        self._arena = SharedArena.create(nbytes)
        self._arena.ensure(self._arena.size)
        self._to = self._arena.array(HEADER_BYTES, nbytes)
        self._from = anonymous(nbytes, huge_pages=False)
        self._from.fill(1)

    def copy(self) -> None:
        np.copyto(self._to, self._from)

    def close(self) -> None:
        del self._to
        self._arena.unlink()
        self._arena.close()


def measure(mib: int, names: list[str], rounds: int) -> dict[str, Any]:
    chunks = max(1, (mib << 20) // OBJECT_BYTES)
    nbytes = chunks * OBJECT_BYTES
    kv, memcpy, ratios = Kv(chunks), Memcpy(nbytes), Ratios()
    raw = RawSocket(nbytes) if "ucx-remote" in names else None
    seconds: list[float] = []
    checked: dict[str, bool] = {}
    for end in _ends(names, nbytes):
        for round_number in range(rounds + 2):
            kv.forget()
            before = timed(memcpy.copy)
            store = timed(lambda end=end: move(end, kv, "store", chunks))
            between = timed(memcpy.copy)
            retrieve = timed(lambda end=end: move(end, kv, "retrieve", chunks))
            checked[end.name] = checked.get(end.name, True) and kv.is_the_same()
            if round_number < 2:  # pages are touched and connections made for the first time
                continue
            seconds += [before, between]
            ratios.add(f"{end.name} store_vs_memcpy", store, min(before, between))
            ratios.add(f"{end.name} retrieve_vs_memcpy", retrieve, min(before, between))
            if raw is not None and end.name == "ucx-remote":
                plain = timed(raw.send)
                ratios.add(f"{end.name} store_vs_raw_socket", store, plain)
                ratios.add(f"{end.name} retrieve_vs_raw_socket", retrieve, plain)
        end.close()
    memcpy.close()
    if raw is not None:
        raw.close()
    gbs = nbytes / statistics.median(seconds) / 1e9
    return {"mib": nbytes >> 20, "memcpy_gb_s": round(gbs, 1), "same_bytes": checked, **ratios.report()}


def _ends(names: list[str], nbytes: int) -> Iterator[Any]:
    for name in names:
        yield Shm(nbytes) if name == "shm" else Ucx(name.removeprefix("ucx-"), nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--paths", nargs="+", default=["shm", "ucx-local", "ucx-remote"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [measure(mib, options.paths, options.rounds) for mib in options.mib]
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        for each in found:
            for name, value in each.items():
                sys.stdout.write(f"{name:40} {value}\n")
    assert threading.active_count() == 1  # noqa: S101  nothing is left behind
    if not all(all(each["same_bytes"].values()) for each in found):
        sys.exit("some bytes were not the same")


if __name__ == "__main__":
    main()
