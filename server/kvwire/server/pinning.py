"""Which chunks stay because somebody said so: operators here, and operators at coordinators."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from kvwire.errors import InvalidArgument, OutOfSpace, TokensInvalid
from kvwire.keys import TOKEN_BYTES, chunk_keys, root
from kvwire.server import convert
from kvwire.serving.intents import IntentStore
from kvwire.serving.requests import check_count
from kvwire.serving.state import StateFolder, no_state

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvwire.server.config import ServerConfig
    from kvwire.server.store import L1Store
    from kvwire.v1 import admin_service_pb2 as admin

log = logging.getLogger("kvwire.server")

SLICE_CHUNKS: Final = 128


class Pinning:
    """The union of all pins, applied to the memory. A key stays pinned while anybody wants it to be.

    Raises ConfigError when the state folder cannot be used.
    """

    def __init__(self, store: L1Store, state: str = "") -> None:
        self._memory = store
        self._holders: dict[bytes, int] = {}
        self._fleet: dict[str, dict[bytes, None]] = {}
        self._folder = StateFolder(state) if state else None
        try:
            self._own = IntentStore(self._folder) if self._folder is not None else None
        except BaseException:
            self._close_folder()
            raise
        self._applied: dict[bytes, None] = {}
        self._apply_own()

    async def close(self) -> None:
        if self._own is not None:
            await self._own.close()
        self._close_folder()

    @property
    def own(self) -> IntentStore | None:
        """What operators want of this server; None without a state folder."""
        return self._own

    @property
    def keys(self) -> int:
        """How many keys are pinned, resident or not."""
        return len(self._holders)

    async def pin(self, keys: Iterable[bytes]) -> int:
        """Persisted when it returns: how many distinct keys.

        Raises StateUnavailable, OutOfSpace, TooManyItems, InvalidArgument; nothing is pinned then.
        """
        wanted = dict.fromkeys(keys)
        if self._own is None:
            raise no_state()
        self._check_room(wanted)
        # Held while the disk is waited for, so that what had room still has it, and is still there.
        self._add(wanted)
        try:
            await self._own.pin(wanted)
        finally:
            self._apply_own()
            self._drop(wanted)
        return len(wanted)

    async def unpin(self, keys: Iterable[bytes]) -> int:
        """Persisted when it returns: how many were pinned here. Raises StateUnavailable."""
        if self._own is None:
            raise no_state()
        try:
            return await self._own.unpin(dict.fromkeys(keys))
        finally:
            self._apply_own()

    def set_fleet(self, coordinator: str, keys: Iterable[bytes]) -> None:
        """All that a coordinator wants to be pinned, instead of what it wanted before."""
        before, now = self._fleet.get(coordinator, {}), dict.fromkeys(keys)
        self._fleet[coordinator] = now
        self._replace(before, now)
        over = len(self._memory.key_pins.over)
        if over:
            log.warning("%d chunks that %s pinned have no room: pins may hold 90 %%", over, coordinator)

    def _check_room(self, keys: Iterable[bytes]) -> None:
        memory = self._memory
        needed = memory.key_pins.with_all(memory.get(key) for key in keys)
        limit = memory.key_pins.limit
        if needed > limit:
            raise OutOfSpace(
                f"Pins would hold {needed} bytes of the memory tier; at most {limit} are allowed, so that "
                "there is room for others.",
                needed=needed,
                capacity=limit,
            )

    def _apply_own(self) -> None:
        now = self._own.intents.pins if self._own is not None else self._applied
        before, self._applied = self._applied, now
        if now is not before:
            self._replace(before, now)

    def _replace(self, before: dict[bytes, None], now: dict[bytes, None]) -> None:
        self._add([key for key in now if key not in before])
        self._drop([key for key in before if key not in now])

    def _add(self, keys: Iterable[bytes]) -> None:
        holders, new = self._holders, list[bytes]()
        for key in keys:
            count = holders.get(key, 0)
            holders[key] = count + 1
            if not count:
                new.append(key)
        self._memory.pin_keys(new)

    def _drop(self, keys: Iterable[bytes]) -> None:
        holders, gone = self._holders, list[bytes]()
        for key in keys:
            count = holders[key] - 1
            if count:
                holders[key] = count
            else:
                del holders[key]
                gone.append(key)
        self._memory.unpin_keys(gone)

    def _close_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()


async def selected_keys(
    selector: admin.PromptSelector, chunk_size: int, config: ServerConfig
) -> tuple[bytes, ...]:
    """The chunk keys that are meant; tokens are hashed in slices. Raises InvalidArgument, TokensInvalid."""
    which = selector.WhichOneof("prompt")
    if which is None:
        raise InvalidArgument("selector.prompt", "is not set: give tokens or chunk_keys")
    if which == "chunk_keys":
        return convert.chunk_keys("chunk_keys", selector.chunk_keys.keys, config)
    tokens = selector.tokens
    if len(tokens) % TOKEN_BYTES:
        raise TokensInvalid(
            f"tokens has {len(tokens)} bytes: pack ids as little-endian uint32.", length=len(tokens)
        )
    check_count("chunks", len(tokens) // TOKEN_BYTES // chunk_size, config.max_chunks)
    chain, view = root(convert.namespace(selector.namespace), chunk_size), memoryview(tokens)
    keys: list[bytes] = []
    step = SLICE_CHUNKS * chunk_size * TOKEN_BYTES
    for start in range(0, len(tokens), step):
        before = keys[-1] if keys else None
        keys += chunk_keys(
            chain, view[start : start + step], chunk_size, start_key=before, first_chunk=len(keys)
        )
        await asyncio.sleep(0)
    return tuple(keys)
