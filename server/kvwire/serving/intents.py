"""What operators want and nobody may forget: pins and quotas, persisted before they are acknowledged.

The file has one line per group of changes: checksum, length, JSON. An acknowledged line is never the last,
incomplete one: that one is what a crash left of a change that nobody was told of, and is cut off. Any other
damage may have been an acknowledged change, and is an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from kvwire.errors import ConfigError, InvalidArgument, KvwireError, StateUnavailable, TooManyItems

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from kvwire.serving.state import StateFolder

log = logging.getLogger("kvwire.serving")

FILE_NAME: Final = "intents.log"
FORMAT: Final = 1
MAX_PINS: Final = 65_536
MAX_QUOTAS: Final = 16_384
KEY_BYTES: Final = 32
MAX_TENANT_BYTES: Final = 128
REWRITE_ABOVE: Final = 1 << 20
"""A file that is larger, and much larger than what it says, is written anew."""


class Change(NamedTuple):
    """One change. `keys` are of "pin" and "unpin", the rest of "quota"."""

    kind: Literal["pin", "unpin", "quota"]
    keys: tuple[bytes, ...] = ()
    tenant: str = ""
    tier: int = 0
    limit: int = 0


@dataclass(slots=True)
class Intents:
    """Pure. `pins` in the order of their pinning; `quotas`: (tenant digest, tier) to a limit in bytes."""

    pins: dict[bytes, None] = field(default_factory=dict)
    quotas: dict[tuple[str, int], int] = field(default_factory=dict)
    revision: int = 0

    def copy(self) -> Intents:
        return Intents(dict(self.pins), dict(self.quotas), self.revision)

    def apply(self, change: Change) -> int:
        """How many pins or quotas are other ones now. Raises TooManyItems and changes nothing."""
        if change.kind == "quota":
            return self._set_quota((change.tenant, change.tier), change.limit)
        keys = dict.fromkeys(change.keys)
        if change.kind == "unpin":
            return sum(self.pins.pop(key, b"") is None for key in keys)
        new = [key for key in keys if key not in self.pins]
        _check_count("pins", len(self.pins) + len(new), MAX_PINS)
        self.pins.update(dict.fromkeys(new))
        return len(new)

    def _set_quota(self, name: tuple[str, int], limit: int) -> int:
        if self.quotas.get(name, 0) == limit:
            return 0
        if limit:
            _check_count("quotas", len(self.quotas) + (name not in self.quotas), MAX_QUOTAS)
            self.quotas[name] = limit
        else:
            del self.quotas[name]
        return 1


class IntentStore:
    """Intents in a file. Lives on one event loop; changes wait for the disk in a thread, in groups.

    Raises ConfigError when the file is damaged or cannot be read.
    """

    def __init__(self, folder: StateFolder) -> None:
        self._folder = folder
        self._path = folder.path / FILE_NAME
        self.intents, self._size = _load(self._path)
        # The first line of a file is written with its name; so is everything where the end is not certain.
        self._rewrite = not self._size
        self._waiting: list[tuple[Change, asyncio.Future[int]]] = []
        self._writer: asyncio.Task[None] | None = None

    @property
    def revision(self) -> int:
        """It grows with every change. 0: there never were any."""
        return self.intents.revision

    async def pin(self, keys: Iterable[bytes]) -> int:
        """Returns how many are new. Raises InvalidArgument, TooManyItems, StateUnavailable."""
        return await self._change(Change("pin", _checked(keys)))

    async def unpin(self, keys: Iterable[bytes]) -> int:
        """Returns how many were pinned. Raises InvalidArgument, StateUnavailable."""
        return await self._change(Change("unpin", _checked(keys)))

    async def set_quota(self, tenant: str, tier: int, limit: int) -> int:
        """In bytes; 0 ends it. Raises InvalidArgument, TooManyItems, StateUnavailable."""
        if not 1 <= len(tenant.encode()) <= MAX_TENANT_BYTES:
            raise InvalidArgument("tenant", f"must have 1 to {MAX_TENANT_BYTES} bytes")
        if tier < 1:
            raise InvalidArgument("tier", "is not set: a quota is of one tier")
        if not 0 <= limit < 1 << 64:
            raise InvalidArgument("limit_bytes", f"{limit} is not a size")
        return await self._change(Change("quota", tenant=tenant, tier=tier, limit=limit))

    async def close(self) -> None:
        """What was begun is finished."""
        while self._writer is not None:
            await asyncio.shield(self._writer)

    async def _change(self, change: Change) -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_groups())
        return await done

    async def _write_groups(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting, []
                await self._write_group(group)
        finally:
            self._writer = None

    async def _write_group(self, group: list[tuple[Change, asyncio.Future[int]]]) -> None:
        draft, results, changes = self.intents.copy(), list[int | KvwireError](), list[Change]()
        for change, _ in group:
            try:
                changed = draft.apply(change)
            except TooManyItems as error:
                results.append(error)
                continue
            results.append(changed)
            if changed:
                changes.append(change)
        failure: Exception | None = None
        if changes:
            draft.revision += 1
            try:
                await asyncio.to_thread(self._persist, draft, changes)
                self.intents = draft
            except OSError as error:
                failure = error
            except Exception as error:
                log.exception("pins and quotas could not be written")
                failure = error
        told = None if failure is None else self._unavailable(failure)
        for (_, done), result in zip(group, results, strict=True):
            if not done.done():
                _answer(done, result, told)

    def _persist(self, draft: Intents, changes: Sequence[Change]) -> None:
        """Raises OSError; the file is as before then, or is written anew by the next change."""
        if not self._rewrite and self._size < max(REWRITE_ABOVE, 4 * _full_size(draft)):
            self._append(_line(_record(draft.revision, changes)))
        else:
            self._write_anew(draft)

    def _append(self, line: bytes) -> None:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._rewrite = True
            raise
        try:
            # Until it is certain again what the file says.
            self._rewrite = True
            os.ftruncate(descriptor, self._size)
            try:
                _write_at(descriptor, self._size, line)
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, self._size)
                os.fsync(descriptor)
                self._rewrite = False
                raise
            self._size += len(line)
            self._rewrite = False
        finally:
            os.close(descriptor)

    def _write_anew(self, draft: Intents) -> None:
        content = _line({"format": FORMAT}) + _line(_snapshot(draft))
        draft_path = self._path.with_suffix(".new")
        descriptor = os.open(draft_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_at(descriptor, 0, content)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        draft_path.replace(self._path)
        # Should this fail, the file is the new one and is not acknowledged: the next change writes it anew.
        self._rewrite = True
        self._size = len(content)
        self._folder.sync()
        self._rewrite = False

    def _unavailable(self, error: Exception) -> StateUnavailable:
        cause = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
        return StateUnavailable(
            f"Nothing was changed: {self._path} cannot be written: {cause}.",
            folder=self._folder.path,
            cause=cause,
        )


def _answer(done: asyncio.Future[int], result: int | KvwireError, failure: KvwireError | None) -> None:
    if isinstance(result, KvwireError):
        done.set_exception(result)
    elif failure is not None:
        done.set_exception(failure)
    else:
        done.set_result(result)


def _checked(keys: Iterable[bytes]) -> tuple[bytes, ...]:
    found = tuple(keys)
    _check_count("keys", len(found), MAX_PINS)
    for index, key in enumerate(found):
        if len(key) != KEY_BYTES:
            raise InvalidArgument("keys", f"key {index} has {len(key)} bytes, not {KEY_BYTES}")
    return found


def _check_count(what: str, actual: int, allowed: int) -> None:
    if actual > allowed:
        raise TooManyItems(
            f"{actual} {what} are more than the {allowed} that are kept.",
            field=what,
            actual=actual,
            allowed=allowed,
        )


def _write_at(descriptor: int, offset: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


# The file.


def _full_size(intents: Intents) -> int:
    return 70 * len(intents.pins) + 64 * len(intents.quotas)


def _record(revision: int, changes: Sequence[Change]) -> dict[str, Any]:
    return {
        "revision": revision,
        "changes": [
            [each.kind, [key.hex() for key in each.keys], each.tenant, each.tier, each.limit]
            for each in changes
        ],
    }


def _snapshot(intents: Intents) -> dict[str, Any]:
    changes = [Change("pin", tuple(intents.pins))] if intents.pins else []
    changes += [
        Change("quota", tenant=tenant, tier=tier, limit=limit)
        for (tenant, tier), limit in intents.quotas.items()
    ]
    return _record(intents.revision, changes)


def _line(content: dict[str, Any]) -> bytes:
    body = json.dumps(content, separators=(",", ":")).encode()
    return b"%08x %d %b\n" % (zlib.crc32(body), len(body), body)


def _load(path: Path) -> tuple[Intents, int]:
    """What the file says, and how many of its bytes are good (0: write it anew). Raises ConfigError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Intents(), 0
    except OSError as error:
        raise ConfigError(f"--state: {path} cannot be read: {error.strerror}.", setting="state") from error
    if not content:
        raise _damaged(path, 0, "it is empty")
    intents, position, number = Intents(), 0, 0
    while position < len(content):
        end = content.find(b"\n", position)
        line = content[position:] if end < 0 else content[position:end]
        try:
            _apply_line(intents, number, line)
        except (ValueError, KeyError, TypeError, KvwireError) as error:
            # The first two lines came with the file's name: no crash leaves half of them.
            if number < 2 or not _is_torn(content, position, end):
                raise _damaged(path, number, error) from error
            log.warning("%s: cut off an unfinished change at its end (%d bytes)", path, len(line))
            break
        if end < 0:
            # All is there but the end of the line.
            return intents, 0
        number, position = number + 1, end + 1
    return intents, position


def _apply_line(intents: Intents, number: int, line: bytes) -> None:
    """Raises ValueError, KeyError or TypeError for what was not written like this."""
    checksum, size, body = line.split(b" ", 2)
    if len(body) != int(size) or zlib.crc32(body) != int(checksum, 16):
        raise ValueError("the checksum does not match")
    content = json.loads(body)
    if number == 0:
        if content["format"] != FORMAT:
            raise ValueError(f"it has format {content['format']}, this version knows {FORMAT}")
        return
    for kind, keys, tenant, tier, limit in content["changes"]:
        intents.apply(Change(kind, tuple(bytes.fromhex(key) for key in keys), tenant, tier, limit))
    intents.revision = content["revision"]


def _is_torn(content: bytes, position: int, end: int) -> bool:
    """Whether a bad line is what a crash leaves: the last one, and shorter than it says it is."""
    tail = content[position:]
    if b"\0\0" in tail:
        # A power cut leaves blocks of zeros where data had not arrived.
        return b"\n" not in tail.rstrip(b"\0\n")
    if end >= 0:
        return False
    # A torn line is a beginning of a good one.
    parts = tail.split(b" ", 2)
    return len(parts) < 3 or not parts[1].isdigit() or len(parts[2]) < int(parts[1])


def _damaged(path: Path, number: int, error: Exception | str) -> ConfigError:
    return ConfigError(
        f"--state: {path} is damaged in line {number + 1} ({error}): it may hold pins and quotas that were "
        "acknowledged. Repair it, or move it away to begin without any.",
        setting="state",
    )
