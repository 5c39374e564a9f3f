"""When the checkpoint is read and written: an optional part of the coordinator."""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvwire.coordinator.archive import (
    ROW,
    SavedRows,
    SavedServer,
    restore_rows,
    restore_servers,
    saved_rows,
    saved_servers,
)
from kvwire.coordinator.checkpoint import HEAD, ROWS, CheckpointWriter, DamagedError, read_frames

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from kvwire.coordinator.core import Core
    from kvwire.coordinator.fleet import Fleet

log = logging.getLogger("kvwire.coordinator")

_LENGTH: Final = struct.Struct("<I")


class Checkpoints:
    """Reads once at the start, writes every interval and at a graceful stop."""

    def __init__(self, core: Core, path: Path, interval: float) -> None:
        self._core = core
        self._path = path
        self._interval = interval
        self._written: Any = None
        self._failing = False
        self._writing: asyncio.Task[bool] | None = None
        self._started = False

    async def start(self) -> None:
        self._core.checkpoint, self._core.restored_extra = load(
            self._core.fleet, self._path, self._core.now()
        )
        self._started = True
        self._core.supervisor.start("checkpoint", self._run())

    async def stop(self) -> None:
        if not self._started:
            # The folder may be another process's, and the file is not what is known here.
            return
        if self._writing is not None:
            # Two at once would meet in the temporary file.
            await self._writing
        await self.write()

    async def write(self) -> bool:
        """False: nothing has changed, or it could not be written, which is said once."""
        self._writing = asyncio.create_task(self._write())
        return await asyncio.shield(self._writing)

    async def _write(self) -> bool:
        core, writer = self._core, None
        head = await core.intake.in_turn(self._head())
        state = self._state(head)
        if state == self._written:
            return False
        try:
            writer = await asyncio.to_thread(CheckpointWriter, self._path)
            await asyncio.to_thread(writer.head, head)
            for piece in saved_rows(core.fleet):
                await asyncio.to_thread(writer.frame, ROWS, encode_rows(piece))
            await asyncio.to_thread(writer.finish)
        except OSError as error:
            if not self._failing:
                log.warning("the checkpoint %s cannot be written: %s", self._path, error)
            self._failing = True
            return False
        finally:
            if writer is not None and not writer.finished:
                writer.abandon()
        self._failing, self._written = False, state
        return True

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self.write()

    def _head(self) -> Generator[None, None, dict[str, Any]]:
        """Of one moment, and in turn with the batches."""
        yield from ()
        return encode_head(
            saved_servers(self._core.fleet, self._core.now()),
            self._core.now(),
            {name: tell() for name, tell in self._core.kept.items()},
        )

    def _state(self, head: dict[str, Any]) -> Any:
        stats = self._core.fleet.stats
        servers = [[name, run, applied] for name, run, applied, *_ in head["servers"]]
        return stats.admitted, stats.resyncs, servers, head["extra"]


def load(fleet: Fleet, path: Path, now: float) -> tuple[str, dict[str, Any]]:
    """How the state began ("loaded", "cold" or "damaged"), and what others kept with it."""
    started = time.monotonic()
    try:
        servers, clock_ahead, extra = _check(path, now)
    except FileNotFoundError:
        return "cold", {}
    except (OSError, DamagedError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the checkpoint %s cannot be used (%s): starting without it", path, error)
        return "damaged", {}
    restore_servers(fleet, servers, now)
    for kind, body in read_frames(path):
        if kind == ROWS:
            restore_rows(fleet, decode_rows(body), clock_ahead)
    placements = fleet.directory.stats().placements
    log.info(
        "checkpoint: %d placements of %d servers in %.1f s",
        placements,
        len(servers),
        time.monotonic() - started,
    )
    return "loaded", extra


def encode_head(servers: list[SavedServer], now: float, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "wall": time.time(),
        "clock": now,
        "servers": [
            [
                each.server_id,
                each.incarnation.hex(),
                each.applied,
                each.lost_for,
                [run.hex() for run in each.runs],
            ]
            for each in servers
        ],
        "extra": extra,
    }


def encode_rows(saved: SavedRows) -> bytes:
    places = json.dumps(
        [[server_id, run.hex(), tier, backend] for server_id, run, tier, backend in saved.places]
    ).encode()
    return _LENGTH.pack(len(places)) + places + saved.rows


def decode_rows(body: bytes) -> SavedRows:
    """Raises DamagedError, ValueError, TypeError."""
    end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    places = tuple(
        (str(server_id), bytes.fromhex(run), int(tier), str(backend))
        for server_id, run, tier, backend in json.loads(body[_LENGTH.size : end])
    )
    rows = body[end:]
    if int(np.frombuffer(rows, ROW)["place"].max(initial=0)) >= len(places):
        raise DamagedError("a row is nowhere")
    return SavedRows(places, rows)


def _check(path: Path, now: float) -> tuple[list[SavedServer], float, dict[str, Any]]:
    """Read all of it, and change nothing. Raises what `load` catches."""
    head: dict[str, Any] | None = None
    for kind, body in read_frames(path):
        if kind == HEAD:
            head = json.loads(body)
        else:
            decode_rows(body)
    if head is None:
        raise DamagedError("it has no head")
    away = max(time.time() - head["wall"], 0.0)
    servers = [
        SavedServer(
            server_id,
            bytes.fromhex(run),
            applied,
            None if lost_for is None else lost_for + away,
            tuple(bytes.fromhex(each) for each in runs),
        )
        for server_id, run, applied, lost_for, runs in head["servers"]
    ]
    return servers, now - head["clock"] - away, dict(head["extra"])
