"""Values in S3, Google Cloud Storage, Azure Blob Storage or memory, over obstore.

Every value is written by one request, which these storages carry out as a whole or not at all: there are no
parts to put together, and none left behind by a writer that dies. Credentials come from the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from kvwire.errors import ConfigError, MissingExtra
from kvwire.server.tiers.threads import Threads

from .base import BackendError, Entry, NotFound, Refused, Room, Unavailable, WrongSize, checked, total
from .copies import Filling, joined, limit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from .base import Buffer, Place

PAGE: Final = 1000
THREADS: Final = 2
TOGETHER: Final = 16
PIECE: Final = 1 << 20
"""Bytes of one step of a read. What is about that large is copied on the event loop."""

REFUSALS: Final = {400, 401, 403, 404, 405, 409, 411, 412, 413, 414, 501}
_STATUS: Final = re.compile(r"status code: (\d{3})")
_SECRET: Final = re.compile(r"([?&](?:sig|X-Amz-[\w-]+|X-Goog-[\w-]+))=[^&\s]*", re.IGNORECASE)


class ObjectBackend:
    """The objects below `prefix` in one bucket or container."""

    max_size = 2 << 30

    def __init__(self, place: Place) -> None:
        try:
            import obstore
        except ImportError as error:
            raise MissingExtra(f"--l2 {place.scheme}://", "l2") from error
        self.scheme = place.scheme
        self._obs: Any = obstore
        self._timeout = place.timeout
        self._prefix = f"{place.prefix}/" if place.prefix else ""
        self._store = _store(place)
        self._threads = Threads(THREADS, f"kvwire-{place.scheme}")

    async def open(self) -> None:
        """One small listing: address, bucket and credentials are right."""
        async for _ in self.list():
            break

    async def write(self, name: str, parts: Sequence[Buffer]) -> None:
        path = self._path(name)
        whole = await self._threads.run(lambda _: joined(parts))
        seconds = limit(self._timeout, len(whole))
        try:
            with self._told(seconds):
                async with asyncio.timeout(seconds):
                    await self._obs.put_async(self._store, path, whole, use_multipart=False)
        except NotFound as error:
            raise Refused(str(error)) from error

    async def read(self, name: str, parts: Sequence[memoryview]) -> None:
        path = self._path(name)
        with self._told(self._timeout):
            async with asyncio.timeout(self._timeout) as until:
                answer = await self._obs.get_async(self._store, path)
                size = answer.meta["size"]
                if size != total(parts):
                    raise WrongSize(f"{name} has {size} bytes, not {total(parts)}")
                filled = Filling(parts)
                async for piece in answer.stream(min_chunk_size=PIECE):
                    filled.take(memoryview(piece))
                    until.reschedule(asyncio.get_running_loop().time() + self._timeout)
        if filled.lacking:
            raise WrongSize(f"{name} ended {filled.lacking} bytes early")

    async def _take(self, filling: Filling, piece: memoryview) -> None:
        if piece.nbytes <= PIECE * 2:
            filling.take(piece)
        else:
            await self._threads.run(lambda _: filling.take(piece))

    async def delete(self, names: Sequence[str]) -> None:
        paths = [self._path(name) for name in names]
        for start in range(0, len(paths), PAGE):
            page = paths[start : start + PAGE]
            try:
                await self._delete(page)
            except NotFound:  # some storages mind, and do not tell which were deleted
                for few in range(0, len(page), TOGETHER):
                    await asyncio.gather(*(self._gone(path) for path in page[few : few + TOGETHER]))

    async def _gone(self, path: str) -> None:
        with contextlib.suppress(NotFound):
            await self._delete([path])

    async def _delete(self, paths: Sequence[str]) -> None:
        with self._told(self._timeout):
            async with asyncio.timeout(self._timeout):
                await self._obs.delete_async(self._store, list(paths))

    async def list(self, prefix: str = "") -> AsyncIterator[Sequence[Entry]]:
        pages = self._obs.list(self._store, (self._prefix + prefix).rstrip("/") or None, chunk_size=PAGE)
        while True:
            with self._told(self._timeout):
                async with asyncio.timeout(self._timeout):
                    page = await anext(pages, None)
            if page is None:
                return
            yield [Entry(found["path"].removeprefix(self._prefix), found["size"]) for found in page]

    async def room(self) -> Room:
        return Room()

    async def close(self) -> None:
        self._threads.close()

    def _path(self, name: str) -> str:
        return self._prefix + checked(name)

    @contextlib.contextmanager
    def _told(self, seconds: float) -> Iterator[None]:
        """Errors of the library become a backend's."""
        try:
            yield
        except (BackendError, asyncio.CancelledError):
            raise
        except TimeoutError as error:
            raise Unavailable(f"no answer within {seconds:.3g} s") from error
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise Refused(_sentence(error)) from error
            raise NotFound(_sentence(error)) from error
        except (self._obs.exceptions.BaseError, OSError, ValueError) as error:
            raise _kind(self._obs.exceptions, error)(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    """What an operator needs of it: neither the library's inside nor a signed address."""
    text = str(error).split("\n\nDebug source", maxsplit=1)[0]
    return _SECRET.sub(r"\1=...", " ".join(text.split()))[:400]


def _kind(exceptions: Any, error: Exception) -> type[BackendError]:
    denied = (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, exceptions.NotSupportedError)
    if isinstance(error, (*denied, exceptions.InvalidPathError, ValueError)):
        return Refused
    status = _STATUS.search(str(error))
    if status and int(status[1]) in REFUSALS:
        return Refused
    return Unavailable


def _store(place: Place) -> Any:
    from obstore import store as stores
    from obstore.exceptions import BaseError

    makers: dict[str, Callable[[Place, dict[str, Any]], Any]] = {
        "memory": lambda _place, _common: stores.MemoryStore(),
        "s3": lambda place, common: stores.S3Store(
            place.location, config=_given(endpoint=place.endpoint, region=place.region), **common
        ),
        "gs": lambda place, common: stores.GCSStore(
            place.location, config=_given(base_url=place.endpoint), **common
        ),
        "az": lambda place, common: stores.AzureStore(
            place.location, config=_given(endpoint=place.endpoint), **common
        ),
    }
    try:
        return makers[place.scheme](place, _common(place))
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(f"--l2 {place.scheme}://{place.location}: {_sentence(error)}") from error


def _given(**values: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value}


def _common(place: Place) -> dict[str, Any]:
    """Repeating is the tier's work, so one attempt here; deadlines are kept here, not by the client."""
    moment = timedelta(milliseconds=1)
    return {
        "client_options": {
            "allow_http": place.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=place.timeout),
            "timeout": timedelta(days=1),
        },
        "retry_config": {
            "max_retries": 0,
            "retry_timeout": timedelta(seconds=place.timeout),
            "backoff": {"init_backoff": moment, "max_backoff": moment, "base": 2},
        },
    }
