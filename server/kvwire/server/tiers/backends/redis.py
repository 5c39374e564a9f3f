"""Values in one Redis or Valkey, over valkey-glide: a key each, set by one command.

The server carries out SET when all of its bytes are there, so a writer that dies leaves nothing. What the
server evicts by its own rules is not found. The password comes from the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kvwire.errors import ConfigError, MissingExtra
from kvwire.server.tiers.threads import Threads

from .aside import Aside
from .base import BackendError, Entry, Full, NotFound, Refused, Room, Unavailable, WrongSize, checked, total
from .copies import Filling, joined, limit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from .base import Buffer, Place

PAGE: Final = 1000
PORT: Final = 6379
PASSWORDS: Final = {"redis": ("REDISCLI_AUTH",), "valkey": ("VALKEYCLI_AUTH", "REDISCLI_AUTH")}
"""Where the programs of each look for the password, too."""

THREADS: Final = 2
_DENIED: Final = re.compile(
    r"\b(NOAUTH|WRONGPASS|NOPERM|WRONGTYPE|ERR)\b|PermissionDenied|AuthenticationFailed"
)


class RedisBackend:
    """The keys below `prefix`. Connects when it is first needed, and again by itself."""

    max_size = 512 << 20

    def __init__(self, place: Place) -> None:
        try:
            import glide
        except ImportError as error:
            raise MissingExtra(f"--l2 {place.scheme}://", "valkey") from error
        self.scheme = place.scheme
        self._glide: Any = glide
        self._timeout = place.timeout
        self._prefix = f"{place.prefix}/" if place.prefix else ""
        self._config = _configuration(glide, place)
        self._client: Any = None
        self._connecting = asyncio.Lock()
        self._aside = Aside(f"kvwire-{place.scheme}-loop")
        self._threads = Threads(THREADS, f"kvwire-{place.scheme}")

    async def open(self) -> None:
        await self._ask("ping")

    async def write(self, name: str, parts: Sequence[Buffer]) -> None:
        key = self._key(name)
        if total(parts) > self.max_size:
            raise Refused(f"{name} has {total(parts)} bytes, Redis takes {self.max_size}")
        whole = await self._threads.run(lambda _: joined(parts))
        await self._ask("set", key, whole, size=len(whole))

    async def read(self, name: str, parts: Sequence[memoryview]) -> None:
        value = await self._ask("get", self._key(name), size=total(parts))
        if value is None:
            raise NotFound(name)
        filling = Filling(parts)
        if len(value) != filling.lacking:
            raise WrongSize(f"{name} has {len(value)} bytes, not {filling.lacking}")
        await self._threads.run(lambda _: filling.take(memoryview(value)))

    async def delete(self, names: Sequence[str]) -> None:
        keys = [self._key(name) for name in names]
        for start in range(0, len(keys), PAGE):
            await self._ask("unlink", keys[start : start + PAGE])

    async def list(self, prefix: str = "") -> AsyncIterator[Sequence[Entry]]:
        pattern = _literally(self._prefix + prefix) + "*"
        cursor, told = "0", set[bytes]()
        while True:
            after, keys = await self._ask("scan", cursor, pattern, PAGE)
            fresh = [key for key in dict.fromkeys(keys) if key not in told]
            told.update(fresh)
            if fresh:
                yield [entry async for entry in self._sized(fresh)]
            cursor = after.decode()
            if cursor == "0":
                return

    async def _sized(self, keys: Sequence[bytes]) -> AsyncIterator[Entry]:
        """Keys that are gone by now, or hold something else, are left out."""
        batch = self._glide.Batch(is_atomic=False)
        for key in keys:
            batch.exists([key])
            batch.strlen(key)
        answers = await self._ask("exec", batch, False)
        for key, there, size in zip(keys, answers[::2], answers[1::2], strict=True):
            if there == 1 and isinstance(size, int):
                yield Entry(key.decode(errors="replace").removeprefix(self._prefix), size)

    async def room(self) -> Room:
        text = (await self._ask("info", [self._glide.InfoSection.MEMORY])).decode()
        facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        used, most = int(facts.get("used_memory", 0)), int(facts.get("maxmemory", 0))
        return Room(used, max(0, most - used) if most else None)

    async def close(self) -> None:
        if self._client is not None:
            await self._aside.run(self._disconnect())
        self._aside.close()
        self._threads.close()

    def _key(self, name: str) -> str:
        return self._prefix + checked(name)

    async def _ask(self, command: str, *args: object, size: int = 0) -> Any:
        """On a loop of its own: the library copies values on the loop that calls it."""
        return await self._aside.run(self._asked(command, *args, size=size))

    async def _asked(self, command: str, *args: object, size: int = 0) -> Any:
        seconds = limit(self._timeout, size)
        try:
            async with asyncio.timeout(seconds):
                client = await self._connected()
                return await getattr(client, command)(*args)
        except self._glide.ClosingError as error:
            await self._disconnect()
            raise _told(error) from error
        except self._glide.TimeoutError as error:
            await self._disconnect()
            raise Unavailable("no answer in time") from error
        except self._glide.GlideError as error:
            raise _told(error) from error
        except (TimeoutError, OSError) as error:
            await self._disconnect()
            raise Unavailable(f"no answer within {seconds:.3g} s") from error

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._client is None:
                self._client = await self._glide.GlideClient.create(self._config)
            return self._client

    async def _disconnect(self) -> None:
        """What is under way on a connection that is silent would keep its memory until it answers."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(self._glide.GlideError):
                await client.close()


def _told(error: Exception) -> BackendError:
    text = " ".join(str(error).split())[:400]
    if text.startswith("OOM"):
        return Full(text)
    return Refused(text) if _DENIED.search(text) else Unavailable(text)


def _literally(prefix: str) -> str:
    return re.sub(r"([*?\[\]\\^])", r"\\\1", prefix)


def _configuration(glide: Any, place: Place) -> Any:
    options = place.options
    if options.get("tls", "no") not in {"yes", "no"}:
        raise ConfigError("--l2: tls= must be yes or no")
    milliseconds = int(place.timeout * 1000)
    glide.Logger.init(glide.LogLevel.ERROR)
    try:
        where = urlsplit(f"//{place.location}")
        return glide.GlideClientConfiguration(
            [glide.NodeAddress(where.hostname or "", where.port or PORT)],
            use_tls=options.get("tls") == "yes",
            credentials=_credentials(glide, place),
            database_id=int(options.get("db", "0")),
            request_timeout=int(limit(place.timeout, RedisBackend.max_size) * 1000),
            reconnect_strategy=glide.BackoffStrategy(num_of_retries=2, factor=50, exponent_base=2),
            client_name="kvwire",
            advanced_config=glide.AdvancedGlideClientConfiguration(
                connection_timeout=milliseconds, tls_config=_tls(glide, options.get("ca", ""))
            ),
        )
    except (ValueError, glide.GlideError) as error:
        raise ConfigError(f"--l2 {place.scheme}://{place.location}: {error}") from error


def _tls(glide: Any, ca: str) -> Any:
    if not ca:
        return None
    try:
        return glide.TlsAdvancedConfiguration(root_pem_cacerts=Path(ca).read_bytes())
    except OSError as error:
        raise ConfigError(f"--l2: ca={ca}: {error.strerror}") from error


def _credentials(glide: Any, place: Place) -> Any:
    given = place.options.get("auth_env")
    names = (given,) if given else PASSWORDS[place.scheme]
    password = next((os.environ[name] for name in names if os.environ.get(name)), None)
    user = place.options.get("user")
    if password is None:
        if given or user:
            raise ConfigError(
                f"--l2 {place.scheme}://{place.location}: the password is expected in {names[0]}"
            )
        return None
    return glide.ServerCredentials(password=password, username=user)
